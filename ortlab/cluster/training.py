"""What a run has its ranks do: the stepper on a worker, and what it tells after every call."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlab import shards
from ortlab.cluster import packing
from ortlab.engines import sharded
from ortlab.engines.base import (
    Batch,
    EvalResult,
    Report,
    ShardedStepper,
    StateBytes,
    StepResult,
    engine_for,
)
from ortlab.memory import SAMPLER, Memory, Meter
from ortlab.settings import FinetuneSettings


@dataclass(frozen=True)
class Told:
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
        self.meter = meter
        self._base_bytes = base_bytes
        self._report: Report | None = None

    def told(self, *, step_ms: float = 0.0) -> Told:
        report = self.stepper.report()
        new, self._report = report != self._report, report
        return Told(
            report if new else None,
            self.stepper.finite(),
            self.meter.take(),
            self.stepper.bytes(),
            self._base_bytes,
            step_ms,
        )


_trainee: _Trainee | None = None


def _now() -> _Trainee:
    assert _trainee is not None
    return _trainee


def prepare(packed: bytes, file: str, settings: FinetuneSettings) -> Told:
    """Makes the stepper of what `packing.pack` gave: (model, loss)."""
    global _trainee
    end()
    meter = SAMPLER.start()
    base_bytes = meter.take().rss_bytes
    try:
        model, loss = packing.unpack(packed, Path(file))
        stepper = sharded.prepare(engine_for(settings), model, loss, settings)
    except BaseException:
        SAMPLER.end(meter)
        raise
    _trainee = _Trainee(stepper, meter, base_bytes)
    return _trainee.told()


def step(batches: list[Batch], lr: float) -> tuple[StepResult, Told]:
    """See `Stepper.step`; the tensors of the result are on the CPU."""
    began = time.perf_counter()
    result = _now().stepper.step(batches, lr=lr)
    tensors: dict[str, Any] = {
        name: None if value is None else value.cpu()
        for name in ("loss", "grad_norm", "loss_scale", "skipped", "own_loss")
        for value in [getattr(result, name)]
    }
    step_ms = (time.perf_counter() - began) * 1e3
    return dataclasses.replace(result, **tensors), _now().told(step_ms=step_ms)


def evaluate(batch: Batch) -> tuple[EvalResult, Told]:
    """See `Stepper.evaluate`; the loss is on the CPU."""
    result = _now().stepper.evaluate(batch)
    loss = None if result.loss is None else result.loss.cpu()
    return dataclasses.replace(result, loss=loss), _now().told()


def write_state(folder: str) -> Any:
    """Writes this rank's shard of `Stepper.state_dict`; what is in them, see `ortlab.shards`."""
    return shards.write(_now().stepper.state_dict(), Path(folder))


def read_state(folder: str, outline: Any) -> Told:
    """Takes the state that is in `folder`."""
    _now().stepper.load_state_dict(shards.read(Path(folder), outline))
    return _now().told()


def adopt(settings: FinetuneSettings) -> None:
    """See `Stepper.adopt`."""
    _now().stepper.adopt(settings)


def reseed(seed: int) -> None:
    """See `Stepper.reseed`."""
    _now().stepper.reseed(seed)


def end() -> None:
    """Gives back what the stepper of this process holds, where there is one."""
    global _trainee
    if _trainee is not None:
        SAMPLER.end(_trainee.meter)
        _trainee.stepper.close()
        _trainee = None
