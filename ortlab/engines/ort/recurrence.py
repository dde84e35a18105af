"""Recurrent layers one after the other, with the dropout between them that eager torch applies.

Torch's decompositions of LSTM, GRU and RNN omit this dropout (torch 2.13: ``num_layers < i - 1`` in
`torch._decomp.decompositions._rnn_helper`). They also compute an LSTM whose input has no gradient
with oneDNN's operator, whose backward pass fails in AOTAutograd
(https://github.com/pytorch/pytorch/issues/158007). `onednn_lstm` is that operator with a backward
pass of its own; where oneDNN cannot compute a layer, ORT computes it step by step.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

_LSTM: Final = 2
"""oneDNN's number of the LSTM, ``ideep::rnn_kind::LSTM``."""


def _by_layer(
    operator: Callable[..., Any],
    x: torch.Tensor,
    state: torch.Tensor | Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute a recurrent operator of torch, [length, batch, width] or with the batch first."""
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    x = x.transpose(0, 1) if batch_first else x
    last: list[list[torch.Tensor]] = []
    for own_weights, *own_states in zip(
        _parts(weights, layers), *(each.chunk(layers) for each in states), strict=True
    ):
        if last and train and dropout > 0:
            x = torch.nn.functional.dropout(x, dropout, True)
        given = own_states[0] if isinstance(state, torch.Tensor) else own_states
        if operator is torch.lstm and _fits_onednn(x, *own_states, *own_weights):
            x, *after = _in_onednn(x, own_states, own_weights, biased, bidirectional)
        else:
            with _without_onednn():
                x, *after = operator(
                    x, given, own_weights, biased, 1, 0.0, train, bidirectional, False
                )
        last.append(after)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.cat(values) for values in zip(*last, strict=True)))


def _fits_onednn(
    x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *weights: torch.Tensor
) -> bool:
    """Return True for a layer that eager torch computes with oneDNN, in single precision."""
    tensors = (x, hidden, cell, *weights)
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and all(each.device.type == "cpu" and each.dtype is torch.float32 for each in tensors)
        and hidden.shape[-1] == cell.shape[-1]  # else it has a projection
        and x.numel() != 0
    )


def _in_onednn(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biased: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a layer of an LSTM, [length, batch, width], in one operator for each direction."""
    directions = 1 + bidirectional
    x, results = x.contiguous(), []  # once for both directions and both passes
    train = torch.is_grad_enabled()
    for reverse, own in enumerate(_parts(weights, directions)):
        if not biased:
            own = [*own, *[own[0].new_zeros(own[0].shape[0])] * 2]
        hidden, cell = (each[reverse : reverse + 1].contiguous() for each in states)
        results.append(onednn_lstm(x, *own, hidden, cell, bool(reverse), biased, train)[:3])
    y, *last = zip(*results, strict=True)
    return torch.cat(y, -1), torch.cat(last[0]), torch.cat(last[1])


@torch.library.custom_op(
    "ortlab::onednn_lstm",
    mutates_args=(),
    schema="(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor hidden, "
    "Tensor cell, bool reverse, bool biased, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
)
def onednn_lstm(
    x: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    reverse: bool,
    biased: bool,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute one direction of a layer of an LSTM with oneDNN, as eager torch does.

    Args:
        x: Input, [length, batch, width].
        w_ih: Weights of the input, [4 * hidden width, width].
        w_hh: Weights of the hidden state, [4 * hidden width, hidden width].
        b_ih: Bias of the input, [4 * hidden width].
        b_hh: Bias of the hidden state, [4 * hidden width].
        hidden: Hidden state before the first step, [1, batch, hidden width].
        cell: Cell state before the first step, [1, batch, hidden width].
        reverse: True to go from the last step to the first.
        biased: False to ignore the biases.
        train: True to save what the backward pass needs.

    Returns:
        Hidden state of each step, last hidden state, last cell state, and bytes for the backward
        pass.
    """
    # Torch's operator reads memory regardless of strides, and results of ORT may have others than
    # those of the capture.
    x, hidden, cell = (each.contiguous() for each in (x, hidden, cell))
    with torch.set_grad_enabled(train):  # this alone decides what it saves; autograd is not here
        *results, saved = torch.ops.aten.mkldnn_rnn_layer(
            *(x, w_ih, w_hh, b_ih, b_hh, hidden, cell, reverse, [], _LSTM, hidden.shape[-1]),
            *(1, biased, False, False, train),  # one layer, not batch first
        )
    return (*results, saved if train else x.new_empty(0, dtype=torch.uint8))


@onednn_lstm.register_fake
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Only oneDNN knows what it saves: here a lower bound, which holds from 64 values a row on."""
    x, hidden, cell, train = given[0], given[5], given[6], given[-1]
    length, batch, width = x.shape
    y = x.new_empty(length, batch, hidden.shape[-1])
    values = 10 * hidden.shape[-1] + 5 * max(width, hidden.shape[-1])
    saved = x.new_empty(4 * values * length * batch if train else 0, dtype=torch.uint8)
    return y, torch.empty_like(hidden), torch.empty_like(cell), saved


@torch.library.custom_op(
    "ortlab::onednn_lstm_backward",
    mutates_args=(),
    schema="(Tensor[] given, Tensor[] results, Tensor[] grads, bool reverse, bool biased) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _onednn_lstm_backward(
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    reverse: bool,
    biased: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the tensors of `onednn_lstm`; that of both biases is the same."""
    *states, saved = results
    tensors = (each.contiguous() for each in (*given, *states, *grads))
    x, w_ih, w_hh, bias, _, hidden, cell = torch.ops.aten.mkldnn_rnn_layer_backward(
        *(*tensors, reverse, _LSTM, states[1].shape[-1]),
        *(1, biased, True, False, [], False, saved),
    )
    return x, w_ih, w_hh, bias, hidden, cell


@_onednn_lstm_backward.register_fake
def _(given: Sequence[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
    made = [torch.empty_like(each) for each in given]
    return (*made[:4], *made[5:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given, (ctx.reverse, ctx.biased, _) = inputs[:7], inputs[7:]
    ctx.save_for_backward(*given, *output)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    given, results = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    x, w_ih, w_hh, bias, hidden, cell = _onednn_lstm_backward(
        given, results, grads[:3], ctx.reverse, ctx.biased
    )
    return x, w_ih, w_hh, bias, bias, hidden, cell, None, None, None


onednn_lstm.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.ortlab.onednn_lstm)
def _operations(
    x: Sequence[int], w_ih: Sequence[int], w_hh: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return what torch's partitioner takes for the cost of computing a layer again."""
    return 2 * x[0] * x[1] * (math.prod(w_ih) + math.prod(w_hh))


IN_ONEDNN: Final = (
    torch.ops.ortlab.onednn_lstm.default,
    torch.ops.ortlab.onednn_lstm_backward.default,
)
"""Operators of oneDNN in graphs."""


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Do what ``torch.backends.mkldnn.flags(enabled=False)`` does, without its warning of TF32."""
    backend: Any = torch.backends.mkldnn
    before, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = before


def _parts(values: Sequence[Any], number: int) -> list[Sequence[Any]]:
    size = len(values) // number
    return [values[i : i + size] for i in range(0, len(values), size)]


REPLACED: Final = {
    operator: functools.partial(_by_layer, operator)
    for operator in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
"""Replacements of torch's recurrent operators in graphs of Dynamo, with the same arguments.

Dynamo captures no packed sequences, for which the operators have other arguments.
"""
