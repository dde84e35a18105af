"""Final form of an exported graph: its named shapes, its metadata, and only ONNX's operators."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import helper

from ortlab._version import __version__
from ortlab.deploy.axes import Axes
from ortlab.deploy.call import ModelCall
from ortlab.deploy.check import Expected
from ortlab.deploy.weights import element_type
from ortlab.engines.torchscript.isolation import NotInGraph

_IR = 10
"""The newest IR version that onnxruntime 1.19 reads."""


@dataclass(frozen=True)
class Port:
    """An input or an output of a graph.

    Attributes:
        name: Its name.
        type: NumPy's name of its element type.
        shape: Its shape; a size that varies is a name, for example "batch".
    """

    name: str
    type: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.type} [{', '.join(map(str, self.shape))}]"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of export.json."""
        return {"name": self.name, "type": self.type, "shape": list(self.shape)}


def ports(
    call: ModelCall, axes: Axes, references: Sequence[Expected], read: Container[str]
) -> tuple[list[Port], list[Port]]:
    """Return the inputs and the outputs of a graph.

    Args:
        call: The call of the model.
        axes: Sizes of the inputs that vary.
        references: Trials with the outputs of eager torch, which show the outputs' sizes that vary.
        read: Names of the tensors that forward reads.

    Raises:
        NotInGraph: If an output's number of dimensions varies.
    """
    varies = axes.by_input()
    inputs = [
        Port(name, _type(t), _named(t.shape, varies.get(name, {})))
        for name, t in call.tensors.items()
        if name in read
    ]
    example = references[0].outputs
    outputs = []
    for name, tensor in example.items():
        dims: dict[int, str] = {}
        for reference in references[1:]:
            if reference.trial.name == "the example":
                continue
            axis, shape = reference.trial.axis, reference.outputs[name].shape
            if len(shape) != tensor.dim():
                raise NotInGraph(
                    f"output {name!r} has another number of dimensions on {reference.trial.name}; "
                    "let forward always return the same number"
                )
            for dim, (before, now) in enumerate(zip(tensor.shape, shape, strict=True)):
                if before == now:
                    continue
                sizes = None if axis is None else reference.tensors[axis.places[0][0]].shape
                follows = (
                    axis is not None
                    and sizes is not None
                    and (before, now) == (axis.size, sizes[axis.places[0][1]])
                    and dims.get(dim, axis.name) == axis.name
                )
                dims[dim] = axis.name if follows and axis is not None else f"{name}_{dim}"
        outputs.append(Port(name, _type(tensor), _named(tensor.shape, dims)))
    return inputs, outputs


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _named(shape: Sequence[int], names: Mapping[int, str]) -> tuple[int | str, ...]:
    return tuple(names.get(dim, size) for dim, size in enumerate(shape))


def finish(
    model: onnx.ModelProto, inputs: Sequence[Port], outputs: Sequence[Port], name: str, opset: int
) -> None:
    """Set the shapes, the name and the metadata of a graph in place.

    Args:
        model: The graph.
        inputs: Its inputs.
        outputs: Its outputs.
        name: Name of the graph.
        opset: Version of ONNX's operators, for the metadata.

    Raises:
        NotInGraph: If the graph has an operator that is not in the ONNX standard.
    """
    foreign = sorted({f"{n.domain}::{n.op_type}" for n in model.graph.node if n.domain})
    if foreign:
        raise NotInGraph(
            f"forward needs {', '.join(foreign)}, which is not in the ONNX standard; compute it "
            "with torch's own operators"
        )
    declared = {port.name: port for port in (*inputs, *outputs)}
    for value in (*model.graph.input, *model.graph.output):
        port = declared.get(value.name)
        if port is not None:
            kind = element_type(port.name, getattr(torch, port.type))
            value.CopyFrom(helper.make_tensor_value_info(port.name, kind, list(port.shape)))
    del model.graph.value_info[:]  # the exporter's shapes are valid for the example only
    model.graph.name = name
    model.ir_version = min(model.ir_version, _IR)
    model.producer_name, model.producer_version = "ortlab", __version__
    helper.set_model_props(
        model, {"ortlab": __version__, "torch": torch.__version__, "opset": str(opset)}
    )
