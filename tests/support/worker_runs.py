"""A small model, its data, and runs that give the same losses in one process and on workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ortlab
from ortlab.metrics.recorder import INDEX, Recorder
from ortlab.training.run import Run
from tests.support.waiting import HANGS_S

TOLERANCE = 1e-5


class Network(nn.Module):
    """A small model with dropout, a running statistic and tied weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 32)
        self.dropout = nn.Dropout(dropout)
        self.again = nn.Linear(6, 32)
        self.again.weight = self.first.weight
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) + self.again(x)
        return self.last(self.dropout(hidden))


def data(samples: int = 400) -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=drawn)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=drawn))


CHOSEN: dict[str, Any] = {
    "engine": "eager",
    "device": "cpu",
    "loss": "cross_entropy",
    "lr": 0.01,
    "batch_size": 13,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 4,
    "max_steps": 50,
}


def begin(model: nn.Module, **changes: Any) -> Run:
    return ortlab.finetune(model, data(), **{**CHOSEN, **changes})


def train(model: nn.Module, **changes: Any) -> Run:
    run = begin(model, **changes)
    run.result(HANGS_S)
    return run


def column(recorder: Recorder, name: str) -> np.ndarray[Any, Any]:
    return recorder.rows()[:, INDEX[name]]


def losses(run: Run) -> np.ndarray[Any, Any]:
    return column(run.recorder, "loss")


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    assert len(one) == len(other)
    return float((np.abs(one - other) / np.abs(one)).max())
