"""Values packed for other processes: as bytes, with their large tensors in a file.

Definitions of notebook cells are pickled by value (`ortlab.cluster.values`). The bytes are sent
over ipyparallel's signed channel. The file is in safetensors format and memory-mapped, so that
weights are in no message and in memory only once.
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
"""Bytes of the largest tensor that is pickled with the other values."""

_Place = tuple[int, bool, bool, dict[str, Any]]
"""Reference to a tensor: number, is a parameter, requires a gradient, attributes."""


class _Pickler(Pickler):
    """Pickler that replaces large tensors by references and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """Return the reference that replaces a large tensor, or None for other values."""
        if type(value) not in (torch.Tensor, nn.Parameter) or not _is_plain(value):
            return None
        if id(value) not in self._numbers:  # ids stay unique because `tensors` keeps it alive
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        number, kind = self._numbers[id(value)], type(value)
        return number, kind is nn.Parameter, value.requires_grad, vars(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is large and safetensors can store it without loss."""
    return (
        tensor.layout == torch.strided
        and tensor.nbytes > _INLINE
        and tensor.is_contiguous()
        and tensor.is_leaf
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.dtype != torch.complex128  # unsupported by safetensors
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Any) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        """Return the tensor of a reference."""
        number, is_parameter, has_gradient, attributes = pid
        if number not in self._made:
            # Without a copy, the file's mapped pages would stay in memory besides the modified
            # ones.
            found = self._tensors.get_tensor(str(number)).clone()
            if is_parameter:
                found = nn.Parameter(found, requires_grad=has_gradient)
            self._made[number] = found.requires_grad_(has_gradient)
            vars(found).update(attributes)
        return self._made[number]


def check(value: Any) -> None:
    """Check that a value can be packed, without copying large tensors.

    Args:
        value: Any value.

    Raises:
        Exception: Whatever error the pickling of the value raises.
    """
    _Pickler(io.BytesIO()).dump(value)


def pack(value: Any, file: Path) -> bytes:
    """Pack a value as bytes, with its large tensors in a file.

    Args:
        value: Any value that can be pickled; a tensor that occurs several times stays one tensor.
        file: The file to write, readable only by the user.

    Returns:
        The bytes, for `unpack`.
    """
    packed = io.BytesIO()
    pickler = _Pickler(packed)
    pickler.dump(value)
    # safetensors rejects views of one storage, so they are copied.
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
    """Return the value that `pack` was given.

    Args:
        packed: The bytes that `pack` returned.
        file: The file that `pack` has written.

    Returns:
        The value; its tensors are copies on the CPU.
    """
    with safe_open(file, "pt") as tensors:
        return _Unpickler(io.BytesIO(packed), tensors).load()
