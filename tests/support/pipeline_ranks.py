"""Pipeline cases, run by each rank: ``python -m tests.support.pipeline_ranks RANK SIZE FOLDER``.

Every rank runs the same cases and writes its results to FOLDER/RANK.json.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from tests.support.ranks import LR, SIZE, Case, alone, data, digest, error, main, together
from tests.support.tensor_ranks import moving, not_finite, parity, rows, transformer


def deep() -> nn.Module:
    """Return layers of different sizes, some without parameters."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 24), nn.Tanh()),
        *(nn.Linear(24, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
    )


class Swapped(nn.Module):
    """Returns numbers that are not contiguous in memory; one parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 24)
        self.spare = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        return hidden.unflatten(1, (4, 6)).transpose(1, 2)


def swapped() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Swapped(), nn.Tanh(), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 4))


def layers() -> nn.Module:
    """Return three equal layers between two others."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16),
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3)),
        nn.Linear(16, 4),
    )


def tied() -> nn.Module:
    """Return layers of which the first and the last but one have the same weight."""
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)),
        *(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)),
    )
    model[6].weight = model[0].weight
    return model


def spread(name: str, engine: str = "eager", stages: int = 2, **more: int) -> Case:
    """Compare a transformer in a pipeline with one process; see `tensor_ranks.transformer`."""
    return transformer(name, engine, ways={"pipeline_stages": stages, **more})


def interleaved(engine: str = "eager") -> Case:
    """Compare two ranks with two stages each of a Sequential with one process."""
    ways = {"pipeline_stages": 2, "pipeline_interleave": 2}
    return parity(layers, functional.cross_entropy, rows, ways=ways, engine=engine, optimizer="sgd")


def timed() -> dict[str, Any]:
    """Return the schedule's times of a step of four micro-batches, and what the report says."""
    many = together(layers(), functional.cross_entropy, pipeline_stages=2, pipeline_interleave=2)
    many.step(data(8, 8, 8, 8), lr=LR)
    found = many._processes.timeline()
    return {
        "actions": [(each.rank, each.action.stage, each.begin < each.end) for each in found],
        "notes": many.report().notes,
    }


def stages(engine: str = "eager", count: int = 2, **changes: Any) -> Case:
    return parity(
        deep,
        functional.cross_entropy,
        rows,
        ways={"pipeline_stages": count, "zero_stage": changes.pop("zero_stage", 0)},
        engine=engine,
        **changes,
    )


def refused() -> dict[str, Any]:
    """Return errors for models that cannot be split or inputs that do not fit; then train on."""

    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = super().forward(x)
            return hidden + 1

    told = []
    for model in (Own(nn.Linear(6, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(6, 4))):
        try:
            together(model, functional.cross_entropy, pipeline_stages=2)
            told.append("nothing")
        except ValueError as raised:
            told.append(str(raised))
    one = alone(deep(), functional.cross_entropy)
    many = together(deep(), functional.cross_entropy, pipeline_stages=2)
    ((inputs, targets),) = data(8)
    try:
        many.step([(inputs, inputs, targets)], lr=LR)
        told.append("nothing")
    except ValueError as raised:
        told.append(str(raised))
    one.step([(inputs, targets)], lr=LR)
    many.step([(inputs, targets)], lr=LR)
    states = one.state_dict(), many.state_dict()
    many.close()
    many.close()
    try:
        many.step([(inputs, targets)], lr=LR)
        told.append("nothing")
    except RuntimeError as raised:
        told.append(str(raised))
    return {"told": told, "error": error(*states)}


def dropout() -> dict[str, Any]:
    """Return the dropout masks of this rank's stage: two steps, and the same two after `reseed`."""
    masks: list[str] = []

    def keep(_module: nn.Module, _inputs: Any, dropped: torch.Tensor) -> None:
        masks.append("".join(str(int(each)) for each in (dropped != 0).flatten()))

    parts = [nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Dropout(0.5)) for _ in range(2)]
    for part in parts:
        part[2].register_forward_hook(keep)
    model = nn.Sequential(*parts)
    before = torch.get_rng_state()
    stepper = together(model, functional.cross_entropy, pipeline_stages=2)
    for seed in (7, 7):
        stepper.reseed(seed)
        for _ in range(2):
            stepper.step(data(32), lr=0.0)
    return {"masks": masks, "undisturbed": torch.equal(before, torch.get_rng_state())}


def beside() -> dict[str, Any]:
    """Step two pipelines of different stages in turn; once closed, they release their groups."""
    one = alone(layers(), functional.cross_entropy)
    more = [
        together(layers(), functional.cross_entropy, pipeline_stages=count) for count in (2, SIZE)
    ]
    for batch in rows():
        losses = [float(each.step([batch], lr=LR).loss) for each in (one, *more)]
    groups = [each._processes._layout.stages for each in more]
    alive = [is_registered(group) for group in groups]
    for each in more:
        each.close()
    return {"losses": losses, "groups": [*alive, *map(is_registered, groups)]}


def is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # depends on torch's version
        return False


def failing() -> dict[str, Any]:
    """Fail the first stage; its rank leaves the process group, as a worker's call does."""

    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x[:, 0] > 100).any()):
                raise ValueError("a row is out of range")
            return super().forward(x)

    stepper = together(
        nn.Sequential(Picky(6, 6), nn.Linear(6, 4)), functional.cross_entropy, pipeline_stages=2
    )
    good, bad = data(8, 8)
    stepper.step([good, good], lr=LR)
    weights = digest(dict(stepper._owner.state_dict()))
    bad[0][-1, 0] = 101.0
    began = time.perf_counter()
    told = "nothing"
    try:
        stepper.step([good, bad], lr=LR)
    except (ValueError, RuntimeError) as raised:
        told = f"{type(raised).__name__}: {raised}"
        dist.destroy_process_group()
    return {
        "told": told,
        "seconds": time.perf_counter() - began,
        "unchanged": weights == digest(dict(stepper._owner.state_dict())),
    }


CASES: dict[int, dict[str, Case]] = {
    8: {
        "bert": spread("bert", tensor_parallel=2),
        "gpt2": spread("gpt2", tensor_parallel=2),
        "llama": spread("llama", tensor_parallel=2),
    },
    2: {
        "eager": stages(),
        "sgd": stages(optimizer="sgd"),
        "ortmodule": stages("ortmodule"),
        "bf16": stages(optimizer="sgd", precision="bf16"),
        "swapped": parity(
            swapped, functional.cross_entropy, rows, ways={"pipeline_stages": 2}, optimizer="sgd"
        ),
        "tied": parity(tied, functional.cross_entropy, rows, ways={"pipeline_stages": 2}),
        "interleaved": interleaved(),
        **{name: spread(name) for name in ("bert", "gpt2", "llama")},
        "timed": timed,
        "moving": moving(layers, {"pipeline_stages": 2}, {"tensor_parallel": 2}),
        "not finite": not_finite(deep, pipeline_stages=2),
        "dropout": dropout,
        "refused": refused,
        "failing": failing,  # must be the last: it leaves no process group
    },
    4: {
        "data x stages": stages(),
        "zero": stages(zero_stage=1),
        "beside": beside,
        "gpt2": spread("gpt2", tensor_parallel=2),
        "llama": spread("llama", tensor_parallel=2, zero_stage=1),
        "four": parity(layers, functional.cross_entropy, rows, ways={"pipeline_stages": 4}),
    },
}

if __name__ == "__main__":
    main(CASES[SIZE])
