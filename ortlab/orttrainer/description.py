"""Description of a model's inputs and outputs by the user: ``model_desc``."""

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
    """Description of one tensor: its name and its sizes.

    A size is a number, or a name if it may change between calls. ``sizes`` is None if they are not
    described.
    """

    name: str
    sizes: Sizes | None
    is_loss: bool = False

    def __str__(self) -> str:
        return self.name if self.sizes is None else f"{self.name} {list(self.sizes)}"


@dataclass(frozen=True)
class Description:
    """Inputs and outputs of a model, in order."""

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]

    @classmethod
    def of(cls, model_desc: Any) -> Description:
        """Parse a description.

        Args:
            model_desc: A dictionary with "inputs", a list of (name, sizes), and "outputs", a list
                of (name, sizes) or (name, sizes, is_loss).

        Returns:
            The description.

        Raises:
            ValueError: If `model_desc` is invalid; the message names the entry.
        """
        if not isinstance(model_desc, Mapping):
            raise ValueError(f"model_desc must be a dictionary like {_EXAMPLE}, not {model_desc!r}")
        for key in model_desc:
            if key not in (*_KEYS, "learning_rate"):
                raise ValueError(f"model_desc has {key!r}: {unknown_name(str(key), _KEYS)}")
        found = {}
        for key in _KEYS:
            listed = model_desc.get(key)
            if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
                raise ValueError(
                    f"model_desc[{key!r}] must be a list of (name, sizes), not {listed!r}; for "
                    f"example {_EXAMPLE}"
                )
            found[key] = tuple(_described(key, i, each) for i, each in enumerate(listed))
        names = [each.name for key in _KEYS for each in found[key]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"model_desc has {twice!r} twice; give every input and output its own name"
            )
        losses = [each.name for each in found["outputs"] if each.is_loss]
        if len(losses) > 1:
            raise ValueError(f"model_desc marks {', '.join(losses)} as the loss; mark only one")
        return cls(found["inputs"], found["outputs"])

    @property
    def loss(self) -> int | None:
        """Index of the output that is the loss; None if none is marked."""
        return next((i for i, each in enumerate(self.outputs) if each.is_loss), None)

    def check_inputs(self, tensors: Sequence[Any], sizes: dict[str, int]) -> None:
        """Check that the inputs of a call match the description.

        Args:
            tensors: The inputs, in order.
            sizes: Sizes by name; those of the inputs are added.

        Raises:
            ValueError: If an input is no tensor or has other sizes.
        """
        for each, tensor in zip(self.inputs, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"{each.name} is a {type(tensor).__name__}, not a tensor; convert it with "
                    "torch.as_tensor(...)"
                )
            _check(each, tensor, sizes)

    def check_outputs(self, tensors: Sequence[Any], sizes: dict[str, int]) -> None:
        """Check that the outputs of a call match the description.

        Args:
            tensors: The outputs, in order; there may be more than are described.
            sizes: Sizes by name, as `check_inputs` has found them.

        Raises:
            ValueError: If outputs are missing or have other sizes.
        """
        if len(tensors) < len(self.outputs):
            missing = ", ".join(map(str, self.outputs[len(tensors) :]))
            raise ValueError(
                f"the model returns {len(tensors)} tensors, and model_desc has also {missing}; "
                "describe only tensors that forward returns"
            )
        for each, tensor in zip(self.outputs, tensors, strict=False):
            _check(each, tensor, sizes)


def _described(key: str, number: int, entry: Any) -> Described:
    where = f"model_desc[{key!r}][{number}]"
    most = 3 if key == "outputs" else 2
    if not isinstance(entry, Sequence) or isinstance(entry, str) or not 2 <= len(entry) <= most:
        form = "(name, sizes) or (name, sizes, is_loss)" if most > 2 else "(name, sizes)"
        raise ValueError(f"{where} must be {form}, not {entry!r}")
    name, sizes, is_loss = (*entry, False)[:3]
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} must begin with a name, not {name!r}")
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ValueError(f"{where}: the sizes of {name!r} must be a list, not {sizes!r}")
    for size in sizes:
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not (whole or (isinstance(size, str) and size)):
            raise ValueError(
                f"{where}: {name!r} has the size {size!r}; a size is a positive integer, or a name "
                "such as 'batch' if it may change"
            )
    if not isinstance(is_loss, bool):
        raise ValueError(f"{where}: is_loss must be True or False, not {is_loss!r}")
    if is_loss and list(sizes) not in ([], [1]):
        raise ValueError(
            f"{where}: the loss {name!r} has sizes {list(sizes)!r}; use [], a loss is a scalar"
        )
    return Described(name, tuple(sizes), is_loss)


def _check(each: Described, tensor: Any, sizes: dict[str, int]) -> None:
    shape = list(tensor.shape)
    if each.sizes is None or (each.is_loss and tensor.numel() == 1):
        return
    if len(shape) != len(each.sizes):
        raise ValueError(f"{each.name} has shape {shape}, but model_desc requires {each}")
    for wanted, size in zip(each.sizes, shape, strict=True):
        expected = sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted
        if size != expected:
            told = f"{wanted}={expected} in this batch" if isinstance(wanted, str) else f"{each}"
            raise ValueError(f"{each.name} has shape {shape}, but model_desc requires {told}")
