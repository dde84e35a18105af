"""What a run has its ranks do: the stepper on a worker, and what it tells after every call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ortlab.checkpoint import sharded as shards
from ortlab.cluster import packing
from ortlab.engines import nonfinite
from ortlab.engines.base import Batch, EvalResult, Report, ShardedStepper, StateBytes, StepResult
from ortlab.engines.distributed import steppers
from ortlab.engines.nonfinite import Cause
from ortlab.engines.registry import engine_for
from ortlab.engines.torch.stepper import training_device
from ortlab.settings import FinetuneSettings
from ortlab.utils import warn_once
from ortlab.utils.process_memory import SAMPLER, Memory, Meter
from ortlab.utils.threads import trim


@dataclass(frozen=True)
class RankReport:
    """What a rank tells beside a result.

    ``report`` is None where the engine has nothing new to say, ``finite`` as `Stepper.finite` is.
    ``held`` is what it holds of the training's state, ``base_bytes`` its resident size before it
    had the model, ``step_ms`` the time of the step, where it was one.
    """

    report: Report | None
    finite: bool
    memory: Memory
    held: StateBytes
    base_bytes: float
    step_ms: float = 0.0


class _Trainee:
    """The stepper of this process."""

    def __init__(self, stepper: ShardedStepper, meter: Meter, base_bytes: float) -> None:
        self.stepper = stepper
        self._meter = meter
        self._base_bytes = base_bytes
        self._from_bytes = self._highest = base_bytes
        self._report: Report | None = None

    def told(self, *, step_ms: float = 0.0) -> RankReport:
        report = self.stepper.report()
        new, self._report = report != self._report, report
        return RankReport(
            report if new else None,
            self.stepper.finite(),
            self._meter.take(),
            self.stepper.bytes(),
            self._base_bytes,
            step_ms,
        )

    def watch(self) -> None:
        """Notes how large this process is, without what it has freed."""
        trim()
        self._restart()
        now = self._meter.take()
        on_cuda = not math.isnan(now.cuda_allocated_bytes)
        self._from_bytes = now.cuda_allocated_bytes if on_cuda else now.rss_bytes

    def grown(self) -> float:
        """Bytes at its largest beyond what it had when `watch` was called."""
        self._restart()
        return max(self._highest - self._from_bytes, 0.0)

    def _restart(self) -> None:
        """Another meter, whose first reading is of this moment."""
        SAMPLER.end(self._meter)
        self._highest = self._meter.highest_peak_bytes()
        self._meter = SAMPLER.start()

    def end(self) -> None:
        """Ends the stepper and the measurement of its memory."""
        self.forget()
        self.stepper.close()

    def forget(self) -> None:
        """Ends the measurement alone: other ranks would not close the stepper along."""
        SAMPLER.end(self._meter)


_trainees: dict[int, _Trainee] = {}
"""The steppers of this process, by the number that the kernel has given each."""


def prepare(number: int, packed: bytes, file: str, settings: FinetuneSettings) -> RankReport:
    """Makes a stepper of what `packing.pack` gave: (model, loss)."""
    _dies_first()
    warn_once.are_seen()
    chosen = engine_for(settings)
    steppers.load(settings)  # a library that comes along is not the model's memory
    trim()
    meter = SAMPLER.start()
    base_bytes = meter.take().rss_bytes
    try:
        model, loss = packing.unpack(packed, Path(file))
        stepper = steppers.prepare(chosen, model, loss, settings)
    except BaseException:
        SAMPLER.end(meter)
        raise
    _trainees[number] = _Trainee(stepper, meter, base_bytes)
    return _trainees[number].told()


def _dies_first() -> None:
    """Where memory runs out Linux ends this process, and not the kernel with all that it has."""
    with contextlib.suppress(OSError):  # another system, or a container that forbids it
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def step(number: int, batches: list[Batch], lr: float) -> tuple[StepResult, RankReport]:
    """See `Stepper.step`; the tensors of the result are on the CPU."""
    trainee = _trainees[number]
    began = time.perf_counter()
    result = trainee.stepper.step(batches, lr=lr)
    tensors: dict[str, Any] = {
        name: None if value is None else value.cpu()
        for name in ("loss", "grad_norm", "loss_scale", "skipped", "own_loss")
        for value in [getattr(result, name)]
    }
    step_ms = (time.perf_counter() - began) * 1e3
    return dataclasses.replace(result, **tensors), trainee.told(step_ms=step_ms)


def evaluate(number: int, batch: Batch) -> tuple[EvalResult, RankReport]:
    """See `Stepper.evaluate`; the loss is on the CPU."""
    trainee = _trainees[number]
    result = trainee.stepper.evaluate(batch)
    loss = None if result.loss is None else result.loss.cpu()
    return dataclasses.replace(result, loss=loss), trainee.told()


def first_bad(
    packed: bytes, file: str, micro_batches: list[Batch], settings: FinetuneSettings
) -> Cause | None:
    """See `ortlab.engines.nonfinite.first_bad`; rank 0 looks at the model that `pack` gave."""
    if torch.distributed.get_rank():
        return None
    try:
        model, loss = packing.unpack(packed, Path(file))
        model.to(training_device(settings.device))
        return nonfinite.first_bad(model, loss, micro_batches, settings)
    except Exception as error:  # noqa: BLE001 - a rank that fails alone takes the others along
        return Cause.unknown(error)


def write_state(number: int, folder: str) -> Any:
    """Write this rank's shard of `Stepper.state_dict`; see `ortlab.checkpoint.sharded`."""
    return shards.write(_trainees[number].stepper.state_dict(), Path(folder))


def read_state(number: int, folder: str, outline: Any) -> RankReport:
    """Takes the state that is in `folder`."""
    trainee = _trainees[number]
    trainee.stepper.load_state_dict(shards.read(Path(folder), outline))
    return trainee.told()


def adopt(number: int, settings: FinetuneSettings) -> None:
    """See `Stepper.adopt`."""
    _trainees[number].stepper.adopt(settings)


def rest(number: int) -> None:
    """See `Stepper.rest`."""
    _trainees[number].stepper.rest()


def reseed(number: int, seed: int) -> None:
    """See `Stepper.reseed`."""
    _trainees[number].stepper.reseed(seed)


def growth(number: int, *, began: bool) -> tuple[StateBytes, float]:
    """What this rank holds, and how far it has grown since this was called with `began`."""
    trainee = _trainees[number]
    if began:
        trainee.watch()
    return trainee.stepper.bytes(), trainee.grown()


def forget(number: int) -> None:
    """Lets go of a stepper that was lost: other ranks would not close it along."""
    trainee = _trainees.pop(number, None)
    if trainee is not None:
        trainee.forget()


def end(number: int) -> None:
    """Gives back what a stepper holds."""
    trainee = _trainees.pop(number)
    trainee.end()
