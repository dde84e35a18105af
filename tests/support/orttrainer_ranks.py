"""Cases of `ORTTrainer`: ``python -m tests.support.orttrainer_ranks RANK SIZE FOLDER``."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ortlab import ORTTrainer, optim
from ortlab.engines.base import NotFinite
from ortlab.engines.loss_scale import held_part
from ortlab.optim import DynamicLossScaler
from tests.support import orttrainers, ranks

RANK, SIZE = ranks.RANK, ranks.SIZE
DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["batch", 6])],
    "outputs": [("y", ["batch", 4])],
}
CONFIGS = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, max_norm_clip=0.5),
    "lamb": lambda: optim.LambConfig(
        [{"params": ["0.weight"], "lambda_coef": 0.5}], lr=0.01, max_norm_clip=0.5
    ),
}


trainer = functools.partial(orttrainers.trainer, sizes=(6, 4))


def several(**more: Any) -> dict[str, Any]:
    return {"world_size": SIZE, "world_rank": RANK, **more}


def half(batch: Any) -> Any:
    """Return this rank's rows of a batch."""
    return [each.chunk(SIZE)[RANK] for each in batch]


def ordered(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer, whose order depends on the engine."""
    return {name: dict(sorted(each.items())) for name, each in sorted(state["optimizer"].items())}


def refused(**options: Any) -> str:
    try:
        trainer(ranks.network(), optim.AdamConfig(), **options)
    except ValueError as error:
        return str(error)
    return ""


def parity(name: str, stage: int, *, halves: bool = False) -> dict[str, Any]:
    """Train two processes on their halves of the batches, and one process on whole ones."""
    zero = {"deepspeed_zero_optimization": {"stage": stage}, "allreduce_post_accumulation": True}

    def made(**more: Any) -> ORTTrainer:
        if halves:
            scaler = DynamicLossScaler(loss_scale=2.0**12)
            more["mixed_precision"] = {"enabled": True, "loss_scaler": scaler}
        accumulation = {"gradient_accumulation_steps": 2}
        return trainer(ranks.network(), CONFIGS[name](), batch=accumulation, **more)

    together, alone = made(distributed=several(**zero)), made()
    losses, scales = 0.0, []
    for i, batch in enumerate(ranks.data(*[8] * 12)):
        if halves and i == 5:
            batch = [batch[0] * 1e6, batch[1]]
        own = together.train_step(*half(batch))[0].float()
        dist.all_reduce(own)
        expected = float(alone.train_step(*batch)[0])
        if not (halves and i == 5):
            losses = max(losses, abs(float(own) / SIZE - expected) / expected)
        if halves:
            scales.append(together.options.mixed_precision.loss_scaler.loss_scale)
    whole = together.state_dict()
    held = held_part(together._optimizer).state.values()
    here = sum(each.nbytes for state in held for each in state.values() if each.dim())
    path = ranks.FOLDER / f"{name} {stage}.safetensors"
    together.save_checkpoint(path, {"epoch": 1})
    resumed = made(distributed=several(**zero))
    told = resumed.load_checkpoint(path)
    last = [half(batch) for batch in ranks.data(8, 8)]
    ends = [[float(each.train_step(*batch)[0]) for batch in last] for each in (together, resumed)]
    return {
        "losses": losses,
        "weights": ranks.error(alone.state_dict()["model"], whole["model"]),
        "moments": ranks.error(ordered(alone.state_dict()), ordered(whole)),
        "digest": ranks.digest(whole),
        "scales": scales,
        "bytes": here,
        "ends": ends,
        "told": told,
    }


def adasum() -> dict[str, Any]:
    """Train on gradients that are orthogonal, whose Adasum is their sum and not their mean."""
    described = {"inputs": [("x", ["batch", 2])], "outputs": [("y", ["batch", 1])]}
    moved = {}
    for name, chosen in (("mean", {}), ("adasum", {"enable_adasum": True})):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = ORTTrainer(
                model,
                described,
                optim.SGDConfig(lr=0.5),
                lambda y, label: (y * label).mean(),
                {"distributed": several(**chosen)},
            )
        x = torch.eye(2)[RANK].expand(3 + RANK, 2)  # batches of different sizes
        made.train_step(x, torch.ones(3 + RANK, 1))
        moved[name] = model.weight.detach().flatten().tolist()
    return moved


def messages() -> dict[str, Any]:
    return {
        "rank": refused(distributed={"world_size": SIZE, "world_rank": 1 - RANK}),
        "adasum": refused(distributed=several(enable_adasum=True)),
    }


def not_finite() -> dict[str, Any]:
    """One rank has a NaN, and both raise; training goes on."""
    found = trainer(ranks.network(), optim.SGDConfig(lr=0.1), distributed=several())
    good, bad = map(half, ranks.data(8, 8))
    before = found.state_dict()["model"]
    told = ""
    try:
        found.train_step(bad[0] * (float("nan") if RANK else 1.0), bad[1])
    except NotFinite as error:
        told = str(error)
    same = ranks.error(before, found.state_dict()["model"])
    found.train_step(*good)
    return {"told": told, "same": same, "after": ranks.error(before, found.state_dict()["model"])}


CASES: dict[str, ranks.Case] = {
    **{
        f"parity {name} {stage}": functools.partial(parity, name, stage)
        for name, stage in (("sgd", 0), ("adam", 0), ("adam", 1), ("lamb", 1))
    },
    "parity in float16": functools.partial(parity, "adam", 1, halves=True),
    "adasum": adasum,
    "messages": messages,
    "not finite": not_finite,
}


if __name__ == "__main__":
    ranks.main(CASES)
