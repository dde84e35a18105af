"""DeepSpeed cases of each rank: ``python -m tests.support.deepspeed_ranks RANK SIZE FOLDER``."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.distributed import steppers
from ortlab.engines.distributed.deepspeed import DeepSpeedStepper
from ortlab.engines.distributed.deepspeed_config import BUCKET
from tests.support import mixed_ranks, ranks
from tests.support.ranks import FOLDER, LR, RANK, alone, course, data, error, network, together

STAGES = (1, 2, 3)
LAYERS, WIDTH = 20, 1024
"""Size of the model whose bytes are counted: 21 million parameters, so the padding is small."""


def moving() -> dict[str, Any]:
    """Train in one process, at stage 2, at stage 3, in one process, through a checkpoint file."""
    whole, _ = course(network(), 20, None, 1, 0)
    losses, taken = course(network(), 5, None, 1, 0)
    for stage in (2, 3):
        more, taken = course(network(), 5, taken, 2, stage)
        taken = Checkpoint.load(taken.save(FOLDER / f"{RANK}.{stage}.safetensors"))
        losses += more
    last, _ = course(network(), 5, taken, 1, 0)
    return {"whole": whole, "moved": [*losses, *last]}


def in_place() -> dict[str, Any]:
    """Train one model at several stages and finally alone; nothing may remain attached to it."""
    model, other = network(), network()
    (batch,) = data(9)
    attributes = [set(vars(each)) for each in (*model.modules(), *model.parameters())]
    state: Any = None
    for stage in (3, 1, 2, 3, 0):
        chosen = {"zero_stage": stage} if stage else {}
        many = (together if stage else alone)(model, functional.cross_entropy, **chosen)
        one = alone(other, functional.cross_entropy)
        if state is not None:
            many.load_state_dict(state)
            one.load_state_dict(state)
        for _ in range(3):
            found, expected = many.step([batch], lr=LR), one.step([batch], lr=LR)
        state = many.state_dict()
        off = error(one.state_dict(), state)
        many.close()
        left = [set(vars(each)) for each in (*model.modules(), *model.parameters())]
        hooks = sum(
            len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()
        )
        assert off < 1e-5, (stage, off)
        assert left == attributes, (stage, left)
        assert hooks == 0, stage
        assert all(type(each._parameters) is dict for each in model.modules())
        weights = error(dict(state["model"]), dict(model.state_dict()))
        assert weights == 0.0, stage
    return {"losses": [float(found.loss), float(expected.loss)]}


def held(stages: Sequence[int], layers: int = LAYERS, **among: Any) -> dict[str, Any]:
    """Return the bytes that each stage reports and those of all tensors between two steps."""

    def live() -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        sizes = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found
        }
        return sum(sizes.values())

    steppers.load(ranks.settings(workers=2, zero_stage=1).parallel)
    gc.collect()
    gc.freeze()  # scanning the libraries' objects would take longer than all steps
    found: dict[str, Any] = {"parameters": layers * (WIDTH + 1) * WIDTH}
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for stage in stages:
        before = live()
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        stepper = together(model, functional.mse_loss, zero_stage=stage, **among)
        stepper.step([batch], lr=LR)
        told = vars(stepper.bytes())
        buffers = {"bucket": 4 * BUCKET, "largest": 4 * WIDTH**2}
        found[str(stage)] = {**told, "all": live() - before, **buffers}
        stepper.close()
        del stepper, model
    gc.unfreeze()
    return found


def gone() -> dict[str, Any]:
    """Return whether a model is still referenced after its stepper was closed."""
    found: dict[str, Any] = {}
    (batch,) = data(8)
    for stage in STAGES:
        model = ranks.Picky()
        kept = weakref.ref(model), weakref.ref(next(model.parameters()))
        stepper = together(model, functional.cross_entropy, zero_stage=stage)
        for _ in range(3):
            stepper.step([batch], lr=LR)
        stepper.close()
        del stepper, model
        gc.collect()
        found[str(stage)] = [each() is None for each in kept]
    return found


class Wayward(nn.Module):
    """Uses one of its two layers, as `choose` decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)
        self.choose = lambda: True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.first if self.choose() else self.second
        found: torch.Tensor = chosen(x)
        return found


def wayward() -> dict[str, Any]:
    """Train with layers that only some ranks use, or that only some steps use."""
    found: dict[str, Any] = {}
    (batch,) = data(8)
    for stage in STAGES:
        told = []
        for case in ("ranks", "steps"):
            model = Wayward()
            stepper = together(model, functional.cross_entropy, zero_stage=stage)
            stepper.step([batch], lr=LR)
            before = ranks.digest(stepper.state_dict())
            model.choose = (lambda: RANK == 0) if case == "ranks" else (lambda: False)
            try:
                stepper.step([batch], lr=LR)
                told.append("nothing")
            except (RuntimeError, ValueError) as raised:
                told.append(f"{type(raised).__name__}: {raised}")
            model.choose = lambda: True
            assert ranks.digest(stepper.state_dict()) == before
            stepper.step([batch], lr=LR)
            assert ranks.digest(stepper.state_dict()) != before
        found[str(stage)] = told
    return found


def turns() -> dict[str, Any]:
    """Train with layers of which each micro-batch uses a different one."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        models = Wayward(), Wayward()
        for model in models:
            calls = itertools.count()
            model.choose = lambda calls=calls: next(calls) % 2 == 0
        many = together(models[0], functional.cross_entropy, zero_stage=stage)
        one = alone(models[1], functional.cross_entropy)
        for _ in range(4):
            one.step(data(8, 8), lr=LR)
            many.step(data(8, 8), lr=LR)
        found[str(stage)] = error(one.state_dict(), many.state_dict())
    return found


def infinite() -> dict[str, Any]:
    """Train with a loss that is infinite on the last rank but has gradients."""

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = functional.cross_entropy(scores, target)
        return found + torch.inf if RANK and hurt else found

    found: dict[str, Any] = {}
    (batch,) = data(8)
    for stage in STAGES:
        hurt = False
        stepper = together(network(), loss, zero_stage=stage)
        stepper.step([batch], lr=LR)
        before = ranks.digest(stepper.state_dict()["model"])
        hurt = True
        stepper.step([batch], lr=LR)
        hurt = False
        stepper.step([batch], lr=LR)
        after = ranks.digest(stepper.state_dict()["model"])
        found[str(stage)] = [stepper.finite(), before == after]
    return found


class Halved(nn.Module):
    """Records the data type in which its products are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.kinds: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        self.kinds.add(str(hidden.dtype))
        return hidden.float()


def halved() -> dict[str, Any]:
    """Train in bf16: products have that type, weights and gradients do not."""
    found: dict[str, Any] = {}
    (batch,) = data(8)
    for stage in STAGES:
        model, chosen = Halved(), {"precision": "bf16"}
        many = together(model, functional.cross_entropy, zero_stage=stage, **chosen)
        one = alone(Halved(), functional.cross_entropy, **chosen)
        for _ in range(5):
            a, b = one.step([batch], lr=LR), many.step([batch], lr=LR)
        many.evaluate(batch)
        kinds = sorted(model.kinds)
        many.close()
        weights = sorted({str(each.dtype) for each in model.parameters()})
        found[str(stage)] = [kinds, weights, float(a.loss), float(b.loss)]
    return found


def settled() -> dict[str, Any]:
    """Return the errors for a model or a state that does not fit, and adopt one that does."""
    mixed = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4, dtype=torch.float64))
    told = []
    stepper = together(network(), functional.cross_entropy, zero_stage=3)
    assert isinstance(stepper, DeepSpeedStepper)
    (batch,) = data(8)
    stepper.step([batch], lr=LR)
    state = stepper.state_dict()
    wide = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 4))
    uneven = {
        **state,
        "optimizer": {**state["optimizer"], "state": dict(state["optimizer"]["state"])},
    }
    uneven["optimizer"]["state"][1] = {
        name: value + 1 for name, value in uneven["optimizer"]["state"][1].items()
    }
    for call in (
        lambda: together(mixed, functional.cross_entropy, zero_stage=2),
        lambda: stepper.load_state_dict({**state, "model": wide.state_dict()}),
        lambda: stepper.load_state_dict(uneven),
    ):
        try:
            call()
            told.append("nothing")
        except ValueError as raised:
            told.append(str(raised))
    unchanged = ranks.digest(stepper.state_dict()) == ranks.digest(state)
    # From now on, the stepper acts like one with the other settings.
    others = {"max_grad_norm": 0.1, "weight_decay": 0.3}
    one = alone(network(), functional.cross_entropy, **others)
    one.load_state_dict(state)
    stepper.adopt(ranks.settings(workers=2, zero_stage=3, **others))
    for _ in range(3):
        one.step([batch], lr=LR)
        stepper.step([batch], lr=LR)
    return {
        "told": told,
        "unchanged": unchanged,
        "adopted": error(one.state_dict(), stepper.state_dict()),
        "notes": stepper.report().notes,
        "environment": {name: os.environ.get(name) for name in ("DS_ACCELERATOR", "LOCAL_RANK")},
    }


CASES: dict[str, ranks.Case] = {
    "held": functools.partial(held, (0, *STAGES)),
    "held mixed": functools.partial(held, STAGES, **mixed_ranks.HALVES),
    "held offloaded": functools.partial(held, STAGES, layers=10, offload_optimizer=True),
    **{
        f"parity {name} {stage} {optimizer}": ranks.parity(name, stage, optimizer)
        for name, stage, optimizer in (
            ("eager", 1, "adamw"),
            ("eager", 2, "adamw"),
            ("eager", 3, "adamw"),
            ("eager", 2, "sgd"),
            ("eager", 3, "sgd"),
            ("ortmodule", 1, "sgd"),
            ("ortmodule", 2, "adamw"),
        )
    },
    "moving": moving,
    "in place": in_place,
    "not finite": functools.partial(ranks.not_finite, STAGES, ("adamw",)),
    **{f"failing {stage}": functools.partial(ranks.failing, stage) for stage in STAGES},
    "ignored": functools.partial(ranks.ignored, 3),
    "statistics": functools.partial(ranks.statistics, 3),
    "unused": functools.partial(ranks.unused, STAGES),
    "layouts": functools.partial(ranks.layouts, STAGES),
    "gone": gone,
    "turns": turns,
    "infinite": infinite,
    "wayward": wayward,
    "halved": halved,
    "settled": settled,
    **mixed_ranks.CASES,
}


if __name__ == "__main__":
    ranks.main(CASES)
