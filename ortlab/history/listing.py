"""Table of the history, filtered and sorted, with this process's active runs first."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.history import sqlite_index
from ortlab.history.entry import AT_WORK, RunEntry, read_entry
from ortlab.history.live_run import LiveRun
from ortlab.settings import RUN_SORTS, HistorySettings
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table
from ortlab.utils.wording import shortened

SHOWN: Final = 50
"""Rows of a table as text or on paper, if no limit is given."""
GOES_ON: Final = "goes on as "
"""Prefix of the note that a run gets when another run continues it; it is stored on disk."""
_SCORES: Final = 2
"""Number of metrics in a cell of the table."""
_NOTE: Final = 160
"""Maximum length of a note in a table."""
_HIGH_FIRST: Final = {"created", "samples_per_s", "peak_bytes", "size_bytes", "steps", "wall_s"}


@dataclass(frozen=True)
class Field:
    """Column of the history.

    Attributes:
        head: Heading.
        key: Attribute of `RunEntry` that the column is sorted by.
        text: Formats the cell of a run.
        number: True for numbers, which are aligned right.
        wide: True for columns that are shown only on request.
    """

    head: str
    key: str
    text: Callable[[RunEntry], str]
    number: bool = False
    wide: bool = False

    @property
    def high_first(self) -> bool:
        """True if the highest values come first: the newest, fastest or largest."""
        return self.key in _HIGH_FIRST

    def value(self, entry: RunEntry) -> float | str | None:
        """Return the value that a run is sorted by; None is unknown.

        Args:
            entry: The run.
        """
        value = getattr(entry, self.key)
        if isinstance(value, float) and math.isnan(value):
            return None
        return value if isinstance(value, int | float) else str(value) or None


def figure(value: float) -> str:
    """Format a number of the history with four significant digits; NaN is a dash.

    Args:
        value: The number.
    """
    return "-" if math.isnan(value) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _engine(entry: RunEntry) -> str:
    """Return the requested engine, and the one used if "auto" or a fallback chose it."""
    if entry.engine_used in ("", entry.engine_asked):
        return entry.engine_asked
    return f"{entry.engine_asked} → {entry.engine_used}"


def _evaluated(entry: RunEntry) -> str:
    accuracy = entry.held_out_accuracy
    hits = "" if math.isnan(accuracy) else f" ({accuracy:.1%})"
    scores = [f"{name} {figure(value)}" for name, value in entry.scores.items()]
    others = [*scores[:_SCORES], "…"] if len(scores) > _SCORES else scores
    loss = figure(entry.held_out_loss) + hits
    # A loop of the user's own may log metrics without a loss.
    return ", ".join(others if others and loss == "-" else [loss, *others])


def _rate(entry: RunEntry) -> str:
    return "-" if math.isnan(entry.learning_rate) else f"{entry.learning_rate:g}"


def _speed(entry: RunEntry) -> str:
    return figure(entry.samples_per_s)


def _peak(entry: RunEntry) -> str:
    return _bytes(entry.peak_bytes)


def _began(entry: RunEntry) -> str:
    """Return the time of the start in the reader's local time, in an earlier year the date."""
    try:
        began = datetime.datetime.fromisoformat(entry.created).astimezone()
        this_year = began.year == datetime.datetime.now().astimezone().year
        return f"{began:%b %d %H:%M}" if this_year else f"{began:%Y-%m-%d}"
    except (ValueError, OverflowError):  # not a time, or out of range
        return "-"


def _took(entry: RunEntry) -> str:
    if math.isnan(entry.wall_s):
        return "-"
    minutes, seconds = divmod(round(entry.wall_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}" if minutes else f"{entry.wall_s:.1f} s"


def _said(entry: RunEntry) -> str:
    """Return tags, continuation, and the last note or error, shortened."""
    tags = [f"#{tag}" for tag in entry.tags.split()]
    parts = [entry.resumed] if entry.resumed else []
    if _waits(entry):
        parts.append(f"{entry.resume} continues it")
    parts += [line.strip() for line in (entry.note or entry.error).splitlines()[:1]]
    return shortened(" ".join([*tags, "; ".join(parts)]), _NOTE)


def _waits(entry: RunEntry) -> bool:
    """Return True if the run was interrupted, can be resumed, and was not resumed yet."""
    cut_off = entry.state == "interrupted" and entry.can_go_on
    return cut_off and not entry.note.startswith(GOES_ON)


def _hint(found: Iterable[RunEntry]) -> str:
    """Return a hint how to resume interrupted runs, the newest first; empty if there is none."""
    waiting = sorted(filter(_waits, found), key=lambda entry: entry.created, reverse=True)
    if not waiting:
        return ""
    newest, others = waiting[0], len(waiting) - 1
    told = f"{newest.name} was interrupted: {newest.resume} continues from its checkpoint"
    return f"{told}; {others:,} more can be resumed the same way" if others else told


FIELDS: Final = (
    Field("run", "name", lambda entry: entry.name),
    Field("state", "state", lambda entry: entry.state),
    Field("model", "model", lambda entry: entry.model),
    Field("engine", "engine_asked", _engine),
    Field("precision", "precision", lambda entry: entry.precision, wide=True),
    Field("lr", "learning_rate", _rate, number=True),
    Field("steps", "steps", lambda entry: f"{entry.steps:,}", number=True),
    Field("loss", "loss", lambda entry: entry.not_finite or figure(entry.loss), number=True),
    Field("evaluation (best)", "held_out_loss", _evaluated, number=True),
    Field("samples/s", "samples_per_s", _speed, number=True, wide=True),
    Field("peak memory", "peak_bytes", _peak, number=True, wide=True),
    Field("started", "created", _began),
    Field("took", "wall_s", _took, number=True, wide=True),
    Field("on disk", "size_bytes", lambda entry: _bytes(entry.size_bytes), number=True, wide=True),
    Field("note", "note", _said),
)


def left_out(settings: HistorySettings) -> tuple[Field, ...]:
    """Return the columns that a listing leaves out so that it fits on a page.

    Args:
        settings: Settings of the listing; a column that it is sorted by is shown.
    """
    sort = RUN_SORTS[settings.sort]
    return tuple(each for each in FIELDS if each.wide and not settings.wide and each.key != sort)


def _bytes(size: float) -> str:
    return "-" if math.isnan(size) else memory(size)


class History(Table[RunEntry]):
    """Sequence of `RunEntry` that is shown as a table, active runs of this process first.

    A notebook shows it with clickable headings and a search box.

    Args:
        found: The runs, filtered and sorted.
        settings: Filters, order and limit.
        total: Number of runs before the limit.
        own: Runs of this process.
    """

    def __init__(
        self,
        found: Sequence[RunEntry],
        settings: HistorySettings,
        *,
        total: int,
        own: Sequence[LiveRun],
    ) -> None:
        self.settings = settings
        self.own = tuple(run for run in own if not run.over())
        """Runs of this process that were active when the table was created."""
        self.hint = _hint(found)
        """Hint how to resume interrupted runs; empty if there is none."""
        self._total = total
        shown = found if settings.limit is not None else found[:SHOWN]
        notes, hidden = [], left_out(settings)
        more = ", ".join(field.head for field in hidden)
        wider = f"; wide=True (--wide) adds {more}" if hidden else ""
        if len(shown) < total:
            notes.append(f"{len(shown):,} of {total:,} runs; limit=N (--limit N) shows more{wider}")
        elif len(shown) > 1:
            size = memory(sum(entry.size_bytes for entry in found))
            notes.append(f"{total:,} runs, {size}{wider}")
        notes += [self.hint] if self.hint else []
        fields = [field for field in FIELDS if field not in hidden]
        columns = [Column[RunEntry](field.head, field.text, field.number) for field in fields]
        super().__init__(shown, columns, notes=notes, empty=_nothing(settings))
        self.found = tuple(found)
        """All runs, including those that do not fit on a page."""

    def now(self) -> History:
        """Return a table of the same runs, with the active ones of this process updated."""
        living = {entry.name: entry for entry in living_entries(self.own)}
        found = [living.get(entry.name, entry) for entry in self.found]
        return History(found, self.settings, total=self._total, own=self.own)

    def _repr_html_(self) -> str:
        return f'{_STYLE}<div class="ortlab-runs">{super()._repr_html_()}</div>'

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Any:
        return iter(self.found)

    def __getitem__(self, place: Any) -> Any:
        return self.found[place]


_STYLE: Final = """
<style>
.ortlab-runs {overflow-x: auto}
.ortlab-runs .ortlab-table :is(th, td) {padding-right: 7px}
.ortlab-runs td {white-space: nowrap}
.ortlab-runs td:is(:nth-child(1), :nth-child(3)) {max-width: 118px; overflow-wrap: break-word}
.ortlab-runs td:is(:nth-child(1), :nth-child(3), :nth-child(4), :nth-child(8)) {white-space: normal}
.ortlab-runs td:last-child {min-width: 110px; white-space: normal}
</style>
"""


def _nothing(settings: HistorySettings) -> str:
    chosen = {n: v for n, v in settings.as_dict().items() if n in _FILTERS and v is not None}
    if not chosen:
        return "no run yet; start one with ortlab.finetune or %ort finetune"
    return "no run has " + ", ".join(f"{name} {value!r}" for name, value in chosen.items())


_FILTERS: Final = ("engine", "state", "model", "tag")


def history(settings: HistorySettings, own: Sequence[LiveRun], root: Path | None = None) -> History:
    """Return the stored runs, filtered and sorted.

    Args:
        settings: Filters, order and limit.
        own: Runs of this process, whose current state takes precedence over the disk.
        root: Folder of the runs; None is `ortlab.history.run_folder.runs_root`.
    """
    living = {entry.name: entry for entry in living_entries(own)}
    found = [living.get(entry.name, entry) for entry in sqlite_index.entries(root)]
    found = list(chosen(found, settings))
    at_work = [entry for entry in found if entry.name in living and entry.at_work]
    first = {entry.name for entry in at_work}
    rest = [entry for entry in found if entry.name not in first]
    ordered = [*reversed(at_work), *ranked(rest, settings.sort, reverse=settings.reverse)]
    limited = ordered if settings.limit is None else ordered[: settings.limit]
    return History(limited, settings, total=len(found), own=own)


def chosen(found: Iterable[RunEntry], settings: HistorySettings) -> Iterable[RunEntry]:
    """Yield the runs that match the filters.

    Args:
        found: The runs.
        settings: Filters.
    """
    for entry in found:
        state = "running" if entry.state in AT_WORK else entry.state
        if settings.state not in (None, state):
            continue
        if settings.engine not in (None, entry.engine_asked, entry.engine_used):
            continue
        if settings.model is not None and settings.model.lower() not in entry.model.lower():
            continue
        if settings.tag is not None and settings.tag not in entry.tags.split():
            continue
        yield entry


def ranked(found: Iterable[RunEntry], sort: str, *, reverse: bool = False) -> list[RunEntry]:
    """Sort runs with the best first: low losses, high speeds, the newest; unknown values last.

    Args:
        found: The runs, from oldest to newest.
        sort: Name of the order; a key of `ortlab.settings.RUN_SORTS`.
        reverse: Reverse the order of the known values.
    """
    key = RUN_SORTS[sort]
    high = (key in _HIGH_FIRST) != reverse
    field = Field("", key, lambda _: "")
    newest = list(reversed(list(found)))  # of equal values, the newest comes first
    known = [entry for entry in newest if field.value(entry) is not None]
    unknown = [entry for entry in newest if field.value(entry) is None]
    return sorted(known, key=lambda entry: field.value(entry) or 0, reverse=high) + unknown


def living_entries(own: Iterable[LiveRun]) -> list[RunEntry]:
    """Return the current summaries of this process's runs, except those whose folder was removed.

    Args:
        own: Runs of this process.
    """
    return [live_entry(run) for run in own if run.folder.is_dir()]


def live_entry(run: LiveRun) -> RunEntry:
    """Return the current summary of a run of this process; after its end, that of its folder.

    Args:
        run: The run.

    Raises:
        ValueError: Its folder was removed.
    """
    over = run.over()  # checked before reading: once a run is over, its folder is complete
    entry = read_entry(run.folder, None if over else run.so_far().as_dict())
    if entry is None:
        raise ValueError(f"the folder of {run.name} was removed: {run.folder}")
    if over:
        return entry
    return dataclasses.replace(
        entry,
        engine_asked=run.engine_asked,
        engine_used=run.engine_used,
        fallback=run.fallback_reason or "",
        precision=run.current_settings.model.precision,
        learning_rate=run.current_settings.optim.learning_rate,
    )
