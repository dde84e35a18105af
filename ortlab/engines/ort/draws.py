"""Random draws of a graph, made by torch's generator in the order of eager torch.

A draw whose distribution depends on sizes alone is taken out of its operator, so that the rest of
the graph can run in ORT. The same seed then gives the same dropout masks as eager torch, bit for
bit, on a CPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import CheckpointPolicy

from ortlab.engines.ort.lowering.graph import Size, shape_of

aten = torch.ops.aten


class Layout:
    """Sizes and strides of a tensor as a function of torch's size symbols.

    Attributes:
        symbols: Symbols that the sizes depend on.
    """

    def __init__(self, like: torch.Tensor) -> None:
        size, stride = shape_of(like.shape), shape_of(like.stride())
        found = {symbol for each in (*size, *stride) for symbol in _symbols(each)}
        self.symbols: list[sympy.Symbol] = sorted(found, key=str)
        names = ", ".join(map(str, self.symbols))
        sizes, strides = ("".join(f"{_source(each)}, " for each in part) for part in (size, stride))
        self._function = eval(f"lambda {names}: (({sizes}), ({strides}))")
        self.dtype, self.device = like.dtype, like.device

    def empty(self, *values: int) -> torch.Tensor:
        """Return memory for the tensor.

        Args:
            *values: Values of the symbols.
        """
        return torch.empty_strided(*self._function(*values), dtype=self.dtype, device=self.device)


def _symbols(size: Size) -> set[sympy.Symbol]:
    return set() if isinstance(size, int) else size.free_symbols


def _source(size: Size) -> str:
    return str(size) if isinstance(size, int) else PythonPrinter().doprint(size)


class Draw:
    """Function of size symbols that draws a tensor.

    Attributes:
        kind: In-place method of the distribution.
    """

    __name__ = __qualname__ = "draw"

    def __init__(self, kind: str, layout: Layout, *parameters: float) -> None:
        """Describe the draw.

        Args:
            kind: In-place method of the distribution, such as "bernoulli_".
            layout: Layout of the tensor; elements are drawn in their order in memory.
            *parameters: Parameters of the distribution.
        """
        self.kind, self._layout, self._parameters = kind, layout, parameters

    def __call__(self, *values: int) -> torch.Tensor:
        """Draw."""
        made = self._layout.empty(*values)
        if (
            self.kind == "bernoulli_"
            and made.numel() >= _AT_A_TIME
            and made.untyped_storage().nbytes() == made.numel() * made.element_size()
            and made.device.type == "cpu"
            and _by_fractions()
        ):
            _bernoulli(made.as_strided((made.numel(),), (1,)), self._parameters[0])
        else:
            getattr(made, self.kind)(*self._parameters)
        return made


_FRACTIONS: Final = 1 << 53
_AT_A_TIME: Final = 1 << 15  # elements up to which torch's operators wake no other thread


def _bernoulli(
    made: torch.Tensor, probability: float, generator: torch.Generator | None = None
) -> None:
    """Draw as ``bernoulli_`` does; many elements take three quarters of its time."""
    drawn = torch.empty(_AT_A_TIME, dtype=torch.int64, device="cpu")
    least = math.ceil(probability * _FRACTIONS)
    for part in torch.split(made, _AT_A_TIME):
        numerators = drawn[: len(part)].random_(generator=generator)
        torch.lt(numerators.bitwise_and_(_FRACTIONS - 1), least, out=part)


@functools.cache
def _by_fractions() -> bool:
    """Return True if ``bernoulli_`` compares a random fraction of 2**53 for each element.

    It does in torch 2.13 (``ATen/core/DistributionsHelper.h``).
    """
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    one, other = (torch.empty(99, dtype=torch.bool, device="cpu") for _ in range(2))
    one.bernoulli_(0.3, generator=generators[0])
    _bernoulli(other, 0.3, generators[1])
    states = [generator.get_state() for generator in generators]
    return torch.equal(one, other) and torch.equal(*states)


class LaidOut:
    """Function of a tensor and size symbols that copies it to memory with other strides."""

    __name__ = __qualname__ = "laid_out"

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, x: torch.Tensor, *values: int) -> torch.Tensor:
        """Copy the tensor."""
        return self._layout.empty(*values).copy_(x)


def is_random(node: fx.Node) -> bool:
    """Return True if a node draws random numbers.

    Args:
        node: Call of an operator.
    """
    return isinstance(node.target, Draw) or (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    )


_LIKE = {aten.rand_like.default: "uniform_", aten.randn_like.default: "normal_"}


def take_out(module: fx.GraphModule) -> None:
    """Replace operators that draw by the draw and the rest of the operator.

    Args:
        module: Graph of ATen operators; it is changed.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.native_dropout.default and node.args[2] is not False:
            _take_dropout(module.graph, node)
        elif node.target in _LIKE:
            _take(module.graph, node, _LIKE[node.target])
        elif node.target is aten.bernoulli.p:
            _take(module.graph, node, "bernoulli_", node.args[1])
    module.recompile()


def _take(graph: fx.Graph, node: fx.Node, kind: str, *parameters: Any) -> None:
    with graph.inserting_before(node):
        made = _draw(graph, node, node.meta["val"], kind, *parameters)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _take_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Replace dropout by a drawn mask and a product; its gradient reads the mask already."""
    x, probability = node.args[0], node.args[1]
    assert isinstance(probability, float | int)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    with graph.inserting_before(node):
        mask = _draw(graph, node, node.meta["val"][1], "bernoulli_", 1 - probability)
        product = graph.call_function(aten.native_dropout_backward.default, (x, mask, scale))
        product.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(product if user.args[1] == 0 else mask)
        graph.erase_node(user)
    graph.erase_node(node)


def _draw(
    graph: fx.Graph, node: fx.Node, like: torch.Tensor, kind: str, *parameters: Any
) -> fx.Node:
    layout = Layout(like)
    made = graph.call_function(Draw(kind, layout, *parameters), known_symbols(graph, layout))
    # A mask is saved for the backward pass: drawn again, it would be another one.
    made.meta = {**node.meta, "val": like, "recompute": CheckpointPolicy.MUST_SAVE}
    return made


def known_symbols(graph: fx.Graph, layout: Layout) -> tuple[fx.Node, ...]:
    """Return nodes with the values of a layout's symbols, as early in the graph as possible.

    Args:
        graph: Graph to find or create them in.
        layout: Layout of a tensor.
    """
    return tuple(_known(graph, symbol) for symbol in layout.symbols)


def _known(graph: fx.Graph, symbol: sympy.Symbol) -> fx.Node:
    nodes: list[fx.Node] = [node for node in graph.nodes if "val" in node.meta]
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return node
    for node in nodes:
        value = node.meta["val"]
        for i, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                with graph.inserting_after(node):
                    made = graph.call_function(aten.sym_size.int, (node, i))
                made.meta["val"] = size
                return made
    raise AssertionError(f"no value of the size {symbol}")
