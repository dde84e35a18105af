"""Cases with DeepSpeed, bf16 weights and the optimizer on the host, run by each rank.

These cases run with those of `tests.support.deepspeed_ranks`, in the same processes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ortlab.engines.distributed.batch_split import share_of
from ortlab.engines.distributed.data_parallel import RankFailed
from tests.support import ranks
from tests.support.ranks import LR, RANK, SIZE, alone, data, digest, error, network, together

HALVES = {"precision": "bf16", "param_dtype": "bf16"}
STAGES = (1, 2, 3)
CLIP_NORM = 0.5


def steps_of(parts: int) -> list[Any]:
    """Return 50 steps, or 20 of several micro-batches; some are uneven, some leave a rank empty."""
    sizes = [16, 9, 5, 1, 12] * (10 if parts == 1 else 4)
    return [data(*[size] * parts) for size in sizes]


@functools.cache
def in_fp32(parts: int) -> list[float]:
    """Return the losses of one process."""
    one = alone(network(), functional.cross_entropy, max_grad_norm=CLIP_NORM)
    return [float(one.step(step, lr=LR).loss) for step in steps_of(parts)]


@functools.cache
def by_hand(parts: int, *, in_bf16: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """Compute losses, gradient norms and the final fp32 copy in one process, by torch alone.

    The weights are the copy rounded to bf16, and so is each rank's gradient. The gradients are
    averaged in fp32, accumulated over micro-batches (before that with `in_bf16`), and rounded again
    where they were bf16.
    """
    steps = steps_of(parts)
    copied = network()
    weights = copy.deepcopy(copied).bfloat16()
    groups = [
        {"params": [p for p in copied.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in copied.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []

    def gradients(micro: Sequence[Any], rank: int) -> list[torch.Tensor]:
        """Return the gradients of `rank`'s rows of the `micro` batches; accumulate the losses."""
        weights.zero_grad()
        for batch in micro:
            share = share_of(batch, rank, SIZE, torch.ones(len(batch[0])))
            inputs, targets = share.batch
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(weights(inputs), targets) / parts
            losses[-1] += float(loss.detach()) * share.part
            (loss * share.factor * SIZE).backward()  # type: ignore[no-untyped-call]
        return [p.grad.clone() for p in weights.parameters() if p.grad is not None]

    def mean(micro: Sequence[Any]) -> list[torch.Tensor]:
        found = [gradients(micro, rank) for rank in range(SIZE)]
        return [sum(each.float() for each in those) / SIZE for those in zip(*found, strict=True)]

    for step in steps:
        losses.append(0.0)
        if in_bf16:
            reduced = [each.bfloat16().float() for each in mean(step)]
        else:
            found = [mean([batch]) for batch in step]
            reduced = [torch.stack(those).sum(0) for those in zip(*found, strict=True)]
        for parameter, gradient in zip(copied.parameters(), reduced, strict=True):
            parameter.grad = gradient
        norms.append(float(nn.utils.clip_grad_norm_(copied.parameters(), CLIP_NORM)))
        optimizer.step()
        with torch.no_grad():
            for weight, value in zip(weights.parameters(), copied.parameters(), strict=True):
                weight.copy_(value)
    return losses, norms, dict(copied.state_dict())


def mixed(stage: int, parts: int) -> ranks.Case:
    """Compare steps of `parts` micro-batches with `by_hand`, and with fp32 in one process."""

    def case() -> dict[str, Any]:
        model = network()
        chosen = {
            "max_grad_norm": CLIP_NORM,
            "gradient_accumulation_steps": parts,
            "zero_stage": stage,
        }
        many = together(model, functional.cross_entropy, **HALVES, **chosen)
        losses, norms, copied = by_hand(parts, in_bf16=parts == 1 or stage == 1)
        found = [many.step(step, lr=LR) for step in steps_of(parts)]
        told = [[float(each.loss) for each in found], [float(each.grad_norm) for each in found]]
        worst = [
            max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip((*told, told[0]), (losses, norms, in_fp32(parts)), strict=True)
        ]
        state = many.state_dict()
        (batch,) = data(9)
        evaluated = float(many.evaluate(batch).loss)
        rounded = copy.deepcopy(network())
        rounded.load_state_dict(state["model"])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = float(functional.cross_entropy(rounded.bfloat16()(batch[0]), batch[1]))
        many.load_state_dict(state)  # nothing is lost in either direction
        again = digest(many.state_dict())
        report = many.report()
        many.close()
        return {
            "steps": max(worst[:2]),
            "from fp32": worst[2],
            "copy": error(copied, dict(state["model"])),
            "evaluated": [expected, evaluated],
            "digests": [digest(state), again],
            "whole": error(dict(state["model"]), dict(model.state_dict())),
            "types": sorted({str(p.dtype) for p in model.parameters()}),
            "notes": report.notes,
            "remarks": report.remarks,
        }

    return case


def moving() -> dict[str, Any]:
    """Move a state through one process, bf16 at stages 2, 3 and 1, fp32 at stage 1, one process.

    Between any two of them, the state stays bitwise the same.
    """
    steps = data(*[12] * 5)
    same, kinds, state = [], [], None
    model = network()
    fp32: dict[str, Any] = {}
    among = [{"zero_stage": stage, **HALVES} for stage in (2, 3, 1)] + [{"zero_stage": 1}]
    for chosen in (fp32, *among, fp32):
        make = together if chosen else alone
        with torch.no_grad():  # the loaded state must replace these values
            for parameter in model.parameters() if state else ():
                parameter.zero_()
        stepper = make(model, functional.cross_entropy, **chosen)
        if state is not None:
            stepper.load_state_dict(state)
            taken = stepper.state_dict()
            same.append(error(state["model"], taken["model"]))
            same.append(error(state["optimizer"]["state"], taken["optimizer"]["state"]))
        kinds.append(str(next(model.parameters()).dtype))
        losses = [float(stepper.step([batch], lr=LR).loss) for batch in steps]
        state = copy.deepcopy(stepper.state_dict())
        stepper.close()
    whole = alone(network(), functional.cross_entropy)
    for _ in range(6):
        expected = [float(whole.step([batch], lr=LR).loss) for batch in steps]
    return {"same": same, "kinds": kinds, "losses": losses, "expected": expected}


class Partly(ranks.Spare):
    """A model with one frozen layer and one unused layer."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.inner[0].parameters():
            parameter.requires_grad_(False)


def untouched() -> dict[str, Any]:
    """Train; frozen and unused weights keep all 32 bits and get no optimizer state."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        model = Partly()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():  # rank 0's values must replace these
            for parameter in model.parameters():
                parameter.add_(RANK)
        many = together(model, functional.cross_entropy, zero_stage=stage, **HALVES)
        for batch in data(8, 8, 8):
            many.step([batch], lr=LR)
        state = many.state_dict()
        trained = ("inner.2.weight", "inner.2.bias")
        changed = sorted(n for n in before if not torch.equal(before[n], state["model"][n]))
        many.close()
        after = dict(model.state_dict())
        found[str(stage)] = {
            "changed": changed == sorted(trained),
            "states": len(state["optimizer"]["state"]),
            "whole": error(dict(state["model"]), after),
        }
    return found


def damaged() -> dict[str, Any]:
    """Make a loss or a gradient non-finite on the last rank, in one step and permanently."""

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = functional.cross_entropy(scores, target)
        if RANK and hurt:
            return found + (scores - scores.detach()).sqrt().sum() if steep else found + torch.inf
        return found

    found: dict[str, Any] = {}
    good, bad = data(8, 8)
    bad[0][-1] = float("nan")
    for stage, case, among in (
        *((stage, case, HALVES) for stage in STAGES for case in ("nan", "infinite", "steep")),
        (2, "offloaded", {"offload_optimizer": True}),
    ):
        hurt = False
        stepper = together(network(), loss, zero_stage=stage, **among)
        stepper.step([good], lr=LR)
        before = digest(stepper.state_dict()["model"])
        assert stepper.finite()
        hurt, steep = case in ("infinite", "steep"), case == "steep"
        stepper.step([good if hurt else bad], lr=LR)
        hurt = False
        stepper.step([good], lr=LR)
        after = digest(stepper.state_dict()["model"])
        found[f"{stage} {case}"] = [stepper.finite(), before == after]
    return found


def failing() -> dict[str, Any]:
    """Fail a step on the last rank; the state is kept and the next steps are as without it."""
    found: dict[str, Any] = {}
    good, bad = data(8, 8)
    bad[0][-1, 0] = 101.0
    for stage, among in ((2, HALVES), (3, HALVES), (2, {"offload_optimizer": True})):
        steppers = [
            together(ranks.Picky(), functional.cross_entropy, zero_stage=stage, **among)
            for _ in range(2)
        ]
        losses = []
        for number, stepper in enumerate(steppers):
            stepper.step([good], lr=LR)
            if number == 0:
                before = digest(stepper.state_dict())
                try:
                    stepper.step([good, bad], lr=LR)
                except (RankFailed, ValueError) as raised:
                    told = type(raised).__name__
                same = digest(stepper.state_dict()) == before
            losses.append([float(stepper.step([good], lr=LR).loss) for _ in range(3)])
        found[f"{stage} {list(among)[-1]}"] = {"told": told, "same": same, "losses": losses}
    return found


class Attentive(nn.Module):
    """Normalizes the inputs and a sum that includes them; records the data types it meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.inner, self.again = nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.register_buffer("scale", torch.tensor(1 / 3))
        self.kinds: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.again(x + self.inner(self.norm(x)))
        self.kinds |= {str(each.dtype) for each in (x, hidden, self.inner.weight)}
        return hidden


def types() -> dict[str, Any]:
    """Check that inputs, weights and results are bf16, while targets and buffers are unchanged."""
    found: dict[str, Any] = {}
    batch = data(8)[0][0], torch.full((8, 6), 1 / 3)
    kept: list[torch.Tensor] = []

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept.append(target)
        return functional.mse_loss(scores, target)

    for stage in STAGES:
        model = Attentive()
        kept.clear()
        many = together(model, loss, zero_stage=stage, **HALVES)
        for _ in range(3):
            many.step([batch], lr=LR)
        many.evaluate(batch)
        exact = all(float(each.flatten()[0]) == float(batch[1][0, 0]) for each in kept)
        exact &= float(many.state_dict()["model"]["scale"]) == float(Attentive().scale)
        found[str(stage)] = [sorted(model.kinds), exact, len(kept)]
        many.close()
    return found


def refused() -> dict[str, Any]:
    """Return the error for a model whose layers have running statistics."""
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    try:
        together(normed, functional.cross_entropy, zero_stage=2, **HALVES)
    except ValueError as raised:
        return {"told": str(raised)}
    return {"told": "nothing"}


def offloaded(stage: int, optimizer: str) -> ranks.Case:
    return ranks.parity("eager", stage, optimizer, offload_optimizer=True)


CASES: dict[str, ranks.Case] = {
    **{f"mixed {stage}": mixed(stage, 1) for stage in STAGES},
    **{f"mixed sums {stage}": mixed(stage, 2) for stage in STAGES},
    "mixed moving": moving,
    "mixed untouched": untouched,
    "mixed damaged": damaged,
    "mixed failing": failing,
    "mixed types": types,
    "mixed refused": refused,
    **{
        f"offload {stage} {optimizer}": offloaded(stage, optimizer)
        for stage, optimizer in ((1, "adamw"), (2, "sgd"), (3, "adamw"))
    },
}
