"""The settings of a run, or of a model before one, as controls: what they cost, what cannot be had.

The kernel's side: every control is made from its setting's declaration, and every reason comes from
the engines (`ortlab.training.settings_preview`). The browser's side is js/src/panel.js, which
documents the messages.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import anywidget
import numpy as np
import traitlets
from IPython.core.getipython import get_ipython

from ortlab.engines.registry import graph_key
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.views import display
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import bundled
from ortlab.notebook.views.pump import Pump
from ortlab.session import session
from ortlab.settings import FinetuneSettings
from ortlab.training import changes, settings_preview
from ortlab.training.run import Run
from ortlab.training.settings_preview import Control, SettingPreview
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table
from ortlab.utils.threads import Thread

if TYPE_CHECKING:
    from torch import nn

    from ortlab.graph.memory import MemoryPlan
    from ortlab.metrics.recorder import Watched
    from ortlab.settings import EngineSettings
    from ortlab.training.control import ChangeOutcome, ChangeRequest

Start = Callable[[dict[str, Any]], Run]
"""Starts a run with these settings."""


class Panel:
    """What a panel shows and does, for a run or for a model before its run; without a widget.

    With `start` a model's panel has a button that begins a run on what is called `data`. What is
    edited stays here until it is applied. `receive` may be called by the kernel's own thread and
    waits for nothing; `news` does the work, in a thread of the view.
    """

    def __init__(
        self,
        target: Run | nn.Module,
        *,
        name: str = "model",
        start: Start | None = None,
        data: str = "DATA",
    ) -> None:
        self.run = target if isinstance(target, Run) else None
        self._target = target
        self._name = name
        self._data = data  # what it is called
        self._start = start
        self.started_in: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Where a run that is started shows itself."""
        self._fixed = self.run.fixed if self.run else None
        self._held = self._holds()
        self._edits: dict[str, str] = {}
        self._serial = 0
        self._asked: ChangeRequest | None = None  # the last change whose outcome was not shown yet
        self._result = ("", "")
        self._plans: dict[tuple[FinetuneSettings, object], tuple[MemoryPlan, EngineSettings]] = {}
        self._foreseen = ""
        self._foreseen_of: object = None
        self._opened = False  # nobody waits for a prediction before that
        self._lock = threading.Lock()  # of `news`: a view has several threads
        self._key: object = None
        self._sent: dict[str, Any] = {}

    @property
    def title(self) -> str:
        """What it is the panel of."""
        return self.run.name if self.run else self._name

    def receive(self, content: Mapping[str, Any]) -> None:
        """What a person did: edit, apply, undo, checkpoint, start, or that the panel was opened."""
        verb = content["do"]
        if "edits" in content:
            self._edits, self._serial = dict(content["edits"]), content["serial"]
            self._result = ("", "")
        self._opened = True
        acts: dict[str, Callable[[], None]] = {
            "apply": self.apply,
            "undo": self.undo,
            "checkpoint": self.checkpoint,
            "start": self.start,
        }
        if verb in acts:
            try:
                acts[verb]()
            except (ValueError, RuntimeError) as error:
                self._result = ("refused", str(error))

    def apply(self) -> None:
        """Has the run take what was edited; ValueError where it cannot."""
        assert self.run is not None
        values, wrong = self._values()
        if wrong:
            raise ValueError("; ".join(wrong.values()))
        if values:
            self._ask(self.run.apply(**values))

    def undo(self) -> None:
        """Has the run take what held before the last change; ValueError where there was none."""
        assert self.run is not None
        if self.run.earlier_settings:
            self._ask(self.run.undo())

    def checkpoint(self) -> None:
        """Has the run keep its state in a file; not waited for."""
        self._result = ("asked", "a checkpoint is kept after the step in flight…")
        Thread(self._keep, name="ortlab-checkpoint").start()

    def start(self) -> None:
        """Begins a run of the model with what was edited."""
        assert self._start is not None
        values, wrong = self._values()
        if wrong:
            raise ValueError("; ".join(wrong.values()))
        with self.started_in():
            run = self._start(values)
        self._edits = {}
        self._result = ("done", f"{run.name} has begun")

    def news(self) -> dict[str, Any]:
        """What changed of ``controls`` and ``standing`` since the last call, as JSON."""
        with self._lock:
            self._hear()
            held = self._holds()
            if held != self._held:
                self._held = held
                # What holds is no edit; what was edited meanwhile still is one.
                values, wrong = self._values()
                left = {*values, *wrong}
                self._edits = {name: text for name, text in self._edits.items() if name in left}
            values, wrong = self._values()
            chosen = self._chosen(values, wrong)
            over = self.run is not None and self.run.over()
            key = (held, chosen, over)
            found: dict[str, Any] = {}
            if key != self._key:
                self._key = key
                found["controls"] = [
                    _json(each, held)
                    for each in settings_preview.controls(held, chosen, fixed=self._fixed)
                ]
            begun = self.run is not None and self.run.step > 0
            if self._opened and (key, begun) != self._foreseen_of:
                self._foreseen_of = (key, begun)
                self._foreseen = self._memory(held, chosen)
            found["standing"] = self._standing(held, chosen, wrong, over=over)
            new = {name: value for name, value in found.items() if self._sent.get(name) != value}
            self._sent |= new
            return new

    def table(self) -> Table[Control]:
        """The same as text: settings, values, costs, what cannot be had; the line to type."""
        held = self._holds()
        found = settings_preview.controls(held, held, fixed=self._fixed)
        front = [each for each in found if each.declaration.panel]
        defaults = {name: each.default for name, each in FinetuneSettings.declarations().items()}
        others = [
            each
            for each in found
            if not each.declaration.panel and each.value != defaults[each.declaration.name]
        ]
        shown = [*front, *others]
        notes = [f"{len(found) - len(shown)} more settings have their defaults"]
        if self.run is None:
            notes.append(f"to train: %ort finetune {self._name} {self._data} --lr 1e-4")
        elif self.run.over():
            notes.append(f"{self.run.name} is over ({self.run.state}): nothing can be applied")
        else:
            notes.append("to change some: run.apply(lr=1e-4), or %ort apply --lr 1e-4")
            notes.append("to go back: run.undo(), or %ort undo")
        return Table(shown, _COLUMNS if self.run else _COLUMNS_BEFORE, notes=notes)

    def _holds(self) -> FinetuneSettings:
        if self.run is not None:
            return self.run.current_settings
        entry = session.wrapped.entry(self._target)
        return FinetuneSettings.of({} if entry is None else entry.settings.as_dict())

    def _values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What was edited and differs from what holds, and what cannot be read."""
        values, wrong = {}, {}
        for name, text in self._edits.items():
            declaration = FinetuneSettings.declarations()[name]
            try:
                value = declaration.check(declaration.parse(_typed(text, declaration.optional)))
            except ValueError as error:
                wrong[name] = str(error)
                continue
            if value != getattr(self._held, name):
                values[name] = value
        return values, wrong

    def _chosen(self, values: Mapping[str, Any], wrong: dict[str, str]) -> FinetuneSettings:
        if not values:  # asked with every update: to check all settings takes 0.2 ms
            return self._held
        try:
            return self._held.replace(**values)
        except ValueError as error:  # each is right, but not with the others
            wrong[list(values)[-1]] = str(error)
            return self._held

    def _ask(self, request: ChangeRequest) -> None:
        self._result = ("asked", "applied after the step in flight…")
        self._asked = request  # last, since another thread looks for it

    def _hear(self) -> None:
        """Show the outcome of the last change, if there is one by now."""
        request = self._asked
        if request is None:
            return
        assert self.run is not None
        if not request.done():
            waits = self.run.state == "paused"
            after = "when the run goes on" if waits else "after the step in flight…"
            self._result = ("asked", f"applied {after}")
            return
        outcome = request.result()
        if outcome.state == "applied":
            self._result = ("done", _made(outcome))
        elif outcome.state == "refused":
            self._result = ("refused", outcome.text)
        else:
            self._result = ("refused", f"{self.run.name} ended before it was applied")
        self._asked = None

    def _keep(self) -> None:
        assert self.run is not None
        try:
            path = self.run.checkpoint()
        except (ValueError, RuntimeError, OSError) as error:
            self._result = ("refused", str(error))
        else:
            self._result = ("done", f"checkpoint kept: {path}")

    def _standing(
        self,
        held: FinetuneSettings,
        chosen: FinetuneSettings,
        wrong: Mapping[str, str],
        *,
        over: bool,
    ) -> dict[str, Any]:
        running = self.run is not None
        differs = _differing(held, chosen)
        blocked = settings_preview.refused(held, chosen, fixed=self._fixed) if differs else None
        cost = ""
        if differs and running and not blocked:
            cost = settings_preview.COSTS[changes.cost(held, chosen)]
        earlier = self.run.earlier_settings if self.run else []
        return {
            "title": self.title,
            "state": self.run.state if self.run else "",
            "over": over,
            "startable": self._start is not None,
            "serial": self._serial,
            "edits": dict(self._edits),
            "wrong": dict(wrong),
            "blocked": blocked or "",
            "pending": [_difference(name, *pair) for name, pair in differs.items()],
            "cost": cost,
            "memory": "" if over else self._foreseen,
            "undo": _undone(held, earlier[-1]) if earlier and not over else "",
            "line": self._line(differs),
            "result": list(self._result),
            "busy": self._asked is not None,
        }

    def _line(self, differs: Mapping[str, tuple[Any, Any]]) -> str:
        """What to type for the same."""
        if not differs:
            return ""
        declared = FinetuneSettings.declarations()
        if self.run is not None:
            values = (f"{name}={value!r}" for name, (value, _) in differs.items())
            return f"run.apply({', '.join(values)})"
        words = (
            f"{declared[name].flag} {declared[name].show(value)}"
            for name, (value, _) in differs.items()
        )
        return f"%ort finetune {self._name} {self._data} {' '.join(words)}"

    def _memory(self, held: FinetuneSettings, chosen: FinetuneSettings) -> str:
        """The peak of a step as it is and as it would be, by the plan of ORT's graph."""
        now, why = self._peak(held)
        if now is None:
            return f"no prediction: {why}"
        if chosen == held:
            return f"{memory(now)} at the peak of a step{_each(held)}, by the graph"
        then, why = self._peak(chosen)
        if then is None:
            return f"{memory(now)} at the peak of a step{_each(held)} now; no prediction: {why}"
        if then == now and _each(held) == _each(chosen):
            return f"{memory(now)} at the peak of a step, as now"
        return f"{memory(now)} → {memory(then)} at the peak of a step{_each(chosen)}"

    def _peak(self, settings: FinetuneSettings) -> tuple[int | None, str]:
        try:
            graph = (graph_key(settings), settings.recompute, settings.optimizer)
            key = (self._held, graph)
            if key not in self._plans:
                # That of what holds, and that of what is looked at.
                kept = {known: plan for known, plan in self._plans.items() if known[0] is key[0]}
                self._plans = {**kept, key: session.plan_for(self._target, settings)}
        # A graph may hold what no plan can be made of: a panel without one is still a panel.
        except Exception as error:  # noqa: BLE001
            return None, str(error)
        return settings_preview.foreseen(*self._plans[key], settings, batch=self._batch(settings))

    def _batch(self, settings: FinetuneSettings) -> int | None:
        """Samples in a micro-batch: what is chosen, or as many as a loader of its own has given."""
        if self.run is None or "batch_size" not in self.run.fixed:
            return settings.batch_size
        recorder = self.run.recorder
        rows, _ = recorder.since(max(recorder.count - 64, 0))
        samples = rows[:, INDEX["samples"]]
        if not np.isfinite(samples).any():
            return None
        return max(1, round(float(np.nanmax(samples)) / self.run.current_settings.accumulation))


def _each(settings: FinetuneSettings) -> str:
    return " of each worker" if settings.workers > 1 else ""


def _made(outcome: ChangeOutcome) -> str:
    if not outcome.text:
        return "applied: it held already"
    cost_s = outcome.cost_s
    took = f"in {plain_text.milliseconds(1e3 * cost_s)}" if cost_s else "at no cost"
    return f"applied after step {outcome.step:,}, {took}: {outcome.text}"


def _typed(text: str, optional: bool) -> str:
    return "none" if optional and not text.strip() else text


def _difference(name: str, value: Any, before: Any) -> str:
    show = FinetuneSettings.declarations()[name].show
    return f"{name}={show(value)} (was {show(before)})"


@functools.lru_cache(maxsize=16)  # each update of a view asks, and nearly always for the same
def _differing(held: FinetuneSettings, chosen: FinetuneSettings) -> Mapping[str, tuple[Any, Any]]:
    """What is chosen and what holds, by the names of the settings in which they differ."""
    before = held.as_dict()
    return {
        name: (value, before[name])
        for name, value in chosen.as_dict().items()
        if value != before[name]
    }


def _undone(held: FinetuneSettings, earlier: FinetuneSettings) -> str:
    return ", ".join(_difference(name, *pair) for name, pair in _differing(held, earlier).items())


def _json(control: Control, held: FinetuneSettings) -> dict[str, Any]:
    declaration = control.declaration
    return {
        "name": declaration.name,
        "help": declaration.help,
        "unit": declaration.unit,
        "front": declaration.panel,
        "number": declaration.type in (int, float),
        "optional": declaration.optional,
        "held": declaration.show(getattr(held, declaration.name)),
        "choices": [[choice.text, choice.reason] for choice in control.choices],
        "reason": control.reason,
        "costs": list(control.costs),
    }


def _refused(control: Control) -> str:
    if control.reason:
        return control.reason
    return "; ".join(_short(choice) for choice in control.choices if choice.reason) or "-"


def _short(choice: SettingPreview) -> str:
    return choice.reason if choice.text in choice.reason else f"{choice.text}: {choice.reason}"


_BEFORE: Final[tuple[Column[Control], ...]] = (
    Column("setting", lambda each: each.declaration.name),
    Column("value", lambda each: each.declaration.show(each.value)),
    Column(
        "choose from",
        lambda each: ", ".join(c.text for c in each.choices if not c.reason) or "-",
    ),
)
_AFTER: Final[tuple[Column[Control], ...]] = (Column("cannot be had", _refused),)
_COLUMNS_BEFORE: Final = (*_BEFORE, *_AFTER)
_COLUMNS: Final = (
    *_BEFORE,
    Column[Control]("a change costs", lambda each: " or ".join(each.costs) or "-"),
    *_AFTER,
)


def panel_of(watched: Watched) -> Panel | None:
    """The panel of a run; None for what has no settings, such as a loop of the user's own."""
    return Panel(watched) if isinstance(watched, Run) else None


class PanelView(anywidget.AnyWidget):
    """A panel by itself, in a notebook.

    RuntimeError where the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    controls: traitlets.List[Any] = traitlets.List().tag(sync=True)
    standing: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def __init__(self, panel: Panel) -> None:

        self._panel = panel
        self._pump: Pump | None = None
        super().__init__(_esm=bundled("panel.js"), _css=bundled("panel.css"), **panel.news())
        self.on_msg(self._receive)
        if panel.run is not None:
            self._pump = Pump(panel.run, self._send_news, self._send_news)

    def close(self) -> None:
        """Closes the panel in every browser; the run goes on."""
        pump = getattr(self, "_pump", None)  # ipywidgets closes what is half made, too
        if pump is not None:
            pump.close()
        super().close()

    def _receive(self, _: PanelView, content: dict[str, Any], __: list[bytes]) -> None:
        """A click, in the kernel's own thread: what takes time is for another."""
        run = self._panel.run
        if run is not None and content["do"] in ("pause", "resume", "stop"):
            getattr(run, content["do"])()
        else:
            self._panel.receive(content)
        if self._pump is None or self._pump.finished:
            Thread(self._send_news, name="ortlab-panel").start()
        else:
            self._pump.wake()

    def _send_news(self) -> None:
        for name, value in self._panel.news().items():
            setattr(self, name, value)


def show(panel: Panel) -> None:
    """Shows the panel in the cell that is running; as text where there is no notebook.

    Without its JavaScript too, and says so. A run that is started from the panel is shown in its
    place.
    """
    table = panel.table()
    if getattr(get_ipython(), "kernel", None) is None:
        print(table)
        return
    display_id = uuid.uuid4().hex
    panel.started_in = lambda: display.shown_in(display_id)
    try:
        view = PanelView(panel)
    except RuntimeError as error:
        print(f"{error}\n{table!r}")
        return
    ends_with_cell(lambda: close_all(view))
    data, metadata = view._repr_mimebundle_() or ({}, {})
    data |= {"text/plain": repr(table), "text/html": table._repr_html_()}
    display.publish(data, metadata, display_id)
