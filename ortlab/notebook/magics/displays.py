"""Rich display of ortlab's objects as the value of a cell, registered with IPython's formatters."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from IPython.display import publish_display_data

from ortlab.search.background import Background
from ortlab.session import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.engines.step_check import StepCheck
    from ortlab.graph.capture import Graphs, Stage
    from ortlab.graph.recompute_plans import RecomputePlans
    from ortlab.graph.source_lines import SourceLines
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.metrics.recorder import Watched
    from ortlab.notebook.views.charts import Live
    from ortlab.search.race import Race
    from ortlab.search.result import Result
    from ortlab.search.tune import Tune
    from ortlab.training.run import Run

_COMPARISON: Final = ("ortlab.history.comparison", "RunComparison")


class Displays:
    """Display functions of one shell, and the live views that they opened.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        # What the running cell has displayed already; its value is not displayed again.
        self._shown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._live: list[Live] = []
        self._functions: dict[tuple[str, str], Callable[[Any], None]] = {
            ("ortlab.training.run", "Run"): self._display,
            ("ortlab.training.trainer_run", "TrainerRun"): self._display,
            ("ortlab.history.saved_run", "SavedRun"): self._display,
            _COMPARISON: _display_comparison,
            ("ortlab.history.listing", "History"): self._display_history,
            ("ortlab.search.comparison", "Comparison"): self._display,
            ("ortlab.search.result", "Result"): self._display_result,
            ("ortlab.graph.capture", "Graphs"): _display_graphs,
            ("ortlab.graph.capture", "Stage"): _display_stage,
            ("ortlab.graph.source_lines", "SourceLines"): _display_lines,
            ("ortlab.graph.recompute_plans", "RecomputePlans"): _display_plans,
            ("ortlab.engines.step_check", "StepCheck"): _display_check,
        }

    def register(self) -> None:
        """Register the display functions; in a terminal only those that print text."""
        self._formatter("text/plain").for_type_by_name(*_COMPARISON, _print_comparison)
        if self._has_front_end:
            for (module, name), display in self._functions.items():
                self._formatter().for_type_by_name(module, name, display)

    def unregister(self) -> None:
        """Remove the display functions and close the live views."""
        while self._live:
            self._live.pop().close()
        self._formatter("text/plain").pop(".".join(_COMPARISON), None)
        if self._has_front_end:
            for module, name in self._functions:
                self._formatter().pop(f"{module}.{name}", None)

    def show(self, watched: Watched | Race | Tune) -> None:
        """Show charts or a table in the running cell.

        Args:
            watched: A run, a tracker, a race or a search.
        """
        # heavy: ipywidgets
        from ortlab.notebook.views import charts, search_view

        self._shown.add(watched)
        if not self._has_front_end and any(live.follows(watched) for live in self._live):
            return  # a terminal prints it already
        try:
            if isinstance(watched, Background):
                live = search_view.follow(watched)
            else:
                live = charts.follow(watched)
        except RuntimeError as error:
            # A package that was installed without its JavaScript still trains.
            print(f"no charts: {error}")
            return
        if live is not None:
            self._live.append(live)

    def forget(self, _: object) -> None:
        """Forget what the last cell displayed, and the views that are over."""
        self._shown.clear()
        self._live = [one for one in self._live if not one.over()]

    @property
    def _has_front_end(self) -> bool:
        """Return whether a kernel serves this shell; a terminal displays text only."""
        return getattr(self._shell, "kernel", None) is not None

    def _formatter(self, kind: str | None = None) -> Any:
        formatter = self._shell.display_formatter
        assert formatter is not None
        return formatter.ipython_display_formatter if kind is None else formatter.formatters[kind]

    def _display(self, run: Run | Race | Tune) -> None:
        """Display a run or a search, unless this cell has started it and shows it already."""
        if run in self._shown:
            return
        if isinstance(run, Background) or not run.over():
            self.show(run)
            return
        from ortlab.notebook.views import charts  # heavy: ipywidgets

        try:
            charts.reopen(run)
        except RuntimeError:  # without the package's JavaScript, its picture
            self.show(run)

    def _display_history(self, history: History) -> None:
        from ortlab.notebook.views import history_view  # heavy: ipywidgets

        live = history_view.show(history)
        if live is not None:
            self._live.append(live)

    def _display_result(self, result: Result[Any]) -> None:
        """Display the result of a search, unless this cell shows the search itself."""
        from ortlab.notebook.views import search_view  # heavy: ipywidgets

        shown = [search for search in session.searches if search in self._shown]
        if not any(repr(search.standing) == repr(result) for search in shown):
            search_view.show(result)


def _display_graphs(graphs: Graphs, stage: str | None = None) -> None:
    """Display the graph view, or without its JavaScript the table."""
    from ortlab.notebook.views import graph_view  # heavy: torch

    for note in graphs.notes:
        print(note)
    try:
        graph_view.show(graphs, stage=stage)
    except RuntimeError as error:
        print(f"{error}\n{graphs!r}")


def _display_lines(lines: SourceLines) -> None:
    """Display the code of a model above its graphs, or without the view's JavaScript alone."""
    from ortlab.notebook.views import graph_view  # heavy: torch

    try:
        graph_view.show(lines.graphs, stage=lines.stage, code=lines)
    except RuntimeError:
        data = {"text/plain": repr(lines), "text/html": lines._repr_html_()}
        publish_display_data(data)  # type: ignore[no-untyped-call]


def _display_stage(stage: Stage) -> None:
    from ortlab.graph.capture import Graphs  # heavy: torch

    _display_graphs(stage.graphs or Graphs("", {stage.name: stage}), stage.name)


def _print_comparison(comparison: RunComparison, printer: Any, cycle: bool) -> None:  # noqa: ARG001
    from ortlab.notebook.static_views import curves  # heavy: numpy

    printer.text(curves.text(comparison))


def _display_comparison(comparison: RunComparison) -> None:
    from ortlab.notebook.views import comparison_view  # heavy: matplotlib

    publish_display_data(*comparison_view.bundle(comparison))  # type: ignore[no-untyped-call]


def _display_plans(plans: RecomputePlans) -> None:
    from ortlab.notebook.views import recompute_view  # heavy: torch

    recompute_view.show(plans)


def _display_check(check: StepCheck) -> None:
    """Display a check, and its result in the same place once there is one."""
    shown = uuid.uuid4().hex

    def publish(*, update: bool) -> None:
        data = {"text/plain": repr(check), "text/html": check._repr_html_()}
        publish_display_data(data, transient={"display_id": shown}, update=update)  # type: ignore[no-untyped-call]

    publish(update=False)
    if not check.done:
        check.when_done(functools.partial(publish, update=True))
