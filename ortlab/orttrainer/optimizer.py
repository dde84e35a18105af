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
        plain = [{"params": own} for _, own in groups]
        return torch.optim.SGD(plain, lr=config.lr)
    if config.name == "AdamOptimizer":
        made = [{"params": own, **_adam(values)} for values, own in groups]
        return torch.optim.AdamW(made, lr=config.lr)
    from ortlab.engines.torch.lamb import Lamb  # heavy: pytorch_optimizer

    kinds = [
        {"params": kind, **_lamb(values)}
        for values, own in groups
        for kind in ([p for p in own if p.dim() >= 2], [p for p in own if p.dim() < 2])
        if kind
    ]
    return Lamb(kinds, lr=config.lr)


def _adam(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_moments(values),
        "bias_correction": values["do_bias_correction"],
        "decay_after": values["weight_decay_mode"] == DecayMode.AFTER_WEIGHT_UPDATE,
    }


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
