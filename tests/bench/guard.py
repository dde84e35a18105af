"""Benchmark of the stale-edit guard's cost per call.

Run ``python -m tests.bench.guard``. The limit is 20 microseconds plus one for every submodule and
parameter.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from ortlab.engines.call_signature import CallSignature
from ortlab.engines.ortmodule.autocast import autocast_now
from ortlab.engines.ortmodule.guard import Guard

ROUNDS, CALLS = 15, 200


def bert(layers: int, width: int) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
        )
    )


def _call_us(guard: Guard, kwargs: dict[str, torch.Tensor]) -> list[float]:
    """Return the microseconds of a call's whole lookup: the guard's key, arguments and autocast."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            guard.key()
            CallSignature.of((), kwargs)
            autocast_now()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return sorted(rounds)


def main() -> None:
    """Print a line for each model."""
    ids = torch.zeros(8, 64, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids[:, 0]}
    net = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
    models: dict[str, tuple[nn.Module, dict[str, torch.Tensor]]] = {
        "NeuralNet": (net, {"x": torch.zeros(16, 64)}),
        "BERT 2 x 128": (bert(2, 128), batch),
        "BERT 12 x 256": (bert(12, 256), batch),
    }
    print("model          submodules parameters  median us (min-max)   bar us")
    for name, (model, kwargs) in models.items():
        submodules = sum(1 for _ in model.modules())
        parameters = sum(1 for _ in model.parameters())
        found = _call_us(Guard(model), kwargs)
        bar = 20 + submodules + parameters
        spread = f"({found[0]:.0f}-{found[-1]:.0f})"
        median = statistics.median(found)
        print(f"{name:14} {submodules:10} {parameters:10} {median:10.0f} {spread:12} {bar:8}")


if __name__ == "__main__":
    main()
