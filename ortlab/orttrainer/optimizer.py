"""Optimizer of an `ORTTrainer`, made from one of the configurations of `ortlab.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ortlab.optim.config import DecayMode
from ortlab.settings import unknown_name


def optimizer_for(config: Any, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the torch optimizer of a configuration, for `FusedStep`.

    Args:
        config: One of `ortlab.optim`, or of ORT's package of that name.
        parameters: The model's parameters by name; frozen ones are left out.

    Returns:
        The optimizer, with the configuration's parameter groups.

    Raises:
        ValueError: If a group names an unknown parameter, or an option is not supported.
    """
    groups = groups_for(config, parameters)
    if config.name == "SGDOptimizer":
        return torch.optim.SGD(groups, lr=config.lr)
    if config.name == "AdamOptimizer":
        return torch.optim.AdamW(groups, lr=config.lr)
    from ortlab.engines.torch.lamb import Lamb  # heavy: pytorch_optimizer

    return Lamb(groups, lr=config.lr)


def groups_for(
    config: Any, parameters: Mapping[str, nn.Parameter], *, in_torch: bool = False
) -> list[dict[str, Any]]:
    """Return the parameter groups of a configuration for a torch optimizer.

    Args:
        config: One of `ortlab.optim`, or of ORT's package of that name.
        parameters: The model's parameters by name; frozen ones are left out.
        in_torch: True if torch's own optimizer takes the steps, and not the graph of `FusedStep`.

    Returns:
        The groups, with their options except the learning rate.

    Raises:
        ValueError: If a group names an unknown parameter, or an option is not supported.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    groups: list[tuple[Mapping[str, Any], list[nn.Parameter]]] = []
    for group in config.params:
        for name in group["params"]:
            if name not in parameters:
                raise ValueError(f"params has {name!r}: {unknown_name(name, parameters)}")
        own = [trained.pop(name) for name in group["params"] if name in trained]
        groups.append((group, own))
    groups.append((config.defaults, list(trained.values())))
    groups = [(values, own) for values, own in groups if own]
    if config.name == "SGDOptimizer":
        return [{"params": own, "momentum": 0.0} for _, own in groups]
    if config.name == "AdamOptimizer":
        return [{"params": own, **_adam(values, in_torch=in_torch)} for values, own in groups]
    return [
        {"params": kind, **_lamb(values)}
        for values, own in groups
        for kind in ([p for p in own if p.dim() >= 2], [p for p in own if p.dim() < 2])
        if kind
    ]


def _adam(values: Mapping[str, Any], *, in_torch: bool) -> dict[str, Any]:
    corrected = bool(values["do_bias_correction"])
    after = values["weight_decay_mode"] == DecayMode.AFTER_WEIGHT_UPDATE
    if not in_torch:
        return {**_moments(values), "bias_correction": corrected, "decay_after": after}
    if after or not corrected:
        raise ValueError(
            "AdamConfig: do_bias_correction=False and AFTER_WEIGHT_UPDATE are not supported with "
            "a loss_scaler or in several processes; leave both at their defaults"
        )
    return _moments(values)


def _lamb(values: Mapping[str, Any]) -> dict[str, Any]:
    if values["do_bias_correction"] or (values["ratio_min"], values["ratio_max"]) != (
        float("-inf"),
        float("inf"),
    ):
        raise ValueError(
            "LambConfig: bias correction and bounds of the trust ratio are not supported; leave "
            "do_bias_correction, ratio_min and ratio_max at their defaults"
        )
    return _moments(values)


def _moments(values: Mapping[str, Any]) -> dict[str, Any]:
    # ORT's own classes rename lambda_coef.
    decay = values["lambda"] if "lambda" in values else values["lambda_coef"]
    return {
        "betas": (values["alpha"], values["beta"]),
        "eps": values["epsilon"],
        "weight_decay": decay,
    }
