"""Benchmark of the cost per step of detecting numbers that are not finite.

Run ``python -m tests.bench.finite``. Steps of engine eager alternate with the same steps without
any check: no norm of the gradients, no flag, no saved statistics. The gradient norm is also shown
in the charts and used by ``clip_norm``; the third column is the cost without the norm.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import TorchStepper
from ortlab.settings import FinetuneSettings
from tests.bench.guard import bert

ROUNDS, STEPS, WARMUP = 15, 12, 5


def _blind(stepper: TorchStepper, *, norm: bool) -> None:
    """Disable all checks of `stepper`, or all but the norm."""

    def update(_: torch.Tensor, lr: float) -> tuple[Any, None, None]:
        gradients = [p.grad for p in stepper._parameters if p.grad is not None]
        found = stepper._processes.norm(gradients) if norm else None
        for group in stepper._optimizer.param_groups:
            group["lr"] = lr
        stepper._optimizer.step()
        return found, None, None

    stepper._changing = []
    stepper._update = update  # type: ignore[method-assign]


def _steppers(model: nn.Module, loss: Any) -> tuple[TorchStepper, TorchStepper, TorchStepper]:
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    made = [engine("eager").prepare(copy.deepcopy(model), loss, settings) for _ in range(3)]
    looks, blind, normed = made
    assert isinstance(looks, TorchStepper)
    assert isinstance(blind, TorchStepper)
    assert isinstance(normed, TorchStepper)
    _blind(blind, norm=False)
    _blind(normed, norm=True)
    return looks, blind, normed


def _step_ms(stepper: TorchStepper, batch: Any) -> float:
    started = time.perf_counter()
    stepper.step([batch], lr=1e-4)
    stepper.finite()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Print a line for each model: medians of all rounds, and the ranges of the ratios."""
    net = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
    normed = nn.Sequential(nn.Linear(64, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Linear(500, 10))
    samples = torch.randn(32, 64), torch.arange(32) % 10
    ids = torch.randint(0, 1000, (8, 64))
    cases: dict[str, tuple[nn.Module, Any, Any]] = {
        "NeuralNet": (net, functional.cross_entropy, samples),
        "with BatchNorm": (normed, functional.cross_entropy, samples),
        "BERT 4 x 256": (bert(4, 256), None, {"input_ids": ids, "labels": ids[:, 0] % 2}),
    }
    print("model           step, ms   beside one that looks at nothing   beside one with a norm")
    for name, (model, loss, batch) in cases.items():
        steppers = _steppers(model, loss)
        for _ in range(WARMUP):
            for each in steppers:
                _step_ms(each, batch)
        rounds = []
        for _ in range(ROUNDS):
            taken: list[list[float]] = [[], [], []]
            for turn in range(STEPS):
                for place in range(3):  # the order changes with every turn
                    at = (turn + place * (1 + turn % 2)) % 3
                    taken[at].append(_step_ms(steppers[at], batch))
            rounds.append([statistics.median(each) for each in taken])
        step_ms = statistics.median(looks for looks, _, _ in rounds)
        beside = [sorted(round_[0] / round_[which] for round_ in rounds) for which in (1, 2)]
        print(f"{name:15} {step_ms:8.2f}   {_spread(beside[0]):32}   {_spread(beside[1])}")


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({ratios[3]:.3f} to {ratios[-4]:.3f})"


if __name__ == "__main__":
    main()
