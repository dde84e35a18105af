"""Metrics of a run's ranks: loss, speed, communication and memory, and the memory saved by ZeRO.

They are read from each rank's recorder, so that live charts, a picture and a table agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ortlab.metrics.recorder import INDEX, NAN
from ortlab.metrics.zero_bytes import MOMENTS, optimizer_bytes, zero_bytes
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, rounded

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Recorder, Rows
    from ortlab.settings import FinetuneSettings

Values = npt.NDArray[np.float64]

RECENT: Final = 32
"""Number of steps in a median; fewer after a change of settings."""
SLOWER: Final = 0.05
SLOWER_MS: Final = 1.0
"""Minimum difference of computing time per step, relative and in ms, for a rank to be slowest."""
PAPER: Final = "arXiv:1910.02054"
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "rest": "rest of the step",
}
"""Parts of a rank's memory and their labels."""


@dataclass(frozen=True)
class Rank:
    """Metrics of one rank over its last steps; NaN is unknown.

    Rates and times are medians. Bytes are measured after the last step.

    Attributes:
        rank: Number of the rank.
        step: Last step.
        loss: Loss of the rank's own samples in that step.
        samples_per_s: Samples per second.
        step_ms: Duration of a step.
        communication_ms: Time in collectives, including the wait for other ranks.
        computing_ms: Duration of a step minus `communication_ms`, though computation may overlap
            with communication.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer_state: Bytes of optimizer state.
        rest: Bytes of the peak beyond these three and beyond the process before it had a model:
            activations and temporary memory of a step.
        host: Bytes of the three that are in host memory, because the optimizer runs there.
        current: True if the rank trained until the last step of the others.
        slowest: True if the other ranks wait for this one.
    """

    rank: int
    step: int
    loss: float
    samples_per_s: float
    step_ms: float
    communication_ms: float
    computing_ms: float
    parameters: float
    gradients: float
    optimizer_state: float
    rest: float
    host: float = 0.0
    current: bool = True
    slowest: bool = False

    @property
    def communication(self) -> float:
        """Communication time as a fraction of the step, 0 to 1."""
        return self.communication_ms / self.step_ms if self.step_ms else NAN

    @property
    def held(self) -> float:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def peak(self) -> float:
        """Step memory in bytes; without `rest` if that is unknown."""
        return self.held if math.isnan(self.rest) else self.held + self.rest

    @property
    def remark(self) -> str:
        """Remark on the rank: the slowest, or until which step it trained; else empty."""
        return "slowest" if self.slowest else "" if self.current else f"until step {self.step:,}"


@dataclass(frozen=True)
class Saving:
    """Memory that ZeRO saves: bytes of parameters, gradients and optimizer state of all ranks.

    Predictions follow the formula of Rajbhandari et al. 2020 (arXiv:1910.02054): in fp32, 4 + 4
    bytes per parameter, plus 8 for the moments of AdamW and LAMB or 4 for SGD's; with bf16 weights,
    2 + 2 bytes, and 4 more for their fp32 copy.

    Attributes:
        stage: Stage of ZeRO, 0 to 3.
        workers: Number of ranks.
        whole: Predicted bytes at stage 0.
        predicted: Predicted bytes at `stage`.
        held: Measured bytes.
        at_one: Predicted bytes at stage 1.
        parts: Number of ranks that one model is split across by tensor or pipeline parallelism;
            ZeRO partitions across the ranks that have the same part.
    """

    stage: int
    workers: int
    whole: float
    predicted: float
    held: float
    at_one: float
    parts: int = 1

    @property
    def measured(self) -> float:
        """Measured saving as a fraction of stage 0; negative if padding takes more."""
        return 1 - self.held / self.whole

    @property
    def expected(self) -> float:
        """Saving that the formula predicts, as a fraction of stage 0."""
        return 1 - self.predicted / self.whole

    def __str__(self) -> str:
        what = f"ZeRO stage {self.stage} on {self.workers} workers: a total of "
        what += f"{memory(self.held)} of parameters, gradients and optimizer state"
        if not self.stage:
            less = self.whole - self.at_one
            each = (
                "one copy per worker" if self.parts == 1 else f"one copy per {self.parts} workers"
            )
            if self.parts == self.workers:
                return f"{what}, {each}"
            return (
                f"{what}, {each}; stage 1 would save {memory(less)} "
                f"({less / self.whole:.1%}), as the formula predicts ({PAPER})"
            )
        saved, word = self.whole - self.held, "less" if self.held <= self.whole else "more"
        return (
            f"{what}, {memory(abs(saved))} ({abs(self.measured):.1%}) {word} than at stage 0; the "
            f"formula ({PAPER}) predicts {memory(self.whole - self.predicted)} "
            f"({self.expected:.1%})"
        )


@dataclass(frozen=True)
class Standing:
    """Current metrics of all ranks that have trained in a run.

    Attributes:
        ranks: Metrics of each rank.
        until: Last step of the ranks if the run has continued in one process, else None.
        saving: Memory that ZeRO saves; None if settings or measurements are unknown.
    """

    ranks: tuple[Rank, ...] = ()
    until: int | None = None
    saving: Saving | None = None

    def notes(self) -> list[str]:
        """Return the notes below the table: the slowest rank and the saved memory, as lines."""
        lines = []
        if self.until is not None:
            lines.append(
                f"the workers trained until step {self.until:,}; the run continued in one process"
            )
        for each in (rank for rank in self.ranks if rank.slowest):
            own, others = each.computing_ms, _of_others(each, self.ranks)
            lines.append(
                f"rank {each.rank} is the slowest: {milliseconds(own)} per step without "
                f"communication, the others {milliseconds(others)}"
            )
        if self.saving is not None:
            lines.append(str(self.saving))
        if host := sum(rank.host for rank in self.ranks if rank.current):
            lines.append(
                f"{memory(host)} of the training state is in host memory, where the optimizer runs"
            )
        return lines


def standing(recorder: Recorder, settings: FinetuneSettings | None = None) -> Standing:
    """Return the current metrics of a run's ranks; cheap enough to call every second.

    Args:
        recorder: Recorder of the run.
        settings: Settings of the last steps on several ranks (see `trained_under`); without them
            the memory that ZeRO saves is unknown.

    Returns:
        The metrics; empty without ranks.
    """
    last = recorder.last
    changed = [event.step for event in recorder.events("change")]
    recent = {number: _recent(each, changed) for number, each in enumerate(list(recorder.ranks))}
    found = [_rank(number, rows) for number, rows in recent.items() if len(rows)]
    if not found or last is None:
        return Standing()
    newest = max(rank.step for rank in found)
    # Ranks report one after another, so one may be a step behind while this is read.
    found = [dataclasses.replace(rank, current=rank.step >= newest - 1) for rank in found]
    slowest = _slowest([rank for rank in found if rank.current])
    found = [dataclasses.replace(rank, slowest=rank is slowest) for rank in found]
    # A step in one process has no communication.
    until = newest if math.isnan(last.communication_ms) else None
    saving = None if settings is None else _saving([r for r in found if r.current], settings)
    return Standing(tuple(found), until, saving)


def trained_under(run: Any) -> FinetuneSettings | None:
    """Return the settings of the last steps that were trained on several ranks.

    Args:
        run: A run, or another object that a view shows.

    Returns:
        The settings; None for a user's own training loop, and for a run in one process.
    """
    held = (*getattr(run, "earlier_settings", ()), getattr(run, "current_settings", None))
    several = (each for each in reversed(held) if each is not None and each.parallel.workers > 1)
    return next(several, None)


def table(recorder: Recorder, settings: FinetuneSettings | None = None) -> Table[Rank]:
    """Return `standing` as a table with a row per rank.

    Args:
        recorder: Recorder of the run.
        settings: See `standing`.

    Returns:
        The table; its notes name the slowest rank and the memory that ZeRO saves.
    """
    found = standing(recorder, settings)
    columns = [
        Column[Rank]("rank", lambda one: str(one.rank), number=True),
        Column[Rank]("step", lambda one: f"{one.step:,}", number=True),
        Column[Rank]("loss", lambda one: _figure(one.loss, "{:.4g}"), number=True),
        Column[Rank]("samples/s", lambda one: _rate(one.samples_per_s), number=True),
        Column[Rank]("step time", lambda one: milliseconds(one.step_ms), number=True),
        Column[Rank]("communication", _told_communication, number=True),
        *(Column[Rank](label, _bytes_of(name), number=True) for name, label in PARTS.items()),
        Column[Rank]("", lambda one: one.remark),
    ]
    return Table(found.ranks, columns, notes=found.notes(), empty="no rank has trained yet")


@dataclass(frozen=True)
class Lines:
    """Loss and throughput of each rank over the steps; NaN where a rank did not train.

    The steps from `first` to `last` are divided into intervals of equal length, which are the same
    for all ranks.

    Attributes:
        first: First step.
        last: Last step.
        loss: Mean loss, of shape [ranks, points].
        samples_per_s: Samples per second, of shape [ranks, points].
    """

    first: int
    last: int
    loss: Values
    samples_per_s: Values


def lines(recorder: Recorder, points: int) -> Lines:
    """Return loss and throughput of the ranks over the steps, for a chart.

    Args:
        recorder: Recorder of the run.
        points: Maximum number of points.

    Returns:
        The curves. As in `standing`, ranks without any step are left out.
    """
    told = [rows for rows in (each.rows() for each in list(recorder.ranks)) if len(rows)]
    if not told:
        return Lines(0, 0, np.empty((0, 0)), np.empty((0, 0)))
    first = int(min(rows[0, INDEX["step"]] for rows in told))
    last = int(max(rows[-1, INDEX["step"]] for rows in told))
    count = min(points, last - first + 1)
    shared = [_shared_out(rows, first, last, count) for rows in told]
    loss, rate = (np.stack(each) for each in zip(*shared, strict=True))
    return Lines(first, last, loss, rate)


def _shared_out(rows: Rows, first: int, last: int, count: int) -> tuple[Values, Values]:
    at = ((rows[:, INDEX["step"]] - first) * count // (last - first + 1)).astype(int)

    def summed(values: Values, known: npt.NDArray[np.bool_]) -> Values:
        sums: Values = np.bincount(at[known], values[known], count).astype(np.float64)
        return sums

    def divided(above: Values, below: Values) -> Values:
        parts: Values = np.divide(above, below, out=np.full(count, NAN), where=below > 0)
        return parts

    loss, samples, time_ms = (rows[:, INDEX[name]] for name in ("loss", "samples", "step_ms"))
    finite = np.isfinite(loss)
    timed = np.isfinite(samples) & np.isfinite(time_ms)
    return (
        divided(summed(loss, finite), summed(np.ones(len(rows)), finite)),
        1e3 * divided(summed(samples, timed), summed(time_ms, timed)),
    )


def _recent(recorder: Recorder, changed: Sequence[int]) -> Rows:
    """Return the last steps of a rank, at most those since the last change of settings."""
    rows, _ = recorder.since(max(0, recorder.count - RECENT), limit=2 * RECENT)
    if not len(rows):
        return rows
    steps = rows[:, INDEX["step"]]
    begin = max((step for step in changed if step < steps[-1]), default=0)
    return rows[steps > begin]


def _rank(number: int, rows: Rows) -> Rank:
    def of(name: str) -> Values:
        values = rows[:, INDEX[name]]
        return values[np.isfinite(values)]

    def median(name: str) -> float:
        return _median(of(name))

    def newest(name: str) -> float:
        values = of(name)
        return float(values[-1]) if len(values) else NAN

    held = [newest(f"{part}_bytes") for part in ("parameter", "gradient", "optimizer")]
    host = float(np.nan_to_num(newest("host_bytes")))  # older records have none
    on_device = sum(held) - host
    on_cuda, resident = of("cuda_peak_bytes"), of("peak_bytes")
    own = rows[:, INDEX["step_ms"]] - rows[:, INDEX["communication_ms"]]
    return Rank(
        rank=number,
        step=int(rows[-1, INDEX["step"]]),
        loss=newest("loss"),
        samples_per_s=median("samples_per_s"),
        step_ms=median("step_ms"),
        communication_ms=median("communication_ms"),
        computing_ms=_median(own[np.isfinite(own)]),
        parameters=held[0],
        gradients=held[1],
        optimizer_state=held[2],
        rest=_rest(
            on_cuda, resident, newest("base_bytes"), on_device if len(on_cuda) else sum(held)
        ),
        host=host,
    )


def _rest(on_cuda: Values, resident: Values, base: float, held: float) -> float:
    """Return the peak beyond `base` and `held`; CUDA's allocator has no base."""
    if len(on_cuda):
        rest = float(on_cuda.max()) - held
    elif len(resident):
        rest = float(resident.max()) - base - held
    else:
        return NAN
    # A negative value is unknown: the process reuses pages from an earlier run.
    return rest if rest >= 0 else NAN


def _of_others(rank: Rank, ranks: Sequence[Rank]) -> float:
    """Return the median computing time per step of the other active ranks, in ms."""
    others = [one.computing_ms for one in ranks if one.current and one.rank != rank.rank]
    return _median(np.array([value for value in others if math.isfinite(value)]))


def _slowest(ranks: Sequence[Rank]) -> Rank | None:
    """Return the rank that the others wait for; None if all are similar or there is only one."""
    known = [rank for rank in ranks if math.isfinite(rank.computing_ms)]
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda rank: rank.computing_ms)
    others = _of_others(slowest, known)
    clearly = max(others * (1 + SLOWER), others + SLOWER_MS)
    return slowest if slowest.computing_ms > clearly else None


def _saving(ranks: Sequence[Rank], settings: FinetuneSettings) -> Saving | None:
    parallel = settings.parallel
    held = sum(rank.held for rank in ranks)
    known = settings.optim.optimizer in MOMENTS  # not of an optimizer of the user's own
    if len(ranks) != parallel.workers or not held > 0 or not known:
        return None
    stage, parts = (
        parallel.zero_stage,
        parallel.tensor_parallel * parallel.pipeline_stages,
    )
    sharing = len(ranks) // parts
    each = 2 if parallel.param_dtype == "bf16" else 4
    if stage < 2:
        models = [(rank.parameters, min(rank.gradients, rank.parameters)) for rank in ranks]
    else:
        parameters, state = (
            [getattr(rank, part) for rank in ranks] for part in ("parameters", "optimizer_state")
        )
        whole = max(parameters) if stage < 3 else sum(parameters)
        # The trained parameters follow from the optimizer state, which is partitioned without
        # communication buckets.
        of_each = optimizer_bytes(
            settings.optim.optimizer,
            mixed=parallel.param_dtype == "bf16",
            offload=parallel.offload_optimizer,
        )
        trained = sum(state) * each / of_each
        models = [(whole, min(trained, whole))] * len(ranks)
    together = [
        float(sum(_placed(*model, sharing, settings, at) for model in models))
        for at in (0, 1, stage)
    ]
    if not together[0] > 0:
        return None
    whole, at_one, predicted = together
    return Saving(stage, len(ranks), whole, predicted, held, at_one, parts)


def _placed(
    parameters: float, trained: float, workers: int, settings: FinetuneSettings, stage: int
) -> int:
    """Return the bytes of one rank by the formula, on its device and on the host.

    In fp32 it assumes parameters of 4 bytes. For other types, gradients and moments have the type
    of the parameters, so the number of 4-byte parameters with the same size gives the same result.
    """
    parallel = settings.parallel
    mixed = parallel.param_dtype == "bf16"
    each = 2 if mixed else 4
    found = zero_bytes(
        round(parameters / each),
        round(trained / each),
        stage=stage,
        ranks=workers,
        optimizer=settings.optim.optimizer,
        mixed=mixed,
        offload=parallel.offload_optimizer and stage > 0,
    )
    return found.parameters + found.gradients + found.optimizer_state + found.host


def _median(values: Values) -> float:
    return float(np.median(values)) if len(values) else NAN


def _figure(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "?"


def _rate(value: float) -> str:
    return rounded(value) if math.isfinite(value) else "?"


def _bytes_of(part: str) -> Callable[[Rank], str]:
    def told(rank: Rank) -> str:
        size: float = getattr(rank, part)
        return memory(size) if math.isfinite(size) else "?"

    return told


def milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits, or without decimals from 1000 ms on.

    Args:
        value: Milliseconds; NaN gives a question mark.
    """
    return _figure(value, "{:,.0f} ms" if value >= 1000 else "{:.3g} ms")


def _told_communication(rank: Rank) -> str:
    told = milliseconds(rank.communication_ms)
    return f"{told} ({rank.communication:.0%})" if math.isfinite(rank.communication) else told
