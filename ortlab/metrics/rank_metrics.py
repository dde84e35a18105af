"""How the ranks of a run stand: their loss, speed, communication and memory, and what ZeRO saved.

Read from what each rank told its recorder, so that live charts, a picture and a table say the same.
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
from ortlab.metrics.zero_bytes import optimizer_bytes, zero_bytes
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, rounded

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Recorder, Rows
    from ortlab.settings import FinetuneSettings

Values = npt.NDArray[np.float64]

RECENT: Final = 32
"""Steps that a median is taken of; fewer after a change of settings."""
SLOWER: Final = 0.05
SLOWER_MS: Final = 1.0
"""Of its own time in a step: what a rank is slower by, at least, to be called the slowest."""
PAPER: Final = "arXiv:1910.02054"
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "rest": "rest of the peak",
}
"""What a rank's memory is split into, and how each part is called."""


@dataclass(frozen=True)
class Rank:
    """One rank by the last steps that it took; NaN is unknown.

    ``step`` is the last one, ``loss`` that of its own samples there. Rates and times are medians.
    ``communication_ms`` has a collective under way, waiting for other ranks included;
    ``computing_ms`` is the step without it, though some of it may have gone on meanwhile. Bytes
    are those held after the last step, and ``rest`` is what the peak has above them and above the
    process without a model: activations, and whatever else a step takes. ``host`` is what of them
    is in host memory as the optimizer steps there. ``current`` says whether it trained to the last
    with the others, ``slowest`` that they wait for it.
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
        """Its share of the step, 0 to 1."""
        return self.communication_ms / self.step_ms if self.step_ms else NAN

    @property
    def held(self) -> float:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def peak(self) -> float:
        """Bytes that training took at its highest; what is held where the rest is unknown."""
        return self.held if math.isnan(self.rest) else self.held + self.rest

    @property
    def remark(self) -> str:
        """What is to be said of it beside its figures."""
        return "slowest" if self.slowest else "" if self.current else f"until step {self.step:,}"


@dataclass(frozen=True)
class Saving:
    """What ZeRO saves over all ranks together: bytes of parameters, gradients, optimizer state.

    ``whole`` is what they would hold at stage 0, ``at_one`` at stage 1 and ``predicted`` at this
    one, by the formula of Rajbhandari et al. 2020 (arXiv:1910.02054): in fp32 4 + 4 bytes a
    parameter, and 8 for the moments of AdamW and LAMB, 4 for SGD's; with bf16 weights 2 + 2, and 4
    more for their fp32 copy. ``held`` is what they do hold.
    Where ``parts`` of them have one model together, by layers or stages, ZeRO shares out among
    those that have the same part.
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
        """The share that is saved, 0 to 1; below 0 where padding takes more."""
        return 1 - self.held / self.whole

    @property
    def expected(self) -> float:
        """The share that the formula says."""
        return 1 - self.predicted / self.whole

    def __str__(self) -> str:
        what = f"ZeRO stage {self.stage} over {self.workers} workers: together they hold "
        what += f"{memory(self.held)} of parameters, gradients and optimizer state"
        if not self.stage:
            less = self.whole - self.at_one
            each = "each all of it" if self.parts == 1 else f"{self.parts} of them all of it"
            if self.parts == self.workers:
                return f"{what}, {each}"
            return (
                f"{what}, {each}; stage 1 would save {memory(less)} "
                f"({less / self.whole:.1%}) by the formula ({PAPER})"
            )
        saved, word = self.whole - self.held, "less" if self.held <= self.whole else "more"
        return (
            f"{what}, {memory(abs(saved))} ({abs(self.measured):.1%}) {word} than at stage 0; the "
            f"formula ({PAPER}) says {memory(self.whole - self.predicted)} ({self.expected:.1%})"
        )


@dataclass(frozen=True)
class Standing:
    """All ranks that ever trained in a run, as they stand now.

    ``until`` is the last step that ranks took where the run has gone on in one process. ``saving``
    is None where the settings are not known, or the figures.
    """

    ranks: tuple[Rank, ...] = ()
    until: int | None = None
    saving: Saving | None = None

    def notes(self) -> list[str]:
        """What is to be said below their figures, in lines."""
        lines = []
        if self.until is not None:
            lines.append(
                f"the workers trained until step {self.until:,}; the run went on in one process"
            )
        for each in (rank for rank in self.ranks if rank.slowest):
            own, others = each.computing_ms, _of_others(each, self.ranks)
            lines.append(
                f"rank {each.rank} is the slowest: {milliseconds(own)} of a step outside of "
                f"communication, the others {milliseconds(others)}"
            )
        if self.saving is not None:
            lines.append(str(self.saving))
        if host := sum(rank.host for rank in self.ranks if rank.current):
            lines.append(f"of what they hold {memory(host)} is in host memory, with the optimizer")
        return lines


def standing(recorder: Recorder, settings: FinetuneSettings | None = None) -> Standing:
    """How the ranks of a run stand; cheap enough for once a second.

    `settings` are those under which ranks trained last (see `trained_under`): what ZeRO saved is
    not told without. Without ranks it is empty.
    """
    last = recorder.last
    changed = [event.step for event in recorder.events("change")]
    recent = {number: _recent(each, changed) for number, each in enumerate(list(recorder.ranks))}
    found = [_rank(number, rows) for number, rows in recent.items() if len(rows)]
    if not found or last is None:
        return Standing()
    newest = max(rank.step for rank in found)
    # They are told one after another: one may be a step behind while this is read.
    found = [dataclasses.replace(rank, current=rank.step >= newest - 1) for rank in found]
    slowest = _slowest([rank for rank in found if rank.current])
    found = [dataclasses.replace(rank, slowest=rank is slowest) for rank in found]
    # A step in one process has no communication.
    until = newest if math.isnan(last.communication_ms) else None
    saving = None if settings is None else _saving([r for r in found if r.current], settings)
    return Standing(tuple(found), until, saving)


def trained_under(run: Any) -> FinetuneSettings | None:
    """The settings of a run, or of whatever is watched, under which its ranks trained last.

    None for a loop of the user's own, and where all of the run that is known was in one process.
    """
    held = (*getattr(run, "earlier_settings", ()), getattr(run, "current_settings", None))
    several = (each for each in reversed(held) if each is not None and each.workers > 1)
    return next(several, None)


def table(recorder: Recorder, settings: FinetuneSettings | None = None) -> Table[Rank]:
    """`standing` as a table, a rank a row; ``notes`` say who is slowest and what ZeRO saved."""
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
    """How loss and samples/s of each rank went: arrays [ranks, points], NaN where it did not train.

    The points are equal shares of the steps from ``first`` to ``last``, the same for all.
    """

    first: int
    last: int
    loss: Values
    samples_per_s: Values


def lines(recorder: Recorder, points: int) -> Lines:
    """The ranks' loss and samples/s in at most so many `points`; a rate is samples over time.

    A rank that has told nothing yet is left out, as in `standing`.
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
    """The last steps of a rank, those under its last settings alone."""
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
    """Of the peak, above what is held; on CUDA the allocator counts from nothing."""
    if len(on_cuda):
        rest = float(on_cuda.max()) - held
    elif len(resident):
        rest = float(resident.max()) - base - held
    else:
        return NAN
    # Where it is less than nothing, pages from an earlier run were given to this one: not known.
    return rest if rest >= 0 else NAN


def _of_others(rank: Rank, ranks: Sequence[Rank]) -> float:
    """The median of what the others that still train compute in a step, in ms."""
    others = [one.computing_ms for one in ranks if one.current and one.rank != rank.rank]
    return _median(np.array([value for value in others if math.isfinite(value)]))


def _slowest(ranks: Sequence[Rank]) -> Rank | None:
    """The one that the others wait for; None where they are much the same, or alone."""
    known = [rank for rank in ranks if math.isfinite(rank.computing_ms)]
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda rank: rank.computing_ms)
    others = _of_others(slowest, known)
    clearly = max(others * (1 + SLOWER), others + SLOWER_MS)
    return slowest if slowest.computing_ms > clearly else None


def _saving(ranks: Sequence[Rank], settings: FinetuneSettings) -> Saving | None:
    held = sum(rank.held for rank in ranks)
    if len(ranks) != settings.workers or not held > 0:
        return None
    stage, parts = settings.zero_stage, settings.tensor_parallel * settings.pipeline_stages
    sharing = len(ranks) // parts
    each = 2 if settings.param_dtype == "bf16" else 4
    if stage < 2:
        models = [(rank.parameters, min(rank.gradients, rank.parameters)) for rank in ranks]
    else:
        parameters, state = (
            [getattr(rank, part) for rank in ranks] for part in ("parameters", "optimizer_state")
        )
        whole = max(parameters) if stage < 3 else sum(parameters)
        # The state tells what is trained: it is shared out without what waits in buckets.
        of_each = optimizer_bytes(
            settings.optimizer,
            mixed=settings.param_dtype == "bf16",
            offload=settings.offload_optimizer,
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

    In fp32 it counts parameters of 4 bytes. Of other types gradients and moments have the same one,
    so that as many of 4 bytes as they take together give the same figures.
    """
    mixed = settings.param_dtype == "bf16"
    each = 2 if mixed else 4
    found = zero_bytes(
        round(parameters / each),
        round(trained / each),
        stage=stage,
        ranks=workers,
        optimizer=settings.optimizer,
        mixed=mixed,
        offload=settings.offload_optimizer and stage > 0,
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
    """Three digits, or whole ones from a second on; a question mark for NaN."""
    return _figure(value, "{:,.0f} ms" if value >= 1000 else "{:.3g} ms")


def _told_communication(rank: Rank) -> str:
    told = milliseconds(rank.communication_ms)
    return f"{told} ({rank.communication:.0%})" if math.isfinite(rank.communication) else told
