"""Optimizer configurations of ORT's first training API, with its names and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import Any, ClassVar

from ortlab.settings import unknown_name
from ortlab.utils.errors import brief

Group = Mapping[str, Any]


class OptimizerConfig:
    """Configuration of an optimizer.

    Args:
        params: Parameter groups: dictionaries with ``params``, a list of parameter names, and the
            settings that differ from the defaults.
        defaults: Settings of all other parameters.

    Attributes:
        defaults: Settings of all parameters outside of the groups.
        params: Parameter groups, with all settings.

    Raises:
        ValueError: A setting is unknown or out of range, or a group sets its own learning rate.
    """

    name: str
    """Name of the optimizer in ORT."""

    @brief
    def __init__(self, params: Sequence[Group], defaults: Mapping[str, Any]) -> None:
        for key, value in defaults.items():
            _check(key, value)
        self.defaults = dict(defaults)
        self.params = [self._group(group) for group in params]

    @property
    def lr(self) -> float:
        """Base learning rate that a schedule scales; it may be changed between steps."""
        return float(self.defaults["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        _check("lr", value)
        self.defaults["lr"] = value

    def _group(self, group: Group) -> dict[str, Any]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(
                f"params has {group!r}; use a dictionary with the names of its parameters, such as "
                "{'params': ['fc1.weight'], 'lambda_coef': 0.01}"
            )
        changes = {key: value for key, value in group.items() if key != "params"}
        if "lr" in changes:
            raise ValueError("a group cannot set its own learning rate; use lr=... for all groups")
        for key, value in changes.items():
            if key not in self.defaults:
                raise ValueError(f"params has {key!r}: {unknown_name(key, self.defaults)}")
            _check(key, value)
        return {**self.defaults, **changes, "params": list(group["params"])}

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in self.defaults.items())
        groups = f", {len(self.params)} groups" if self.params else ""
        return f"{type(self).__name__}({values}{groups})"


def _check(key: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise ValueError(f"{key}={value!r} is {type(value).__name__}, not a number")
    if isinstance(value, bool) or key in ("ratio_min", "ratio_max"):
        return
    if math.isnan(value) or value < 0:
        raise ValueError(f"{key}={value!r} must be at least 0")
    if key in ("alpha", "beta") and value >= 1:
        raise ValueError(f"{key}={value!r} must be below 1")
    if key == "max_norm_clip" and value == 0:
        raise ValueError("max_norm_clip=0 would clip every gradient to 0; use a norm above 0")


class SGDConfig(OptimizerConfig):
    """Gradient descent without momentum and weight decay.

    Args:
        params: Must be empty; the optimizer has no parameter groups.
        lr: Learning rate.

    Raises:
        ValueError: `params` is not empty, or `lr` is out of range.
    """

    name = "SGDOptimizer"

    def __init__(self, params: Sequence[Group] = (), lr: float = 0.001) -> None:
        if params:
            raise ValueError("SGDConfig has no parameter groups; use lr, which applies to all")
        super().__init__((), {"lr": lr})


@unique
class DecayMode(IntEnum):
    """Order of weight decay and update: decay first as in torch's AdamW, or last (Hugging Face)."""

    BEFORE_WEIGHT_UPDATE = 0
    AFTER_WEIGHT_UPDATE = 1


class AdamConfig(OptimizerConfig):
    """AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101).

    Args:
        params: Parameter groups; see `OptimizerConfig`.
        lr: Learning rate.
        alpha: Decay rate of the first moment.
        beta: Decay rate of the second moment.
        lambda_coef: Weight decay.
        epsilon: Constant that is added to the denominator.
        max_norm_clip: Maximum norm of all gradients together; larger gradients are clipped.
        do_bias_correction: Correct the bias of the moments.
        weight_decay_mode: Order of weight decay and update; a `DecayMode`.

    Raises:
        ValueError: A setting is unknown or out of range.
    """

    name = "AdamOptimizer"
    DecayMode: ClassVar = DecayMode

    def __init__(
        self,
        params: Sequence[Group] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: int = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": DecayMode(weight_decay_mode),
        }
        super().__init__(params, defaults)


class LambConfig(OptimizerConfig):
    """LAMB (You et al. 2020, arXiv:1904.00962); see `ortlab.engines.torch.lamb`.

    Args:
        params: Parameter groups; see `OptimizerConfig`.
        lr: Learning rate.
        alpha: Decay rate of the first moment.
        beta: Decay rate of the second moment.
        lambda_coef: Weight decay.
        ratio_min: Lower bound of the trust ratio.
        ratio_max: Upper bound of the trust ratio.
        epsilon: Constant that is added to the denominator.
        max_norm_clip: Maximum norm of all gradients together; larger gradients are clipped.
        do_bias_correction: Correct the bias of the moments.

    Raises:
        ValueError: A setting is unknown or out of range.
    """

    name = "LambOptimizer"

    def __init__(
        self,
        params: Sequence[Group] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__(params, defaults)
