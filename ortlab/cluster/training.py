"""Worker's side of a run: the stepper of a rank, and the report after each call of it."""

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
from ortlab.cluster import packing, recording
from ortlab.cluster.host_files import place_of
from ortlab.engines import nonfinite
from ortlab.engines.base import Batch, EvalResult, Report, ShardedStepper, StateBytes, StepResult
from ortlab.engines.distributed import steppers
from ortlab.engines.nonfinite import Cause
from ortlab.engines.registry import engine_for
from ortlab.engines.torch.stepper import training_device
from ortlab.metrics.timeline import RankTimeline
from ortlab.settings import FinetuneSettings
from ortlab.utils import warn_once
from ortlab.utils.process_memory import SAMPLER, Memory, Meter
from ortlab.utils.threads import trim


@dataclass(frozen=True)
class RankReport:
    """Report of a rank that comes with each result.

    ``report`` is the engine's, or None if it has not changed, and ``finite`` is `Stepper.finite`.
    ``held`` is the rank's part of the training's state, ``base_bytes`` its resident size before it
    had the model, and ``step_ms`` the time of the step, 0 for other calls.
    """

    report: Report | None
    finite: bool
    memory: Memory
    held: StateBytes
    base_bytes: float
    step_ms: float = 0.0


class _Trainee:
    """Stepper of this process, with its memory meter."""

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
        """Record the current memory of this process, without memory that it has freed."""
        trim()
        self._restart()
        now = self._meter.take()
        on_cuda = not math.isnan(now.cuda_allocated_bytes)
        self._from_bytes = now.cuda_allocated_bytes if on_cuda else now.rss_bytes

    def grown(self) -> float:
        """Return the growth since `watch`, up to the peak, in bytes."""
        self._restart()
        return max(self._highest - self._from_bytes, 0.0)

    def _restart(self) -> None:
        """Start a new meter, whose first reading is the current memory."""
        SAMPLER.end(self._meter)
        self._highest = self._meter.highest_peak_bytes()
        self._meter = SAMPLER.start()

    def end(self) -> None:
        """End the stepper and the measurement of its memory."""
        self.forget()
        self.stepper.close()

    def forget(self) -> None:
        """End only the measurement: closing the stepper needs all ranks."""
        SAMPLER.end(self._meter)


_trainees: dict[int, _Trainee] = {}
"""Steppers of this process, by the number that the kernel assigned to each."""


def prepare(number: int, packed: bytes, file: str, settings: FinetuneSettings) -> RankReport:
    """Prepare a stepper on this rank; all ranks call it.

    Args:
        number: Number of the stepper.
        packed: (model, loss, optimizer) as `packing.pack` returned it.
        file: The file with the model's tensors, as `HostFiles` named it.
        settings: The run's settings.

    Returns:
        The rank's report.
    """
    _dies_first()
    warn_once.are_seen()
    chosen = engine_for(settings)
    steppers.load(settings.parallel)  # so that the library does not count as the model's memory
    trim()
    meter = SAMPLER.start()
    base_bytes = meter.take().rss_bytes
    try:
        model, loss, optim = packing.unpack(packed, place_of(file))
        stepper = steppers.prepare(chosen, model, loss, settings, given=optim)
    except BaseException:
        SAMPLER.end(meter)
        raise
    _trainees[number] = _Trainee(stepper, meter, base_bytes)
    return _trainees[number].told()


def _dies_first() -> None:
    """Make Linux kill this process before the kernel when memory runs out."""
    with contextlib.suppress(OSError):  # another system, or a container without permission
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def step(number: int, batches: list[Batch], lr: float) -> tuple[StepResult, RankReport]:
    """Take a step; see `Stepper.step`.

    Args:
        number: Number of the stepper.
        batches: The step's micro-batches.
        lr: The learning rate.

    Returns:
        The result, with its tensors on the CPU, and the rank's report.
    """
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


def recorded_step(
    number: int, batches: list[Batch], lr: float
) -> tuple[StepResult, RankReport, RankTimeline]:
    """Take a step under torch's profiler; see `step`.

    Args:
        number: Number of the stepper.
        batches: The step's micro-batches.
        lr: The learning rate.

    Returns:
        What `step` returns, and the timeline of the rank.
    """
    taken, timeline = recording.recorded(lambda: step(number, batches, lr))
    return *taken, timeline


def evaluate(number: int, batch: Batch, outputs: bool) -> tuple[EvalResult, RankReport]:
    """Evaluate a batch; see `Stepper.evaluate`.

    Args:
        number: Number of the stepper.
        batch: The batch.
        outputs: True to return the predictions and targets of the rank's own rows.

    Returns:
        The result, with its loss on the CPU, and the rank's report.
    """
    trainee = _trainees[number]
    result = trainee.stepper.evaluate(batch, outputs=outputs)
    loss = None if result.loss is None else result.loss.cpu()
    return dataclasses.replace(result, loss=loss), trainee.told()


def evaluated(number: int, value: float) -> None:
    """See `Stepper.evaluated`.

    Args:
        number: Number of the stepper.
        value: The metric.
    """
    _trainees[number].stepper.evaluated(value)


def first_bad(
    packed: bytes, file: str, micro_batches: list[Batch], settings: FinetuneSettings
) -> Cause | None:
    """Find the cause of a loss that is not finite, on rank 0; see `nonfinite.first_bad`.

    Args:
        packed: (model, loss, optimizer) as `packing.pack` returned it.
        file: The file with the model's tensors, as `HostFiles` named it.
        micro_batches: The step's micro-batches.
        settings: The run's settings.

    Returns:
        The cause; None on other ranks.
    """
    if torch.distributed.get_rank():
        return None
    try:
        model, loss, _ = packing.unpack(packed, place_of(file))
        model.to(training_device(settings.parallel.device))
        return nonfinite.first_bad(model, loss, micro_batches, settings)
    except Exception as error:  # noqa: BLE001 - a rank that fails alone ends the whole run
        return Cause.unknown(error)


def write_state(number: int, folder: str) -> Any:
    """Write this rank's shard of `Stepper.state_dict`; see `ortlab.checkpoint.sharded`.

    Args:
        number: Number of the stepper.
        folder: The folder to write to, as `HostFiles` named it.

    Returns:
        The outline of the state, for `read_state`.
    """
    return shards.write(_trainees[number].stepper.state_dict(), place_of(folder))


def read_state(number: int, folder: str, outline: Any) -> RankReport:
    """Load a state that `write_state` wrote.

    Args:
        number: Number of the stepper.
        folder: The folder with the shards, as `HostFiles` named it.
        outline: The outline of the state.

    Returns:
        The rank's report.
    """
    trainee = _trainees[number]
    trainee.stepper.load_state_dict(shards.read(place_of(folder), outline))
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
    """Measure this rank's state and the growth of its memory.

    Args:
        number: Number of the stepper.
        began: True to start the measurement now.

    Returns:
        The bytes of the state, and the growth since the last call with `began`.
    """
    trainee = _trainees[number]
    if began:
        trainee.watch()
    return trainee.stepper.bytes(), trainee.grown()


def forget(number: int) -> None:
    """Release a lost stepper without closing it, which would need all ranks.

    Args:
        number: Number of the stepper.
    """
    trainee = _trainees.pop(number, None)
    if trainee is not None:
        trainee.forget()


def end(number: int) -> None:
    """Close a stepper and release its memory; all ranks call it.

    Args:
        number: Number of the stepper.
    """
    trainee = _trainees.pop(number)
    trainee.end()
