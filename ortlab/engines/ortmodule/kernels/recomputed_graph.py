"""Recompute plans: a session's graph rewritten to recompute activations in the backward pass.

A plan names modules, such as "bert.encoder.layer.*" for all layers of a list. Outputs of such a
module that other modules read are stored. Everything else in it that the gradient reads is
recomputed from them just before it is read (Chen et al., Training Deep Nets with Sublinear Memory
Cost, 2016). The last matrix products of a module are not recomputed if storing their results takes
little more memory. Kernels stay the same, and dropout draws the same mask again, because its random
numbers are generated from a stored key. ORT has recompute plans of its own
(`compat.gradient_checkpointing`), which name operators and support only its own kernels.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch
from onnx import TensorProto, helper

from ortlab.engines import plan_names
from ortlab.engines.ortmodule.compat.restoring import in_order
from ortlab.engines.ortmodule.kernels import DOMAIN
from ortlab.engines.ortmodule.kernels.nodes import BACKWARD, called, mark_backward, operator
from ortlab.engines.torch.autograd import read_by
from ortlab.engines.torchscript.failures import module_path
from ortlab.utils.onnx_shapes import bytes_of

SUFFIX = "_recompute"
"""Suffix of the names of recomputed nodes and tensors, as in ORT's own plans."""
_YIELD = "YieldOp"
_ROOT = "/_original_module/"  # repeated if the graph includes the loss
_ITEM = re.compile(r".+\.\d+(_\d+)?|\d+")
"""Part of a scope that is an item of a list. From its second call on the exporter adds a number."""
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_NOT_AGAIN = frozenset(
    {"If", "Loop", "Scan", "PythonOp", "TritonOp", "BatchNormalization", "BatchNormInternal"}
    | {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}
    | {"Multinomial", "Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"}
    | {"BiasSoftmaxDropout"}
)
"""Operators that draw random numbers, have side effects, or contain a graph or code."""
_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Gemm", "Conv", "matmul", "linear"})
"""Operators and ortlab kernels that take most of a step's time."""
_CHEAP = 1.5
"""Memory that may be stored to avoid recomputing products, relative to the module's outputs."""
_ANY_SIZE = 64
"""Value assumed for sizes that depend on the batch, to compare tensors of one graph."""
_SIZES = frozenset({TensorProto.INT64, TensorProto.INT32})
_KEYED = {"dropout": "dropout_of", "attention": "attention_of"}
_RATIO = {"dropout": 1, "attention": 4}


@dataclass(frozen=True)
class RecomputedPart:
    """Modules that a plan names.

    Attributes:
        plan: Name of the plan.
        occurrences: For each module, the indices of its forward nodes.
    """

    plan: str
    occurrences: tuple[frozenset[int], ...]


class Plans:
    """Recompute plans that a session's graph with a gradient supports.

    Args:
        model: Graph, which is not modified.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        self._nodes = _sizes_first(list(in_order(self._model).graph.node))
        self._end = next(i for i, n in enumerate(self._nodes) if n.op_type == _YIELD)
        graph = self._model.graph
        told = (*graph.input, *graph.value_info, *graph.output)
        self._told = {each.name: each for each in told}
        self._given = {each.name for each in graph.output}
        self._makers = {name: i for i, n in enumerate(self._nodes) for name in n.output if name}
        self._readers: Mapping[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self._nodes):
            for name in dict.fromkeys(read_by(node)):
                self._readers[name].append(i)

    @functools.cached_property
    def parts(self) -> dict[str, RecomputedPart]:
        """Parts that can be recomputed, keyed by plan, in the order of their first nodes."""
        found: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for i in range(self._end):
            for plan, scope in _named(self._nodes[i]):
                found[plan][scope].add(i)
        parts = {
            plan: RecomputedPart(plan, tuple(map(frozenset, scopes.values())))
            for plan, scopes in found.items()
        }
        return {
            plan: part
            for plan, part in parts.items()
            if any(self._wanted(nodes) for nodes in part.occurrences)
        }

    @property
    def layers(self) -> tuple[str, ...]:
        """Plans of whole layers."""
        return plan_names.whole_layers(self.parts)

    def check(self, plans: Iterable[str]) -> tuple[str, ...]:
        """Return the plans that `plans` stand for.

        Args:
            plans: Names of plans. "layers" stands for all whole layers.

        Raises:
            UnknownPlan: If a plan does not exist.
        """
        return plan_names.checked(plans, self.parts)

    def applied(self, plans: Iterable[str]) -> onnx.ModelProto:
        """Return the graph that recomputes parts of the model, with nodes in execution order.

        A session follows that order by priority. Without plans, return an unchanged copy of the
        graph, in the order that a session uses by default.

        Args:
            plans: Names of the plans to apply.

        Raises:
            UnknownPlan: If a plan does not exist.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        occurrences = self._occurrences(self.check(plans))
        if not occurrences:
            return model
        del model.graph.node[:]
        return _Rewriting(self, model, occurrences).done()

    def _occurrences(self, plans: Sequence[str]) -> list[frozenset[int]]:
        """Return the modules of all plans, without those within another one."""
        found = [nodes for plan in plans for nodes in self.parts[plan].occurrences]
        found.sort(key=len, reverse=True)
        outermost: list[frozenset[int]] = []
        for nodes in found:
            if not any(nodes <= other for other in outermost):
                outermost.append(nodes)
        return outermost

    def _wanted(self, nodes: Collection[int]) -> list[str]:
        """Return the outputs of `nodes` to recompute for backward.

        Backward reads them and no other forward node does. Tensors stored instead of the last
        products are left out.
        """
        found = [
            name
            for i in sorted(nodes)
            for name in self._nodes[i].output
            if any(reader > self._end for reader in self._readers.get(name, ()))
            and self._goes(self._storage(name, nodes), nodes)
            and self._goes(name, nodes)
        ]
        kept = self._kept(nodes, found)
        return [name for name in found if name not in kept] or found

    def _kept(self, nodes: Collection[int], wanted: Sequence[str]) -> set[str]:
        """Return those of `wanted` that are cheaper to store than to recompute.

        A layer that ends with a norm would repeat its last product only for that norm's input and a
        dropout mask, which together are as large as the layer's output.
        """
        given = [n for i in nodes for n in self._nodes[i].output if n and self._leaves(n, nodes)]
        most = _CHEAP * self._bytes(given, nodes)
        makers = {name: self._again_for(name, nodes) for name in wanted}
        kept: set[str] = set()
        for i in sorted(nodes, reverse=True):
            if (called(self._nodes[i]) or self._nodes[i].op_type) not in _PRODUCTS:
                continue
            more = kept | {name for name in wanted if i in makers[name]}
            if not self._bytes(more, nodes) <= most:
                break
            kept = more
        return kept

    def _again_for(self, name: str, nodes: Collection[int]) -> set[int]:
        """Return the nodes that run again to recompute `name`."""
        found: set[int] = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            if self._goes(each, nodes) and (maker := self._makers[each]) not in found:
                found.add(maker)
                waiting += self._nodes[maker].input
        return found

    def _bytes(self, names: Iterable[str], nodes: Collection[int]) -> float:
        """Return the bytes of the tensors' storage for some batch, or NaN if a size is unknown."""
        total = 0.0
        for name in {self._storage(name, nodes) for name in names}:
            told = self._told.get(name)
            if told is None or not told.type.tensor_type.HasField("shape"):
                return math.nan
            tensor = told.type.tensor_type
            sizes = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            try:
                total += bytes_of(tensor.elem_type, sizes, defaultdict(lambda: _ANY_SIZE))
            except (ValueError, TypeError, ZeroDivisionError):
                return math.nan
        return total

    def _goes(self, name: str, nodes: Collection[int]) -> bool:
        """Return True if only `nodes` read a tensor in forward, and it can be recomputed."""
        maker = self._makers.get(name, -1)
        return (
            maker in nodes
            and self._repeats(maker)
            and not any(self._leaves(each, nodes) for each in self._nodes[maker].output)
        )

    def _leaves(self, name: str, nodes: Collection[int]) -> bool:
        """Return True if a tensor is a graph output or read by forward nodes outside of `nodes`."""
        readers = self._readers.get(name, ())
        return name in self._given or any(i not in nodes and i <= self._end for i in readers)

    def _storage(self, name: str, nodes: Collection[int]) -> str:
        """Return the tensor whose storage `name` views."""
        maker = self._makers.get(name, -1)
        while maker in nodes and self._nodes[maker].op_type in _VIEWS:
            name = self._nodes[maker].input[0]
            maker = self._makers.get(name, -1)
        return name

    def _repeats(self, at: int) -> bool:
        """Return True if a node returns the same again. Sizes are not worth recomputing."""
        node = self._nodes[at]
        return self._kind(node.output[0]) not in _SIZES and _repeats(node)

    def _kind(self, name: str) -> int | None:
        """Return a tensor's element type, or if unknown, that of the tensor it is made from."""
        while name not in self._told and name in self._makers:
            node = self._nodes[self._makers[name]]
            if node.op_type in ("Shape", "Size"):
                return TensorProto.INT64
            if not node.input:
                return None
            name = node.input[0]
        told = self._told.get(name)
        return None if told is None else told.type.tensor_type.elem_type


class _Rewriting:
    """Rewriting of one graph, which then recomputes what belongs to `occurrences` only."""

    def __init__(
        self, plans: Plans, model: onnx.ModelProto, occurrences: Iterable[frozenset[int]]
    ) -> None:
        self._plans = plans
        self._model = model
        self._nodes = [_copy(node) for node in plans._nodes]
        self._again: dict[str, str] = {}
        """Name of the recomputed copy of each tensor."""
        self._twins: list[onnx.NodeProto] = []
        self._on_demand: dict[str, onnx.NodeProto] = {}
        """Nodes that run when one of their outputs is first read, keyed by output."""
        self._order: list[onnx.NodeProto] = []
        self._keys: dict[int, onnx.NodeProto] = {}
        for nodes in occurrences:
            wanted = plans._wanted(nodes)
            for name in wanted:
                self._name_again(name, nodes)

    def done(self) -> onnx.ModelProto:
        """Return the rewritten graph."""
        end = self._plans._end
        for i, node in enumerate(self._nodes[: end + 1]):
            self._order += [self._keys[i], node] if i in self._keys else [node]
            self._order += self._let_go(node)
        for node in self._nodes[end + 1 :]:
            node.input[:] = [self._again.get(name, name) for name in node.input]
            mark_backward(node)
        waiting = _waiting_for(self._nodes[end].output, self._nodes[end + 1 :])
        late = {id(node) for node in waiting}
        for node in (*self._twins, *(n for n in self._nodes[end + 1 :] if id(n) not in late)):
            self._on_demand |= dict.fromkeys(filter(None, node.output), node)
        _Schedule(waiting, self._add).run()
        self._model.graph.node.extend(self._order)
        return self._model

    def _let_go(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return nodes that read outputs of `node` which nothing else in forward reads.

        ORT then releases those tensors after that read.
        """
        end, readers = self._plans._end, self._plans._readers
        return [
            helper.make_node("Shape", [name], [f"{name}_shape"], name=f"{name}_shape")
            for name in node.output
            if name in self._again and all(i > end for i in readers.get(name, ()))
        ]

    def _add(self, node: onnx.NodeProto) -> None:
        """Add a node of backward after the nodes that it needs and that depend on forward only."""
        stack = [node]
        while stack:
            before = [n for name in read_by(stack[-1]) if (n := self._on_demand.get(name))]
            if before:
                stack += before
                continue
            last = stack.pop()
            if last is node or last.output[0] in self._on_demand or not last.output[0]:
                self._order.append(last)
            for name in last.output:
                self._on_demand.pop(name, None)

    def _name_again(self, name: str, nodes: Collection[int]) -> str:
        """Return the name of a tensor's recomputed copy, or its own name if it is stored.

        Not recursive, because a long chain of nodes would exceed the recursion limit.
        """
        waiting = [name]
        while waiting:
            each = waiting[-1]
            maker = self._plans._makers.get(each)
            if each in self._again or maker is None or not self._plans._goes(each, nodes):
                waiting.pop()
                continue
            before = [
                read
                for read in self._nodes[maker].input
                if read not in self._again and self._plans._goes(read, nodes)
            ]
            if before:
                waiting += before
                continue
            waiting.pop()
            self._twin(maker)
        return self._again.get(name, name)

    def _twin(self, at: int) -> None:
        """Create the node that recomputes the outputs of node `at`."""
        node = self._nodes[at]
        if (kernel := called(node)) in _KEYED:
            self._draw_by_key(at, kernel)
        twin = _copy(node)
        twin.name = node.name + SUFFIX
        twin.input[:] = [self._again.get(name, name) for name in twin.input]
        for place, name in enumerate(twin.output):
            if name:
                second = name + SUFFIX
                self._again[name] = twin.output[place] = second
                if name in self._plans._told:
                    told = self._model.graph.value_info.add()
                    told.CopyFrom(self._plans._told[name])
                    told.name = second
        mark_backward(twin)
        self._twins.append(twin)

    def _draw_by_key(self, at: int, kernel: str) -> None:
        node = self._nodes[at]
        key = f"{node.output[0]}_key"
        drawing = helper.make_node(
            "ATen",
            [node.input[0], node.input[_RATIO[kernel]]],
            [key],
            name=f"{node.name}_key",
            domain=node.domain,
            operator=f"{DOMAIN}::key",
            overload_name="",
        )
        self._keys[at] = drawing
        told = helper.make_tensor_value_info(key, TensorProto.INT64, [1])
        self._model.graph.value_info.append(told)
        place = 1 if kernel == "dropout" else 0
        node.input.insert(place, key)
        for each in node.attribute:
            if each.name == "operator":
                each.s = f"{DOMAIN}::{_KEYED[kernel]}".encode()


def _sizes_first(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return `nodes` with those moved before the yield that read sizes of forward's outputs."""
    end = next(i for i, node in enumerate(nodes) if node.op_type == _YIELD)
    there = {name for node in nodes[:end] for name in node.output}
    early = [n for n in nodes[end:] if n.op_type in ("Shape", "Size") and n.input[0] in there]
    taken = {id(node) for node in early}
    for node in early:
        unmarked = [each for each in node.attribute if each.name != BACKWARD]
        del node.attribute[:]
        node.attribute.extend(unmarked)
    return [*nodes[:end], *early, *(node for node in nodes[end:] if id(node) not in taken)]


def _waiting_for(given: Iterable[str], backward: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes of `backward` that depend on the tensors `given`."""
    made, found = set(given), []
    for node in backward:
        if any(name in made for name in read_by(node)):
            found.append(node)
            made.update(node.output)
    return found


class _Schedule:
    """Order of `nodes` in which short chains to a graph output do not wait.

    Computing the gradient of a weight releases two activations that only it still reads, so it runs
    as soon as possible. `add` is called with each node in order.
    """

    SOON = 3
    """Maximum number of nodes in a short chain to a graph output."""

    def __init__(
        self, nodes: Sequence[onnx.NodeProto], add: Callable[[onnx.NodeProto], None]
    ) -> None:
        self._nodes = nodes
        self._add = add
        makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        self._before = [{makers[n] for n in read_by(node) if n in makers} for node in nodes]
        self._after: list[list[int]] = [[] for _ in nodes]
        for i, before in enumerate(self._before):
            for each in before:
                self._after[each].append(i)
        self._left = list(map(len, self._before))
        height = [0] * len(nodes)
        for i in reversed(range(len(nodes))):
            height[i] = 1 + max((height[each] for each in self._after[i]), default=0)
        self._ends = [each <= self.SOON for each in height]
        self._done = [False] * len(nodes)

    def run(self) -> None:
        """Add all nodes."""
        for i in range(len(self._nodes)):
            if not self._done[i]:
                self._run(i)

    def _run(self, first: int) -> None:
        ready = collections.deque([first])
        while ready:
            i = ready.popleft()
            self._done[i] = True
            self._add(self._nodes[i])
            for each in self._after[i]:
                self._left[each] -= 1
                if self._left[each] == 0 and self._ends[each]:
                    ready.append(each)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    return copied


def _repeats(node: onnx.NodeProto) -> bool:
    """Return True if a node is deterministic and has no side effects."""
    if node.op_type in _NOT_AGAIN:
        return False
    if node.op_type != "ATen":
        return True
    name = operator(node)
    domain, _, short = name.rpartition("::")
    if domain == DOMAIN:
        return True
    if domain not in ("", "aten") or "batch_norm" in short:
        return False
    named = (each.s.decode() for each in node.attribute if each.name == "overload_name")
    overload = next(named, "")
    try:
        found = getattr(getattr(torch.ops.aten, short), overload or "default")
    except AttributeError:
        return False
    drawing = torch.Tag.nondeterministic_seeded in found.tags
    return not drawing and not found._schema.is_mutable


def _named(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yield the plans that a forward node belongs to, each with the scope of its occurrence."""
    name = next((each for each in (*node.output, node.name) if each.startswith(_ROOT)), "")
    scopes = name.removeprefix(_ROOT).removeprefix(_ROOT[1:]).split("/")[:-1]
    at = next((i for i, each in enumerate(scopes) if _ITEM.fullmatch(each)), None)
    if at is None:
        return
    for end in range(at + 1, min(len(scopes), at + 1 + plan_names.DEEPEST) + 1):
        layer = re.sub(r"\d+(_\d+)?$", "*", scopes[at])
        names = [*scopes[:at], layer, *scopes[at + 1 : end]]
        path = module_path("/".join(["_original_module", *names]))
        yield path or "*", "/".join(scopes[:end])
