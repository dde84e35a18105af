"""Result of a run, also of one that is still training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ortlab.metrics.evaluation import Evaluation
from ortlab.metrics.recorder import NAN, State
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import rounded


@dataclasses.dataclass(frozen=True, repr=False)
class RunResult:
    """Result of a run. Unknown numbers are NaN.

    ``before`` and ``after`` are the first and the last evaluation, ``best`` is the best one by
    ``keep_best`` (by the loss if that is not set), not counting the one before training; None
    without evaluation data. Rates count only the time of the steps, without the first one and those
    after changes of settings, which export and warm up; ``wall_s`` is the whole time, pauses
    included. ``peak_bytes`` is the peak memory of the process: its resident size with Python and
    libraries, or on CUDA the bytes that torch allocated; with several workers, that of the worker
    that used most. ``skipped_steps`` is the number of ``steps`` whose gradients overflowed in fp16,
    ``loss_scale`` is the last loss scale. ``not_finite`` is "nan", "inf" or "-inf" if that was the
    loss of the last step; in run.json, which is JSON, its ``final_loss`` is null.
    """

    state: State
    steps: int
    wall_s: float
    final_loss: float = NAN
    before: Evaluation | None = None
    after: Evaluation | None = None
    best: Evaluation | None = None
    samples_per_s: float = NAN
    tokens_per_s: float = NAN
    peak_bytes: float = NAN
    export_s: float = 0.0
    check_s: float = 0.0
    skipped_steps: int = 0
    loss_scale: float = NAN
    not_finite: str = ""

    def __str__(self) -> str:
        parts = [f"{self.state} after {self.steps} steps in {self.wall_s:.1f} s"]
        if self.not_finite or not math.isnan(self.final_loss):
            parts.append(f"loss {self.final_loss:.4g}")
        if self.before is not None and self.after is not None:
            parts.append(f"evaluation (first): {self.before}; evaluation (last): {self.after}")
            if self.best is not None and self.best.step != self.after.step:
                parts.append(f"evaluation (best, step {self.best.step:,}): {self.best}")
        if not math.isnan(self.samples_per_s):
            parts.append(f"{rounded(self.samples_per_s)} samples/s")
        if not math.isnan(self.peak_bytes):
            parts.append(f"peak memory {memory(self.peak_bytes)}")
        if self.skipped_steps:
            parts.append(told_skipped(self.skipped_steps, self.loss_scale))
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"<RunResult: {self}>"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in the form of run.json.

        Returns:
            Values that JSON can hold, except that unknown numbers are NaN.
        """
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunResult:
        """Return a result from what `as_dict` returned, as run.json has it.

        Args:
            values: The fields by name; numbers that are not known are None.
        """
        found = {name: values[name] for name in ("before", "after", "best")}
        evaluations = {
            name: each and Evaluation(**{**_numbers(each), "metrics": _numbers(each["metrics"])})
            for name, each in found.items()
        }
        known = _numbers(values)
        if known.get("not_finite"):
            known["final_loss"] = float(known["not_finite"])  # JSON has no number for it
        return cls(**{**known, **evaluations})


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: NAN if value is None else value for name, value in values.items()}


def told_skipped(steps: int, loss_scale: float) -> str:
    """Return a line about skipped steps.

    Args:
        steps: Number of skipped steps.
        loss_scale: Loss scale of the next step; NaN if unknown.

    Returns:
        Text such as "2 steps skipped: gradients overflowed, scale 16,384".
    """
    now = "" if math.isnan(loss_scale) else f", scale {loss_scale:,.10g}"
    return f"{steps} step{'s' * (steps > 1)} skipped: gradients overflowed{now}"
