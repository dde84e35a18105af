"""Weights of an ONNX model: in its file, or as external data in the same folder only.

Protobuf messages are limited to 2 GiB. Larger weights go into a separate file, as ONNX specifies
under "External Data" (https://onnx.ai/onnx/repo-docs/ExternalData.html).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import torch
from onnx.external_data_helper import set_external_data

PROTOBUF_LIMIT = 2**31
_ROOM = 2**26  # for the graph itself
_ALIGNMENT = 4096  # page size: onnxruntime can memory-map tensors with this alignment
_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}


def element_type(name: str, dtype: torch.dtype) -> int:
    """Return ONNX's number of an element type.

    Args:
        name: Name of the tensor, for the error message.
        dtype: Type in torch.

    Raises:
        ValueError: If onnxruntime does not support the type.
    """
    if dtype not in _TYPES:
        raise ValueError(f"{name} has type {dtype}, which onnxruntime does not support; convert it")
    return _TYPES[dtype]


def write(
    model: onnx.ModelProto, weights: Mapping[str, torch.Tensor], file: Path, *, external: bool
) -> None:
    """Write a model and its weights into a file.

    If the weights are external, they are written one tensor at a time, so that at most one of them
    is in memory twice.

    Args:
        model: The model, which has the weights as additional inputs.
        weights: Weights by name.
        file: Where to write the model.
        external: Whether to write the weights into a separate file beside it, which also happens
            if they do not fit into one.
    """
    size = sum(tensor.nbytes for tensor in weights.values()) + model.ByteSize()
    graph = model.graph
    if not (external or size > PROTOBUF_LIMIT - _ROOM):
        put_in(graph, weights)
        file.write_bytes(model.SerializeToString())
        return
    _take_from_inputs(graph, weights)
    data = file.with_name(f"{file.name}.data")
    with data.open("wb") as out:
        for name, tensor in weights.items():
            raw = _bytes(tensor)
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            proto = _proto(name, tensor, b"")
            set_external_data(proto, location=data.name, offset=out.tell(), length=len(raw))
            proto.ClearField("raw_data")
            out.write(raw)
            graph.initializer.append(proto)
    file.write_bytes(model.SerializeToString())


def put_in(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> None:
    """Turn a graph's weight inputs into initializers.

    Args:
        graph: The graph, which has the weights as additional inputs.
        weights: Weights by name.
    """
    _take_from_inputs(graph, weights)
    for name, tensor in weights.items():
        graph.initializer.append(_proto(name, tensor, _bytes(tensor)))


def _take_from_inputs(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> None:
    kept = [each for each in graph.input if each.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)


def _proto(name: str, tensor: torch.Tensor, raw: bytes) -> onnx.TensorProto:
    kind = element_type(name, tensor.dtype)
    return onnx.TensorProto(name=name, data_type=kind, dims=list(tensor.shape), raw_data=raw)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the values in the format of ONNX's ``raw_data``: little-endian, in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def check_places(file: Path) -> None:
    """Check that a model's external data is in its own folder.

    Args:
        file: The model.

    Raises:
        ValueError: If a tensor's data is outside the folder, or missing.
    """
    model = onnx.load_model(str(file), load_external_data=False)
    folder = file.parent.resolve()
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = _place(tensor)
        wanted = folder / place
        if (
            not place
            or ".." in (*PurePosixPath(place).parts, *PureWindowsPath(place).parts)
            or PurePosixPath(place).is_absolute()
            or PureWindowsPath(place).anchor
            or folder not in wanted.resolve().parents
        ):
            raise ValueError(
                f"{file.name} has the data of {tensor.name!r} in {place!r}, which is outside its "
                "folder and is not read; export the model again"
            )
        if not wanted.is_file():
            raise ValueError(
                f"{file.name} needs {place!r} in its folder for the data of {tensor.name!r}; copy "
                "it there"
            )


def files(file: Path) -> list[Path]:
    """Return the paths of a model and its external data.

    Args:
        file: The model.
    """
    model = onnx.load_model(str(file), load_external_data=False)
    external = onnx.TensorProto.EXTERNAL
    beside = {_place(each) for each in _tensors(model) if each.data_location == external}
    return [file, *(file.parent / name for name in sorted(beside))]


def _place(tensor: onnx.TensorProto) -> str:
    """Return the path of a tensor's data, relative to the model's folder.

    A tensor with several locations is rejected, because readers differ in which one they use.
    """
    named = [each.value for each in tensor.external_data if each.key == "location"]
    if len(named) != 1 or not isinstance(named[0], str):  # protobuf gives bytes if not UTF-8
        raise ValueError(
            f"the data of {tensor.name!r} is in {named!r}, which is not a file name; export the "
            "model again"
        )
    return named[0]


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor that may have external data: initializers, constants, subgraphs' too."""
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    graphs = [model.graph]
    while nodes or graphs:
        while graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
        if nodes:
            for attribute in nodes.pop().attribute:
                yield from (attribute.t, *attribute.tensors)
                for one in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (one.values, one.indices)
                graphs += [attribute.g, *attribute.graphs]
