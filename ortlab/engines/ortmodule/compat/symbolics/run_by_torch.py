"""Export rules for functions whose forward and backward passes are computed by torch.

Either the exporter has no rule for them or ORT has no gradient. Each function becomes an operator
``ortlab::<name>`` that calls torch's function. Its gradient ``ortlab::<name>_backward`` calls the
function again and uses torch's autograd. The cost is that of eager torch plus one more forward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ortlab.engines.ortmodule.compat.symbolics.builder import (
    DETACHED,
    aten,
    aten_node,
    rule,
    stock,
    with_gradient,
)
from ortlab.engines.torchscript.nodes import (
    Graph,
    Value,
    cast,
    constant,
    literal,
    missing,
    rank,
    ranked_like_output,
)

_LIBRARY = "ortlab"
_SYMPTOM = "no rule, or no gradient"

_ONE = "Tensor x"
_TWO = "Tensor x, Tensor y"
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "digamma", "erfc", "erfinv",
         "exp2", "expm1", "lgamma", "sinh", "tan", "ceil", "floor", "frac", "round", "sign",
         "trunc"),
        (_ONE,),
    ),
    **dict.fromkeys(("atan2", "hypot", "logaddexp", "xlogy"), (_TWO,)),
    "amax": ("Tensor x, int[] dim, bool keepdim",),
    "amin": ("Tensor x, int[] dim, bool keepdim",),
    "prod": ("Tensor x, int? dtype", "Tensor x, int dim, bool keepdim, int? dtype"),
    "cumprod": ("Tensor x, int dim, int? dtype",),
    "addcdiv": ("Tensor x, Tensor y, Tensor z, float value",),
    "binary_cross_entropy": ("Tensor x, Tensor target, Tensor? weight, int reduction",),
    "poisson_nll_loss": (
        "Tensor x, Tensor y, bool log_input, bool full, float eps, int reduction",
    ),
    "soft_margin_loss": ("Tensor x, Tensor target, int reduction",),
    "hinge_embedding_loss": ("Tensor x, Tensor target, float margin, int reduction",),
    "margin_ranking_loss": (
        "Tensor x, Tensor y, Tensor target, float margin, int reduction",
    ),
    "cosine_embedding_loss": (
        "Tensor x, Tensor y, Tensor target, float margin, int reduction",
    ),
    "triplet_margin_loss": (
        "Tensor x, Tensor y, Tensor z, float margin, float p, float eps, bool swap, "
        "int reduction",
    ),
    "pixel_shuffle": ("Tensor x, int factor",),
    "pixel_unshuffle": ("Tensor x, int factor",),
    "index_copy": ("Tensor x, int dim, Tensor index, Tensor y",),
    "logcumsumexp": ("Tensor x, int dim",),
    "quantile": ("Tensor x, float q, int? dim, bool keepdim, int interpolation",),
    "rot90": ("Tensor x, int k, int[] dims",),
    "take_along_dim": ("Tensor x, Tensor index, int dim",),
    "linalg_solve": ("Tensor x, Tensor y, bool left",),
    **dict.fromkeys(
        (f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)),
        ("Tensor x, int[] padding",),
    ),
    "einsum_of": (
        "Tensor x, int[] equation",
        "Tensor x, Tensor y, int[] equation",
        "Tensor x, Tensor y, Tensor z, int[] equation",
    ),
    **dict.fromkeys(
        ("index_reduce", "scatter_reduce"),
        ("Tensor x, int dim, Tensor index, Tensor y, int reduce, bool include_self",),
    ),
}  # fmt: skip
"""Functions exported in this way, with torch's arguments: one signature per number of arguments."""

_WORDS = {
    "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
}
"""Torch's values of arguments; an ORT node holds the index, since it does not support strings."""

_BY_KEYWORD = frozenset({"dtype", "value", "include_self", "interpolation", "left"})
"""Last arguments that torch's functions take by keyword alone."""

EXPORTS: dict[str, Callable[..., Value]] = {}
"""The rules of `_FUNCTIONS` by name, for other rules that need them."""


def _einsum_of(*arguments: Any) -> Tensor:
    *tensors, equation = arguments
    found: Tensor = torch.einsum("".join(map(chr, equation)), *tensors)
    return found


_OURS = {"einsum_of": _einsum_of}
"""Functions that torch has under another name, or with arguments that an ORT node cannot hold."""


def define() -> None:
    """Register the operators with torch, once per process: ORT's graphs call them by name."""
    _library()


@functools.cache
def _library() -> Any:
    make: Any = torch.library.Library
    library: Any = make(_LIBRARY, "DEF")
    _, name = DETACHED.split("::")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, torch.clone, "CompositeExplicitAutograd")
    for function, schemas in _FUNCTIONS.items():
        for schema in schemas:
            name, count = _name(function, schema), len(_differentiable(schema))
            gradients = f"({', '.join(['Tensor'] * count)})"
            ordered = ", ".join(_ordered(schema, schema.split(", ")))
            library.define(f"{name}({ordered}) -> Tensor")
            library.define(f"{name}_backward(Tensor gradient, {ordered}) -> {gradients}")
            called = _OURS.get(function) or getattr(torch.ops.aten, function)
            call = functools.partial(_call, called, schema)
            library.impl(name, call, "CompositeExplicitAutograd")
            backward = functools.partial(_backward, call, count)
            library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    return library


def _name(function: str, schema: str) -> str:
    """Return the operator's name for this number of arguments; the exporter knows no overloads."""
    return f"{function}_{len(schema.split(','))}"


def _differentiable(schema: str) -> list[int]:
    """Return the indices of the arguments that get a gradient: tensors, except targets, weights."""
    return [i for i, each in enumerate(schema.split(", ")) if re.match(r"Tensor [a-z]$", each)]


def _ordered(schema: str, arguments: Sequence[Any]) -> list[Any]:
    """Return torch's `arguments` in the order of an ORT node: those with a gradient first.

    ORT assigns a gradient node's outputs to the first inputs and skips the other inputs.
    """
    places = _differentiable(schema)
    return [arguments[i] for i in sorted(range(len(arguments)), key=lambda i: i not in places)]


def _call(function: Callable[..., Any], schema: str, *arguments: Any) -> Tensor:
    """Call torch's function, whose last argument may be keyword-only."""
    *others, last = schema.split(", ")
    name, order = last.split()[-1], _ordered(schema, range(len(arguments)))
    given = [arguments[order.index(i)] for i in range(len(arguments))]
    for word, values in _WORDS.items():
        if (at := _at(schema, word)) >= 0:
            given[at] = values[given[at]]
    if name not in _BY_KEYWORD:
        found: Tensor = function(*given)
    else:
        found = function(*given[: len(others)], **{name: given[-1]})
    return found


def _backward(call: Callable[..., Tensor], count: int, gradient: Tensor, *arguments: Any) -> Any:
    """Return the gradients of the first `count` arguments."""
    leaves = [argument.detach().requires_grad_() for argument in arguments[:count]]
    with torch.enable_grad():
        found = torch.autograd.grad(
            call(*leaves, *arguments[count:]),
            leaves,
            gradient,
            allow_unused=True,
            materialize_grads=True,
        )
    return found[0] if len(found) == 1 else found


def _declare(function: str, schemas: tuple[str, ...]) -> None:
    by_count = {len(schema.split(",")): schema for schema in schemas}

    def export(g: Graph, *arguments: Value) -> Value:
        schema = by_count.get(len(arguments))
        if schema is None:
            return stock(function)(g, *arguments)
        for declared, value in zip(schema.split(", "), arguments, strict=True):
            kind, name = declared.split()
            if missing(value) and not kind.endswith("?"):
                raise RuntimeError(f"{function} without {name} is not supported")
        given = [
            cast(g, value, torch.float32)
            if declared.startswith("float") and not missing(value)
            else value
            for declared, value in zip(schema.split(", "), arguments, strict=True)
        ]
        for word, values in _WORDS.items():
            if (at := _at(schema, word)) >= 0:
                given[at] = constant(g, values.index(literal(given[at], "s")))
        differentiable = [given[place] for place in _differentiable(schema)]
        for place in _differentiable(schema):
            given[place] = with_gradient(g, given[place], *differentiable)
        # ORT assumes that the output has the rank of the first input, so dimensions are kept here.
        axes = _axes_to_drop(schema, given)
        if axes:
            given[_at(schema, "keepdim")] = constant(g, True, torch.bool)
        found = aten(g, f"{_LIBRARY}::{_name(function, schema)}", *_ordered(schema, given))
        if axes:
            return g.op("Squeeze", found, constant(g, axes))
        if rank(ranked_like_output(g, found)) > 0:
            return found
        return g.op("ReduceSum", g.op("Reshape", found, constant(g, [-1])), keepdims_i=0)

    EXPORTS[function] = export
    for schema in schemas:
        name = f"{_LIBRARY}::{_name(function, schema)}"
        rule(function, _SYMPTOM, (name, "", functools.partial(_gradient, name, schema)))(export)


def _at(schema: str, name: str) -> int:
    """Return the index of an argument; -1 if there is none of this name."""
    names = [each.split()[-1] for each in schema.split(", ")]
    return names.index(name) if name in names else -1


def _axes_to_drop(schema: str, arguments: Sequence[Value]) -> list[int]:
    """Return the dimensions that a reduction without keepdim removes."""
    if _at(schema, "keepdim") < 0 or literal(arguments[_at(schema, "keepdim")], "i"):
        return []
    dim, every = arguments[_at(schema, "dim")], range(rank(arguments[0]))
    if re.search(r"int\?? dim", schema):
        given = every if missing(dim) else [literal(dim, "i")]
    else:
        given = literal(dim, "is") or every
    return [axis % len(every) for axis in given]


def _gradient(name: str, schema: str) -> list[tuple[Any, ...]]:
    inputs = ["GO(0)", *(f"I({i})" for i in range(len(schema.split(","))))]
    outputs = [f"GI({i})" for i in range(len(_differentiable(schema)))]
    return [aten_node(f"{name}_backward", inputs, outputs)]


for _function, _schemas in _FUNCTIONS.items():
    _declare(_function, _schemas)
