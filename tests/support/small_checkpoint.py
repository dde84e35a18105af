"""A checkpoint of a few bytes, which tests also take in processes of their own."""

from __future__ import annotations

from typing import Any

import torch

from ortlab.checkpoint.checkpoint import Checkpoint, Order, Position
from ortlab.settings import FinetuneSettings
from ortlab.utils.rng import RandomStates


def taken(
    model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, step: int = 3
) -> Checkpoint:
    now = RandomStates.now()
    order = Order(now, [torch.Generator().manual_seed(5).get_state()])
    place = Position(step, 1, 2, 4, "samples", -1, now, order, 99)
    values = {"weight": torch.ones(2)} if model is None else model
    return Checkpoint(values, optimizer or {}, place, FinetuneSettings().as_dict())
