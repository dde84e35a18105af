"""Cases for several processes together: ``python -m tests.support.ranks RANK SIZE FOLDER``.

Every rank runs the same cases and writes its results to FOLDER/RANK.json.
"""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import hashlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Report
from ortlab.engines.distributed import adasum, data_parallel, steppers
from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import TorchStepper
from ortlab.metrics.recorder import Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training.control import Control
from ortlab.training.data_loading import batches
from ortlab.training.trainer import Trainer

RANK, SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
LR = 0.01
Case = Callable[[], dict[str, Any]]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))


def data(*sizes: int) -> list[Any]:
    """Return one batch of each size."""
    drawn = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 6, generator=drawn),
            torch.randint(0, 4, (size,), generator=drawn),
        )
        for size in sizes
    ]


def settings(**changes: Any) -> FinetuneSettings:
    return FinetuneSettings.of(**{"engine": "eager", "device": "cpu", **changes})


def together(model: nn.Module, loss: Any, **changes: Any) -> Any:
    """Return a stepper of all ranks."""
    chosen = settings(workers=SIZE, **changes)
    return steppers.prepare(engine(chosen.model.engine), model, loss, chosen)


def alone(model: nn.Module, loss: Any, **changes: Any) -> TorchStepper:
    """Return a stepper of one process, made in every rank."""
    chosen = settings(**changes)
    stepper = engine(chosen.model.engine).prepare(model, loss, chosen)
    assert isinstance(stepper, TorchStepper)
    return stepper


def flat(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries with its path."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{path}", each) for path, each in flat(value))
        else:
            yield str(key), value


def error(one: Any, other: Any) -> float:
    """Return the largest relative error of `other`, by norm; infinite if the structures differ."""
    first, second = dict(flat(one)), dict(flat(other))
    if list(first) != list(second):
        return float("inf")
    worst = 0.0
    for path, value in first.items():
        if not isinstance(value, torch.Tensor):
            if value != second[path]:
                return float("inf")
            continue
        found = second[path]
        if (value.shape, value.dtype) != (found.shape, found.dtype):
            return float("inf")
        norm = float(value.double().norm())
        worst = max(worst, float((value.double() - found.double()).norm()) / (norm or 1.0))
    return worst


def digest(state: Any) -> str:
    """Return a hash that is equal for bitwise equal states."""
    found = hashlib.sha256()
    for path, value in flat(state):
        kept = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(path.encode() + kept)
    return found.hexdigest()


def parity(name: str, stage: int, optimizer: str, **among: Any) -> Case:
    """Compare 50 steps with one process: two micro-batches each, some of them uneven or tiny.

    The settings `among` apply only to the ranks.
    """

    def case() -> dict[str, Any]:
        sizes = [16, 9] if name == "eager" else [16, 7]
        few = data(*(sizes * 10), *([5, 1] * 15 if name == "eager" else sizes * 15))
        pairs = [few[i : i + 2] for i in range(0, len(few), 2)] * 2
        chosen = {"engine": name, "optimizer": optimizer, "max_grad_norm": 0.5}
        model = network()
        many = together(model, functional.cross_entropy, zero_stage=stage, **chosen, **among)
        one = alone(network(), functional.cross_entropy, **chosen)
        worst, communication = 0.0, 0.0
        for pair in pairs[:50]:
            expected = one.step(pair, lr=LR)
            found = many.step(pair, lr=LR)
            assert (expected.samples, expected.tokens) == (found.samples, found.tokens)
            for a, b in ((expected.loss, found.loss), (expected.grad_norm, found.grad_norm)):
                assert a is not None
                worst = max(worst, abs(float(a) - float(b)) / abs(float(a)))
            communication += found.communication_ms
        state = many.state_dict()
        evaluated, hits = 0.0, []
        for batch in data(9, 1):
            a, b = one.evaluate(batch), many.evaluate(batch)
            assert a.loss is not None
            evaluated = max(evaluated, abs(float(a.loss) - float(b.loss)) / float(a.loss))
            hits.append([(each.correct, each.predicted, each.samples) for each in (a, b)])
        report = many.report()
        many.close()
        if RANK == 0:  # nobody else takes part, so a reduction would hang
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
        return {
            "steps": worst,
            "state": error(one.state_dict(), state),
            "digest": digest(state),
            "evaluated": evaluated,
            "hits": hits,
            "communication_ms": communication,
            "engine": report.engine_used,
            "notes": report.notes,
        }

    return case


def course(model: nn.Module, steps: int, begin: Checkpoint | None, size: int, stage: int) -> Any:
    """Train `steps` more steps with `size` processes; return the losses and the final state."""
    inputs, targets = data(40)[0]
    chosen = settings(
        workers=size,
        zero_stage=stage,
        batch_size=6,
        gradient_accumulation_steps=2,
        num_train_epochs=6,
        lr=LR,
        max_grad_norm=0.5,
    )
    loss = functional.cross_entropy
    if size == 1:
        stepper: Any = engine("eager").prepare(model, loss, chosen)
    else:
        stepper = steppers.prepare(engine("eager"), model, loss, chosen)
    recorder = Recorder()
    ours = Trainer(
        stepper,
        batches(TensorDataset(inputs, targets), chosen),
        chosen,
        control=Control(),
        recorder=recorder,
        begin=begin,
    )
    going = ours.steps()
    losses = [float(next(going).loss) for _ in range(steps)]
    taken = ours.checkpoint()
    going.close()
    return losses, taken


def moving() -> dict[str, Any]:
    """Train in one process, then on all ranks, then in one process, through a checkpoint file."""
    whole, _ = course(network(), 15, None, 1, 0)
    first, taken = course(network(), 5, None, 1, 0)
    taken = Checkpoint.load(taken.save(FOLDER / f"{RANK}.first.safetensors"))
    second, taken = course(network(), 5, taken, SIZE, 1)
    taken = Checkpoint.load(taken.save(FOLDER / f"{RANK}.second.safetensors"))
    third, _ = course(network(), 5, taken, 1, 0)
    return {"whole": whole, "moved": [*first, *second, *third]}


def not_finite(
    stages: Sequence[int] = (0, 1), optimizers: Sequence[str] = ("adamw", "lamb")
) -> dict[str, Any]:
    """Train with a NaN among the samples of the last rank only."""
    found: dict[str, Any] = {}
    for stage, optimizer in itertools.product(stages, optimizers):
        chosen = {"zero_stage": stage, "optimizer": optimizer}
        stepper = together(network(), functional.cross_entropy, **chosen)
        good, bad = data(8, 8)
        stepper.step([good], lr=LR)
        finite, before = stepper.finite(), digest(stepper.state_dict()["model"])
        bad[0][-1] = float("nan")
        loss = float(stepper.step([bad], lr=LR).loss)
        after = digest(stepper.state_dict()["model"])
        found[f"{stage} {optimizer}"] = [finite, stepper.finite(), loss != loss, before == after]
    return found


def overflow() -> dict[str, Any]:
    """Train with a gradient too large for float16, caused by the samples of the last rank only."""
    found: dict[str, Any] = {}
    for stage in (0, 1):
        chosen = {"precision": "fp16", "optimizer": "sgd", "zero_stage": stage}
        torch.manual_seed(1)
        stepper = together(nn.Linear(6, 4), functional.cross_entropy, **chosen)
        good, bad = data(8, 8)
        bad[0][-1] = 3e4
        results: list[Any] = []
        momenta: list[bool] = []
        states = [digest(stepper.state_dict()["model"])]
        for batch in (bad, good):
            result = stepper.step([batch], lr=LR)
            results.append([bool(result.skipped), float(result.loss_scale)])
            states.append(digest(stepper.state_dict()["model"]))
            kept = stepper.state_dict()["optimizer"]["state"].values()
            momenta.append(any(bool(each["momentum_buffer"].any()) for each in kept))
        found[str(stage)] = {
            "momenta": momenta,
            "results": results,
            "states": states,
            "finite": stepper.finite(),
        }
    return found


class Picky(nn.Module):
    """Fails on a row that begins with a number above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] > 100).any()):
            raise ValueError("a row is out of range")
        hidden: torch.Tensor = self.inner(x)
        return hidden


def failing(stage: int = 0, engine: str = "eager") -> dict[str, Any]:
    """Fail forward on the last rank only: in a first micro-batch, a last one, in evaluation.

    Afterwards, training continues as in one process.
    """
    many = together(Picky(), functional.cross_entropy, zero_stage=stage, engine=engine)
    one = alone(Picky(), functional.cross_entropy)
    good, bad = data(8, 8)
    bad[0][-1, 0] = 101.0
    many.step([good], lr=LR)
    one.step([good], lr=LR)
    told = []
    for call in (
        lambda: many.step([bad, good], lr=LR),
        lambda: many.step([good, bad], lr=LR),
        lambda: many.evaluate(bad),
    ):
        try:
            call()
        except (data_parallel.RankFailed, ValueError) as raised:
            told.append(f"{type(raised).__name__}: {raised}")
    for _ in range(2):
        expected, found = one.step([good], lr=LR), many.step([good], lr=LR)
    return {
        "told": told,
        "error": error(one.state_dict(), many.state_dict()),
        "loss": [float(expected.loss), float(found.loss)],
    }


def ignored(stage: int = 0, engine: str = "eager") -> dict[str, Any]:
    """Compare losses that are means over the targets other than -100.

    The number of these targets differs between ranks. In the second of the causal cases, all of
    rank 0's targets are ignored.
    """
    from tests.support import tiny  # imports transformers, which takes seconds

    found = {}
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (6, 12), generator=drawn)
    labels = ids.clone()
    for row, length in enumerate((12, 9, 4, 11, 7, 2)):
        labels[row, length:] = -100
    none = labels.clone()
    none[:3] = -100

    def causal() -> nn.Module:
        torch.manual_seed(2)
        return tiny.gpt2()

    (rows,) = data(6)
    target = torch.tensor([0, -100, -100, 1, 2, 3])
    for name, make, loss, batch in (
        ("causal", causal, None, {"input_ids": ids, "labels": labels}),
        ("causal without", causal, None, {"input_ids": ids, "labels": none}),
        ("cross_entropy", network, functional.cross_entropy, (rows[0], target)),
    ):
        one = alone(make(), loss)
        many = together(make(), loss, zero_stage=stage, engine=engine)
        a, b = one.step([batch], lr=LR), many.step([batch], lr=LR)
        assert a.grad_norm is not None
        found[name] = [
            abs(float(a.loss) - float(b.loss)) / float(a.loss),
            abs(float(a.grad_norm) - float(b.grad_norm)) / float(a.grad_norm),
        ]
        assert a.tokens == b.tokens
    return found


class Masked(nn.Module):
    """Records its dropout mask, applied to ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones(64), training=self.training)
        self.seen.append("".join(str(int(each > 0)) for each in mask))
        return x.mean() * self.scale


def dropout() -> dict[str, Any]:
    """Return the dropout masks of this rank: two steps, and the same two after `reseed`."""
    model = Masked()
    stepper = together(model, None)
    batch = {"x": torch.ones(4, 2)}
    before = torch.get_rng_state()
    for seed in (7, 7):
        stepper.reseed(seed)
        stepper.step([batch], lr=LR)
        stepper.evaluate(batch)
        stepper.step([batch], lr=LR)
    seen = [mask for mask in model.seen if "0" in mask]
    undisturbed = torch.equal(before, torch.get_rng_state())
    engines: list[int] = []
    chosen = settings(workers=SIZE)
    stepper = TorchStepper(
        model,
        None,
        chosen,
        owner=model,
        device=torch.device("cpu"),
        report=lambda: Report("eager"),
        reseed=engines.append,
        processes=functools.partial(data_parallel.Ranks, settings=chosen, group=dist.group.WORLD),
    )
    stepper.reseed(7)
    return {"masks": seen, "undisturbed": undisturbed, "engine's": engines}


def statistics(stage: int = 0, engine: str = "eager") -> dict[str, Any]:
    """Train with buffers that start differently on the ranks and see different rows."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean.fill_(RANK)
    stepper = together(model, functional.cross_entropy, zero_stage=stage, engine=engine)
    (batch,) = data(8)
    first = digest(stepper.state_dict()["model"])
    stepper.step([batch], lr=LR)
    return {
        "states": [first, digest(stepper.state_dict()["model"])],
        "remarks": stepper.report().remarks,
        "notes": stepper.report().notes,
    }


class Spare(nn.Module):
    """A model with a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.inner(x)
        return {"logits": scores, "more": self.head(scores)}


def unused(stages: Sequence[int] = (0, 1), engine: str = "eager") -> dict[str, Any]:
    """Train; a parameter without a gradient keeps no gradient and no state."""
    found = {}
    for stage in stages:
        many = together(Spare(), functional.cross_entropy, zero_stage=stage, engine=engine)
        one = alone(Spare(), functional.cross_entropy)
        for batch in data(8, 8, 8):
            one.step([batch], lr=LR)
            many.step([batch], lr=LR)
        found[str(stage)] = error(one.state_dict(), many.state_dict())
    return found


def held() -> dict[str, Any]:
    """Return the bytes that each stage takes for a model of 4.2 million parameters."""
    found: dict[str, Any] = {}
    for stage in (0, 1):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
        found["parameters"] = sum(p.numel() for p in model.parameters())
        stepper = together(model, functional.mse_loss, zero_stage=stage)
        stepper.step([(torch.randn(4, 512), torch.randn(4, 512))], lr=LR)
        found[str(stage)] = vars(stepper.bytes())
    return found


def refused() -> dict[str, Any]:
    """Return the errors for settings or data that are wrong on this rank or across the ranks."""
    told = []
    mixed = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4, dtype=torch.float64))
    whole = settings(workers=SIZE + 1)
    steps: Any = together(network(), functional.cross_entropy)
    (batch,) = data(8 + 8 * RANK)
    for call in (
        lambda: steppers.prepare(engine("eager"), network(), None, whole),
        lambda: together(mixed, functional.cross_entropy, zero_stage=1),
        lambda: steps.step([batch], lr=LR),
        lambda: steps.step([{"x": torch.zeros(8, 6), "y": torch.zeros(7, 6)}], lr=LR),
    ):
        try:
            call()
            told.append("nothing")
        except (ValueError, RuntimeError) as raised:
            told.append(f"{type(raised).__name__}: {raised}")
    return {"told": told}


def layouts(stages: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Train with weights that are not stored row by row in memory."""
    found = {}
    drawn = torch.Generator().manual_seed(3)
    batch = torch.randn(4, 3, 5, 5, generator=drawn), torch.randint(0, 4, (4,), generator=drawn)

    def images() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 4))
        return model.to(memory_format=torch.channels_last)

    for stage in stages:
        one = alone(images(), functional.cross_entropy)
        many = together(images(), functional.cross_entropy, zero_stage=stage)
        for _ in range(2):
            one.step([batch], lr=LR)
            many.step([batch], lr=LR)
        found[str(stage)] = error(one.state_dict(), many.state_dict())
    return found


def subgroups() -> dict[str, Any]:
    """Train one model in each of two groups of every other rank."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    errors = []
    for reduction, stage, optimizer in (("mean", 1, "adamw"), ("adasum", 0, "sgd")):
        chosen = {"optimizer": optimizer, "zero_stage": stage, "workers": 2, "reduction": reduction}
        # Each row occurs twice, so the mean and Adasum equal those of one half.
        inputs, targets = data(4)[0]
        batch = inputs.repeat(2, 1) + RANK % 2, targets.repeat(2)
        many = steppers.prepare(
            engine("eager"),
            network(),
            functional.cross_entropy,
            settings(**chosen),
            groups[RANK % 2],
        )
        one = alone(network(), functional.cross_entropy, optimizer=optimizer)
        for _ in range(3):
            one.step([batch], lr=LR)
            many.step([batch], lr=LR)
        errors.append(error(one.state_dict(), many.state_dict()))
    return {"errors": errors}


def pairwise(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Combine a power of two of vectors by Adasum as the paper defines it, in float64."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    a, b = pairwise(vectors[:half]), pairwise(vectors[half:])
    shared = (a * b).sum()
    first = 1 - shared / (2 * (a * a).sum()) if a.any() else torch.ones(())
    second = 1 - shared / (2 * (b * b).sum()) if b.any() else torch.ones(())
    return first * a + second * b


def combined() -> dict[str, Any]:
    """Call `adasum.combine` with odd-sized tensors, one zero on rank 0, one zero on all ranks."""
    sizes = [1, 7, 3, 2, 5]
    drawn = torch.Generator().manual_seed(11)
    each = [torch.randn(sum(sizes), generator=drawn) for _ in range(SIZE)]
    each[0][8:11] = 0
    for vector in each:
        vector[11:13] = 0
    mine = each[RANK].clone()
    group = dist.group.WORLD
    assert group is not None
    adasum.combine(mine, sizes, group)
    parts = [
        pairwise(list(tensors)) for tensors in zip(*(v.split(sizes) for v in each), strict=True)
    ]
    expected = torch.cat(parts)
    return {
        "error": float((mine - expected).norm() / expected.norm()),
        "digest": digest({"vector": mine}),
    }


def gradients(model: nn.Module, batch: Any, rank: int, parts: int = 2) -> list[torch.Tensor]:
    """Return the gradients of the mean loss over `rank`'s rows of two equal micro-batches."""
    rows = len(batch[0]) // parts // SIZE
    model.zero_grad()
    for part in range(parts):
        begin = part * rows * SIZE + rank * rows
        own = slice(begin, begin + rows)
        (functional.cross_entropy(model(batch[0][own]), batch[1][own]) / parts).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def by_hand(
    optimizer: str, clip_norm: float | None, steps: list[Any]
) -> tuple[nn.Module, dict[int, Any], float]:
    """Compute the paper's result in one process: the model, the mean moments and the last norm."""
    model = network()
    chosen = settings(optimizer=optimizer)
    copies = [copy.deepcopy(model) for _ in range(SIZE)]

    def make(each: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in each.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in each.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        if chosen.optim.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=LR, momentum=0.9)
        return torch.optim.AdamW(groups, lr=LR)

    makers = [make(each) for each in (copies if optimizer == "adamw" else [model])]
    norm = 0.0
    for batch in steps:
        found = [gradients(copy.deepcopy(model), batch, rank) for rank in range(SIZE)]
        if optimizer == "sgd":
            for parameter, *each in zip(model.parameters(), *found, strict=True):
                parameter.grad = pairwise(each).float()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or 1e9))
            makers[0].step()
            continue
        before = [p.detach().clone() for p in model.parameters()]
        norms = [torch.cat([g.reshape(-1) for g in each]).norm() for each in found]
        norm = float(torch.stack(norms).square().mean().sqrt())
        for each, own, maker in zip(copies, found, makers, strict=True):
            for parameter, was, gradient in zip(each.parameters(), before, own, strict=True):
                parameter.data.copy_(was)
                parameter.grad = gradient
            maker.step()
        with torch.no_grad():
            for parameter, was, *now in zip(
                model.parameters(), before, *(c.parameters() for c in copies), strict=True
            ):
                parameter.copy_(was + pairwise([one - was for one in now]).float())
    first, *others = (maker.state_dict()["state"] for maker in makers)
    for number, state in first.items():
        for name in state:
            state[name] = sum((o[number][name] for o in others), state[name]) / len(makers)
    return model, first, norm


def adasum_steps(engine: str = "eager") -> dict[str, Any]:
    """Make five steps of two micro-batches: by SGD at both stages, clipped, and by AdamW."""
    found = {}
    steps = data(*([4 * SIZE] * 5))
    for optimizer, stage, clip_norm in (
        ("sgd", 0, 0.5),
        ("sgd", 1, 0.5),
        ("adamw", 0, None),
    ):
        chosen = {"optimizer": optimizer, "zero_stage": stage, "max_grad_norm": clip_norm}
        many = together(
            network(), functional.cross_entropy, engine=engine, reduction="adasum", **chosen
        )
        for inputs, targets in steps:
            half = len(inputs) // 2
            pair = [(inputs[:half], targets[:half]), (inputs[half:], targets[half:])]
            result = many.step(pair, lr=LR)
        expected, moments, norm = by_hand(optimizer, clip_norm, steps)
        state = many.state_dict()
        first = digest(state)
        again = digest(many.state_dict())
        told = "nothing"
        try:
            many.adopt(
                settings(
                    engine=engine,
                    reduction="adasum",
                    workers=SIZE,
                    optimizer=optimizer,
                    max_grad_norm=0.1,
                )
            )
        except ValueError as raised:
            told = str(raised)
        found[f"{optimizer} {stage}"] = {
            "adopted": told,
            "error": error(dict(expected.state_dict()), dict(state["model"])),
            "norm": abs(float(result.grad_norm) - norm) / norm,
            "moments": error(moments, state["optimizer"]["state"]),
            "digests": [first, again],
        }
    return found


CASES: dict[int, dict[str, Case]] = {
    2: {
        **{
            f"parity {name} {stage} {optimizer}": parity(name, stage, optimizer)
            for name, stage, optimizer in (
                ("eager", 0, "adamw"),
                ("eager", 0, "sgd"),
                ("eager", 1, "adamw"),
                ("eager", 1, "sgd"),
                ("eager", 0, "lamb"),
                ("eager", 1, "lamb"),
                ("ortmodule", 0, "sgd"),
                ("ortmodule", 1, "adamw"),
            )
        },
        "moving": moving,
        "not finite": not_finite,
        "overflow": overflow,
        "failing": failing,
        "ignored": ignored,
        "dropout": dropout,
        "statistics": statistics,
        "unused": unused,
        "held": held,
        "refused": refused,
        "layouts": layouts,
        "combined": combined,
        "adasum": adasum_steps,
    },
    4: {
        "combined": combined,
        "adasum": adasum_steps,
        "parity": parity("eager", 1, "adamw"),
        "subgroups": subgroups,
    },
}


def main(cases: Mapping[str, Case]) -> None:
    """Run `cases` in this rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(FOLDER / "store"), SIZE)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=limit)
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:  # noqa: BLE001 - the case's test fails with it
            found[name] = {"failed": traceback.format_exc()}
        (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    # Objects that reference a group keep gloo's threads alive. These abort the process if they
    # release backward's tensors while the interpreter shuts down: pytorch's issue 190489.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # Python then treats DeepSpeed as not installed, and stage 1 is torch's own.
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    main(CASES[SIZE])
