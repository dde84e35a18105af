"""Recorder of a run's metrics: samples of the steps, and events.

The training thread only appends to a queue. A reader (a view, or the recorder's writer thread)
moves the queue into a bounded, downsampled series. Only the writer thread calls the sinks, which
store the full series.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ortlab.settings import LOWEST_LOSS_SCALE
from ortlab.utils.threads import Thread

if TYPE_CHECKING:
    import torch

Rows = npt.NDArray[np.float64]
"""Samples as an array of shape [samples, len(COLUMNS)]; unknown values are NaN."""

Chart = Literal["loss", "throughput", "memory", "lr", "time"]
Merge = Literal["last", "mean", "max"]

NAN = float("nan")


@dataclass(frozen=True)
class Column:
    """Metric of a step.

    Attributes:
        name: Name of the metric.
        unit: Unit; empty without one.
        chart: Chart that shows it; None for none.
        label: Label in the chart.
        merge: How several steps are combined when the series is downsampled.
    """

    name: str
    unit: str
    chart: Chart | None
    label: str
    merge: Merge = "mean"


COLUMNS: tuple[Column, ...] = (
    Column("step", "", None, "step", "last"),
    Column("time_s", "s", None, "time since the start", "last"),
    Column("epoch", "", None, "epoch", "last"),
    Column("loss", "", "loss", "training loss"),
    Column("lr", "", "lr", "learning rate"),
    Column("grad_norm", "", None, "gradient norm"),
    Column("samples", "samples", None, "samples in the step"),
    Column("tokens", "tokens", None, "tokens in the step"),
    Column("samples_per_s", "samples/s", "throughput", "samples/s"),
    Column("tokens_per_s", "tokens/s", "throughput", "tokens/s"),
    Column("step_ms", "ms", "time", "step"),
    Column("data_ms", "ms", "time", "data"),
    Column("forward_ms", "ms", "time", "forward"),
    Column("backward_ms", "ms", "time", "backward"),
    Column("optimizer_ms", "ms", "time", "optimizer"),
    Column("communication_ms", "ms", "time", "communication"),
    Column("rss_bytes", "B", "memory", "resident size", "last"),
    Column("peak_bytes", "B", "memory", "peak resident size", "max"),
    Column("cuda_allocated_bytes", "B", "memory", "CUDA allocated", "last"),
    Column("cuda_reserved_bytes", "B", "memory", "CUDA reserved", "last"),
    Column("cuda_peak_bytes", "B", "memory", "CUDA peak", "max"),
    Column("device_used_bytes", "B", "memory", "used on the device", "last"),
    # A separate unit gives it a separate axis.
    Column("loss_scale", "loss scale", "lr", "loss scale", "last"),
    Column("skipped", "", None, "share of steps skipped"),
    # Of a rank: its part of the training state, and its memory before it had the model.
    Column("parameter_bytes", "B", None, "parameters", "last"),
    Column("gradient_bytes", "B", None, "gradients", "last"),
    Column("optimizer_bytes", "B", None, "optimizer state", "last"),
    Column("host_bytes", "B", None, "of these in host memory", "last"),
    Column("base_bytes", "B", None, "before the model", "last"),
)
INDEX = {column.name: index for index, column in enumerate(COLUMNS)}
"""Position of each column in a row."""

_MEANS = [INDEX[column.name] for column in COLUMNS if column.merge == "mean"]
_PEAKS = [INDEX[column.name] for column in COLUMNS if column.merge == "max"]
_RATES = [INDEX["samples_per_s"], INDEX["tokens_per_s"]]
_TIME = [INDEX["step_ms"]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Metrics of one step, in the order of `COLUMNS`; unknown values are NaN.

    ``loss``, ``lr``, ``grad_norm``, ``loss_scale`` and ``skipped`` (1 or 0) may be 0-d tensors,
    also on a device: the recorder fetches them outside of the training thread.
    """

    step: float
    time_s: float = NAN
    epoch: float = NAN
    loss: float | torch.Tensor = NAN
    lr: float | torch.Tensor = NAN
    grad_norm: float | torch.Tensor = NAN
    samples: float = NAN
    tokens: float = NAN
    samples_per_s: float = NAN
    tokens_per_s: float = NAN
    step_ms: float = NAN
    data_ms: float = NAN
    forward_ms: float = NAN
    backward_ms: float = NAN
    optimizer_ms: float = NAN
    communication_ms: float = NAN
    rss_bytes: float = NAN
    peak_bytes: float = NAN
    cuda_allocated_bytes: float = NAN
    cuda_reserved_bytes: float = NAN
    cuda_peak_bytes: float = NAN
    device_used_bytes: float = NAN
    loss_scale: float | torch.Tensor = NAN
    skipped: float | torch.Tensor = NAN
    parameter_bytes: float = NAN
    gradient_bytes: float = NAN
    optimizer_bytes: float = NAN
    host_bytes: float = NAN
    base_bytes: float = NAN


_TENSORS = ("loss", "lr", "grad_norm", "loss_scale", "skipped")
_values = operator.attrgetter(*INDEX)


@dataclass(frozen=True)
class Event:
    """Event at a step.

    Attributes:
        kind: One of "eval" (`values`: loss, accuracy), "change" of settings (`values`: cost_s, from
            the end of the step before the change to the end of the first step after it),
            "checkpoint" (saved, of this step), "pause" (its begin and its end), "early_stop",
            "skipped_data" (all batches that were skipped so far), "not_finite" (the first loss of a
            user's loop), "metric_failed" (a metric that raised), "state", "note", "warning" (with
            cost_s: a requested change that failed) and "error".
        step: Step at which it happened.
        time_s: Time since the start of the run.
        text: Description.
        values: Numbers, by name.
    """

    kind: str
    step: int
    time_s: float
    text: str = ""
    values: dict[str, float] = field(default_factory=dict)


State = Literal["starting", "running", "paused", "stopping", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class Status:
    """Status of a run.

    Badges, lines and advice do not change with every step: views send them only on a change.

    Attributes:
        state: State of the run.
        step: Completed steps.
        total_steps: Total number of steps; None if unknown.
        elapsed_s: Elapsed time.
        left_s: Estimated remaining time; None if unknown.
        badges: Messages that the user must see, such as a fallback.
        lines: Details.
        error: Message of the run's error; None without one.
        advice: Command that resumes a run that waits after a failure, as the user types it; empty
            if there is none.
    """

    state: State
    step: int
    total_steps: int | None
    elapsed_s: float
    left_s: float | None
    badges: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    error: str | None = None
    advice: str = ""


class Watched(Protocol):
    """Object that a view can show: a run, or a user's own training loop."""

    @property
    def title(self) -> str:
        """Title above the charts."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Recorder with the metrics to show."""
        ...

    @property
    def interactive(self) -> bool:
        """True if `pause`, `resume` and `stop` have an effect."""
        ...

    def status(self) -> Status:
        """Return the current status; cheap."""
        ...

    def pause(self) -> None:
        """Request a pause before the next step."""
        ...

    def resume(self) -> None:
        """Request to resume."""
        ...

    def stop(self) -> None:
        """Request to stop after the step in flight; further calls have no effect."""
        ...

    def over(self) -> bool:
        """Return True if the run has ended and records nothing more."""
        ...

    def wait_over(self, timeout: float | None = None) -> bool:
        """Block until the run is over.

        Args:
            timeout: Maximum time in seconds; None waits without a limit.

        Returns:
            True if the run is over, False after a timeout.
        """
        ...


class Sink(Protocol):
    """Destination of the full series; called by one thread at a time."""

    def write(self, rows: Rows, events: Sequence[Event]) -> None:
        """Append rows and events; they survive a crash of the process once this returns.

        Args:
            rows: Samples of shape [samples, len(COLUMNS)].
            events: Events.

        Raises:
            OSError: They cannot be written. Nothing has been written then, and the same data is
                passed again later.
        """
        ...

    def close(self) -> None:
        """Close the sink after the last write."""
        ...


def merged(rows: Rows, size: int) -> Rows:
    """Merge every `size` consecutive rows into one.

    Args:
        rows: Samples of shape [samples, len(COLUMNS)].
        size: Number of rows to merge; the last group may be smaller.

    Returns:
        The merged rows of shape [ceil(samples / size), len(COLUMNS)].
    """
    if size <= 1 or not len(rows):
        return rows
    first = np.arange(0, len(rows), size)
    out: Rows = rows[np.minimum(first + size, len(rows)) - 1]
    values = rows[:, _MEANS]
    known = ~np.isnan(values)
    count = np.add.reduceat(known, first, axis=0, dtype=np.float64)
    total = np.add.reduceat(np.where(known, values, 0.0), first, axis=0)
    out[:, _MEANS] = np.divide(total, count, out=np.full_like(total, NAN), where=count > 0)
    # Fast steps would count too much in a mean of rates.
    time_ms = rated_ms(rows)
    amounts = np.add.reduceat(np.where(time_ms > 0, rows[:, _RATES], 0.0) * time_ms, first, axis=0)
    time_ms = np.add.reduceat(time_ms, first, axis=0)
    out[:, _RATES] = np.divide(amounts, time_ms, out=out[:, _RATES], where=time_ms > 0)
    out[:, _PEAKS] = np.fmax.reduceat(rows[:, _PEAKS], first, axis=0)
    return out


def rated_ms(rows: Rows) -> Rows:
    """Return the time of each row in milliseconds that its rates are of, 0 where one is unknown.

    Args:
        rows: Samples of shape [samples, len(COLUMNS)].

    Returns:
        The times, of shape [samples, 2] for samples and tokens per second.
    """
    known = np.isfinite(rows[:, _RATES]) & (rows[:, _TIME] > 0)
    return np.where(known, rows[:, _TIME], 0.0)


def peak_bytes(recorded: Sequence[Rows]) -> float:
    """Return the peak memory of a run, as its result and the history have it.

    It is the peak of torch's allocator on CUDA, or without CUDA the peak resident size.

    Args:
        recorded: Samples of the run; of each rank if several train, of which the largest counts.

    Returns:
        The peak in bytes, NaN if it is unknown.
    """
    rows = np.concatenate(recorded)
    for name in ("cuda_peak_bytes", "peak_bytes"):
        values = rows[:, INDEX[name]]
        if np.isfinite(values).any():
            return float(np.nanmax(values))
    return NAN


class _Series:
    """Series of a whole run in at most `capacity` rows of `stride` steps, doubled when full."""

    def __init__(self, capacity: int) -> None:
        # Grows on demand: a kernel's Out may keep hundreds of runs, and most of them are short.
        self._rows = np.empty((min(capacity, 64), len(COLUMNS)))
        self._capacity = capacity
        self._used = 0
        self._tail = np.empty((0, len(COLUMNS)))
        self.stride = 1

    def extend(self, rows: Rows) -> None:
        rows = np.concatenate([self._tail, rows])
        while len(rows) >= self.stride:
            take = min(len(rows) // self.stride, len(self._rows) - self._used)
            taken, rows = rows[: take * self.stride], rows[take * self.stride :]
            self._rows[self._used : self._used + take] = merged(taken, self.stride)
            self._used += take
            if self._used == len(self._rows) < self._capacity:
                more = min(self._used, self._capacity - self._used)
                self._rows = np.concatenate([self._rows, np.empty((more, len(COLUMNS)))])
            elif self._used == len(self._rows):
                self._used //= 2
                self._rows[: self._used] = merged(self._rows, 2)
                self.stride *= 2
        self._tail = rows.copy()

    def place(self, step: float) -> int:
        """Return the index of the first row that ends after `step`."""
        return int(np.searchsorted(self._rows[: self._used, INDEX["step"]], step, side="right"))

    def rows(self, first: int = 0) -> Rows:
        """Return the rows from index `first` on; the last row ends with the newest step."""
        parts = [self._rows[first : self._used]]
        if len(self._tail):
            parts.append(merged(self._tail, self.stride))
        return np.concatenate(parts)


class _Recent:
    """The newest `most` rows, in an array of up to twice that size to avoid frequent copies."""

    def __init__(self, most: int) -> None:
        self._rows = np.empty((min(most, 64), len(COLUMNS)))
        self._most = most
        self._used = 0

    def extend(self, rows: Rows) -> None:
        rows = rows[-self._most :]
        needed = self._used + len(rows)
        if needed > len(self._rows):
            kept, size = self.rows(), min(max(needed, 2 * len(self._rows)), 2 * self._most)
            if size > len(self._rows):
                self._rows = np.empty((size, len(COLUMNS)))
            self._rows[: len(kept)] = kept
            self._used = len(kept)
        self._rows[self._used : self._used + len(rows)] = rows
        self._used += len(rows)

    def rows(self) -> Rows:
        """Return a view of the rows, which the next `extend` may change."""
        return self._rows[max(self._used - self._most, 0) : self._used]


class _Outlet:
    """Sink with its backlog."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.size = 0
        """Number of rows and events in the backlog."""
        self.trouble: str | None = None
        self._waiting: deque[tuple[Rows, list[Event]]] = deque()
        self._dropped = 0

    def put(self, rows: Rows, events: list[Event], most: int) -> None:
        """Add rows and events to the backlog, or drop them if it would exceed `most`."""
        many = len(rows) + len(events)
        if self.size + many > most:
            self._dropped += many
        else:
            self._waiting.append((rows, events))
            self.size += many

    def write(self, lock: threading.Lock) -> Iterator[str]:
        """Write the backlog to the sink until it is empty or fails, and yield warnings.

        `lock` protects the fields that `put` changes as well.
        """
        while self._waiting:
            rows, events = self._waiting[0]
            try:
                self.sink.write(rows, events)
            except OSError as error:
                before, self.trouble = self.trouble, f"metrics cannot be written: {error}"
                if before is None:
                    yield f"{self.trouble}; the run continues and tries again"
                return
            with lock:
                self._waiting.popleft()
                self.size -= len(rows) + len(events)
                dropped, self._dropped = self._dropped, 0
            if dropped:
                yield f"{dropped} steps were not written: the disk did not keep up"
        if self.trouble is not None:
            self.trouble = None
            yield "metrics are written again"


class Recorder:
    """Recorder of a run: a downsampled series for views, and the full series for sinks.

    `add` and `event` only append to a queue; they never wait for a disk, a view or a device. All
    methods for reading are thread-safe; they may wait for a device if losses are still on it. If a
    sink fails (the disk is full), its data is kept and written again every second, with a warning
    event. If it does not recover (the disk hangs), data is dropped, counted and reported in a
    warning.

    Args:
        capacity: Maximum number of rows of the downsampled series; even.
        sinks: Destinations of the full series.
        of_rank: Returns the sinks of a rank, by its number.

    Raises:
        ValueError: `capacity` is odd or below 2.
    """

    PERIOD_S = 0.5
    WRITE_EVERY = 2  # periods: a crash of the process loses about a second
    PENDING = 8192  # queued samples from which the adding thread processes the queue itself
    BACKLOG = 262_144  # maximum rows waiting for a sink, 224 bytes each
    RECENT = 1024  # newest rows that are kept unmerged, for live views

    def __init__(
        self,
        capacity: int = 4096,
        sinks: Sequence[Sink] = (),
        *,
        of_rank: Callable[[int], Sequence[Sink]] = lambda _: (),
    ) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity={capacity} must be even and at least 2")
        self._capacity = capacity
        self._queue: deque[Sample | Event] = deque()
        self._lock = threading.Lock()
        self._series = _Series(capacity)
        self._recent = _Recent(self.RECENT)
        self._count = 0
        self._totals = np.zeros(len(COLUMNS))
        self._rated = np.zeros(len(COLUMNS))  # of the steps whose rates are known
        self._events: list[Event] = []
        self._event_count = 0
        self._outlets = [_Outlet(sink) for sink in sinks]
        self._of_rank = of_rank
        self.ranks: list[Recorder] = []
        """Recorders of the ranks, if several train, with the sinks from `of_rank`."""
        self._writing = threading.Lock()
        self.not_finite_step: int | None = None
        """First step whose loss, or gradient norm on a device, was NaN or infinite.

        With a loss scale, it is the first step that overflowed at the lowest scale.
        """
        self._skipped = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Recorder: {self.count} steps, {len(self.events())} events>"

    def add(self, sample: Sample) -> None:
        """Record the metrics of a step.

        Args:
            sample: The metrics.
        """
        self._queue.append(sample)
        if self._thread is None:
            self._start()
        if len(self._queue) > self.PENDING:
            self._absorb()

    def event(self, event: Event) -> None:
        """Record an event.

        Args:
            event: The event.
        """
        self._queue.append(event)
        if self._thread is None:
            self._start()

    def restore(self, rows: Rows, events: Sequence[Event], *, write: bool = False) -> None:
        """Restore the records of a run that is over.

        Args:
            rows: Samples of shape [samples, len(COLUMNS)].
            events: Events.
            write: Write them to the sinks, too.
        """
        with self._lock:
            self._keep(rows, events)
            for outlet in self._outlets if write else ():
                outlet.put(rows, list(events), self.BACKLOG)
        if write:
            self._write()

    def rank(self, number: int) -> Recorder:
        """Return the recorder of a rank, which is created on first use.

        Args:
            number: Number of the rank; ranks must be created in order.
        """
        if number == len(self.ranks):
            self.ranks.append(Recorder(self._capacity, self._of_rank(number)))
        return self.ranks[number]

    def peak_bytes(self) -> float:
        """Return the peak memory so far. See `peak_bytes`."""
        return peak_bytes([each.rows() for each in self.ranks or [self]])

    @property
    def trouble(self) -> str | None:
        """Reason why metrics are not written, as a line; None if they are."""
        troubles = [each.trouble for each in self._outlets]
        troubles += [each.trouble for each in self.ranks]
        return next(filter(None, troubles), None)

    @property
    def count(self) -> int:
        """Number of samples recorded so far."""
        self._absorb()
        return self._count

    @property
    def event_count(self) -> int:
        """Number of events recorded so far, also of those that `events` has dropped."""
        self._absorb()
        return self._event_count

    @property
    def last(self) -> Sample | None:
        """Newest sample, with its loss as a float; None before the first."""
        self._absorb()
        with self._lock:
            return Sample(*self._recent.rows()[-1].tolist()) if self._count else None

    def rows(self, after: float = -math.inf) -> Rows:
        """Return the downsampled series.

        Args:
            after: Return only rows that end after this step, and the last row.

        Returns:
            At most ``capacity + 1`` rows; the last one ends with the newest step.
        """
        self._absorb()
        with self._lock:
            return self._series.rows(self._series.place(after))

    def mean(self, name: str, most: int) -> float:
        """Return the mean of a column over the newest steps; NaN before the first.

        Args:
            name: Name of the column.
            most: Maximum number of steps.
        """
        self._absorb()
        with self._lock:
            recent = self._recent.rows()[-most:, INDEX[name]]
            return float(np.add.reduce(recent)) / len(recent) if len(recent) else NAN

    def since(self, cursor: int, limit: int = 256) -> tuple[Rows, int]:
        """Return the rows since the previous call, for a live view.

        A view that is more than `RECENT` steps behind gets rows of the downsampled series. Their
        first row may include steps from before the cursor; their last step is always after it.

        Args:
            cursor: Cursor from the previous call; 0 is the beginning.
            limit: Maximum number of recent rows; more are merged.

        Returns:
            The rows, and the cursor for the next call.
        """
        self._absorb()
        with self._lock:
            missed = self._count - cursor
            recent = self._recent.rows()
            if missed > len(recent):
                return self._series.rows(cursor // self._series.stride), self._count
            fresh = recent[len(recent) - missed :]
            return merged(fresh, math.ceil(missed / limit)).copy(), self._count

    def total(self, name: str) -> float:
        """Return the sum of a column over all steps; unknown values count as 0.

        Args:
            name: Name of the column.
        """
        self._absorb()
        return float(self._totals[INDEX[name]])

    def rate(self, name: str) -> float:
        """Return the amount per second of step time, without the steps that exported or warmed up.

        Args:
            name: Name of the amount: samples or tokens.

        Returns:
            The rate over all steps whose rate is known; over all steps if there are none.
        """
        self._absorb()
        totals = self._rated if self._rated[INDEX["step_ms"]] else self._totals
        time_s = float(totals[INDEX["step_ms"]]) / 1e3
        return float(totals[INDEX[name]]) / time_s if time_s else NAN

    def events(self, *kinds: str) -> tuple[Event, ...]:
        """Return the events so far.

        Beyond the capacity of the recorder, every second event is dropped; the sinks get all.

        Args:
            *kinds: Kinds of events to return; none means all.
        """
        self._absorb()
        with self._lock:
            return tuple(event for event in self._events if not kinds or event.kind in kinds)

    def flush(self) -> None:
        """Write everything recorded so far to the sinks, also of the ranks, and wait for them."""
        self._absorb()
        self._write()
        for recorder in list(self.ranks):
            recorder.flush()

    def close(self) -> None:
        """Write the rest, close the sinks and end the writer thread.

        Raises:
            OSError: A sink cannot take the rest and stays open; another call tries it again.
        """
        first = not self._closing.is_set()
        self._closing.set()
        if first:
            self._start()
            assert self._thread is not None
            self._thread.join()
        else:
            self._finish()
        for recorder in self.ranks:
            with contextlib.suppress(OSError):  # the others are closed first; see below
                recorder.close()
        if (trouble := self.trouble) is not None:
            raise OSError(trouble)

    def _start(self) -> None:
        """Start the writer thread; an unused recorder does not need it."""
        with self._lock:
            if self._thread is None:
                thread = Thread(self._drain, name="ortlab-recorder")
                thread.start()
                self._thread = thread

    def _drain(self) -> None:
        periods = 0
        while not self._closing.wait(self.PERIOD_S):
            self._absorb()
            periods += 1
            much = any(outlet.size > self.PENDING for outlet in self._outlets)
            if periods % self.WRITE_EVERY == 0 or much:
                self._write()
        self._finish()

    def _finish(self) -> None:
        """Write the rest, and close the sinks that took it."""
        self._absorb()
        self._write()
        for outlet in self._outlets:
            if not outlet.size:
                with contextlib.suppress(OSError):  # its rows are written, and the run is over
                    outlet.sink.close()
        self._outlets = [outlet for outlet in self._outlets if outlet.size]

    def _absorb(self) -> None:
        """Move the queue into the series and the backlogs; any thread may call this."""
        with self._lock:  # also if the queue is empty: another thread may be moving what it had
            if not self._queue:
                return
            items = [self._queue.popleft() for _ in range(len(self._queue))]
            events = [item for item in items if isinstance(item, Event)]
            samples = [item for item in items if isinstance(item, Sample)]
            rows = _rows(samples)
            events += self._first_skipped(rows)
            self._keep(rows, events)
            if len(rows):
                self._note_not_finite(samples, rows)
            for outlet in self._outlets:
                outlet.put(rows, events, self.BACKLOG)

    def _keep(self, rows: Rows, events: Sequence[Event]) -> None:
        self._events += events
        self._event_count += len(events)
        while len(self._events) > self._capacity:
            del self._events[1::2]
        if len(rows):
            self._series.extend(rows)
            self._recent.extend(rows)
            self._count += len(rows)
            finite = np.isfinite(rows)
            self._totals += np.add.reduce(rows, axis=0, where=finite)
            finite &= finite[:, [INDEX["samples_per_s"]]]
            self._rated += np.add.reduce(rows, axis=0, where=finite)

    def _note_not_finite(self, samples: Sequence[Sample], rows: Rows) -> None:
        if self.not_finite_step is not None:
            return
        bad = ~np.isfinite(rows[:, [INDEX["loss"], INDEX["grad_norm"]]])
        scale = rows[:, INDEX["loss_scale"]]
        if not bad.any() and np.isnan(scale).all():
            return
        # A gradient norm that was not measured is the float NaN, not a tensor.
        bad[:, 1] &= [not isinstance(sample.grad_norm, float) for sample in samples]
        collapsed = (rows[:, INDEX["skipped"]] > 0) & (scale < LOWEST_LOSS_SCALE)
        found = np.where(np.isnan(scale), bad.any(axis=1), collapsed)
        if found.any():
            self.not_finite_step = int(rows[found.argmax(), INDEX["step"]])

    def _first_skipped(self, rows: Rows) -> list[Event]:
        """Return a note about the first step that was skipped because of an overflow."""
        skipped = rows[:, INDEX["skipped"]] > 0
        if self._skipped or not skipped.any():
            return []
        self._skipped = True
        first = Sample(*rows[skipped.argmax()].tolist())
        why = f"its gradients overflowed; the loss scale is {first.loss_scale:,.10g}"
        text = f"step {first.step:.0f} was skipped: {why}"
        return [Event("note", int(first.step), first.time_s, text)]

    def _write(self) -> None:
        """Write the backlogs to the sinks until they fail."""
        with self._writing:
            for outlet in self._outlets:
                for text in outlet.write(self._lock):
                    self._warn(text)

    def _warn(self, text: str) -> None:
        with self._lock:
            step, time_s = self._recent.rows()[-1, :2].tolist() if self._count else (0.0, 0.0)
        self.event(Event("warning", int(step), time_s, text))


def _rows(samples: Sequence[Sample]) -> Rows:
    values = [_values(sample) for sample in samples]
    rows = np.empty((len(values), len(COLUMNS)))
    if not values:
        return rows
    columns = list(zip(*values, strict=True))
    for name in _TENSORS:
        columns[INDEX[name]] = tuple(numbers(columns[INDEX[name]]))
    rows[:] = np.array(columns, dtype=np.float64).T
    return rows


def numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Convert floats and 0-d tensors to floats, fetching all tensors on a device at once.

    Args:
        values: Floats, and tensors of shape [].
    """
    if set(map(type, values)) <= {float, int}:  # the usual case on a CPU
        return list(map(float, values))
    on_device = [i for i, value in enumerate(values) if _on_device(value)]
    out: list[Any] = list(values)
    if on_device:
        import torch  # heavy: torch

        fetched = torch.stack([out[i].detach().float() for i in on_device]).tolist()
        for i, value in zip(on_device, fetched, strict=True):
            out[i] = value
    return [float(value) for value in out]


def _on_device(value: object) -> bool:
    # numpy's numbers have a string as their device.
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
