"""Rules that replace ORT nodes by ATen nodes, which call torch's or ortlab's kernels.

A rule takes nodes of one operator and returns an equivalent replacement, or None if it does not
apply. Names and outputs stay the same, so that readers of the graph (views, memory plan, profile)
find them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortlab.engines.ortmodule.kernels import DOMAIN, nodes
from ortlab.engines.ortmodule.kernels.nodes import BACKWARD, called
from ortlab.engines.torch.autograd import read_by

_LOW = "_ortlab_bf16"
_NAME = re.compile(r"[A-Za-z_]\w*")
Sizes = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Value:
    """Element type and shape of a tensor, as far as known. Sizes may be ORT's symbolic names."""

    kind: int | None
    sizes: Sizes | None

    @property
    def rank(self) -> int | None:
        """Number of dimensions, or None if unknown."""
        return None if self.sizes is None else len(self.sizes)


class Graph:
    """A graph that is being rewritten, with the look-ups that its rules need.

    Args:
        model: Graph, which is modified.
        low: True if products use bfloat16.
    """

    def __init__(self, model: onnx.ModelProto, *, low: bool) -> None:
        self.model = model
        self.low = low
        """True if products use bfloat16."""
        graph = model.graph
        self.nodes = list(graph.node)
        self._values: dict[str, Value] = {}
        self._sizes: dict[str, int | str] = {}
        for info in (*graph.value_info, *graph.input, *graph.output):
            self.tell(info.name, _value(info))
        self._constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        for name, array in self._constants.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            self._values.setdefault(name, Value(kind, array.shape))
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: Mapping[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(read_by(node)):
                self.readers[name].append(node)
        self.given = {each.name for each in graph.output}
        self.wide = self.number(False, bool)
        """Constant that requests a float32 result when it is a kernel's last input."""
        self.lowered: dict[str, str] = {}
        """Originals of the lower-precision copies that products read, keyed by the copy's name."""

    def tell(self, name: str, value: Value) -> None:
        """Record the type and shape of a tensor.

        Args:
            name: Name of the tensor.
            value: Its type and shape.
        """
        self._values[name] = value

    def rename(self, names: Sizes | None, sizes: Sizes) -> None:
        """Record the sizes that names invented by shape inference stand for.

        Args:
            names: Shape with invented names.
            sizes: The same shape in terms of known names.
        """
        pairs = zip(names or (), sizes, strict=False)
        self._sizes |= {a: b for a, b in pairs if isinstance(a, str) and b is not None and a != b}

    def _renamed(self, size: int | str | None) -> int | str | None:
        if not isinstance(size, str) or not self._sizes:
            return size
        known = self._sizes.get(size)
        if known is not None:
            return self._renamed(known)
        return _NAME.sub(
            lambda m: f"({self._renamed(m[0])})" if m[0] in self._sizes else m[0], size
        )

    def value(self, name: str) -> Value:
        """Return the type and shape of a tensor.

        If its type is unknown, it is derived from the inputs of its node.

        Args:
            name: Name of the tensor.
        """
        known = self._values.get(name)
        if known is not None and known.kind is not None:
            return known
        maker = self.makers.get(name)
        kind = None
        if maker is not None and name == maker.output[0] and maker.op_type not in _OF_OTHER_TYPE:
            like = 1 if maker.op_type == "Where" else 0
            kind = self.value(maker.input[like]).kind if len(maker.input) > like else None
        found = Value(kind, None if known is None else known.sizes)
        self._values[name] = found
        return found

    def are_float(self, names: Iterable[str]) -> bool:
        """Return True if all tensors are float32.

        Args:
            names: Names of the tensors.
        """
        return all(self.value(name).kind == TensorProto.FLOAT for name in names)

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of a constant, or None if the tensor is not constant.

        Args:
            name: Name of the tensor.
        """
        return self._constants.get(name)

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the only node that reads a tensor, or None if there are more or it is an output.

        Args:
            name: Name of the tensor.
        """
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.given else None

    def number(self, value: Any, kind: Any) -> str:
        """Return the name of a graph constant with this value, and add it if necessary.

        Args:
            value: Value of the constant.
            kind: Numpy data type.
        """
        array = np.array(value, dtype=kind)
        name = f"{DOMAIN}_{array.dtype}_{array.tolist()}"
        if name not in self._constants:
            self._constants[name] = array
            self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def call(
        self,
        operator: str,
        inputs: Sequence[str],
        like: onnx.NodeProto,
        outputs: Sequence[str] | None = None,
    ) -> onnx.NodeProto:
        """Return a node that calls an ortlab kernel in place of another node.

        Args:
            operator: Name of the kernel.
            inputs: Names of the input tensors.
            like: Node to replace, whose name and attributes are used.
            outputs: Names of the output tensors. By default those of `like`.
        """
        made = nodes.call(
            f"{DOMAIN}::{operator}",
            inputs,
            like.output if outputs is None else outputs,
            name=like.name,
            doc_string=like.doc_string,
        )
        made.attribute.extend(each for each in like.attribute if each.name == BACKWARD)
        for name in made.output:
            if name and name not in self._values:
                self.tell(name, Value(TensorProto.FLOAT, None))
        return made

    def finish(self, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
        """Return the model with new nodes and everything known about their tensors.

        Args:
            nodes: Nodes of the graph.
        """
        graph = self.model.graph
        del graph.node[:]
        graph.node.extend(nodes)
        outer = {each.name for each in (*graph.input, *graph.output)}
        del graph.value_info[:]
        for name, value in self._values.items():
            if value.kind is not None and name not in outer and name not in self._constants:
                sizes = None if value.sizes is None else [self._renamed(n) for n in value.sizes]
                graph.value_info.append(helper.make_tensor_value_info(name, value.kind, sizes))
        return self.model


_OF_OTHER_TYPE: Final = frozenset(
    {"Shape", "Size", "Cast", "ArgMax", "ArgMin", "NonZero", "Equal", "Less", "LessOrEqual", "Not"}
    | {"Greater", "GreaterOrEqual", "And", "Or", "Xor", "IsNaN", "IsInf", "ConstantOfShape", "If"}
    | {"IsFinite", "IsAllFinite", "QuantizeLinear", "OneHot", "Loop", "Scan", "ATen", "PythonOp"}
    | {"PythonOpGrad", "YieldOp", "Multinomial", "Bernoulli", "RandomNormal", "RandomUniform"}
    | {"RandomNormalLike", "RandomUniformLike"}
)
"""Operators whose first output may have another type than their first input. The output of Where
has the type of its second input."""


def _value(info: onnx.ValueInfoProto) -> Value:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return Value(tensor.elem_type or None, None)
    sizes = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in tensor.shape.dim
    )
    return Value(tensor.elem_type or None, sizes)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as Python values.

    Args:
        node: Node of a graph.
    """
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


# ---- rules ---------------------------------------------------------------------------------------

Rule = Callable[[Graph, onnx.NodeProto], "Substitution | None"]


@dataclass(frozen=True)
class Substitution:
    """A replacement: the nodes `made` compute the same as the nodes `replaced`.

    Attributes:
        replaced: Nodes of the graph.
        made: New nodes, which take the positions of the last replaced ones.
        always: True to apply it without measuring, because it changes the precision, or because it
            reads integers, which `choice` cannot generate, and was faster in all tests.
        tells: New types and shapes of tensors.
    """

    replaced: tuple[onnx.NodeProto, ...]
    made: tuple[onnx.NodeProto, ...]
    always: bool = False
    tells: tuple[tuple[str, Value], ...] = ()
    """New types and shapes of tensors."""


RULES: dict[str, Rule] = {}
"""Rules by ORT operator."""


def _rule(*operators: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, rule))
        return rule

    return add


def _lowered(graph: Graph, names: Sequence[str]) -> list[str]:
    """Return the names of a product's operands. `substitute` adds their lower-precision copies."""
    if not graph.low:
        return list(names)
    graph.lowered |= {f"{name}{_LOW}": name for name in names}
    return [f"{name}{_LOW}" for name in names]


@_rule("MatMul", "FusedMatMul", "Gemm")
def _product(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    given = attributes(node)
    biased: bool = node.op_type == "Gemm" and len(node.input) == 3 and given.get("beta", 1.0) != 0.0
    if not graph.are_float(node.input):
        return None
    ranks = [graph.value(name).rank for name in node.input[:2]]
    if node.op_type != "Gemm" and any(rank is None or rank < 2 for rank in ranks):
        return None
    if given.get("transBatchA") or given.get("transBatchB"):
        return _product_of_moved(graph, node)
    flips = [bool(given.get(name, 0)) for name in ("transA", "transB")]
    alpha = float(given.get("alpha", 1.0))
    operands = _lowered(graph, node.input[:2])
    if biased:
        if alpha != 1.0 or given.get("beta", 1.0) != 1.0:
            return None
        if graph.value(node.input[2]).rank == 2:
            numbers = [graph.number(flip, bool) for flip in flips]
            made = graph.call("add_product", [*operands, node.input[2], *numbers], node)
            return Substitution((node,), (made,), always=graph.low)
        if flips[0] or not _is_bias(graph, node.input[2], node.input[1], flips[1]):
            return None
        return _linear(graph, (node,), operands, node.input[2], flips[1])
    add = graph.only_reader(node.output[0])
    if add is not None and add.op_type == "Add" and alpha == 1.0 and not flips[0]:
        bias = next((name for name in add.input if name != node.output[0]), "")
        if _is_bias(graph, bias, node.input[1], flips[1]):
            return _linear(graph, (node, add), operands, bias, flips[1])
    numbers = [graph.number(flip, bool) for flip in flips]
    inputs = [*operands, *numbers, graph.number(alpha, np.float32), graph.wide]
    made = graph.call("matmul", inputs, node)
    return Substitution((node,), (made,), always=graph.low)


def _product_of_moved(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    """Replace a product of operands [m, ..., k] that FusedMatMul's transBatch reads as [..., m, k].

    Lower-precision products need a copy in that order. ORT's own kernel reads the operands
    directly.
    """
    if not graph.low:
        return None
    given = attributes(node)
    operands, made = _lowered(graph, node.input[:2]), []
    for place, side in enumerate("AB"):
        rank = graph.value(node.input[place]).rank
        if not given.get(f"transBatch{side}") or rank is None or rank < 3:
            continue
        moved = f"{node.output[0]}_{side}{_LOW}"
        graph.tell(moved, Value(TensorProto.BFLOAT16, None))
        axes = graph.number([*range(1, rank - 1), 0, rank - 1], np.int64)
        made.append(graph.call("permute", [operands[place], axes], node, [moved]))
        made[-1].name = f"{node.name}_{side}"
        operands[place] = moved
    numbers = [graph.number(bool(given.get(name, 0)), bool) for name in ("transA", "transB")]
    alpha = graph.number(float(given.get("alpha", 1.0)), np.float32)
    made.append(graph.call("matmul", [*operands, *numbers, alpha, graph.wide], node))
    return Substitution((node,), tuple(made), always=True)


@_rule("FusedGemm")
def _product_and_activation(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    """Split into two nodes for lower-precision products, which ORT's FusedGemm does not support."""
    given = attributes(node)
    activation = given.get("activation", b"").decode()
    if not graph.low or activation not in ("Tanh", "Relu", "Sigmoid"):
        return None
    gemm = onnx.NodeProto()
    gemm.CopyFrom(node)
    gemm.op_type = "Gemm"
    gemm.output[0] = f"{node.output[0]}_linear"
    found = _product(graph, gemm)
    if found is None:
        return None
    graph.tell(gemm.output[0], graph.value(node.output[0]))
    apart = helper.make_node(activation, gemm.output, node.output, name=f"{node.name}_{activation}")
    return Substitution((node,), (*found.made, apart), always=True)


def _is_bias(graph: Graph, name: str, matrix: str, flip: bool) -> bool:
    """Return True if a tensor has one element for each column of `matrix`, without broadcasting."""
    sizes = graph.value(matrix).sizes
    if sizes is None or len(sizes) != 2 or (columns := sizes[0 if flip else 1]) is None:
        return False
    return graph.value(name).sizes == (columns,) and graph.are_float([name])


def _linear(
    graph: Graph,
    nodes: tuple[onnx.NodeProto, ...],
    operands: Sequence[str],
    bias: str,
    flip: bool,
) -> Substitution:
    made = graph.call("linear", [*operands, bias, graph.number(flip, bool), graph.wide], nodes[0])
    made.output[:] = nodes[-1].output
    return Substitution(nodes, (made,), always=graph.low)


@_rule("Add", "Sum")
def _sum(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    sizes = {graph.value(name).sizes for name in node.input}
    if len(node.input) < 2 or len(node.input) > 4 or not graph.are_float(node.input):
        return None
    if len(node.input) == 2:
        return Substitution((node,), (graph.call("add", node.input, node),))
    (same, *others) = sizes
    if others or same is None or None in same:
        return None
    return Substitution((node,), (graph.call("sum", [*node.input, ""][:4], node),))


@_rule("Dropout")
def _dropout(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    """Replace together with the gradient, as ortlab stores the mask as bytes and ORT as booleans.

    Always applied: ORT seeds a new linear congruential engine for each mask with the previous seed
    plus one (dropout_op.h), and the first numbers of such engines are nearly the same. A dropout
    with a seed of its own is not replaced, because it has to draw exactly that mask.
    """
    if len(node.input) != 3 or "seed" in attributes(node) or not graph.are_float(node.input[1:2]):
        return None
    training = graph.constant(node.input[2])
    if training is None or not bool(training) or graph.constant(node.input[1]) is None:
        return None
    found = graph.value(node.input[0])
    mask = [*node.output, ""][1] or f"{node.output[0]}_mask"
    gradients = graph.readers[mask]
    if found.kind not in (TensorProto.FLOAT, TensorProto.DOUBLE) or any(
        each.op_type != "DropoutGrad" for each in gradients
    ):
        return None
    made = [graph.call("dropout", [*node.input[:2], graph.wide], node, [node.output[0], mask])]
    made += [
        graph.call("dropout_backward", [*each.input[:3], graph.wide], each) for each in gradients
    ]
    results = [node.output[0], *(each.output[0] for each in gradients)]
    tells = [(name, Value(found.kind, graph.value(name).sizes)) for name in results]
    tells.append((mask, Value(TensorProto.UINT8, graph.value(node.output[0]).sizes)))
    return Substitution((node, *gradients), tuple(made), always=True, tells=tuple(tells))


DROPOUT: Final[Mapping[str, Rule]] = {"Dropout": _dropout}
"""Replacement of the only kernel that is wrong in ORT on a CPU."""
_ELEMENTWISE: Final = {
    "BiasGelu": "bias_gelu",
    "BiasGeluGrad_dX": "bias_gelu_backward",
    "ReluGrad": "relu_backward",
}
"""Kernels with the same inputs as an ORT operator."""


@_rule(*_ELEMENTWISE)
def _elementwise(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    if not graph.are_float(node.input):
        return None
    made = graph.call(_ELEMENTWISE[node.op_type], [*node.input, graph.wide], node)
    return Substitution((node,), (made,), always=graph.low)


@_rule("FastGelu", "FastGeluGrad", "BiasFastGeluGrad_dX")
def _fast_gelu(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    if not graph.are_float(name for name in node.input if name):
        return None
    forward = node.op_type == "FastGelu"
    inputs = [*node.input, ""][: 2 if forward else 3]
    made = graph.call(f"fast_gelu{'' if forward else '_backward'}", [*inputs, graph.wide], node)
    return Substitution((node,), (made,), always=graph.low)


@_rule("SoftmaxCrossEntropyLossInternal")
def _cross_entropy(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    """Replace together with the gradient: ortlab stores one number per row, ORT one per class."""
    logits, labels, weight, ignored = [*node.input, "", ""][:4]
    reduction = attributes(node).get("reduction", b"mean")
    if weight or reduction not in (b"mean", b"sum") or graph.value(logits).rank != 2:
        return None
    if not graph.are_float([logits]) or graph.value(labels).kind != TensorProto.INT64:
        return None
    sums = node.output[1]
    gradients = graph.readers[sums]
    if sums in graph.given or any(
        each.op_type != "SoftmaxCrossEntropyLossInternalGrad"
        or each.input[1:5] != [sums, *node.input[1:4]]
        for each in gradients
    ):
        return None
    ignored = ignored or graph.number(-100, np.int64)
    mean = graph.number(reduction == b"mean", bool)
    made = [graph.call("cross_entropy", [logits, labels, ignored, mean], node)]
    for each in gradients:
        more = each.input[5] if len(each.input) > 5 else ""
        inputs = [each.input[0], logits, sums, labels, ignored, mean, more, graph.wide]
        made.append(graph.call("cross_entropy_backward", inputs, each))
    rows = graph.value(logits).sizes
    tells = ((sums, Value(TensorProto.FLOAT, rows and rows[:1])),)
    return Substitution((node, *gradients), tuple(made), always=True, tells=tells)


@_rule("LayerNormalization")
def _layer_norm(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    given = attributes(node)
    if len(node.input) != 3 or len(node.output) != 3 or not graph.are_float(node.input):
        return None
    if graph.value(node.input[1]).rank != 1 or given.get("axis", -1) != -1:
        return None
    eps = graph.number(given.get("epsilon", 1e-5), np.float32)
    return Substitution((node,), (graph.call("layer_norm", [*node.input, eps], node),))


@_rule("LayerNormalizationGrad")
def _layer_norm_gradient(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    if not graph.are_float(node.input) or graph.value(node.input[2]).rank != 1:
        return None
    if attributes(node).get("axis", -1) != -1 or not all(node.output):
        return None
    return Substitution((node,), (graph.call("layer_norm_backward", node.input, node),))


@_rule("Softmax", "SoftmaxGrad_13")
def _softmax(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    if not graph.are_float(node.input):
        return None
    operator = "softmax" if node.op_type == "Softmax" else "softmax_backward"
    axis = graph.number(attributes(node).get("axis", -1), np.int64)
    return Substitution((node,), (graph.call(operator, [*node.input, axis], node),))


@_rule("Transpose")
def _transpose(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    axes = attributes(node).get("perm")
    if axes is None or not graph.are_float(node.input):
        return None
    made = graph.call("permute", [node.input[0], graph.number(axes, np.int64)], node)
    return Substitution((node,), (made,))


@_rule("ReduceSum")
def _reduce_sum(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    given = attributes(node)
    axes = graph.constant(node.input[1]) if len(node.input) == 2 else None
    if axes is None or axes.size == 0 or not graph.are_float(node.input[:1]):
        return None
    keep = graph.number(bool(given.get("keepdims", 1)), bool)
    inputs = [node.input[0], graph.number(axes, np.int64), keep]
    return Substitution((node,), (graph.call("reduce_sum", inputs, node),), always=graph.low)


@_rule("ATen")
def _embedding_gradient(graph: Graph, node: onnx.NodeProto) -> Substitution | None:
    if attributes(node)["operator"] != b"embedding_backward" or len(node.input) != 6:
        return None
    plain = all(graph.constant(name) is not None for name in node.input[4:])
    if not plain or any(graph.constant(name) for name in node.input[4:]):
        return None  # gradients scaled by frequency, or sparse
    if not graph.are_float(node.input[:1]):
        return None
    made = graph.call("embedding_backward", node.input[:4], node)
    return Substitution((node,), (made,), always=True)


def _describe(graph: Graph, node: onnx.NodeProto) -> None:
    """Record sizes that shape inference does not know: of attention, its gradients, and shapes."""
    if called(node) == "attention":
        _describe_attention(graph, node)
    elif called(node) == "attention_backward":
        for gradient, of in zip(node.output, node.input[1:5], strict=True):
            graph.tell(gradient, Value(TensorProto.FLOAT, graph.value(of).sizes))
    elif node.op_type == "Gather" and graph.value(node.output[0]).sizes is None:
        places, maker = graph.constant(node.input[1]), graph.makers.get(node.input[0])
        if places is not None and maker is not None and maker.op_type == "Shape":
            graph.tell(node.output[0], Value(TensorProto.INT64, places.shape))


def _describe_attention(graph: Graph, node: onnx.NodeProto) -> None:
    query, key, value = (graph.value(name).sizes for name in node.input[:3])
    if query is None or key is None or value is None:
        return
    sizes = (*query[:3], value[3])
    graph.rename(graph.value(node.output[0]).sizes, sizes)
    graph.tell(node.output[0], Value(TensorProto.FLOAT, sizes))
    batch, heads = query[:2]
    if batch is not None and heads is not None:
        both = isinstance(batch, int) and isinstance(heads, int)
        rows = int(batch) * int(heads) if both else f"({batch})*({heads})"
        kind = TensorProto.BFLOAT16 if graph.low else TensorProto.FLOAT
        graph.tell(node.output[1], Value(kind, (rows, query[2], key[2])))


# ---- the whole graph -----------------------------------------------------------------------------


def substitute(
    model: onnx.ModelProto,
    *,
    low: bool,
    better: Callable[[Substitution, Graph], bool] = lambda _found, _graph: True,
    rules: Mapping[str, Rule] = RULES,
) -> onnx.ModelProto:
    """Replace nodes of a session's graph by faster kernels, in place.

    Args:
        model: Graph, which is modified and returned.
        low: True to compute every float32 product in bfloat16, even if that is slower.
        better: Returns True if a replacement is faster. By default always True.
        rules: Rules that may apply. `DROPOUT` keeps all of ORT's kernels that are correct.
    """
    graph = Graph(model, low=low)
    taken: dict[int, list[onnx.NodeProto]] = {}  # replacements by id of the replaced node
    for node in graph.nodes:
        _describe(graph, node)
        rule = rules.get(node.op_type)
        found = rule(graph, node) if rule is not None and id(node) not in taken else None
        if found is None:
            continue
        if found.always or better(found, graph):
            taken |= {id(old): [] for old in found.replaced}
            places = found.replaced[-len(found.made) :]
            for i, new in enumerate(found.made):
                taken[id(places[min(i, len(places) - 1)])].append(new)
            for name, value in found.tells:
                graph.tell(name, value)
    chosen = [made for node in graph.nodes for made in taken.get(id(node), [node])]
    if low:
        narrow(graph, chosen)
    return graph.finish(list(_with_copies(graph, chosen)))


def _readers(nodes: Iterable[onnx.NodeProto]) -> Mapping[str, list[tuple[onnx.NodeProto, int]]]:
    """Return readers and input index for each tensor. The index is -1 in a branch or a loop."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in nodes:
        for place, name in enumerate(node.input):
            found[name].append((node, place))
        for name in {*read_by(node)} - {*node.input}:
            found[name].append((node, -1))
    return found


def spare_zeros(model: onnx.ModelProto) -> list[int]:
    """Mark outputs of a model whose missing gradient may be passed as a single zero.

    ORTModule otherwise creates zeros of the output's size if the graph reads the gradient, which is
    the case for logits that the user's loss does not depend on. The cross entropy kernel does not
    need them.

    Args:
        model: Graph, which is modified.

    Returns:
        Indices of those outputs.
    """
    yields = next((node for node in model.graph.node if node.op_type == "YieldOp"), None)
    if yields is None:
        return []
    readers = _readers(model.graph.node)

    def spared(name: str) -> bool:
        return bool(readers[name]) and all(
            spared(node.output[0])
            if node.op_type == "Identity"
            else (called(node), place) == ("cross_entropy_backward", 6)
            for node, place in readers[name]
        )

    found = [i for i, name in enumerate(yields.output) if name and spared(name)]
    single = {yields.output[i] for i in found}
    single |= {
        name
        for node in model.graph.node
        if node.input and node.input[0] in single and node.op_type == "Identity"
        for name in node.output
    }
    for info in model.graph.value_info:
        if info.name in single:
            info.type.tensor_type.shape.ClearField("dim")
    for attribute in yields.attribute:
        if attribute.name == "full_shape_outputs":
            attribute.ints[:] = [i for i in attribute.ints if i not in found]
    return found


# ---- bfloat16 between products -------------------------------------------------------------------

_READS: Final[Mapping[str, tuple[int, ...]]] = {
    "dropout": (0,),
    "dropout_backward": (0,),
    "bias_gelu": (0,),
    "bias_gelu_backward": (0, 1),
    "fast_gelu": (0,),
    "fast_gelu_backward": (0, 1),
    "relu_backward": (0, 1),
    "cross_entropy": (0,),
    "cross_entropy_backward": (1,),
    "attention": (0, 1, 2),
    "attention_backward": (0, 1, 2, 3),
    "layer_norm_backward": (0,),
    "reduce_sum": (0,),
    "permute": (0,),
}
"""Inputs of ortlab's kernels that may be bfloat16, except for products."""
_WRITES: Final[Mapping[str, int]] = {
    "matmul": 1,
    "linear": 1,
    "dropout": 1,
    "dropout_backward": 1,
    "bias_gelu": 1,
    "bias_gelu_backward": 1,
    "fast_gelu": 1,
    "fast_gelu_backward": 1,
    "relu_backward": 1,
    "cross_entropy_backward": 1,
    "attention": 1,
    "attention_backward": 3,
}
"""Number of a kernel's first outputs that are bfloat16 if its last input requests it."""
_PASSES: Final = frozenset({"Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten"})
"""ORT operators whose output has the type of their first input, whatever it is."""


def narrow(graph: Graph, nodes: Sequence[onnx.NodeProto]) -> None:
    """Store tensors as bfloat16 if nothing reads them as float32, so products need no copy.

    Autocast computes in the same precision: no output or input of a product has more digits.

    Args:
        graph: Graph that is rewritten.
        nodes: Its nodes, which are modified.
    """
    copies = {original: copy for copy, original in graph.lowered.items()}
    kernels = {id(node): called(node) for node in nodes}
    readers = _readers(nodes)
    groups = []  # an input, and the outputs of one node that have its type
    for node in nodes:
        kernel = kernels[id(node)]
        if kernel in _WRITES:
            groups.append(("", [name for name in node.output[: _WRITES[kernel]] if name]))
        elif node.op_type in _PASSES or kernel == "permute":
            groups.append((node.input[0], [node.output[0]]))
    found = {name for _, group in groups for name in group if graph.are_float([name])}

    def takes(node: onnx.NodeProto, place: int) -> bool:
        kernel = kernels[id(node)]
        if place == 0 and (node.op_type in _PASSES or kernel == "permute"):
            return node.output[0] in found
        return place in _READS.get(kernel, ())

    while True:
        kept = set()
        for like, group in groups:
            fits = not like or like in found
            fits &= all(
                name in found and name not in graph.given and all(takes(*r) for r in readers[name])
                for name in group
            )
            if fits and any(readers[name] or name in copies for name in group):
                kept.update(group)
        if kept == found:
            break
        found = kept
    low = graph.number(True, bool)
    for node in nodes:
        if kernels[id(node)] in _WRITES and node.output[0] in found:
            node.input[-1] = low
        for place, name in enumerate(node.input):
            if graph.lowered.get(name) in found:
                node.input[place] = graph.lowered[name]
    for name in found:
        graph.tell(name, Value(TensorProto.BFLOAT16, graph.value(name).sizes))
        graph.lowered.pop(copies.get(name, ""), None)


def _tell_flattened(graph: Graph, name: str) -> None:
    """Record the shape of a matrix that ORT's gradient of a product has flattened."""
    maker = graph.makers.get(name)
    if graph.value(name).sizes is None and name.endswith("_reshape_2d") and maker is not None:
        *rows, columns = graph.value(maker.input[0]).sizes or (None,)
        if rows and None not in rows:
            count = "*".join(f"({size})" for size in rows)
            graph.tell(name, Value(graph.value(name).kind, (count, columns)))


def _with_copies(graph: Graph, nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield `nodes`, each after the lower-precision copies that it is the first to read."""
    waiting = dict(graph.lowered)
    for node in nodes:
        for name in dict.fromkeys(node.input):
            if name not in waiting:
                continue
            original = waiting.pop(name)
            _tell_flattened(graph, original)
            graph.tell(name, Value(TensorProto.BFLOAT16, graph.value(original).sizes))
            copy = graph.call("to_bf16", [original], node, [name])
            copy.name = f"{name}_copy"
            yield copy
        yield node
