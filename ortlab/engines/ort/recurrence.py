"""Recurrent layers one after the other, with the dropout between them that eager torch applies.

Torch's decompositions of LSTM, GRU and RNN omit this dropout (torch 2.13: ``num_layers < i - 1`` in
`torch._decomp.decompositions._rnn_helper`). They also compute an LSTM whose input has no gradient
with oneDNN's operator, whose backward pass fails (https://github.com/pytorch/pytorch/issues/158007).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch


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
        with _without_onednn():
            x, *after = operator(x, given, own_weights, biased, 1, 0.0, train, bidirectional, False)
        last.append(after)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.cat(values) for values in zip(*last, strict=True)))


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
