"""Files for ORT's on-device training: its API creates them from a graph, and trains with them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortlab.engines.ortmodule.compat import exporting, ortmodule
from ortlab.engines.torchscript import failures, streams
from ortlab.utils.plain_onnxruntime import let_threads_sleep, plain_onnxruntime

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
OPSET = 15
"""Newest opset at which that API differentiates LayerNormalization."""


class NotDifferentiable(RuntimeError):
    """Raised when ORT cannot create the files; the message names the unsupported part."""


def generate(
    model: onnx.ModelProto,
    folder: Path,
    *,
    trained: Sequence[str],
    frozen: Sequence[str],
    optimizer: str,
    weight_decay: float,
    nodes: Sequence[failures.Node],
) -> None:
    """Write the four files of a model to a folder.

    Args:
        model: Graph whose first output is the loss; changed in place.
        folder: Folder to write to.
        trained: Names of the trained parameters. The checkpoint stores them.
        frozen: Names of the frozen parameters. The checkpoint stores them too.
        optimizer: "adamw", with torch's epsilon and order of decay and update, or "sgd", without
            momentum.
        weight_decay: Weight decay of "adamw".
        nodes: Nodes of the graph with the user's lines, for errors.

    Raises:
        NotDifferentiable: If ORT cannot create the files from this graph.
    """
    ortmodule()  # the patches that ORT's training package needs
    from onnxruntime.training import artifacts, onnxblock  # optional: onnxruntime-training

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
        # ORT raises many types of exceptions; only the message tells the cause.
        except Exception as error:
            failures.attach_nodes(error, nodes)
            raise NotDifferentiable(str(failures.explain(error))) from error
    _draw_masks(folder / TRAINING)
    _drop_unread(folder / EVAL)
    if optimizer == "adamw":
        _as_torch_does(folder / OPTIMIZER)


def _give_all_outputs(graph: onnx.GraphProto) -> None:
    """Add outputs that gradients read: ORT itself adds them for some graphs only."""
    for node in graph.node:
        if node.op_type in ("SoftmaxCrossEntropyLoss", "Dropout") and len(node.output) == 1:
            node.output.append(f"{node.output[0]}_more")


def _spell_out_norms(graph: onnx.GraphProto) -> None:
    """Replace BatchNorm with running statistics by differentiable products and sums.

    ORT would replace the operator with one that uses the statistics of the batch.
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
    """Yield nodes of (x - mean) * weight / sqrt(variance + eps) + bias, over dimension 1."""
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
    """Return `model` with every shape expressed by its inputs' sizes.

    ONNX's own inference invents names such as unk__0, and can give the two operands of an Add the
    same one. ORT then omits the sum over the batch in the gradient of the broadcast operand, as for
    BERT's position embeddings.

    Args:
        model: Graph to infer shapes for.
    """
    plain_onnxruntime()
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference  # optional: ORT

    found: onnx.ModelProto = SymbolicShapeInference.infer_shapes(
        model, auto_merge=True, guess_output_rank=True
    )
    return found


def _draw_masks(file: Path) -> None:
    """Replace dropouts to draw from one continuing generator; `kernels.substitutes` explains why.

    ORT's Dropout reseeds its generator for each mask, so that it drops some elements every time.
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
                "DropoutGrad",  # zeros the masked elements and scales the others
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
    """Remove constants that only dropout in training reads: each session would warn about them."""
    model = onnx.load(file)
    read = {name for node in model.graph.node for name in node.input}
    kept = [
        node for node in model.graph.node if node.op_type != "Constant" or node.output[0] in read
    ]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, file)


def _as_torch_does(file: Path) -> None:
    """Set AdamW to decay before the update, as torch does.

    ORT's default is Hugging Face's order: decay after the update.
    """
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
    """Files of `folder`, loaded in ORT's training API as on a device.

    Raises NotDifferentiable if ORT lacks a kernel, and names the one of `nodes` that needs it.
    """

    def __init__(self, folder: Path, nodes: Sequence[failures.Node] = ()) -> None:
        import onnxruntime  # optional: onnxruntime-training
        from onnxruntime.training import api  # optional: onnxruntime-training

        options = onnxruntime.SessionOptions()
        let_threads_sleep(options)
        options.log_severity_level = 3
        self._state = api.CheckpointState.load_checkpoint(str(folder / CHECKPOINT))
        try:
            self._module = api.Module(
                str(folder / TRAINING),
                self._state,
                str(folder / EVAL),
                device="cpu",
                session_options=options,
            )
        except Exception as error:
            failures.attach_nodes(error, nodes)
            raise NotDifferentiable(str(failures.explain(error))) from error
        api.Optimizer(str(folder / OPTIMIZER), self._module)  # checks that the file can be loaded

    def names(self) -> list[str]:
        """Return the names of a batch's inputs, in order."""
        found: list[str] = self._module.input_names()
        return found

    def loss(self, batch: Mapping[str, np.ndarray]) -> float:
        """Run forward and backward in training mode; gradients accumulate.

        Args:
            batch: Inputs by name.

        Returns:
            The loss.
        """
        self._module.train()
        outputs = self._module(*(batch[name] for name in self.names()))
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        return float(np.asarray(first).reshape(()))

    def gradients(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the accumulated gradients of parameters.

        Args:
            names: Names of the parameters.
        """
        return {name: np.array(self._state.parameters[name].grad) for name in names}
