"""Values for other processes: as bytes, with the tensors among them in a file beside.

What cells define goes by value (`ortlab.cluster.values`). The bytes travel over ipyparallel's
signed channel; the file is safetensors and read through a mapping, so that weights are in no
message and in memory once.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ortlab.cluster.values import Pickler

_INLINE = 1 << 16
"""Bytes of the largest tensor that goes with the others' values."""

_Place = tuple[int, bool, bool, dict[str, Any]]
"""A tensor's number, whether it is a parameter and has a gradient, and its attributes."""


class _Pickler(Pickler):
    """Leaves large tensors out, and notes them by number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """What stands for a tensor."""
        if type(value) not in (torch.Tensor, nn.Parameter) or not _is_plain(value):
            return None
        if id(value) not in self._numbers:  # `tensors` keeps it, so that no other gets its id
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        number, kind = self._numbers[id(value)], type(value)
        return number, kind is nn.Parameter, value.requires_grad, vars(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is large, and all that there is of it are its values."""
    return (
        tensor.layout == torch.strided
        and tensor.nbytes > _INLINE
        and tensor.is_contiguous()
        and tensor.is_leaf
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.dtype != torch.complex128  # for which safetensors has no form
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Any) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        """The tensor in its place."""
        number, is_parameter, has_gradient, attributes = pid
        if number not in self._made:
            # A mapping would keep the file's pages beside those that training writes.
            found = self._tensors.get_tensor(str(number)).clone()
            if is_parameter:
                found = nn.Parameter(found, requires_grad=has_gradient)
            self._made[number] = found.requires_grad_(has_gradient)
            vars(found).update(attributes)
        return self._made[number]


def check(value: Any) -> None:
    """Raises what keeps `value` from being packed; copies no large tensor."""
    _Pickler(io.BytesIO()).dump(value)


def pack(value: Any, file: Path) -> bytes:
    """`value` as bytes, and its large tensors in `file`. What is one tensor stays one."""
    packed = io.BytesIO()
    pickler = _Pickler(packed)
    pickler.dump(value)
    # Views of one storage, which safetensors refuses, get memory of their own.
    tensors = {
        str(number): tensor.detach().cpu().clone() if _is_view(tensor) else tensor.detach().cpu()
        for number, tensor in enumerate(pickler.tensors)
    }
    save_file(tensors, file)
    file.chmod(0o600)
    return packed.getvalue()


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def unpack(packed: bytes, file: Path) -> Any:
    """What `pack` was given; every tensor in memory of its own, on the CPU."""
    with safe_open(file, "pt") as tensors:
        return _Unpickler(io.BytesIO(packed), tensors).load()
