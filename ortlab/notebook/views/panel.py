"""Settings panel of a run, or of a model before a run: controls with costs and unavailable values.

This is the kernel's side: every control is generated from the declaration of its setting, and every
reason comes from the engines (`ortlab.training.settings_preview`). Model, data and loss are chosen
among the notebook's variables. The browser's side is js/src/form.js, which documents the messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import anywidget
import numpy as np
import traitlets
from IPython.core.getipython import get_ipython

from ortlab.engines.registry import graph_key, resolved
from ortlab.engines.wrapped_models import is_model
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.views import display
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import bundled
from ortlab.notebook.views.pump import Pump
from ortlab.session import session
from ortlab.settings import (
    LOSSES,
    DataSettings,
    Declaration,
    FinetuneSettings,
    LimitSettings,
    OptimSettings,
    ParallelSettings,
)
from ortlab.training import changes, data_loading, settings_preview
from ortlab.training.run import Run
from ortlab.training.settings_preview import Control, SettingPreview
from ortlab.utils.errors import message
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table
from ortlab.utils.threads import Thread

if TYPE_CHECKING:
    from torch import nn

    from ortlab.graph.memory import MemoryPlan
    from ortlab.metrics.recorder import Watched
    from ortlab.settings import EngineSettings
    from ortlab.training.control import ChangeOutcome, ChangeRequest


class Variables(Protocol):
    """The notebook's variables, from which a panel takes model, data and loss."""

    def names(self, kind: str) -> list[str]:
        """Return the names of the variables of a kind: model, loader or loss."""
        ...

    def get(self, name: str | None) -> Any:
        """Return the value of a variable; None if there is none."""
        ...

    def model(self, name: str) -> nn.Module:
        """Return a model; raise a ValueError if there is none of that name."""
        ...

    def value(self, kind: str, name: str) -> Any:
        """Return the value of a variable; raise a ValueError if there is none of that name."""
        ...

    def loss(self, name: str | None) -> Any:
        """Return the loss function of that name, or the name itself if it is one of ortlab."""
        ...


_PLACES: Final = {
    "model": ("model", "model", "the model to train"),
    "train": ("training data", "loader", "the data to train on"),
    "eval_dataset": ("evaluation data", "loader", "data to evaluate the model on"),
}
"""Arguments that are variables of the notebook -> label, kind of variables, help."""
_FIRST: Final = ("loss", LimitSettings.title, DataSettings.title, OptimSettings.title)
"""Setting and topics that come first in the panel, loss beside the data that it is computed of."""
_MEANT: Final = (("loss", r"\bloss"), ("train", r"\b(batch|data)\b"))
"""Control -> words of errors that are about it and name no setting with its value."""


class Panel:
    """State and actions of a panel, for a run or for a model before its run, without a widget.

    Edits are stored here until they are applied. `receive` may be called in the kernel's main
    thread and never waits; `news` does the work, in a thread of the view.

    Args:
        target: The run, or the model before its run.
        name: Name of the model in the notebook.
        data: Name of the training data in the notebook; None if the user has yet to choose it.
        variables: The notebook's variables; the panel can start a run only with them.
    """

    def __init__(
        self,
        target: Run | nn.Module,
        *,
        name: str = "model",
        data: str | None = None,
        variables: Variables | None = None,
    ) -> None:
        self.run = target if isinstance(target, Run) else None
        self._model = target
        self._variables = variables
        self._named = {"model": name, "train": data or "", "eval_dataset": ""}
        self.started_in: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Context in which a run is started; it selects the output that displays the run."""
        self._fixed = self.run.fixed if self.run else None
        self._edits: dict[str, str] = {}
        self._held = self._holds()
        self._serial = 0
        # JupyterLab begins to send a view's messages to a subshell, a thread of its own, while
        # earlier ones still wait for the main thread.
        self._receiving = threading.Lock()
        self._asked: ChangeRequest | None = None  # last change whose outcome was not shown yet
        self._result = ("", "")
        self._failed: dict[str, str] = {}  # control -> reason of a start that failed because of it
        self._plans: dict[tuple[FinetuneSettings, object], tuple[MemoryPlan, EngineSettings]] = {}
        self._foreseen = ""
        self._foreseen_of: object = None
        self.opened = False  # predictions are not needed before
        self._key: object = None
        self._found: list[Control] = []
        self._found_for: object = None  # settings in effect and chosen that these are for
        self._sent: dict[str, Any] = {}

    @property
    def title(self) -> str:
        """Name of the run or the model."""
        return self.run.name if self.run else self._chosen_name("model")

    def receive(self, content: Mapping[str, Any]) -> None:
        """Handle a message of the browser: edit, apply, undo, checkpoint, start or open.

        Errors of an action become the result that the panel shows.

        Args:
            content: The message, as documented in js/src/panel.js.
        """
        verb = content["do"]
        if "edits" in content:
            with self._receiving:
                if content["serial"] >= self._serial:
                    self._edit(dict(content["edits"]), content["serial"])
        self.opened = True
        acts: dict[str, Callable[[], None]] = {
            "apply": self.apply,
            "undo": self.undo,
            "checkpoint": self.checkpoint,
            "start": self.start,
        }
        if verb in acts:
            self._failed = {}
            try:
                acts[verb]()
            except (ValueError, RuntimeError) as error:
                self._refuse(str(error))

    def _edit(self, edits: dict[str, str], serial: int) -> None:
        before, self._edits = self._edits, edits
        self._serial = serial
        self._result = ("", "")
        if any(name in self._failed for name, _ in before.items() ^ edits.items()):
            self._failed = {}

    def apply(self) -> None:
        """Request the run to apply the edits.

        Raises:
            ValueError: If an edit is not a valid value, or the run cannot apply it.
        """
        assert self.run is not None
        values, wrong = self._values()
        if wrong:
            raise ValueError("; ".join(wrong.values()))
        if values:
            self._ask(self.run.apply(**values))

    def undo(self) -> None:
        """Request the run to revert its last change; no effect if there was none.

        Raises:
            ValueError: If the run cannot apply the earlier settings.
        """
        assert self.run is not None
        if self.run.earlier_settings:
            self._ask(self.run.undo())

    def checkpoint(self) -> None:
        """Save a checkpoint of the run, without waiting for it."""
        self._result = ("asked", "a checkpoint will be saved after the step in flight…")
        Thread(self._keep, name="ortlab-checkpoint").start()

    def start(self) -> None:
        """Start a run of the model with the edited settings, which the panel keeps.

        Raises:
            ValueError: If an edit is not a valid value, or the run cannot be started with it.
        """
        assert self._variables is not None
        values, wrong = self._values()
        chosen = self._chosen(values, wrong)
        if wrong:
            raise ValueError("; ".join(wrong.values()))
        given: dict[str, Any] = {}
        for place, (label, kind, _) in _PLACES.items():
            name = self._chosen_name(place)
            try:
                if place == "train" and not name:
                    raise ValueError(f"choose the {label}")
                given[place] = self._variables.value(kind, name) if name else None
                if kind == "loader" and name:
                    evaluation = place == "eval_dataset"
                    data_loading.batches(given[place], chosen, evaluation=evaluation)
            except ValueError as error:
                self._refuse(str(error), place)
                return
        given["loss"] = self._variables.loss(values.pop("loss", None))
        with self.started_in():
            run = session.finetune(**given, **values)
        if self._result[0] != "refused":  # it may have failed already
            self._result = ("done", f"{run.name} started")

    def failed_at_start(self, run: Watched) -> bool:
        """Show the error of a run that the panel started, if it failed before its first step.

        Args:
            run: The run, which is over.

        Returns:
            True if it failed and the panel is needed again.
        """
        if not isinstance(run, Run) or run.error is None or run.step:
            return False
        said = "\n".join((message(run.error), *getattr(run.error, "__notes__", ())))
        self._refuse(said)
        return True

    def _refuse(self, why: str, *controls: str) -> None:
        """Show an error, and mark the controls that it is about."""
        self._failed = dict.fromkeys(controls or _about(why), why)
        self._result = ("refused", f"not started: {why}" if self._variables else why)

    def news(self) -> dict[str, Any]:
        """Return the changes of ``controls`` and ``standing`` since the last call, as JSON.

        A view that calls this in several threads must also send the result under one lock.
        """
        self._hear()
        self._follow_model()
        held = self._holds()
        if held != self._held:
            self._held = held
            # An edit that is in effect now is no longer an edit; newer edits still are.
            values, wrong = self._values()
            left = {*values, *wrong, *_PLACES}
            self._edits = {name: text for name, text in self._edits.items() if name in left}
        values, wrong = self._values()
        chosen = self._chosen(values, wrong)
        over = self.run is not None and self.run.over()
        key = (held, chosen, over)
        found: dict[str, Any] = {}
        if key != self._key or self._variables is not None:  # which may be new ones
            self._key = key
            found["controls"] = [
                *self._places(),
                *(_json(self._of_variables(e), held) for e in self._controls(held, chosen)),
            ]
        begun = self.run is not None and self.run.step > 0
        if self.opened and (key, begun) != self._foreseen_of:
            self._foreseen_of = (key, begun)
            self._foreseen = self._memory(held, chosen)
        found["standing"] = self._standing(held, chosen, wrong, over=over)
        new = {name: value for name, value in found.items() if self._sent.get(name) != value}
        self._sent |= new
        return new

    def table(self) -> Table[Control]:
        """Return the panel as a table: settings, values, costs, unavailable values, code line."""
        held = self._holds()
        found = self._controls(held, held)
        front = [each for each in found if each.declaration.panel]
        defaults = {name: each.default for name, each in FinetuneSettings.declarations().items()}
        others = [
            each
            for each in found
            if not each.declaration.panel and each.value != defaults[each.declaration.name]
        ]
        shown = [*front, *others]
        notes = [f"{len(found) - len(shown)} more settings have their default values"]
        notes += filter(None, [resolved(held)[1]])
        if self.run is None:
            notes.append(f"to train: {self._line({})} --lr 1e-4")
        elif self.run.over():
            notes.append(f"{self.run.name} has ended ({self.run.state}): no setting can be changed")
        else:
            notes.append(
                "to change settings: run.apply(learning_rate=1e-4), or %ort apply --lr 1e-4"
            )
            notes.append("to revert the last change: run.undo(), or %ort undo")
        return Table(shown, _COLUMNS if self.run else _COLUMNS_BEFORE, notes=notes)

    def _chosen_name(self, place: str) -> str:
        return self._edits.get(place, self._named[place])

    def _follow_model(self) -> None:
        """Turn to the model that the user chose, or that its variable has by now."""
        if self._variables is None:
            return
        value = self._variables.get(self._chosen_name("model"))
        if value is not self._model and is_model(value):
            self._model, self._plans, self._foreseen_of = value, {}, None

    def _places(self) -> Iterator[dict[str, Any]]:
        """Yield the controls of model and data."""
        if self._variables is None:
            return
        for place, (label, kind, told) in _PLACES.items():
            held, blank = self._named[place], [] if place == "model" else [""]
            names = (*blank, *self._variables.names(kind), held, self._chosen_name(place))
            yield _described(
                name=place,
                label=label,
                help=told,
                front=True,
                held=held,
                choices=[[name, ""] for name in dict.fromkeys(names)],
                says={"": "none" if place == "eval_dataset" else "choose…"},
            )

    def _controls(self, held: FinetuneSettings, chosen: FinetuneSettings) -> list[Control]:
        """Return the controls of all settings in the panel's order."""
        if self._found_for != (held, chosen):  # it takes 0.3 s to ask every engine
            found = settings_preview.controls(held, chosen, fixed=self._fixed)
            self._found = sorted(found, key=lambda each: _order(each.declaration))
            self._found_for = held, chosen
        return self._found

    def _of_variables(self, control: Control) -> Control:
        """Return a control with what the notebook's variables offer or rule out."""
        name, variables = control.declaration.name, self._variables
        if variables is not None and name == "loss":
            shown = control.declaration.show(control.value)
            losses = dict.fromkeys(("none", *LOSSES, *variables.names("loss"), shown))
            return dataclasses.replace(control, choices=tuple(map(SettingPreview, losses)))
        if variables is not None and name == "batch_size":
            data = variables.get(self._chosen_name("train"))
            own = "" if data is None else data_loading.own_batches(data)
            return dataclasses.replace(control, reason=control.reason or own)
        return control

    def _holds(self) -> FinetuneSettings:
        if self.run is not None:
            return self.run.current_settings
        entry = session.wrapped.entry(self._model)
        return FinetuneSettings.of({} if entry is None else entry.settings.as_dict())

    def _values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the edits that differ from the settings in effect, and errors of invalid edits."""
        values, wrong = {}, {}
        for name, text in self._edits.items():
            if name in _PLACES:
                continue
            declaration = FinetuneSettings.declarations()[name]
            try:
                value = declaration.check(declaration.parse(_typed(text, declaration.optional)))
            except ValueError as error:
                wrong[name] = str(error)
                continue
            if value != self._held[name]:
                values[name] = value
        return values, wrong

    def _chosen(self, values: Mapping[str, Any], wrong: dict[str, str]) -> FinetuneSettings:
        if not values:  # called in every update; validation takes 0.2 ms
            return self._held
        try:
            return self._held.replace(**values)
        except ValueError as error:  # each value is valid, but they conflict
            wrong |= dict.fromkeys(_about(str(error)) or list(values)[-1:], str(error))
            return self._held

    def _ask(self, request: ChangeRequest) -> None:
        self._result = ("asked", "will be applied after the step in flight…")
        self._asked = request  # assigned last, since another thread reads it

    def _hear(self) -> None:
        """Show the outcome of the last change if it is known."""
        request = self._asked
        if request is None:
            return
        assert self.run is not None
        if not request.done():
            waits = self.run.state == "paused"
            after = "when the run resumes" if waits else "after the step in flight…"
            self._result = ("asked", f"will be applied {after}")
            return
        outcome = request.result()
        if outcome.state == "applied":
            self._result = ("done", _made(outcome))
        elif outcome.state == "refused":
            self._result = ("refused", outcome.text)
        else:
            self._result = ("refused", f"{self.run.name} ended before the change was applied")
        self._asked = None

    def _keep(self) -> None:
        assert self.run is not None
        try:
            path = self.run.checkpoint()
        except (ValueError, RuntimeError, OSError) as error:
            self._result = ("refused", str(error))
        else:
            self._result = ("done", f"checkpoint saved: {path}")

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
            "startable": self._variables is not None,
            "serial": self._serial,
            "edits": dict(self._edits),
            "wrong": self._failed | dict.fromkeys(_about(blocked or ""), blocked) | dict(wrong),
            "blocked": blocked or "",
            "pending": [_difference(name, *pair) for name, pair in differs.items()],
            "cost": cost,
            "engine": "" if over else resolved(chosen)[1],
            "memory": "" if over else self._foreseen,
            "undo": _undone(held, earlier[-1]) if earlier and not over else "",
            "line": self._line(differs),
            "result": list(self._result),
            "busy": self._asked is not None,
        }

    def _line(self, differs: Mapping[str, tuple[Any, Any]]) -> str:
        """Return the line of code that has the same effect."""
        if self.run is not None:
            values = (f"{name}={value!r}" for name, (value, _) in differs.items())
            return f"run.apply({', '.join(values)})" if differs else ""
        declared = FinetuneSettings.declarations()
        model, data, evaluation = map(self._chosen_name, _PLACES)
        words = [declared[name].typed(value) for name, (value, _) in differs.items()]
        if evaluation:
            words.insert(0, f"--eval-dataset {evaluation}")
        return " ".join(["%ort finetune", model, data or "DATA", *words])

    def _memory(self, held: FinetuneSettings, chosen: FinetuneSettings) -> str:
        """Return the current and predicted step memory, from the plan of ORT's graph."""
        now, why = self._peak(held)
        on_each, then_on_each = _each(held.parallel), _each(chosen.parallel)
        if now is None:
            return f"no prediction: {why}"
        if chosen == held:
            return f"{memory(now)}{on_each}, predicted from the graph"
        then, why = self._peak(chosen)
        if then is None:
            return f"{memory(now)}{on_each} now; no prediction: {why}"
        if then == now and on_each == then_on_each:
            return f"{memory(now)}, unchanged"
        return f"{memory(now)} → {memory(then)}{then_on_each}"

    def _peak(self, settings: FinetuneSettings) -> tuple[int | None, str]:
        try:
            model = settings.model
            again = model.recompute, model.activation_budget
            key = (self._held, (graph_key(settings), again, settings.optim.optimizer))
            if key not in self._plans:
                # Only plans of the settings in effect stay cached.
                kept = {known: plan for known, plan in self._plans.items() if known[0] is key[0]}
                self._plans = {**kept, key: session.plan_for(self._model, settings)}
        # Some graphs cannot be planned; the panel also works without a prediction.
        except Exception as error:  # noqa: BLE001
            return None, str(error)
        return settings_preview.foreseen(*self._plans[key], settings, batch=self._batch(settings))

    def _batch(self, settings: FinetuneSettings) -> int | None:
        """Return the chosen micro-batch size, or the largest recent one of a DataLoader."""
        if self.run is None or "batch_size" not in self.run.fixed:
            return settings.data.batch_size
        recorder = self.run.recorder
        rows, _ = recorder.since(max(recorder.count - 64, 0))
        samples = rows[:, INDEX["samples"]]
        if not np.isfinite(samples).any():
            return None
        micro_batches = self.run.current_settings.data.gradient_accumulation_steps
        return max(1, round(float(np.nanmax(samples)) / micro_batches))


def _each(parallel: ParallelSettings) -> str:
    return " of each worker" if parallel.workers > 1 else ""


def _made(outcome: ChangeOutcome) -> str:
    if not outcome.text:
        return "applied: no value changed"
    cost_s = outcome.cost_s
    took = f"in {plain_text.milliseconds(1e3 * cost_s)}" if cost_s else "at no cost"
    return f"applied after step {outcome.step:,}, {took}: {outcome.text}"


def _typed(text: str, optional: bool) -> str:
    return "none" if optional and not text.strip() else text


def _difference(name: str, value: Any, before: Any) -> str:
    show = FinetuneSettings.declarations()[name].show
    return f"{name}={show(value)} (was {show(before)})"


@functools.lru_cache(maxsize=16)  # called in each update of a view, mostly for the same settings
def _differing(held: FinetuneSettings, chosen: FinetuneSettings) -> Mapping[str, tuple[Any, Any]]:
    """Return setting -> (chosen value, value in effect), for the settings that differ."""
    before = held.as_dict()
    return {
        name: (value, before[name])
        for name, value in chosen.as_dict().items()
        if value != before[name]
    }


def _undone(held: FinetuneSettings, earlier: FinetuneSettings) -> str:
    return ", ".join(_difference(name, *pair) for name, pair in _differing(held, earlier).items())


def _order(declaration: Declaration) -> int:
    """Return where a control stands; those of equal numbers are in the order of declaration."""
    places = {key: at for at, key in enumerate(_FIRST)}
    other = places.get(declaration.topic, len(_FIRST))
    return places.get(declaration.name, other)


def _about(error: str) -> list[str]:
    """Return the controls that an error is about: settings that it names, else loss or data."""
    said = error.partition("; ")[0]
    declared = FinetuneSettings.declarations()
    found = [name for name in declared if re.search(rf"\b{name}(=| ')", said)]
    return found or [name for name, words in _MEANT if re.search(words, error)][:1]


def _json(control: Control, held: FinetuneSettings) -> dict[str, Any]:
    declaration = control.declaration
    return _described(
        name=declaration.name,
        label=declaration.name.replace("_", " "),
        alias=declaration.alias,
        help=declaration.help,
        unit=declaration.unit,
        topic=declaration.topic,
        front=declaration.panel,
        number=declaration.type in (int, float),
        range=_range(declaration),
        optional=declaration.optional,
        held=declaration.show(held[declaration.name]),
        choices=[[choice.text, choice.reason] for choice in control.choices],
        says={"none": "the model's own"} if declaration.name == "loss" else {},
        reason=control.reason,
        costs=list(control.costs),
    )


def _described(**control: Any) -> dict[str, Any]:
    """Return a control as the browser expects it; what is not given has no effect there."""
    nothing = {"alias": "", "unit": "", "topic": "", "number": False, "range": []}
    return {**nothing, "optional": False, "says": {}, "reason": "", "costs": [], **control}


def _range(declaration: Declaration) -> list[float]:
    """Return the bounds of a share, which a slider can set; empty for other settings."""
    low, high = declaration.minimum, declaration.maximum
    if declaration.type is not float or not declaration.panel or low is None or high is None:
        return []
    return [low, high]


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
_AFTER: Final[tuple[Column[Control], ...]] = (Column("not available", _refused),)
_COLUMNS_BEFORE: Final = (*_BEFORE, *_AFTER)
_COLUMNS: Final = (
    *_BEFORE,
    Column[Control]("cost of a change", lambda each: " or ".join(each.costs) or "-"),
    *_AFTER,
)


def panel_of(watched: Watched) -> Panel | None:
    """Return the panel of a run.

    Args:
        watched: A run, or anything else that is recorded.

    Returns:
        The panel; None if there are no settings, such as for the user's own training loop.
    """
    return Panel(watched) if isinstance(watched, Run) else None


class PanelView(anywidget.AnyWidget):
    """Widget of a panel in a notebook.

    Args:
        panel: The panel to show.
        still: Mark of the output that pages without a kernel show in place of the view.

    Raises:
        RuntimeError: If the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    controls: traitlets.List[Any] = traitlets.List().tag(sync=True)
    standing: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)

    def __init__(self, panel: Panel, still: str = "") -> None:
        self._panel = panel
        self._pump: Pump | None = None
        self._sending = threading.Lock()
        super().__init__(
            _esm=bundled("panel.js"), _css=bundled("panel.css"), still=still, **panel.news()
        )
        self.on_msg(self._receive)
        self._shell = get_ipython() if panel.run is None else None
        if panel.run is not None:
            self._pump = Pump(panel.run, self.send_news, self.send_news)
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._cell_ran)

    def close(self) -> None:
        """Close the panel in every browser; the run continues."""
        pump = getattr(self, "_pump", None)  # ipywidgets also closes widgets whose __init__ failed
        if pump is not None:
            pump.close()
        if (shell := getattr(self, "_shell", None)) is not None:
            shell.events.unregister("post_run_cell", self._cell_ran)
            self._shell = None
        super().close()

    def _cell_ran(self, _: object = None) -> None:
        """Offer the variables that the notebook has now."""
        self.send_news()

    def _receive(self, _: PanelView, content: dict[str, Any], __: list[bytes]) -> None:
        """Handle a click in the kernel's main thread; slow work goes to another thread."""
        run = self._panel.run
        if run is not None and content["do"] in ("pause", "resume", "stop"):
            getattr(run, content["do"])()
        else:
            self._panel.receive(content)
        if self._pump is None or self._pump.finished:
            Thread(self.send_news, name="ortlab-panel").start()
        else:
            self._pump.wake()

    def send_news(self) -> None:
        """Send what has changed to every browser."""
        with self._sending:  # else a thread could send its older news last
            for name, value in self._panel.news().items():
                setattr(self, name, value)


def show(panel: Panel) -> None:
    """Show the panel in the running cell, or print it as text outside of a notebook.

    It is also printed as text, after an error message, if the package has no JavaScript. A run that
    is started from the panel replaces the panel in the output, and the panel returns if the run
    fails before its first step.

    Args:
        panel: The panel to show.
    """
    table = panel.table()
    if getattr(get_ipython(), "kernel", None) is None:
        print(table)
        return
    display_id = uuid.uuid4().hex
    mark = display.still_of(display_id)
    try:
        view = PanelView(panel, mark)
    except RuntimeError as error:
        print(f"{error}\n{table!r}")
        return
    ends_with_cell(lambda: close_all(view))
    data, metadata = view._repr_mimebundle_() or ({}, {})
    data["text/plain"] = panel.title
    page = display.still(mark, display.PANEL_OR_RUN, table._repr_html_())
    still = {"text/plain": repr(table), "text/html": page}

    def take_back(run: Watched) -> bool:
        if not panel.failed_at_start(run):
            return False
        view.send_news()
        display.republish(data, metadata, display_id)
        display.republish(still, {}, mark)
        return True

    panel.started_in = lambda: display.shown_in(display.Place(display_id, take_back))
    display.publish(data, metadata, display_id)
    display.publish(still, {}, mark)
