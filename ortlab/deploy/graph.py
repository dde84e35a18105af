"""The graph of an export made fit to leave: its shapes, its metadata, ONNX's operators alone."""

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
"""The newest form of the file that onnxruntime 1.19 reads."""


@dataclass(frozen=True)
class Port:
    """An input or an output: its name, numpy's name of its type, its shape.

    A size that varies is a name, as "batch".
    """

    name: str
    type: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.type} [{', '.join(map(str, self.shape))}]"

    def as_dict(self) -> dict[str, Any]:
        """As export.json holds it."""
        return {"name": self.name, "type": self.type, "shape": list(self.shape)}


def ports(
    call: ModelCall, axes: Axes, references: Sequence[Expected], read: Container[str]
) -> tuple[list[Port], list[Port]]:
    """Inputs, those that are `read`, and outputs, whose sizes the `references` tell."""
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
                raise NotInGraph(f"output {name!r} has another rank on {reference.trial.name}")
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
    """Gives `model` the shapes of its ports, its name and where it comes from.

    NotInGraph where it has an operator that is not ONNX's own.
    """
    foreign = sorted({f"{n.domain}::{n.op_type}" for n in model.graph.node if n.domain})
    if foreign:
        raise NotInGraph(
            f"forward needs {', '.join(foreign)}, which only this process has: compute it with "
            "torch's own operators"
        )
    declared = {port.name: port for port in (*inputs, *outputs)}
    for value in (*model.graph.input, *model.graph.output):
        port = declared.get(value.name)
        if port is not None:
            kind = element_type(port.name, getattr(torch, port.type))
            value.CopyFrom(helper.make_tensor_value_info(port.name, kind, list(port.shape)))
    del model.graph.value_info[:]  # the exporter's hold for the example alone
    model.graph.name = name
    model.ir_version = min(model.ir_version, _IR)
    model.producer_name, model.producer_version = "ortlab", __version__
    helper.set_model_props(
        model, {"ortlab": __version__, "torch": torch.__version__, "opset": str(opset)}
    )
