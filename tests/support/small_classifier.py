"""A small classifier of two classes, and batches for it."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Two layers, batch statistics and dropout; a head of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def pairs(number: int = 4, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, 4, generator=made), torch.randint(2, (rows,), generator=made))
        for _ in range(number)
    ]
