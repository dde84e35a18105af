"""Checks of a checkpoint: of its values alone, and against the model and optimizer that load it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_FEW = 3
_MOST = 2**53
"""Upper bound of whole numbers: float64, which the charts use, is exact up to here."""


def _whole(least: int, most: int = _MOST) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < most


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_model(value: Any) -> bool:
    """Return whether a value is a state dictionary, with versions of modules that torch reads."""
    versions = getattr(value, "_metadata", {})
    return (
        _is_mapping(value)
        and all(isinstance(name, str) for name in value)
        and _is_mapping(versions)
        and all(
            _is_mapping(module) and isinstance(module.get("version"), int | None)
            for module in versions.values()
        )
    )


def _is_order(value: Any) -> bool:
    return value is None or (
        isinstance(value.generators, list)
        and all(isinstance(state, torch.Tensor) for state in value.generators)
    )


_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "model": _is_model,
    "optimizer": _is_mapping,
    "settings": _is_mapping,
    "loss_scale": lambda value: value is None or _is_mapping(value),
    "scheduler": lambda value: value is None or _is_mapping(value),
    "versions": _is_mapping,
    "step": _whole(0),
    "epoch": _whole(0),
    "read": _whole(0),
    "length": lambda value: value is None or _whole(0)(value),
    "unit": lambda value: value in ("samples", "micro-batches"),
    "evaluated": _whole(-1),
    "order": _is_order,
    "engine_seed": _whole(0, 2**31),
}
"""Fields of a `Checkpoint` and of its `Position` -> whether a value is one that a run has."""


def check_values(values: Mapping[str, Any]) -> None:
    """Check the values of a checkpoint that need neither a model nor data to be checked.

    Args:
        values: Fields of a `Checkpoint` and of its `Position`, by name.

    Raises:
        ValueError: A value is not one that a run has; the message names it.
    """
    for name, is_valid in _VALUES.items():
        if not is_valid(values[name]):
            raise ValueError(f"{name} is {_told(values[name])}")
    if values["evaluated"] > values["step"]:
        raise ValueError(f"evaluated is {values['evaluated']}, after step {values['step']}")
    values["random"].check()
    if values["order"] is not None:
        values["order"].random.check()


def _told(value: Any) -> str:
    """Return a plain value in short, and the type of any other."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return reprlib.repr(value) if plain else type(value).__name__


def check_model(kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that a checkpoint's state dictionary matches the model's.

    Args:
        kept: State dictionary in the checkpoint.
        own: State dictionary of the model.

    Raises:
        ValueError: Names, types or shapes differ; the message names the first ones.
    """
    found = [f"{name} is not in the model" for name in kept if name not in own]
    found += [f"{name} is not in the checkpoint" for name in own if name not in kept]
    for name in kept:
        there, here = _form(kept[name]), _form(own.get(name))
        if name in own and there != here:
            found.append(f"{name} is {there} in the checkpoint and {here} in the model")
    if found:
        more = f", and {len(found) - _FEW} more" if len(found) > _FEW else ""
        raise ValueError(
            f"the checkpoint does not match the model: {', '.join(found[:_FEW])}{more}; create the "
            "model as it was when the checkpoint was saved"
        )


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


_ENTRIES: Mapping[str, set[str]] = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "lamb": {"exp_avg", "exp_avg_sq"},
    "sgd": {"momentum_buffer"},
}
"""Entries of the state of a parameter that has taken a step, by the setting ``optimizer``."""


def _is_option(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or _is_amount(value)


_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "params": lambda value: isinstance(value, list),
    "lr": _is_amount,
    "weight_decay": _is_amount,
    "eps": _is_amount,
    "momentum": _is_amount,
    "betas": lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_is_amount(beta) and beta < 1 for beta in value)
    ),
}
"""Options of a parameter group -> whether a value is valid; for all others see `_is_option`."""


def check_optimizer(
    kept: Mapping[str, Any],
    own: Mapping[str, Any],
    parameters: Sequence[tuple[str, torch.Tensor]],
    optimizer: str,
) -> None:
    """Check that a checkpoint's optimizer state matches the optimizer's.

    Args:
        kept: State dictionary of the optimizer in the checkpoint.
        own: State dictionary of the optimizer, of which the sizes of the groups are compared.
        parameters: Names and parameters of the optimizer, in its order.
        optimizer: Setting ``optimizer`` of the optimizer.

    Raises:
        ValueError: Parameter groups, entries, shapes or types differ, or a value is not one that an
            optimizer has; the message names it.
    """
    states, groups = _parts(kept, own)
    _check_groups(groups)
    for number, state in states.items():
        _check_state(state, *parameters[number], _ENTRIES[optimizer])


def check_own_optimizer(kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that the state of the user's optimizer in a checkpoint has the form of the optimizer's.

    Its entries and their shapes are up to the optimizer.

    Args:
        kept: State dictionary of the optimizer in the checkpoint.
        own: State dictionary of the optimizer.

    Raises:
        ValueError: Parameter groups differ in size, or an option in its type; the message names it.
    """
    _, groups = _parts(kept, own)
    for there, here in zip(groups, own["param_groups"], strict=True):
        for name in there.keys() & here.keys():
            one, other = there[name], here[name]
            if not (_alike(one, other) or one is None or other is None):
                raise ValueError(
                    f"the checkpoint's optimizer has {_told(one)} as option {_told(name)}, and "
                    f"this one {_told(other)}; give the optimizer that the run had"
                )


def _alike(one: Any, other: Any) -> bool:
    number = int, float
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) or (isinstance(one, number) and isinstance(other, number))


def _parts(
    kept: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Mapping[int, Any], list[Mapping[str, Any]]]:
    """Return states and groups of an optimizer in a checkpoint, in the form of this one's."""
    states, groups = kept.get("state"), kept.get("param_groups")
    if not (
        kept.keys() == {"state", "param_groups"}
        and isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
        and isinstance(groups, list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    ):
        raise ValueError(
            "the checkpoint's optimizer state is not in torch's format; use another checkpoint"
        )
    there, here = (
        [len(group["params"]) for group in state["param_groups"]] for state in (kept, own)
    )
    if there != here:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {there} parameters, and this one of {here}; "
            "train and freeze the same parameters as the run of the checkpoint"
        )
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"the checkpoint's optimizer has parameters {reprlib.repr(numbers)}, which are not in "
            "order; use another checkpoint"
        )
    for number in states:
        if type(number) is not int or number not in range(len(numbers)):
            raise ValueError(
                f"the checkpoint's optimizer has state for parameter {_told(number)}, but there "
                f"are only {len(numbers)} parameters; use another checkpoint"
            )
    return states, groups


def _check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the options of all groups."""
    for group in groups:
        # Every optimizer has these two; the others depend on the optimizer and torch's version.
        for name, value in {"lr": None, "weight_decay": None, **group}.items():
            known = isinstance(name, str) and name.isidentifier()
            if not known or not _OPTIONS.get(name, _is_option)(value):
                raise ValueError(
                    f"the checkpoint's optimizer has {_told(value)} as option {_told(name)}; use "
                    "another checkpoint"
                )


def _check_state(
    state: Mapping[str, Any], name: str, parameter: torch.Tensor, entries: set[str]
) -> None:
    """Check every value in the optimizer state of one parameter."""
    if state and state.keys() != entries:
        there, here = (reprlib.repr(sorted(map(str, each))) for each in (state, entries))
        raise ValueError(
            f"the checkpoint's optimizer has {there} for {name}, and this one {here}; use another "
            "checkpoint"
        )
    check_kept(state, name, parameter)
    for entry, value in state.items():
        if fault := _fault(entry, value, parameter):
            raise ValueError(
                f"the checkpoint's optimizer has {fault} as {entry} of {name}, which is "
                f"{_form(parameter)}; use another checkpoint"
            )


def _fault(entry: str, value: Any, parameter: torch.Tensor) -> str:
    """Return what an entry has that no step gives; "" for nothing."""
    if entry == "step" and _form(value) in ("float32[]", "float64[]"):
        return "" if _is_amount(value.item()) else str(value.item())
    if entry == "step" or _form(value) != _form(parameter):
        return _form(value)
    # An empty minimum would raise, and one with NaN, of a run that diverged, is not negative.
    negative = entry == "exp_avg_sq" and value.numel() and value.min() < 0
    return "negative values" if negative else ""


def check_kept(state: Mapping[str, Any], name: str, parameter: torch.Tensor) -> None:
    """Check that the optimizer state of one parameter matches it.

    Args:
        state: State of the parameter, by entry.
        name: Name of the parameter.
        parameter: The parameter.

    Raises:
        ValueError: The shape of an entry differs from the parameter's.
    """
    for entry, value in state.items():
        shaped = isinstance(value, torch.Tensor) and value.dim() > 0
        if shaped and value.shape != parameter.shape:
            raise ValueError(
                f"the checkpoint's optimizer has {entry} of shape {list(value.shape)} for {name}, "
                f"whose shape is {list(parameter.shape)}; use a checkpoint of this model"
            )
