"""Call of a model that is exported: its input and output tensors by name.

Inputs are named after the parameters of forward, outputs after the fields of the model's result.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortlab.engines.base import Batch
from ortlab.engines.batch import TARGETS, arguments, describe

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_ANSWERS = (*TARGETS, "start_positions", "end_positions", "return_loss")
"""Arguments that models use only for their loss; an inference graph has none of them."""


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor in a call: an argument's position, or a keyword."""

    name: str
    at: int | str


class ModelCall:
    """Call of a model whose tensors may change and whose other arguments are constant.

    Attributes:
        module: The model.
        tensors: Tensors of the call by name.
        outputs: Names of the results; empty before the first call.
        left_out: Names of results that cannot be part of a graph.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.module = module
        self._args, self._kwargs = list(args), dict(kwargs)
        self._slots: list[_Slot] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.outputs: tuple[str, ...] = ()
        self.left_out: tuple[str, ...] = ()
        for name, at, value in _named(module, args, kwargs):
            if isinstance(value, torch.Tensor):
                self._slots.append(_Slot(name, at))
                self.tensors[name] = value.detach()
            elif not isinstance(value, _PLAIN):
                raise ValueError(
                    f"{name} is {_kind(value)}: an exported graph takes tensors only, and plain "
                    "values become constants; leave it out, or pass each tensor as its own argument"
                )
        if not self.tensors:
            raise ValueError(
                f"the batch ({describe([args, kwargs])[1:-1]}) has no tensor for forward; give "
                "the arguments that the model is called with"
            )

    @classmethod
    def of(cls, module: nn.Module, batch: Batch) -> ModelCall:
        """Return the call that a batch makes, without its labels.

        Args:
            module: The model.
            batch: Example batch.

        Raises:
            ValueError: If the batch does not fit forward.
        """
        args, kwargs = _without_answers(module, batch)
        return cls(module, args, kwargs)

    def masks(self) -> list[str]:
        """Return the names of the mask inputs.

        A mask has "mask" in its name, shape [batch, seq], and only zeros and ones.
        """
        return [name for name, tensor in self.tensors.items() if _is_mask(name, tensor)]

    def padded(self, *, left: bool) -> dict[str, torch.Tensor]:
        """Return the tensors with masks that hide more in each row, but never all of it.

        Args:
            left: Whether to hide the beginning of the rows instead of the end.
        """
        changed = dict(self.tensors)
        for name in self.masks():
            mask = torch.ones_like(changed[name])
            rows, length = mask.shape
            for row in range(rows):
                hidden = min((row + 1) * max(1, length // (rows + 1)), length - 1)
                if hidden:
                    mask[row, slice(hidden) if left else slice(length - hidden, None)] = 0
            changed[name] = mask
        return changed

    @property
    def fixed(self) -> dict[str, Any]:
        """Arguments that are constants of the graph, by name."""
        named = _named(self.module, self._args, self._kwargs)
        return {name: value for name, _, value in named if not isinstance(value, torch.Tensor)}

    def results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on other tensors and set ``outputs`` and ``left_out``.

        Args:
            tensors: Tensors in the order of ``self.tensors``.

        Returns:
            The results in the order of ``outputs``.

        Raises:
            ValueError: If the model returns something other than tensors.
        """
        args, kwargs = list(self._args), dict(self._kwargs)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if isinstance(slot.at, int):
                args[slot.at] = tensor
            else:
                kwargs[slot.at] = tensor
        left_out: list[str] = []
        found = list(_results(self.module(*args, **kwargs), "", left_out))
        names = _distinct([name for name, _ in found], set(self.tensors))
        if not found:
            raise ValueError(
                f"forward of {type(self.module).__name__} returns no tensor; return at least one"
            )
        self.outputs, self.left_out = tuple(names), tuple(left_out)
        return [tensor for _, tensor in found]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the model without gradients.

        Args:
            tensors: Tensors by name.

        Returns:
            The results by name.
        """
        with torch.no_grad():  # cloned, because forward may modify its inputs in place
            found = self.results([tensors[slot.name].clone() for slot in self._slots])
        return {name: each.detach() for name, each in zip(self.outputs, found, strict=True)}


def _is_mask(name: str, tensor: torch.Tensor) -> bool:
    if "mask" not in name or tensor.dim() != 2 or tensor.is_floating_point():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())


def _named(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int | str, Any]]:
    """Yield the name, the position or keyword, and the value of every argument."""
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(args) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(name)
    for i, value in enumerate(args):
        yield names[i], i, value
    for key, value in kwargs.items():
        yield key, key, value


def _without_answers(module: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments of forward for inference.

    A mapping loses the labels that forward does not require; a tuple loses its last item if forward
    takes fewer arguments. An encoder-decoder of transformers gets the decoder input that it would
    derive from the labels.
    """
    if isinstance(batch, Mapping):
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        inputs = dict(batch)
        for name in batch:
            if not (name in _ANSWERS or "label" in str(name)):
                continue
            known = parameters.get(name)
            if known is None or known.default is not inspect.Parameter.empty or takes_any:
                answer = inputs.pop(name)
                made = getattr(module, "prepare_decoder_input_ids_from_labels", None)
                if name == "labels" and made and not _decodes(inputs):
                    inputs["decoder_input_ids"] = made(answer)
        return arguments(module, inputs)
    try:
        return arguments(module, batch)
    except ValueError:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise
        shorter = batch[:-1]
        try:
            return arguments(module, shorter)
        except ValueError:
            return arguments(module, batch)  # raises an error that describes the whole batch


def _decodes(inputs: Mapping[str, Any]) -> bool:
    return any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def _results(value: Any, name: str, left_out: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a result with its name: its field, key or index."""
    if isinstance(value, torch.Tensor):
        yield name or "output", value
        return
    if value is None:
        return
    # Not imported here: a result can be a cache only if the module is already loaded.
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None and isinstance(value, caches.Cache):
        left_out.append(name or "output")
        return
    for key, item in _items(value, name):
        yield from _results(item, f"{name}_{key}" if name else str(key), left_out)


def _items(value: Any, name: str) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        keys = getattr(value, "_fields", None)  # of a named tuple
        own = (f"output_{i}" for i in range(len(value))) if not name else range(len(value))
        return list(zip(keys or own, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    raise ValueError(
        f"forward returns {name or 'a result'} that is {_kind(value)}, not a tensor; a graph has "
        "only tensors, so remove it from the result"
    )


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _distinct(names: Sequence[str], taken: set[str]) -> list[str]:
    """Return the names, with a suffix where a name is already taken."""
    found: list[str] = []
    for name in names:
        own, number = name, 1
        while own in taken or own in found:
            own, number = f"{name}_out" if number == 1 else f"{name}_out{number}", number + 1
        found.append(own)
    return found
