"""Runs of a module without side effects on the module, its inputs or the random states."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortlab.utils.errors import Concise
from ortlab.utils.rng import RandomStates


class NotInGraph(Concise, RuntimeError):
    """Raised when `forward` does something that no graph can express; the message names the fix."""


@contextlib.contextmanager
def inputs_kept(inputs: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Restore `inputs` on exit.

    Inputs that require gradients are skipped: autograd refuses to change them in place.

    Args:
        inputs: Tensors that the code in this context may change in place.

    Yields:
        A list that is filled on exit with the indices of the inputs that were changed.
    """
    changed: list[int] = []
    kept = [
        (i, tensor, tensor._version, tensor.clone())
        for i, tensor in enumerate(inputs)
        if not tensor.requires_grad and not tensor.is_inference()
    ]
    try:
        yield changed
    finally:
        for i, tensor, version, value in kept:
            if tensor._version != version:
                changed.append(i)
                tensor.copy_(value)


class NoDropout(TorchFunctionMode):
    """Mode in which every torch dropout is the identity.

    A dropout with ``p=1`` is still run: it draws no random numbers and is not a dropout in a graph.

    Attributes:
        used: True once a dropout was skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the input of a dropout; call `func` for everything else."""
        named = dict(kwargs or {})
        if func in _DROPOUTS and (args[1] if len(args) > 1 else named.get("p")) != 1:
            self.used = True
            return args[0] if args else named["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in named:
                named["dropout_p"] = 0.0
        elif func is functional.multi_head_attention_forward:
            args = (*args[:_ATTENTION_P], 0.0, *args[_ATTENTION_P + 1 :])
        elif func in _RECURRENT:
            # (..., has_biases, num_layers, dropout, ...), shifted by one with packed sequences.
            at = next(i for i, value in enumerate(args) if isinstance(value, bool)) + 2
            args = (*args[:at], 0.0, *args[at + 1 :])
        return func(*args, **named)


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[set[str]]:
    """Restore buffers, attributes, hooks and random states on exit. ``.grad`` is never written.

    The random states are those of Python, NumPy, torch and CUDA.

    Args:
        module: Module to restore, with all its submodules.

    Yields:
        A set that is filled on exit with the names of attributes that were set in the meantime, and
        of lists, dictionaries and sets among them whose items changed. It contains no buffers.
    """
    written: set[str] = set()
    modules = list(module.named_modules())
    attributes = [(name, child, dict(child.__dict__)) for name, child in modules]
    registered_buffers = [(child._buffers, dict(child._buffers)) for _, child in modules]
    buffers = [
        (buffer, buffer.detach().clone())
        for _, before in registered_buffers
        for buffer in before.values()
        if buffer is not None
    ]
    contents = [
        (f"{name or type(child).__name__}.{key}", held, _items(held), copy.copy(held))
        for name, child in modules
        for key, held in child.__dict__.items()
        if type(held) in (list, dict, set) and key not in ("_parameters", "_buffers", "_modules")
    ]
    # transformers models register hooks at their first call and record that in an attribute.
    hooks = [
        (held, dict(held))
        for _, child in modules
        for name, held in child.__dict__.items()
        if "_hooks" in name and isinstance(held, dict)
    ]
    states = RandomStates.now()
    try:
        yield written
    finally:
        for held, registered in hooks:
            held.clear()
            held.update(registered)
        for name, held, items, before in contents:
            if len(now := _items(held)) != len(items) or not all(map(operator.is_, now, items)):
                written.add(name)
                held.clear()
                (held.extend if isinstance(held, list) else held.update)(before)
        for name, child, before in attributes:
            written.update(_put_back(name or type(child).__name__, child, before))
        for registered, before in registered_buffers:
            registered.clear()
            registered.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        states.give_back()


def _items(held: list[Any] | dict[Any, Any] | set[Any]) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else list(held)


def _put_back(path: str, module: nn.Module, before: Mapping[str, Any]) -> Iterator[str]:
    now = module.__dict__
    for name in [name for name in now if name not in before]:
        del now[name]
        if name != _HOOKED:
            yield f"{path}.{name}"
    for name, value in before.items():
        if now.get(name) is not value:
            now[name] = value
            yield f"{path}.{name}"


_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.native_dropout,
}


_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


_ATTENTION_P = 10  # where multi_head_attention_forward takes dropout_p


_HOOKED = "_output_capturing_hooks_installed"
"""Attribute in which transformers records that a model has its hooks; the hooks are restored too,
so its removal is not reported."""
