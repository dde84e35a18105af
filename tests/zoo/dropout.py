"""Eager torch with the dropout masks that ORT drew, so that the two can be compared exactly.

Every Dropout node of an exported graph gets its own seed. ORT's kernel then draws the same masks in
another session with the same seed, ratio and shape. The masks are read there and used by eager
torch's dropout calls, in the order of the graph's nodes. A ratio, position or number of dropouts
that differs from eager torch's gives another mask, and therefore another loss.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy
import onnx
import torch
from torch import Tensor
from torch.nn import functional

from ortlab.engines.ortmodule.export import Export

Draw = Callable[[Sequence[int], float], Tensor]
"""A function that returns the next mask for a shape and a ratio; True keeps an element."""


class DropoutDiffers(AssertionError):
    """Raised when eager torch calls dropout more or less often than ORT's graph does."""


class Replay:
    """Context that seeds the dropout of every export; `loss` replays that of the last call."""

    def __init__(self) -> None:
        self._seeds = itertools.count(1)
        self._draws: dict[int, list[Draw]] = {}
        self._last: Export | None = None

    def __enter__(self) -> Replay:
        replay, build, run = self, Export.build, Export.run

        def seeded_build(export: Export, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            transitions = export.manager._graph_transition_manager
            process = transitions.get_post_processed_model

            def process_and_seed(*inputs: Any) -> Any:
                result = process(*inputs)
                info = transitions._post_export_processed_model_info
                graph = info._post_export_processed_model.graph
                replay._draws[id(export)] = [drawn_by_ort(s) for s in replay._seed(graph)]
                return result

            transitions.get_post_processed_model = process_and_seed
            build(export, args, kwargs)

        def noted_run(export: Export, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if id(export) in replay._draws:
                replay._last = export
            return run(export, args, kwargs)

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch.object(Export, "build", seeded_build))
        self._patches.enter_context(mock.patch.object(Export, "run", noted_run))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _seed(self, graph: onnx.GraphProto) -> Iterator[int]:
        values = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
        for node in graph.node:
            if node.op_type == "Dropout" and _ratio(values[node.input[1]]) > 0:
                seed = next(self._seeds)
                node.attribute.append(onnx.helper.make_attribute("seed", seed))
                yield seed

    def loss(self, forward: Callable[[], Tensor]) -> Tensor:
        """Return the output of the eager `forward` with the masks of ORT's last forward.

        Call it once for every forward of ORT, because the masks differ from call to call.
        Dropouts after the last one in ORT's graph must not matter: the graph omits nodes
        that no result depends on.
        """
        without: list[Tensor] = []
        with self._masks(without):
            loss = forward()
        if without:
            found = torch.autograd.grad(loss, without, allow_unused=True, retain_graph=True)
            if any(gradient is not None for gradient in found):
                raise DropoutDiffers("eager torch calls dropout more often than ORT")
        return loss

    @contextlib.contextmanager
    def _masks(self, without: list[Tensor]) -> Iterator[None]:
        """Collect in `without` the masks of dropouts that have no node in ORT's graph."""
        assert self._last is not None
        waiting = list(self._draws[id(self._last)])

        def draw(shape: Sequence[int], ratio: float) -> Tensor:
            if waiting:
                return waiting.pop(0)(shape, ratio)
            without.append(torch.ones(tuple(shape), requires_grad=True))
            return without[-1]

        with drawing(draw):
            yield
        if waiting:
            raise DropoutDiffers(f"ORT calls dropout {len(waiting)} times more than eager torch")


@contextlib.contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Make eager torch's dropouts use the masks of `draw`, in order, within the context."""
    with contextlib.ExitStack() as stack:
        for module, name, replaced in (
            (functional, "dropout", _dropout),
            (functional, "scaled_dot_product_attention", _attention),
            (torch._VF, "lstm", _recurrence),
            (torch._VF, "gru", _recurrence),
        ):
            call = functools.partial(replaced, draw, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, call))
        yield


def _ratio(constant: onnx.NodeProto) -> float:
    return float(onnx.numpy_helper.to_array(constant.attribute[0].t))


def drawn_by_ort(seed: int | None) -> Draw:
    """Return masks of ORT's own kernel for this seed; with None, use ORT's generator for all."""
    import onnxruntime  # onnxruntime is not installed everywhere that tests are collected

    node = onnx.helper.make_node("Dropout", ["x", "ratio", "on"], ["y", "mask"])
    if seed is not None:
        node.attribute.append(onnx.helper.make_attribute("seed", seed))
    number, truth = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    value = onnx.helper.make_tensor_value_info
    given = [value("x", number, None), value("ratio", number, []), value("on", truth, [])]
    graph = onnx.helper.make_graph([node], "dropout", given, [value("mask", truth, None)])
    opset = [onnx.helper.make_opsetid("", 13)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )

    def draw(shape: Sequence[int], ratio: float) -> Tensor:
        x = numpy.zeros(shape, numpy.float32)
        found = session.run(
            ["mask"], {"x": x, "ratio": numpy.array(ratio, numpy.float32), "on": numpy.array(True)}
        )
        return torch.from_numpy(found[0])

    return draw


# ---- eager torch's dropouts, with a mask ---------------------------------------------------------


def _dropout(
    draw: Draw,
    original: Callable[..., Tensor],
    input: Tensor,  # noqa: A002 - torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0:
        return original(input, p, training, inplace)
    return input * draw(input.shape, p) / (1 - p)


def _attention(
    draw: Draw,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if enable_gqa:
        each = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
    return weights * draw(weights.shape, dropout_p) / (1 - dropout_p) @ value


def _recurrence(
    draw: Draw,
    original: Callable[..., Any],
    x: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    ratio: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> Any:
    """Compute nn.LSTM or nn.GRU one layer at a time, with dropout between the layers."""
    if not training or ratio == 0 or layers == 1:
        rest = (biased, layers, ratio, training, both_ways, batch_first)
        return original(x, states, weights, *rest)
    ways, each = 1 + both_ways, len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    last = []
    for layer in range(layers):
        if layer > 0:
            x = x * draw(x.shape, ratio) / (1 - ratio)
        begin, end = layer * ways, (layer + 1) * ways
        first = (
            tuple(state[begin:end] for state in states)
            if isinstance(states, tuple)
            else states[begin:end]
        )
        own = weights[layer * each : (layer + 1) * each]
        x, *after = original(x, first, own, biased, 1, 0.0, True, both_ways, False)
        last.append(after)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.cat(values) for values in zip(*last, strict=True)))
