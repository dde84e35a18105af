"""Status of one kernel: its wrapped models, its runs and searches, and its workers."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ortlab.engines.base import GraphCount
from ortlab.engines.wrapped_models import ModelRow
from ortlab.utils.tables import Column, Table, escaped

if TYPE_CHECKING:
    from ortlab.engines.wrapped_models import WrappedModels
    from ortlab.training.run import Run
    from ortlab.training.run_registry import BackgroundSearch, FollowedRun, RunRegistry


class _Ends(Protocol):
    def over(self) -> bool: ...


E = TypeVar("E", bound=_Ends)

_ENDED: Final = 5
"""Number of ended runs and searches that are shown; ``%ort runs`` lists all."""
_START: Final = (
    "%%ort as the first line of a cell wraps its models; %ort finetune model data trains one"
)
_HELP: Final = "%ort help lists all commands"


@dataclass(frozen=True)
class RunRow:
    """Row of a run, a race or a search.

    Attributes:
        name: Name of the run.
        state: Its state.
        step: Optimizer steps done, and all of them if known; "-" for a search.
        engine_asked: Engine that was asked for.
        engine_used: Engine in use.
        model: The user's name of the model, if known, and its class.
        notes: What the user must know: where it resumed from, a fallback, an error, how to resume.
    """

    name: str
    state: str
    step: str = "-"
    engine_asked: str = "-"
    engine_used: str = "-"
    model: str = "-"
    notes: tuple[str, ...] = ()


_MODEL_COLUMNS: Final[tuple[Column[ModelRow], ...]] = (
    Column("model", lambda row: row.name),
    Column("class", lambda row: row.kind),
    Column("engine asked", lambda row: row.engine_asked),
    Column("engine used", lambda row: row.engine_used),
    Column("graphs", lambda row: _graphs(row), number=True),
    Column("in ORT", lambda row: _in_ort(row)),
    Column("in torch", lambda row: _in_torch(row)),
    Column("fallback", lambda row: row.fallback_reason or "-"),
)
_RUN_COLUMNS: Final[tuple[Column[RunRow], ...]] = (
    Column("run", lambda row: row.name),
    Column("state", lambda row: row.state),
    Column("step", lambda row: row.step, number=True),
    Column("engine asked", lambda row: row.engine_asked),
    Column("engine used", lambda row: row.engine_used),
    Column("model", lambda row: row.model),
)


class KernelStatus:
    """Status of a kernel at one moment, displayed as tables.

    Args:
        wrapped: The wrapped models.
        registry: The runs and searches.
        workers: Description of the workers; "" if none were started.
        notes: Further lines to show.

    Attributes:
        models: Table of the wrapped models.
        runs: Table of the runs and searches, active ones first.
        workers: Description of the workers.
        notes: Lines below the tables: what was not wrapped, and how to go on.
    """

    def __init__(
        self,
        wrapped: WrappedModels,
        registry: RunRegistry,
        *,
        workers: str = "",
        notes: Iterable[str] = (),
    ) -> None:
        models = wrapped.table()
        self.models = Table(
            tuple(models), _MODEL_COLUMNS, notes=models.notes, empty="no model is wrapped"
        )
        known = [*registry.runs, *registry.trainers]
        rows = [*map(_run_row, _shown(known)), *map(_search_row, _shown(list(registry.searches)))]
        self.runs = Table(
            rows,
            _RUN_COLUMNS,
            notes=[f"{row.name}: {note}" for row in rows for note in row.notes],
            empty="no run yet",
        )
        self.workers = workers
        begun = len(self.models) or rows
        self.notes = (*notes, *(() if begun else (_START,)), _HELP)

    def __repr__(self) -> str:
        lines = [escaped(line) for line in self._lines()]
        return "\n\n".join([repr(self.models), repr(self.runs), "\n".join(lines)])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return (
            f"{self.models._repr_html_()}{self.runs._repr_html_()}"
            f'<div class="ortlab-table">{lines}</div>'
        )

    def _lines(self) -> list[str]:
        return [*([f"workers: {self.workers}"] if self.workers else []), *self.notes]


def _graphs(row: ModelRow) -> str:
    return "-" if row.graphs is None else f"{row.graphs.graphs or 'none yet'}"


def _in_ort(row: ModelRow) -> str:
    found = row.graphs or GraphCount(0)
    return _segments(found, found.ort_segments, found.ort_share)


def _in_torch(row: ModelRow) -> str:
    found = row.graphs or GraphCount(0)
    return _segments(found, found.torch_segments, found.torch_share)


def _segments(found: GraphCount, count: int | None, share: float | None) -> str:
    if not found.graphs or count is None:
        return "-"
    told = f"{count} segment{'s' * (count != 1)}"
    return told if share is None or not count else f"{told}, {share:.1%}"


def _shown(known: Sequence[E]) -> list[E]:
    """Return the active ones and the newest of those that ended."""
    ended = [each for each in known if each.over()]
    return [each for each in known if not each.over()] + ended[-_ENDED:]


def _run_row(run: Run | FollowedRun) -> RunRow:
    try:
        status = run.status()
        total = "" if status.total_steps is None else f"/{status.total_steps:,}"
        error = (status.error or "").splitlines()[:1]
        advice = [f"to resume: {status.advice}"] if status.advice else []
        return RunRow(
            run.name,
            status.state,
            f"{status.step:,}{total}",
            run.engine_asked,
            run.engine_used,
            _model(run),
            (*filter(None, [run.resumed]), *status.badges, *error, *advice),
        )
    # Its thread may change anything meanwhile. The other rows are right, and so is the next status.
    except Exception as error:  # noqa: BLE001
        return _unreadable(run.name, error)


def _model(run: Run | FollowedRun) -> str:
    """Return the user's name of the model, if known, and its class."""
    with contextlib.suppress(OSError, ValueError):  # the folder was removed
        about = run.about
        name = about["names"].get("model")
        return f"{name} ({about['model']})" if name else f"{about['model']}"
    return "-"


def _search_row(search: BackgroundSearch) -> RunRow:
    try:
        if not search.over():
            return RunRow(search.name, "running", notes=(search.doing,))
        if search.error is not None:
            return RunRow(search.name, "failed", notes=(f"{search.error}",))
        return RunRow(search.name, search.doing)
    except Exception as error:  # noqa: BLE001 - as in `_run_row`
        return _unreadable(search.name, error)


def _unreadable(name: str, error: Exception) -> RunRow:
    told = f"its status cannot be read now: {type(error).__name__}: {error}"
    return RunRow(name, "unknown", notes=(told,))
