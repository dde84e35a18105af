"""Conversion of nested values to JSON and named tensors, and back."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


class Packed:
    """Converter of nested values to JSON, which collects their tensors by name.

    A dictionary becomes ``{"dict": [[key, value], ...]}``, since its keys may be numbers; a state
    dictionary has the versions of its modules beside it, as ``versions``. Tensors, arrays, tuples
    and non-finite numbers are objects with one key: ``tensor``, ``array``, ``tuple`` or ``float``.

    Attributes:
        tensors: The tensors by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}

    def pack(self, value: Any, name: str) -> Any:
        """Convert a value to JSON.

        Args:
            value: The value.
            name: Prefix of the names of its tensors.

        Returns:
            The value as JSON, with references to `tensors`.

        Raises:
            ValueError: The value has an unsupported type.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._named(value, name)}
        if isinstance(value, np.ndarray):
            return {"array": self._named(torch.from_numpy(value), name)}
        if isinstance(value, Mapping):
            within = name if name.endswith(".") or not name else f"{name}."
            packed = {
                "dict": [
                    [self.pack(key, name), self.pack(item, f"{within}{key}")]
                    for key, item in value.items()
                ]
            }
            versions = getattr(value, "_metadata", None)
            return packed if versions is None else {**packed, "versions": self.pack(versions, name)}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{name}.{place}") for place, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(float(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(
            f"{name} is a {type(value).__name__}, which a checkpoint cannot store; use tensors, "
            "arrays, numbers, strings, lists, tuples and dictionaries"
        )

    def _named(self, tensor: torch.Tensor, name: str) -> str:
        known = self._names.get(memory_of(tensor))
        if known is not None:
            return known
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            what = "meta" if tensor.is_meta else tensor.layout
            raise ValueError(f"{name} is not a dense tensor ({what}), so it cannot be stored")
        if tensor.dtype == torch.complex128:
            raise ValueError(f"{name} is complex128, which safetensors does not support")
        while name in self.tensors:  # different keys with the same text, such as 1 and "1"
            name += "'"
        self._names[memory_of(tensor)] = name
        kept = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # safetensors refuses different views of one storage, so they are copied.
        whole = kept.untyped_storage().nbytes() == kept.nbytes
        self.tensors[name] = kept if whole else kept.clone()
        return name


def unpacked(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Convert JSON from `Packed` back to the original value.

    Args:
        value: The JSON.
        tensors: The tensors by name.
    """
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "array" in value:
        return tensors[value["array"]].numpy()
    if "tuple" in value:
        return tuple(unpacked(value["tuple"], tensors))
    if "float" in value:
        return float(value["float"])
    items = [(unpacked(key, tensors), unpacked(item, tensors)) for key, item in value["dict"]]
    if "versions" not in value:
        return dict(items)
    return _with_versions(items, unpacked(value["versions"], tensors))


def _with_versions(items: list[tuple[Any, Any]], versions: Any) -> OrderedDict[Any, Any]:
    """Create a state dictionary as torch does, with the versions of its modules."""
    made = OrderedDict(items)
    made._metadata = versions  # type: ignore[attr-defined]
    return made


def rebuilt(value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy nested containers and replace every tensor.

    Args:
        value: The nested value.
        leaf: Called with each tensor; returns its replacement.
    """
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, Mapping):
        items = [(key, rebuilt(item, leaf)) for key, item in value.items()]
        versions = getattr(value, "_metadata", None)
        return dict(items) if versions is None else _with_versions(items, versions)
    if isinstance(value, list | tuple):
        return type(value)(rebuilt(item, leaf) for item in value)
    return value


def memory_of(tensor: torch.Tensor) -> object:
    """Return a key of the tensor's memory, which is equal for tied tensors only.

    Args:
        tensor: The tensor.
    """
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
