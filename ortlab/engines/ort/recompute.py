"""Joint graphs of forward and backward pass, and their partition under a recompute plan.

What the backward pass reads is either stored by the forward pass or computed again. Torch's
partitioner decides that under a budget, see ``activation_memory_budget`` of
``torch._functorch.config``. Plans name modules, of which only the outputs are stored (Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from ortlab.engines import plan_names
from ortlab.engines.ort import draws
from ortlab.engines.ort.lowering.graph import VIEWS
from ortlab.engines.ort.onnx_model import (
    bytes_of,
    form_of,
    is_number,
    model_path,
    module_calls,
    tensors_in,
)
from ortlab.engines.ort.segments import PRODUCTS

aten = torch.ops.aten

_PRODUCTS: Final = PRODUCTS | {aten.convolution.default}
"""Operators that take most of a step's time."""

_WEIGHT: Final = "ortlab_weight"
"""Key in the metadata of nodes that read a weight for `_Weights`."""

_CHEAP: Final = 1.5
"""Memory that may be stored to avoid recomputing products, relative to a module's outputs."""


@dataclass(frozen=True)
class Recompute:
    """Recompute plan of a training step.

    Attributes:
        plans: Modules of which only the outputs are stored, see `plan_names`.
        budget: Share of the activations that may be stored, in (0, 1]. 1.0 is torch's own choice,
            which computes again what is cheap.
    """

    plans: tuple[str, ...] = ()
    budget: float = 1.0


NOTHING: Final = Recompute()


def plans_of(module: nn.Module) -> tuple[str, ...]:
    """Return the plans that name modules of a model, outer modules before inner ones.

    Args:
        module: Model.
    """
    found = (plan_names.plan_of(path) for path, _ in module.named_modules())
    return tuple(dict.fromkeys(filter(None, found)))


Call = tuple[Any, str]
"""An operator, and the code that calls it."""


def call_of(node: fx.Node) -> Call:
    """Return the call that a node computes, or is a part of.

    Args:
        node: Node of a graph that torch has traced.
    """
    return node.meta.get("original_aten"), str(node.meta.get("stack_trace"))


class JointGraph:
    """A joint graph as torch has traced it.

    Args:
        module: The graph; it is not changed.
        options: Keyword arguments of torch's partitioner.
    """

    def __init__(self, module: fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._module = module
        self._options = dict(options)
        self._results: int = options["num_fwd_outputs"]

    def calls_of(self, plan: str) -> int:
        """Return the number of calls of the modules that a plan names.

        Args:
            plan: Plan, see `plan_names`.
        """
        return len(_Tags(self._module.graph, self._results).calls([plan]))

    def operators(self) -> dict[int, Call]:
        """Return which operator made each node of autograd, by its sequence number.

        Later operators without a node of their own have the number of the last one before them.
        """
        found: dict[int, Call] = {}
        for node in self._module.graph.nodes:
            if node.op == "call_function":
                found.setdefault(node.meta.get("seq_nr", -1), call_of(node))
        return found

    def partitioned(self, recompute: Recompute) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward graph.

        Args:
            recompute: What the backward pass computes again.
        """
        joint = fx.GraphModule(self._module, _copy(self._module.graph))
        if recompute != NOTHING:
            tags = _Tags(joint.graph, self._results)
            tags.store_changed()
            tags.put(recompute.plans)
        if recompute.budget == 1:
            return min_cut_rematerialization_partition(joint, [], **self._options)
        static = self._options.get("static_lifetime_input_indices") or ()
        weights = _Weights(joint.graph, static)
        with torch._functorch.config.patch(activation_memory_budget=recompute.budget):
            both = min_cut_rematerialization_partition(joint, [], **self._options)
        for module in both:
            weights.give_back(module)
        return both


class _Weights:
    """Parameters and buffers of a joint graph, which count as empty while it is partitioned.

    They are in memory whatever is stored. Torch's partitioner counts them as stored and, where they
    are larger than the activations, ignores the budget.
    """

    def __init__(self, graph: fx.Graph, static: Sequence[int]) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._values: dict[str, torch.Tensor] = {}
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in (inputs[i] for i in static):
            if not _is_tensor(node):
                continue
            value = node.meta["val"]
            with graph.inserting_before(first):  # its readers see its shape
                read = graph.call_function(aten.alias.default, (node,))
            read.meta = {**node.meta, _WEIGHT: True}
            node.replace_all_uses_with(
                read, delete_user_cb=lambda user, read=read: user is not read
            )
            self._values[node.name] = value
            node.meta = {**node.meta, "val": value.new_empty(0)}

    def give_back(self, module: fx.GraphModule) -> None:
        """Restore the values in a graph made of the joint graph."""
        for node in list(module.graph.nodes):
            if node.op == "placeholder" and node.name in self._values:
                node.meta = {**node.meta, "val": self._values[node.name]}
            elif _WEIGHT in node.meta and node.op == "call_function":
                node.replace_all_uses_with(node.all_input_nodes[0])
                module.graph.erase_node(node)
        module.recompile()


class _Tags:
    """Tags for torch's partitioner on the forward nodes of a joint graph."""

    def __init__(self, graph: fx.Graph, results: int) -> None:
        self._graph = graph
        (output,) = graph.find_nodes(op="output")
        self._returned = {node for node in output.args[0][:results] if isinstance(node, fx.Node)}
        self._forward = _with_sources(self._returned)

    @functools.cached_property
    def _written(self) -> set[fx.Node]:
        return set(self._changed())

    def _changed(self) -> Iterator[fx.Node]:
        """Iterate over the inputs that forward may change, such as the buffers of a batch norm.

        AOTAutograd returns their new values, which are not told from other results here.
        """
        for result in self._returned:
            if not _is_tensor(result):
                continue
            form = form_of(result.meta["val"])
            for node in _with_sources({result}):
                is_input = node.op == "placeholder" and node is not result and _is_tensor(node)
                if is_input and form_of(node.meta["val"]) == form:
                    yield node

    def store_changed(self) -> None:
        """Let the backward pass read no input that forward changes, but what was made of it."""
        for source in self._written:
            for reader in source.users:
                if reader in self._forward and not is_number(reader):
                    reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def put(self, plans: Sequence[str]) -> None:
        """Let the backward pass compute the modules of plans again from their inputs."""
        for number, nodes in enumerate(self.calls(plans)):
            leaving = {node for node in nodes if self._leaves(node, nodes)}
            cones = {
                node: self._cone(node, nodes, leaving)
                for node in nodes
                if self._is_read_later(node)
            }
            stored = self._stored(nodes, leaving, cones)
            for node in leaving | stored:
                if next(tensors_in(node.meta.get("val")), None) is not None:
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for node in set().union(*(cones[each] for each in cones if each not in stored)):
                if node not in stored:
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    node.meta["ac_graph_id"] = number + 1

    def calls(self, plans: Sequence[str]) -> list[dict[fx.Node, None]]:
        """Return the forward nodes of each outermost call of a module that a plan names."""
        found: dict[str, dict[fx.Node, None]] = defaultdict(dict)
        for node in self._graph.nodes if plans else ():
            if node in self._forward and node.op == "call_function":
                for key, path in module_calls(node):
                    if plan_names.plan_of(model_path(path)) in plans:
                        found[key][node] = None
                        break
        return list(found.values())

    def _leaves(self, node: fx.Node, nodes: Mapping[fx.Node, None]) -> bool:
        """Return True if forward reads a node, or a view of it, outside of `nodes`."""
        return node in self._returned or any(
            user in self._forward
            and (user not in nodes or (_is_view(user) and self._leaves(user, nodes)))
            for user in node.users
        )

    def _is_read_later(self, node: fx.Node) -> bool:
        return any(user not in self._forward for user in node.users)

    def _cone(
        self, node: fx.Node, nodes: Mapping[fx.Node, None], leaving: Set[fx.Node]
    ) -> set[fx.Node]:
        """Return the nodes that compute `node` again from what is stored."""

        def goes(each: fx.Node) -> bool:
            if each.target is operator.getitem and not goes(each.all_input_nodes[0]):
                return False  # no tuple is stored
            return each in nodes and each not in leaving and self._repeats(each)

        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each not in found and goes(each):
                found.add(each)
                waiting += each.all_input_nodes
        return found

    def _repeats(self, node: fx.Node) -> bool:
        """Return True if a node computes the same tensors whenever it runs."""
        if isinstance(node.target, draws.Draw) or node.meta.get("recompute"):
            return False
        if node.target is operator.getitem:
            return True
        return (
            isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
            and not draws.is_random(node)
            and not is_number(node)
            and "unbacked_bindings" not in node.meta
            and self._written.isdisjoint(node.all_input_nodes)
        )

    def _stored(
        self,
        nodes: Mapping[fx.Node, None],
        leaving: Set[fx.Node],
        cones: Mapping[fx.Node, Set[fx.Node]],
    ) -> set[fx.Node]:
        """Return the nodes that are cheaper to store than to compute again.

        A layer that ends with a norm would repeat its last product only for that norm's input.
        """
        most = _CHEAP * _bytes(leaving)
        found: set[fx.Node] = set()
        for product in reversed(list(nodes)):
            if product.target not in _PRODUCTS:
                continue
            more = found | {node for node, cone in cones.items() if product in cone}
            if _bytes(more) > most:
                break
            found = more
        return found


def _copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph; `copy.deepcopy` of torch's pytrees would give a warning."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def _with_sources(nodes: Set[fx.Node]) -> set[fx.Node]:
    """Return nodes with all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_view(node: fx.Node) -> bool:
    return node.target in VIEWS or node.target is operator.getitem


def _bytes(nodes: Set[fx.Node]) -> int:
    """Return the size of the memory of nodes; that of a view is what it is a view of."""
    found: set[fx.Node] = set()
    for node in nodes:
        while node.target in VIEWS:
            node = node.all_input_nodes[0]
        found.add(node)
    return sum(map(bytes_of, filter(_is_tensor, found)))
