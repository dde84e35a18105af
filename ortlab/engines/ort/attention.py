"""Scaled dot product attention in ORT's operators, with the results and draws of eager torch."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any, Final

import torch

from ortlab.engines.ort.lowering.graph import HALVES, carried
from ortlab.engines.torch.cpu import has_instructions

_OPERATOR = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by its formula.

    A query whose keys are all masked has the result 0, as in torch. No intermediate value is
    infinite, so that no gradient is NaN.

    Args:
        query: Queries, [..., heads, length, width].
        key: Keys, [..., heads of keys, source, width].
        value: Values, [..., heads of keys, source, width of values].
        attn_mask: Booleans, True where attention is allowed, or numbers to add to the scores.
        dropout_p: Probability of dropout of the attention weights.
        is_causal: True to let each query attend only to keys up to its own position.
        scale: Factor of the scores; by default 1 / sqrt(width).
        enable_gqa: True if several heads of queries share one head of keys.

    Returns:
        The weighted values, [..., heads, length, width of values].
    """
    device = query.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else query.dtype
    rest = attn_mask, dropout_p, is_causal, scale, enable_gqa
    if dtype not in HALVES or has_instructions(dtype):
        return _attention(query, key, value, *rest)
    # As in torch's kernel, scores are not rounded to 16 bits.
    query, key, value = (each.to(dtype).to(carried(dtype)) for each in (query, key, value))
    with torch.autocast(device, enabled=False):
        return _attention(query, key, value, *rest).to(dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """See `attention`."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    scores = torch.matmul(query * factor, key.transpose(-1, -2))
    keep = None
    if is_causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores + _added(rows[:, None] >= columns, scores)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores + _added(attn_mask, scores)
        keep = attn_mask.any(-1, keepdim=True)
    elif attn_mask is not None:
        scores = scores + attn_mask.clamp(min=torch.finfo(scores.dtype).min)
        keep = (attn_mask != -math.inf).any(-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p, True)
    result = torch.matmul(weights, value)
    return result if keep is None else result * keep


def _added(allowed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return what masks scores when it is added, which is faster in ORT than to select them."""
    lowest = torch.finfo(scores.dtype).min / 2  # so that the sum with a score is finite
    return torch.where(allowed, scores.new_zeros(()), scores.new_full((), lowest))


def _with_attention(function: Any) -> Any:
    """Return a function of torch.nn.functional that calls `attention` instead of torch's."""
    names = {**function.__globals__, _OPERATOR.__name__: attention}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = made  # which modes of torch are handed
    return made


REPLACED: Final = {_OPERATOR: attention, _MULTI_HEAD: _with_attention(_MULTI_HEAD)}
"""Replacements of torch's functions in graphs of Dynamo."""
