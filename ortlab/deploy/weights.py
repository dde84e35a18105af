"""A model's weights in its file, or beside it as external data, which is never read elsewhere.

Protobuf's messages end at 2 GiB; what is larger goes into a file of its own, as ONNX says under
"External Data" (https://onnx.ai/onnx/repo-docs/ExternalData.html).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import torch
from onnx.external_data_helper import set_external_data

PROTOBUF_LIMIT = 2**31
_ROOM = 2**26  # for the graph itself
_ALIGNMENT = 4096  # of a page: onnxruntime maps what begins there
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
    """ONNX's number of a type; ValueError where it has none."""
    if dtype not in _TYPES:
        raise ValueError(f"{name} is of {dtype}, which no onnxruntime kernel takes; convert it")
    return _TYPES[dtype]


def write(
    model: onnx.ModelProto, weights: Mapping[str, torch.Tensor], file: Path, *, external: bool
) -> None:
    """Writes `model`, whose further inputs are `weights`, with them into `file`.

    With `external`, or where they are too large, the weights go into a file beside it, one tensor
    at a time, at most one in memory twice.
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
    """Gives `graph`, whose further inputs are `weights`, those as constants of its own."""
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
    """The values as ONNX has them in ``raw_data``: little-endian, in C's order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def check_places(file: Path) -> None:
    """ValueError where the model in `file` has data anywhere but in a file of its own folder."""
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
                f"{file.name} has the data of {tensor.name!r} in {place!r}, which is not in its "
                "own folder: it is not read"
            )
        if not wanted.is_file():
            raise ValueError(f"{file.name} needs {place!r} beside it, with {tensor.name!r}")


def files(file: Path) -> list[Path]:
    """`file` and what lies beside it with its data."""
    model = onnx.load_model(str(file), load_external_data=False)
    external = onnx.TensorProto.EXTERNAL
    beside = {_place(each) for each in _tensors(model) if each.data_location == external}
    return [file, *(file.parent / name for name in sorted(beside))]


def _place(tensor: onnx.TensorProto) -> str:
    """The file that a tensor's data is in, relative to the model's folder.

    ValueError where that is not one name: readers differ in which of several they take.
    """
    named = [each.value for each in tensor.external_data if each.key == "location"]
    if len(named) != 1 or not isinstance(named[0], str):  # bytes are what is no UTF-8
        raise ValueError(f"the data of {tensor.name!r} is in {named!r}, which is no file's name")
    return named[0]


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that may have external data: initializers, constants, those of subgraphs."""
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
