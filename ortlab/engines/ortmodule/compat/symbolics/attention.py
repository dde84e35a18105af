"""Export rules for attention: as ONNX operators, ortlab's CPU kernel, or torch's fused kernels.

Torch's kernels (flash, memory-efficient or cuDNN on a GPU, flash on a CPU) store no scores for the
gradient. As in eager mode, torch selects the kernel: the operator ``ortlab::attention`` calls
``scaled_dot_product_attention``, and the ORT session's forward pass keeps the state that its
gradient needs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortlab.engines.ortmodule.compat import forward_states
from ortlab.engines.ortmodule.compat.symbolics.builder import (
    Gradient,
    all_of,
    aten,
    aten_node,
    attention,
    is_trained,
    rule,
    with_gradient,
)
from ortlab.engines.torchscript import rules
from ortlab.engines.torchscript.nodes import (
    Graph,
    Value,
    cast,
    constant,
    dtype,
    literal,
    missing,
    number,
    rank,
    ranked_like_output,
)

_KERNEL = "ortlab_kernels::attention"
_FUSED = "ortlab::attention"


def _kernel_gradient() -> Gradient:
    inputs = ["GO(0)", "I(0)", "I(1)", "I(2)", "I(3)", "O(1)", "I(4)", "I(6)", "Mask", "I(8)"]
    outputs = [f"GI({i})" for i in range(4)]
    return [all_of(4), aten_node(f"{_KERNEL}_backward", inputs, outputs)]


def _fused_gradient() -> Gradient:
    # The kernel has saved its inputs, but ORT only preserves the memory of what the node reads.
    inputs = ["GO(0)", "I(0)", "I(1)", "I(2)", "I(3)", "O(0)", "O(1)", "Mask"]
    outputs = [f"GI({i})" for i in range(4)]
    return [all_of(4), aten_node(f"{_FUSED}_backward", inputs, outputs)]


_SYMPTOM = "with dropout: 'i < node_->OutputDefs().size() was false', as Dropout has no mask output"


@rule("scaled_dot_product_attention", _SYMPTOM, (_FUSED, "", _fused_gradient))
@rule("scaled_dot_product_attention", _SYMPTOM, (_KERNEL, "", _kernel_gradient))
def _attention(
    g: Graph,
    query: Value,
    key: Value,
    value: Value,
    mask: Value = None,
    dropout_p: Value = None,
    is_causal: Value = None,
    scale: Value = None,
    enable_gqa: Value = None,
) -> Value:
    if not missing(enable_gqa) and literal(enable_gqa, "i"):
        key, value = (rules.repeat_heads(g, x, query) for x in (key, value))
    causal = not missing(is_causal) and bool(literal(is_causal, "i"))
    chosen = attention()
    if chosen is None or not _fits(query, key, value, mask, any_float=chosen.fused):
        return rules.attention(g, query, key, value, mask, dropout_p, causal, scale)
    masked = not missing(mask)
    given = mask if masked else constant(g, [[[[0.0]]]], dtype(query))
    ratio = constant(g, 0.0 if missing(dropout_p) else number(dropout_p), torch.float32)
    inputs = [with_gradient(g, query, key, value, given), key, value, given, ratio]
    inputs += [
        constant(g, causal, torch.bool),
        cast(g, rules.attention_scale(g, query, scale), torch.float32),
    ]
    if chosen.fused:
        learned = masked and is_trained(mask)
        inputs += [constant(g, masked, torch.bool), constant(g, learned, torch.bool)]
    else:
        inputs += [constant(g, chosen.low, torch.bool), constant(g, False, torch.bool)]
    found, _ = aten(g, _FUSED if chosen.fused else _KERNEL, *inputs, outputs=2)
    return ranked_like_output(g, found)


def _fits(query: Value, key: Value, value: Value, mask: Value | None, *, any_float: bool) -> bool:
    """Return True if a kernel supports these: one common type, float32 unless `any_float`."""
    kind = dtype(query)
    if not (kind == torch.float32 or (any_float and kind.is_floating_point)):
        return False
    if any(dtype(each) != kind or rank(each) != 4 for each in (query, key, value)):
        return False
    return missing(mask) or dtype(mask) in (kind, torch.bool)


@dataclass(eq=False)
class _Held:
    """State of one call of the forward kernel for its backward pass: part of autograd's graph."""

    inputs: tuple[Tensor, ...]
    output: Tensor


_held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
"""States by ticket; the forward pass through ORT's session owns them."""
_tickets = itertools.count(1)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    ratio: float,
    causal: bool,
    scale: float,
    masked: bool,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    """Run ``scaled_dot_product_attention``; return its output and a ticket for the backward."""
    # Torch selects other kernels if the mask needs a gradient.
    trained = (query, key, value, mask) if learned else (query, key, value)
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        inputs = tuple(each.detach().requires_grad_() for each in trained)
        given = inputs[3] if learned else _as_bool(mask) if masked else None
        output = torch.nn.functional.scaled_dot_product_attention(
            inputs[0],
            inputs[1],
            inputs[2],
            given,
            dropout_p=ratio,
            is_causal=causal,
            scale=scale,
        )
    held, ticket = _Held(inputs, output), next(_tickets)
    if forward_states.hold(held):
        _held[ticket] = held
    return output.detach().contiguous(), torch.tensor(ticket)


def _fused_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - this and the others are in the saved state
    value: Tensor,  # noqa: ARG001
    mask: Tensor,  # noqa: ARG001
    output: Tensor,  # noqa: ARG001
    ticket: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and mask; empty tensors where not `wanted`."""
    held = _held.get(int(ticket))
    if held is None:
        raise RuntimeError(
            "the state of this forward pass was released: backward can run once per forward"
        )
    places = [i for i, _ in enumerate(held.inputs) if wanted[i]]
    found = torch.autograd.grad(held.output, [held.inputs[i] for i in places], gradient)
    by_place = dict(zip(places, found, strict=True))
    empty = query.new_empty(0)
    return tuple(by_place.get(i, empty).contiguous() for i in range(4))


def _as_bool(mask: Tensor) -> Tensor:
    """Return a mask that ORT passed as uint8 as bool; ORT's DLPack does not support bool."""
    return mask.view(torch.bool) if mask.dtype == torch.uint8 else mask


@functools.cache
def define() -> Any:
    """Register the operator with torch, once per process: ORT's graphs call it by name.

    Returns:
        The library of the operator.
    """
    make: Any = torch.library.Library
    library: Any = make("ortlab", "FRAGMENT")
    library.define(
        "attention(Tensor query, Tensor key, Tensor value, Tensor mask, float ratio, bool causal, "
        "float scale, bool masked, bool learned) -> (Tensor, Tensor)"
    )
    library.define(
        "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor mask, "
        "Tensor output, Tensor ticket, bool[4] wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("attention", _fused, "CompositeExplicitAutograd")
    library.impl("attention_backward", _fused_backward, "CompositeExplicitAutograd")
    return library
