"""A model's inputs and outputs as the user describes them: ``model_desc``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortlab.settings import unknown_name

Sizes = tuple[int | str, ...]
_KEYS = ("inputs", "outputs")
_EXAMPLE = "{'inputs': [('x', ['batch', 784])], 'outputs': [('y', ['batch', 10])]}"


@dataclass(frozen=True)
class Described:
    """A tensor: its name and sizes, of which those with a name may differ from call to call.

    ``sizes`` is None where nobody has said them.
    """

    name: str
    sizes: Sizes | None
    is_loss: bool = False

    def __str__(self) -> str:
        return self.name if self.sizes is None else f"{self.name} {list(self.sizes)}"


@dataclass(frozen=True)
class Description:
    """What goes into a model, in order, and what comes out of it."""

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]

    @classmethod
    def of(cls, model_desc: Any) -> Description:
        """What `model_desc` says; ValueError says where it cannot be understood."""
        if not isinstance(model_desc, Mapping):
            raise ValueError(f"model_desc is a dictionary like {_EXAMPLE}, not {model_desc!r}")
        for key in model_desc:
            if key not in (*_KEYS, "learning_rate"):
                raise ValueError(f"model_desc has {key!r}: {unknown_name(str(key), _KEYS)}")
        found = {}
        for key in _KEYS:
            listed = model_desc.get(key)
            if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
                raise ValueError(
                    f"model_desc[{key!r}] is a list of (name, sizes), not {listed!r}; as in "
                    f"{_EXAMPLE}"
                )
            found[key] = tuple(_described(key, i, each) for i, each in enumerate(listed))
        names = [each.name for key in _KEYS for each in found[key]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"model_desc has {twice!r} twice; every input and output has a name")
        losses = [each.name for each in found["outputs"] if each.is_loss]
        if len(losses) > 1:
            raise ValueError(f"model_desc marks {', '.join(losses)} as the loss; mark one")
        return cls(found["inputs"], found["outputs"])

    @property
    def loss(self) -> int | None:
        """Which of the outputs is the loss; None where none is marked."""
        return next((i for i, each in enumerate(self.outputs) if each.is_loss), None)

    def check_inputs(self, tensors: Sequence[Any], sizes: dict[str, int]) -> None:
        """ValueError where `tensors` are not as described; notes what named `sizes` are."""
        for each, tensor in zip(self.inputs, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"{each.name} is a {type(tensor).__name__}, not a tensor; give "
                    "torch.as_tensor(...) of it"
                )
            _check(each, tensor, sizes)

    def check_outputs(self, tensors: Sequence[Any], sizes: dict[str, int]) -> None:
        """ValueError where a model's outputs are others than described."""
        if len(tensors) < len(self.outputs):
            missing = ", ".join(map(str, self.outputs[len(tensors) :]))
            raise ValueError(
                f"the model gives {len(tensors)} tensors and model_desc has {missing} more; "
                "describe what forward returns"
            )
        for each, tensor in zip(self.outputs, tensors, strict=False):
            _check(each, tensor, sizes)


def _described(key: str, number: int, entry: Any) -> Described:
    where = f"model_desc[{key!r}][{number}]"
    most = 3 if key == "outputs" else 2
    if not isinstance(entry, Sequence) or isinstance(entry, str) or not 2 <= len(entry) <= most:
        form = "(name, sizes) or (name, sizes, is_loss)" if most > 2 else "(name, sizes)"
        raise ValueError(f"{where} is {form}, not {entry!r}")
    name, sizes, is_loss = (*entry, False)[:3]
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} begins with a name, not {name!r}")
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ValueError(f"{where}: the sizes of {name!r} are a list, not {sizes!r}")
    for size in sizes:
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not (whole or (isinstance(size, str) and size)):
            raise ValueError(
                f"{where}: {name!r} has the size {size!r}; a size is a whole number above 0, or a "
                "name such as 'batch' where it may differ"
            )
    if not isinstance(is_loss, bool):
        raise ValueError(f"{where}: is_loss is True or False, not {is_loss!r}")
    if is_loss and list(sizes) not in ([], [1]):
        raise ValueError(f"{where}: the loss {name!r} has sizes {list(sizes)!r}; a loss has none")
    return Described(name, tuple(sizes), is_loss)


def _check(each: Described, tensor: Any, sizes: dict[str, int]) -> None:
    shape = list(tensor.shape)
    if each.sizes is None or (each.is_loss and tensor.numel() == 1):
        return
    if len(shape) != len(each.sizes):
        raise ValueError(f"{each.name} is {shape}, and model_desc has {each}")
    for wanted, size in zip(each.sizes, shape, strict=True):
        expected = sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted
        if size != expected:
            told = f"{wanted} is {expected} here" if isinstance(wanted, str) else f"has {each}"
            raise ValueError(f"{each.name} is {shape}, and in model_desc {told}")
