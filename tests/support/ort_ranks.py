"""Cases of engine ``ort`` in several processes, run as those of `tests.support.deepspeed_ranks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ortlab
from ortlab.engines.distributed import deepspeed_library
from ortlab.engines.ort.capture import Backend
from tests.support import pipeline_ranks, ranks
from tests.support.mixed_ranks import HALVES
from tests.support.ranks import LR, RANK, SIZE, Spare, data, network, together

Step = Callable[[Any, Any], float]


class Deep(nn.Module):
    """A model of more than one bucket of gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(520, 520), nn.GELU()) for _ in range(3)]
        self.layers = nn.Sequential(nn.Linear(6, 520), *layers, nn.Linear(520, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def halved() -> dict[str, Any]:
    """Return the losses of 20 steps with 16-bit weights at stage 2, in ORT and in eager torch."""
    found: dict[str, Any] = {}
    for name in ("ort", "eager"):
        many = together(network(), functional.cross_entropy, engine=name, zero_stage=2, **HALVES)
        found[name] = [float(many.step([batch], lr=LR).loss) for batch in data(*[8] * 20)]
        many.close()
    return found


def with_hooks() -> dict[str, Any]:
    """Return what is told of a head that the loss does not use, where DeepSpeed hooks gradients."""
    many = together(Spare(), functional.cross_entropy, engine="ort", zero_stage=2)
    (batch,) = data(8)
    many.step([batch], lr=LR)
    return {"remarks": many.report().remarks}


# --- processes that a user's own program combines

compiled_graphs: list[str] = []
"""Phases of the graphs that were compiled for ORT."""
_compiled = Backend.compiled


def counted(backend: Backend, phase: Any, *arguments: Any) -> Any:
    compiled_graphs.append(phase)
    return _compiled(backend, phase, *arguments)


Backend.compiled = counted  # type: ignore[method-assign, assignment]


def own_rows(batch: Any) -> Any:
    """Return this rank's rows of a batch."""
    return tuple(each.chunk(SIZE)[RANK] for each in batch)


def against_eager(make: Callable[[nn.Module], Step]) -> dict[str, Any]:
    """Train a model by `make`'s steps on this rank's rows, and another in one eager process.

    Returns:
        The losses of both, the second ones those of this rank's rows; the error of the weights; and
        the number of graphs that were compiled for ORT.
    """
    torch._dynamo.reset()
    before = len(compiled_graphs)
    model, reference = Deep(), Deep()
    step = make(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    losses: list[list[float]] = [[], []]
    for inputs, targets in data(*[8] * 16, *[4] * 4):
        x, y = own_rows((inputs, targets))
        losses[0].append(step(x, y))
        with torch.no_grad():
            losses[1].append(float(functional.cross_entropy(reference(x), y)))
        optimizer.zero_grad()
        functional.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    error = ranks.error(dict(reference.state_dict()), dict(model.state_dict()))
    return {
        "losses": losses[0],
        "expected": losses[1],
        "error": error,
        "graphs": len(compiled_graphs) - before,
    }


def plain_step(module: nn.Module) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def wrapped_inside(model: nn.Module) -> Step:
    """Return steps of DistributedDataParallel around a wrapped model."""
    return plain_step(DistributedDataParallel(ortlab.wrap(model, engine="ort")))


def compiled_inside(model: nn.Module) -> Step:
    """Return steps of DistributedDataParallel around a compiled model."""
    compiled: Any = torch.compile(model, backend="ortlab")
    return plain_step(DistributedDataParallel(compiled))


def compiled_outside(model: nn.Module) -> Step:
    """Return steps of a compiled DistributedDataParallel, cut by torch at its buckets."""
    parallel: Any = DistributedDataParallel(model, bucket_cap_mb=2)
    compiled: Any = torch.compile(parallel, backend="ortlab")
    return plain_step(compiled)


def of_deepspeed(stage: int, model: nn.Module) -> Step:
    """Return steps of DeepSpeed's engine at a ZeRO stage, compiled by its own method."""
    device = torch.device("cpu")
    engine = deepspeed_library.initialized(
        device,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
        },
    )
    engine.compile(backend="ortlab")

    def step(x: Any, y: Any) -> float:
        loss = functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


CASES: dict[str, ranks.Case] = {
    **{
        f"parity {stage} {optimizer}": ranks.parity("ort", stage, optimizer)
        for stage, optimizer in ((0, "adamw"), (0, "lamb"), (1, "adamw"), (2, "adamw"), (2, "sgd"))
    },
    "parity with a budget": ranks.parity("ort", 2, "adamw", activation_budget=0.3),
    "parity with recompute": ranks.parity("ort", 0, "adamw", recompute="*"),
    "adasum": functools.partial(ranks.adasum_steps, "ort"),
    **{f"failing {stage}": functools.partial(ranks.failing, stage, "ort") for stage in (0, 2)},
    "ignored": functools.partial(ranks.ignored, 2, "ort"),
    "statistics": functools.partial(ranks.statistics, 2, "ort"),
    "unused": functools.partial(ranks.unused, (0,), "ort"),
    "halved": halved,
    "with hooks": with_hooks,
    "stages": pipeline_ranks.stages("ort"),
    **{
        each.__name__: functools.partial(against_eager, each)
        for each in (wrapped_inside, compiled_inside, compiled_outside)
    },
    **{
        f"of_deepspeed {stage}": functools.partial(
            against_eager, functools.partial(of_deepspeed, stage)
        )
        for stage in (1, 2)
    },
}


if __name__ == "__main__":
    ranks.main(CASES)
