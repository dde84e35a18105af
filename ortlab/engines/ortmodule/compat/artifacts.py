"""The files of ORT's on-device training: its API makes them of a graph, and trains them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortlab.engines.ortmodule.compat import exporting, ortmodule
from ortlab.engines.torchscript import streams
from ortlab.utils.plain_onnxruntime import plain_onnxruntime

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
OPSET = 15
"""The newest at which that API differentiates LayerNormalization."""


class NotDifferentiable(RuntimeError):
    """ORT cannot make the files; the message says what of the graph it does not take."""


def generate(
    model: onnx.ModelProto,
    folder: Path,
    *,
    trained: Sequence[str],
    frozen: Sequence[str],
    optimizer: str,
    weight_decay: float,
) -> None:
    """Writes the four files of `model`, whose first output is the loss, into `folder`.

    `trained` and `frozen` are parameters, which the checkpoint gets. `optimizer` is "adamw", with
    torch's epsilon and its order of decay and update, or "sgd", without momentum.
    """
    ortmodule()  # the patches that ORT's training package needs
    from onnxruntime.training import artifacts, onnxblock

    if (reason := exporting.wrong_gradient(model.graph)) is not None:
        raise NotDifferentiable(reason)
    _give_all_outputs(model.graph)
    _spell_out_norms(model.graph)
    block: Any = onnxblock.optim.SGD()
    if optimizer == "adamw":
        block = onnxblock.optim.AdamW(eps=1e-8, weight_decay=weight_decay)
    with streams.EXPORT, streams.streams_filtered(noise=rb"^.*$\n?"), _quiet():
        try:
            artifacts.generate_artifacts(
                model,
                requires_grad=list(trained),
                frozen_params=list(frozen),
                optimizer=block,
                artifact_directory=folder,
                additional_output_names=[each.name for each in model.graph.output][1:],
            )
        # ORT raises plain exceptions of many kinds; what they mean is in the message.
        except Exception as error:
            said = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise NotDifferentiable(said[0]) from error
    _draw_masks(folder / TRAINING)
    _drop_unread(folder / EVAL)
    if optimizer == "adamw":
        _as_torch_does(folder / OPTIMIZER)


def _give_all_outputs(graph: onnx.GraphProto) -> None:
    """Names outputs that gradients read: without them ORT makes them for some graphs alone."""
    for node in graph.node:
        if node.op_type in ("SoftmaxCrossEntropyLoss", "Dropout") and len(node.output) == 1:
            node.output.append(f"{node.output[0]}_more")


def _spell_out_norms(graph: onnx.GraphProto) -> None:
    """BatchNorm by its running statistics as products and sums, which can be differentiated.

    Of the operator ORT would make one that takes the batch's own statistics.
    """
    values = (*graph.value_info, *graph.input, *graph.output)
    ranks = {each.name: len(each.type.tensor_type.shape.dim) for each in values}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "BatchNormalization":
            nodes.append(node)
            continue
        x, weight, bias, mean, variance = node.input
        eps = next((each.f for each in node.attribute if each.name == "epsilon"), 1e-5)
        nodes += _norm(node.output[0], [x, weight, bias, mean, variance], eps, ranks[x])
    del graph.node[:]
    graph.node.extend(nodes)


def _norm(output: str, inputs: list[str], eps: float, rank: int) -> Iterator[onnx.NodeProto]:
    """(x - mean) weight / sqrt(variance + eps) + bias, over the second of `rank` dimensions."""
    x, weight, bias, mean, variance = inputs

    def made(operator: str, names: list[str], part: str) -> onnx.NodeProto:
        return onnx.helper.make_node(operator, names, [part], name=part)

    parts = {name: f"{output}_{name}" for name in ("eps", "safe", "root", "scale", "off", "by")}
    value = onnx.helper.make_tensor(parts["eps"], onnx.TensorProto.FLOAT, [], [eps])
    yield onnx.helper.make_node("Constant", [], [parts["eps"]], value=value)
    yield made("Add", [variance, parts["eps"]], parts["safe"])
    yield made("Sqrt", [parts["safe"]], parts["root"])
    yield made("Div", [weight, parts["root"]], parts["scale"])
    wide = {"scale": parts["scale"], "bias": bias, "mean": mean}
    if rank > 2:
        axes = onnx.numpy_helper.from_array(np.arange(1, rank - 1), f"{output}_axes")
        yield onnx.helper.make_node("Constant", [], [axes.name], value=axes)
        for key, name in list(wide.items()):
            wide[key] = f"{output}_wide_{key}"
            yield made("Unsqueeze", [name, axes.name], wide[key])
    yield made("Sub", [x, wide["mean"]], parts["off"])
    yield made("Mul", [parts["off"], wide["scale"]], parts["by"])
    yield made("Add", [parts["by"], wide["bias"]], output)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with every shape in terms of its inputs' sizes.

    ONNX's own inference makes up names such as unk__0, of which those of two operands of an Add can
    be the same: ORT then leaves out the sum over a batch in the gradient of what was broadcast, as
    that of BERT's position embeddings.
    """
    plain_onnxruntime()
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    found: onnx.ModelProto = SymbolicShapeInference.infer_shapes(
        model, auto_merge=True, guess_output_rank=True
    )
    return found


def _draw_masks(file: Path) -> None:
    """Has dropouts draw from a generator that goes on; `kernels.substitutes` says why.

    ORT's Dropout seeds its own anew for each mask, so that it drops some elements by rote.
    """
    model = onnx.load(file)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Dropout":
            nodes.append(node)
            continue
        x, ratio, training = node.input
        mask = node.output[1]
        made, drawn = onnx.helper.make_node, f"{mask}_drawn"
        nodes += [
            made("RandomUniformLike", [x], [drawn], name=drawn, dtype=onnx.TensorProto.FLOAT),
            made("GreaterOrEqual", [drawn, ratio], [mask], name=mask),
            made(
                "DropoutGrad",  # zeros what is masked out, and scales the rest
                [x, mask, ratio, training],
                node.output[:1],
                name=node.name,
                domain="com.microsoft",
            ),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, file)


def _drop_unread(file: Path) -> None:
    """Constants that only dropout in training read: each session would warn of them."""
    model = onnx.load(file)
    read = {name for node in model.graph.node for name in node.input}
    kept = [
        node for node in model.graph.node if node.op_type != "Constant" or node.output[0] in read
    ]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, file)


def _as_torch_does(file: Path) -> None:
    """Decay before the update: ORT's own choice is Hugging Face's, after it."""
    model = onnx.load(file)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "AdamWOptimizer" and attribute.name == "adam_mode":
                attribute.i = 0
    onnx.save(model, file)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Device:
    """The files of `folder` in ORT's training API, as a device would load them."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime
        from onnxruntime.training import api

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._state = api.CheckpointState.load_checkpoint(str(folder / CHECKPOINT))
        self._module = api.Module(
            str(folder / TRAINING),
            self._state,
            str(folder / EVAL),
            device="cpu",
            session_options=options,
        )
        api.Optimizer(str(folder / OPTIMIZER), self._module)  # whether that file can be loaded

    def names(self) -> list[str]:
        """What a batch has, in order."""
        found: list[str] = self._module.input_names()
        return found

    def loss(self, batch: Mapping[str, np.ndarray]) -> float:
        """The loss of a batch, in training; its gradients are added to those that are there."""
        self._module.train()
        outputs = self._module(*(batch[name] for name in self.names()))
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        return float(np.asarray(first).reshape(()))

    def gradients(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Those of parameters, since they were last reset."""
        return {name: np.array(self._state.parameters[name].grad) for name in names}
