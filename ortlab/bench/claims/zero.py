"""Claim that ZeRO fits larger batches: bytes and largest batch of each rank, stage by stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortlab.bench.claims.batch import LargestBatches, beside, ended
from ortlab.bench.claims.children import Request, SetUp, TrialFailed, child
from ortlab.bench.claims.search import MOST_ROWS, PREDICTION, Largest, Search, ZeroSettings
from ortlab.bench.result import table
from ortlab.engines import compatibility
from ortlab.engines.base import tell
from ortlab.engines.distributed.deepspeed_config import BUCKET
from ortlab.metrics.rank_metrics import PAPER
from ortlab.metrics.zero_bytes import ZeroBytes, zero_bytes
from ortlab.settings import FinetuneSettings
from ortlab.utils.process_memory import free_bytes, memory
from ortlab.utils.wording import counted

CLOSE = 0.05
"""Relative difference between the largest batch and one that does not fit."""
PROBE_ROWS, PROBE_ROWS_QUICK = 32, 1024
"""Batch of the first measurement in one process."""
_BUCKET_BYTES = 4 * BUCKET
METHOD = (
    "Each rank is a fresh process under RLIMIT_DATA, of one thread unless --threads says "
    "more, and the ranks are joined by gloo over loopback. A trial is three steps on all "
    "ranks. A batch, counted per rank, does not fit if a rank runs out of memory; one at most "
    f"{CLOSE:.0%} larger than the largest does not. Limit and peak count beyond what a rank has "
    "when the libraries are loaded and it has no model, with 1 MiB for each thread's stack. "
    "One worker is one process without a group. "
    "State: parameters + gradients + optimizer state (AdamW) in MiB, of the rank with the "
    f"highest peak, measured from its tensors and predicted by the formula of {PAPER}. Predicted "
    "peak: the rest of a step, measured with two batches in one process, with the predicted "
    "parameters and optimizer state, and with what a rank holds in addition when activations "
    "peak: DistributedDataParallel's gradients, or DeepSpeed's buffers and, at stage 3, its shard "
    f"of the gradients. {PREDICTION}"
)


@dataclass(frozen=True)
class StepMemory:
    """Memory of steps in one process.

    Attributes:
        parameters: Number of parameters.
        trained: Number of trained parameters.
        fixed_bytes: Memory beside parameters, optimizer state and what each sample takes.
        sample_bytes: Memory of each sample.
    """

    parameters: int
    trained: int
    fixed_bytes: float
    sample_bytes: float

    @classmethod
    def of(cls, small: dict[str, Any], large: dict[str, Any]) -> StepMemory:
        """Return the memory by the answers for two batches whose peaks are those of activations.

        Args:
            small: Answer for a batch, with its ``rows``.
            large: Answer for a larger one.
        """
        state = small["state_bytes"]
        rise = large["peak_bytes"] - small["peak_bytes"]
        each = rise / (large["rows"] - small["rows"])
        rest = small["peak_bytes"] - state["parameters"] - state["optimizer_state"]
        return cls(
            state["parameters"] // 4,
            state["gradients"] // 4,
            rest - each * small["rows"],
            each,
        )

    def state(self, workers: int, stage: int) -> ZeroBytes:
        """Return the predicted training state of a rank.

        Args:
            workers: Number of ranks.
            stage: Stage of ZeRO.
        """
        return zero_bytes(
            self.parameters,
            self.trained,
            stage=stage,
            ranks=workers,
            optimizer="adamw",
            mixed=False,
        )

    def peaks(self, workers: int, stage: int, *, deepspeed: bool) -> list[int]:
        """Return the predicted peaks of a rank, in bytes, for batches from one sample on.

        Args:
            workers: Number of ranks.
            stage: Stage of ZeRO.
            deepspeed: True if DeepSpeed shards; otherwise stage 1 is torch's.
        """
        state = self.state(workers, stage)
        held = state.parameters + state.optimizer_state
        through = 0
        if workers > 1 and not (deepspeed and stage):
            through = state.gradients  # buckets that are views of all gradients
        elif stage:
            through = _BUCKET_BYTES  # `reduce_bucket_size`, taken when the backward pass begins
        if stage == 3:
            # `stage3_max_live_parameters` and, ahead of them, `stage3_prefetch_bucket_size`
            through += state.gradients + min(4 * self.parameters, 3 * _BUCKET_BYTES)
        least = held + max(through, state.gradients)
        rest = held + through + self.fixed_bytes
        return [max(least, round(rest + n * self.sample_bytes)) for n in range(1, MOST_ROWS + 1)]


class _RankSearch(Search):
    """Search with a prediction that was made before it."""

    planned: Sequence[int] = ()

    def _predicted(self) -> tuple[list[int], str]:
        return list(self.planned), ""


@dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
        engine: Name of the engine.
        workers: Number of ranks.
        stage: Stage of ZeRO.
        largest: Result of the search.
        state: Predicted training state of a rank; None after an error.
    """

    engine: str
    workers: int
    stage: int
    largest: Largest
    state: ZeroBytes | None = None


class ZeroBatches(LargestBatches):
    """Measurement of the claim.

    Args:
        settings: Settings of the claim.

    Raises:
        ValueError: As for `LargestBatches`.
    """

    def __init__(self, settings: ZeroSettings) -> None:
        super().__init__(settings)
        self._zero = settings.replace(threads=settings.threads or 1)
        self.cells: list[Cell] = []
        self._steps: dict[str, dict[str, StepMemory]] = {}

    def run(self) -> None:
        """See `Measurement.run`."""
        given = self._zero
        for model, engine in itertools.product(given.models.split(","), given.engines.split(",")):
            counts = [int(each) for each in given.workers.split(",")]
            try:
                step = self._step(model, engine)
            except TrialFailed as error:
                self._add(engine, 1, 0, Largest(model, engine, error=str(error)))
                continue
            self._steps.setdefault(model, {})[engine] = step
            for workers in counts[: 2 if given.quick else None]:
                for stage in map(int, given.stages.split(",") if workers > 1 else "0"):
                    self.measure(model, engine, workers, stage, step)

    def _step(self, model: str, engine: str) -> StepMemory:
        """Measure one process with two batches whose peaks are beyond the limit."""
        rows = PROBE_ROWS_QUICK if self._zero.quick else PROBE_ROWS
        beyond: list[dict[str, Any]] = []
        while len(beyond) < 2:
            if rows > MOST_ROWS:
                raise TrialFailed(
                    f"a batch of {MOST_ROWS} is too small for this limit; choose less --memory"
                )
            tell(f"{model}, {engine}: one process, batch {rows}")
            given = self._zero
            request = Request(
                model,
                engine,
                rows,
                limit_bytes=free_bytes("cpu"),
                threads=given.threads,
                quick=given.quick,
            )
            with child(request) as process:
                answer = process.answer()
            if not answer["fits"]:
                raise TrialFailed(answer["why"])
            if answer["peak_bytes"] > self.limit_bytes:
                beyond.append({**answer, "rows": rows})
            rows *= 2
        return StepMemory.of(*beyond)

    def measure(self, model: str, engine: str, workers: int, stage: int, step: StepMemory) -> None:
        """Add a row, with the reason where ranks cannot train so.

        Args:
            model: Name of the model.
            engine: Name of the engine.
            workers: Number of ranks.
            stage: Stage of ZeRO.
            step: Memory of steps in one process.
        """
        options = {"workers": workers, "zero_stage": stage} if workers > 1 else {}
        set_up = SetUp(f"{engine}, {counted(workers, 'worker')}, stage {stage}", engine, options)
        chosen = FinetuneSettings.of({"engine": engine, "device": "cpu", **options})
        if (reason := compatibility.group_conflict(chosen, workers, is_world=True)) is not None:
            self._add(engine, workers, stage, Largest(model, set_up.label, error=reason))
            return
        search = _RankSearch(model, set_up, self.limit_bytes, self._zero, close=CLOSE)
        deepspeed = compatibility.deepspeed_missing() is None
        search.planned = step.peaks(workers, stage, deepspeed=deepspeed)
        self._add(engine, workers, stage, search.run(), step.state(workers, stage))

    def _add(
        self,
        engine: str,
        workers: int,
        stage: int,
        largest: Largest,
        state: ZeroBytes | None = None,
    ) -> None:
        self.cells.append(Cell(engine, workers, stage, largest, state))
        self.found.append(largest)

    def as_dict(self) -> dict[str, Any]:
        """See `Measurement.as_dict`."""
        steps = {
            model: {engine: dataclasses.asdict(step) for engine, step in each.items()}
            for model, each in self._steps.items()
        }
        cells = [
            {
                "engine": cell.engine,
                "workers": cell.workers,
                "stage": cell.stage,
                "predicted_state_bytes": cell.state and dataclasses.asdict(cell.state),
                **largest,
            }
            for cell, largest in zip(self.cells, super().as_dict()["largest"], strict=True)
        ]
        return {"limit_bytes": self.limit_bytes, "method": METHOD, "steps": steps, "cells": cells}

    def tables(self) -> list[str]:
        """See `Measurement.tables`."""
        lines = [f"Each rank in {memory(self.limit_bytes)} beyond the libraries.", ""]
        if self._zero.quick:
            lines = [*lines, "Twice that batch, or less, does not fit: the search ends early.", ""]
        heads = ["model", "engine", "workers", "stage", "predicted state", "state", "error"]
        heads += ["predicted batch", "largest batch", "error", "of stage 0's"]
        heads += ["predicted peak", "peak", "error"]
        lines += [*table(heads, [self._row_of(cell) for cell in self.cells]), "", METHOD]
        return [*lines, *(f"- {line}" for line in map(ended, self.found) if line)]

    def _row_of(self, cell: Cell) -> list[str]:
        each = cell.largest
        names = [each.model, cell.engine, str(cell.workers), str(cell.stage)]
        if each.rows is None or cell.state is None:
            return [*names, "not measured, see below", *[""] * 9]
        expected, here = _parts(dataclasses.asdict(cell.state)), _parts(each.state_bytes)
        batch, batch_error = beside(each.predicted_rows, each.rows_error, str, "")
        peak, peak_error = beside(each.predicted_bytes, each.bytes_error, memory, "")
        same = (other for other in self.cells if other.largest.model == each.model)
        plain = next(
            (
                other.largest.rows
                for other in same
                if (other.engine, other.workers, other.stage) == (cell.engine, cell.workers, 0)
            ),
            None,
        )
        return [
            *names,
            _told(expected),
            _told(here),
            f"{sum(here) / sum(expected) - 1:+.1%}" if here else "",
            batch,
            str(each.rows),
            batch_error,
            f"{each.rows / plain:.2f}" if plain and not self._zero.quick else "",
            peak,
            memory(each.peak_bytes) if each.peak_bytes is not None else "",
            peak_error,
        ]


def _parts(state: Any) -> list[int]:
    """Return parameters, gradients and optimizer state in bytes; nothing if they are unknown."""
    names = ("parameters", "gradients", "optimizer_state")
    return [state[name] for name in names] if state else []


def _told(parts: Sequence[int]) -> str:
    if not parts:
        return ""
    return " + ".join(f"{part / 2**20:.1f}" for part in parts) + f" = {memory(sum(parts))}"
