"""``%ort`` and ``%%ort``: read what was typed, hand it to the session, show what came of it."""

from __future__ import annotations

import ast
import contextlib
import shlex
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from ortlab.api import check_setup, device, graphs, prune_runs, script, workers, zero_plan
from ortlab.deploy import page
from ortlab.deploy.torchrun_script import Script
from ortlab.engines import caches
from ortlab.engines.wrapped_models import CellReport, is_model, is_own_name, model_called
from ortlab.history.exporters import check_free
from ortlab.history.run_files import StoredRun
from ortlab.notebook import privacy
from ortlab.notebook.magics import cells, completion
from ortlab.notebook.magics.commands import (
    COMMANDS,
    HELP,
    WRAP,
    ParsedCommand,
    command_called,
    overview,
    split,
)
from ortlab.notebook.views.closing import cell_begins
from ortlab.plan.zero_memory import ZeroPlan
from ortlab.session import session
from ortlab.settings import EngineSettings, HistorySettings, RecomputeSettings, unknown_name
from ortlab.utils import warn_once
from ortlab.utils.tables import Table

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn

    from ortlab.cluster.workers import Workers
    from ortlab.deploy.exported import Exported
    from ortlab.deploy.on_device_training import TrainingArtifacts
    from ortlab.engines.doctor import Fact
    from ortlab.graph.capture import Graphs, Stage
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute import RecomputePlans
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.prune import Pruning
    from ortlab.metrics.recorder import Watched
    from ortlab.notebook.views.charts import Live
    from ortlab.search.race import Race
    from ortlab.search.result import Result
    from ortlab.search.tune import Tune
    from ortlab.session import FollowedRun
    from ortlab.training.run import Run
    from ortlab.utils.findings import Finding

S = TypeVar("S")


def _no_trainer(run: Run | FollowedRun, otherwise: str) -> Run:
    """The `run`, which is no Trainer's; ValueError says what there is `otherwise`."""
    from ortlab.training.run import Run

    if not isinstance(run, Run):
        raise ValueError(f"{run.name} is a Trainer's run: {otherwise}")
    return run


@dataclass(frozen=True)
class _OpenCell:
    """A ``%%ort`` cell whose body is running: what it asked for, and the models before it."""

    number: int
    names: list[str]
    settings: EngineSettings
    models: dict[str, weakref.ref[nn.Module]]


@magics_class
class OrtMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ip = shell
        self._names = completion.Names(shell)
        # A cell that raised never finishes; eight are more than ever run inside one another.
        self._open: deque[_OpenCell] = deque(maxlen=8)

    @line_cell_magic
    def ort(self, line: str, cell: str | None = None) -> object:
        if cell is not None:
            return self._run_cell(line, cell)
        words = split(line)
        if not words:
            return session.wrapped.table()
        name, *rest = words
        if name in HELP:
            print(overview())
            return None
        self._check_command(name)
        given = command_called(name).read(rest, self._ip.user_ns)
        if given is None:
            return None
        command: Callable[[ParsedCommand], object] = getattr(self, f"_{name}")
        with _one_line():
            return command(given)

    ort.__doc__ = overview()

    def begin(self, number: int, line: str, has_body: bool) -> None:
        """Called before the body of a ``%%ort`` cell; see `cells`."""
        line = self._ip.var_expand(line, depth=1)  # type: ignore[no-untyped-call]
        given = WRAP.read(split(line), self._ip.user_ns)
        if given is None:
            return
        if not has_body:
            raise UsageError(
                "%%ort is the first line of a cell that makes a model, and this cell has no more; "
                "%ort lists the models, %ort wrap NAME wraps one"
            )
        with _one_line():
            settings = EngineSettings.of(given.settings)
            session.check_engine(settings.engine)
        self._open.append(
            _OpenCell(
                number,
                given.words["name"],
                settings,
                {n: weakref.ref(v) for n, v in self._ip.user_ns.items() if is_model(v)},
            )
        )

    def finish(self, number: int, bound: tuple[str, ...], value: object = None) -> object:
        """Called at the end of the body of a ``%%ort`` cell; `value` is its last expression's."""
        (cell,) = (cell for cell in self._open if cell.number == number)
        self._open.remove(cell)
        namespace = self._ip.user_ns
        # What other magics, star imports and functions of the cell bound is not in its own code.
        changed = (
            name
            for name, now in list(namespace.items())
            if is_model(now) and (name not in cell.models or cell.models[name]() is not now)
        )
        with _one_line(), _progress():
            names = [name for name in (*bound, *changed) if is_own_name(name)]
            report = session.bind_cell(namespace, names, cell.names, cell.settings)
        _say(report, cell.settings)
        return value

    def _run_cell(self, line: str, cell: str) -> object:
        """The cell form where IPython's transformers did not see it: ``run_cell_magic``."""
        shell = self._ip
        source = shell.transform_cell(  # type: ignore[no-untyped-call]
            f"%%ort {line}\n{cell}"
        )
        name = shell.compile.cache(source, shell.execution_count)
        tree = shell.compile.ast_parse(source, filename=name)
        tree = shell.transform_ast(tree)  # type: ignore[no-untyped-call]
        *body, last = tree.body
        for statement in body:
            exec(_compiled(ast.Module([statement], []), shell, name), shell.user_ns)
        return eval(_compiled(ast.Expression(last.value), shell, name), shell.user_ns)

    def _check_command(self, name: str) -> None:
        """A model's name where a command belongs deserves better than a list of commands."""
        if name not in COMMANDS and is_model(self._ip.user_ns.get(name)):
            raise UsageError(f"%ort has no command {name!r}; to wrap it: %ort wrap {name}")

    # The commands, one method each, by their names.

    def _wrap(self, given: ParsedCommand) -> None:
        names = given.words["name"]
        if not names:
            raise UsageError("%ort wrap: name a model, as in %ort wrap model")
        settings = EngineSettings.of(given.settings)
        with _progress():
            report = session.bind_cell(self._ip.user_ns, names, names, settings)
        _say(report, settings)

    def _unwrap(self, given: ParsedCommand) -> None:
        models = [model_called(name, self._ip.user_ns) for name in given.words["name"]]
        for name, model in zip(given.words["name"], models, strict=True):
            if session.wrapped.entry(model) is None:
                raise ValueError(f"{name} is not wrapped; %ort lists what is")
        for model in dict.fromkeys(models):
            session.wrapped.unwrap(model)

    def _finetune(self, given: ParsedCommand) -> Run:
        settings = dict(given.settings)
        loss = settings.pop("loss", None)
        evaluation = given.words["eval_data"]
        return session.finetune(
            model_called(given.words["model"], self._ip.user_ns),
            self._value("loader", given.words["train"]),
            eval_data=None if evaluation is None else self._value("loader", evaluation),
            loss=self._loss(loss),
            resume_from=given.words["resume_from"],
            **settings,
        )

    def _race(self, given: ParsedCommand) -> Race:
        return self._searched(session.race, given)

    def _tune(self, given: ParsedCommand) -> Tune:
        return self._searched(session.tune, given)

    def _searched(self, search: Callable[..., S], given: ParsedCommand) -> S:
        settings = dict(given.settings)
        loss = settings.pop("loss", None)
        return search(
            model_called(given.words["model"], self._ip.user_ns),
            self._value("loader", given.words["data"]),
            loss=self._loss(loss),
            **settings,
        )

    def _graph(self, given: ParsedCommand) -> Graphs | Stage | Table[tuple[str, int, int]]:
        model = model_called(given.words["model"], self._ip.user_ns)
        with _progress():
            found = graphs(model, self._batch(given))
        stage, since = given.words["stage"], given.words["since"]
        if since is not None:
            return found.diff(since, stage or "execution")
        return found if stage is None else found.stage(stage)

    def _memory(self, given: ParsedCommand) -> MemoryPlan:
        model = model_called(given.words["model"], self._ip.user_ns)
        optimizer = given.words["optimizer"] or "adamw"
        with _progress():
            plan = session.memory_plan(model, self._batch(given), optimizer=optimizer)
        sizes = dict(_size("memory", word) for word in given.words["sizes"])
        if given.words["budget"] is not None:
            most = plan.at(**sizes).max_batch(given.words["budget"])
            print(f"batch={most} is the largest that fits into {given.words['budget']}")
            sizes["batch"] = most
        return plan.at(**sizes)

    def _recompute(self, given: ParsedCommand) -> RecomputePlans:
        model = model_called(given.words["model"], self._ip.user_ns)
        words = given.words
        chosen, budget = words["choose"], words["budget"]
        if chosen is not None and budget is not None:
            raise UsageError("%ort recompute: --budget chooses a plan, and so does --choose")
        with _progress():
            plans = session.recompute_plans(
                model, self._batch(given), optimizer=words["optimizer"] or "adamw"
            ).at(**dict(_size("recompute", word) for word in words["sizes"]))
            if RecomputeSettings.of(given.settings).measure:
                plans.measure()
        if budget is not None:
            chosen = plans.least_time(budget)
        if chosen is not None:
            plans.choose(chosen)
            print(f"{chosen} from the next step on")
        return plans

    def _profile(self, given: ParsedCommand) -> Profile:
        model = model_called(given.words["model"], self._ip.user_ns)
        with _progress():
            return session.profile(model, self._batch(given), **given.settings)

    def _batch(self, given: ParsedCommand) -> object | None:
        name = given.words["batch"]
        return None if name is None else self._value("batch", name)

    def _panel(self, given: ParsedCommand) -> None:
        from ortlab.notebook.views.panel import Panel, show

        name, data = given.words["target"], given.words["data"]
        value = None if name is None else self._ip.user_ns.get(name)
        if not is_model(value):
            if name is not None and session.last_run is None and not session.trainers:
                model_called(name, self._ip.user_ns)
            show(Panel(_no_trainer(self._run(name), "a panel is for ortlab.finetune's")))
            return
        busy = session.training(value)
        if busy is not None:
            show(Panel(busy))
            return

        def start(settings: dict[str, Any]) -> Run:
            loss = self._loss(settings.pop("loss", None))
            return session.finetune(value, train, loss=loss, **settings)

        if data is None:
            show(Panel(value, name=name))
        else:
            train = self._value("loader", data)
            show(Panel(value, name=name, start=start, data=data))

    def _apply(self, given: ParsedCommand) -> None:
        if not given.settings:
            raise UsageError("%ort apply: name a setting, as in %ort apply --lr 1e-4")
        run = _no_trainer(self._run_alive(given), "stop it, and train with other arguments")
        run.apply(**given.settings)
        names = ", ".join(given.settings)
        print(f"{run.name} takes {names} after the step in flight; %ort undo goes back")

    def _checkpoint(self, given: ParsedCommand) -> Path:
        run = _no_trainer(self._run(given.words["run"]), "TrainingArguments(save_steps=...) saves")
        return run.checkpoint(given.words["to"])

    def _undo(self, given: ParsedCommand) -> None:
        run = _no_trainer(self._run_alive(given), "its arguments hold to its end")
        run.undo()
        print(f"{run.name} goes back to what held before the last change, after the step in flight")

    def _runs(self, given: ParsedCommand) -> History | Pruning | None:
        chosen = HistorySettings.declarations()
        filters = {name: value for name, value in given.settings.items() if name in chosen}
        prunes = {name: value for name, value in given.settings.items() if name not in chosen}
        folder = given.words["tensorboard"]
        if prunes.pop("prune", False):
            for name in ("sort", "reverse", "limit"):
                if name in filters:
                    raise UsageError(f"%ort runs: --{name} does not go with --prune")
            if folder is not None:
                raise UsageError("%ort runs: --tensorboard does not go with --prune")
            return prune_runs(**prunes, **filters)
        if prunes:
            flags = ", ".join("--" + name.replace("_", "-") for name in prunes)
            raise UsageError(f"%ort runs: {flags} removes runs, which --prune asks for")
        found = session.history(**filters)
        if folder is None:
            return found
        check_free(Path(folder), (entry.name for entry in found))
        for entry in found:
            print(session.open_run(entry.name).to_tensorboard(folder), flush=True)
        print(f"{len(found)} runs are there: tensorboard --logdir {shlex.quote(folder)}")
        return None

    def _compare(self, given: ParsedCommand) -> RunComparison:
        names = given.words["runs"]
        values = (self._ip.user_ns.get(name) for name in names)
        runs = [
            value if isinstance(value, StoredRun) else name
            for name, value in zip(names, values, strict=True)
        ]
        return session.compare_runs(*runs)

    def _pause(self, given: ParsedCommand) -> None:
        run = self._run_alive(given)
        if not run.interactive:
            raise ValueError(
                f"{run.name} holds the main thread and cannot pause; await trainer.train_async()"
            )
        run.pause()
        print(f"{run.name} pauses after the step in flight; %ort resume lets it go on")

    def _resume(self, given: ParsedCommand) -> Run | None:
        words = given.words
        others = [words[each] for each in ("model", "train", "eval_data", "loss")]
        if words["run"] is None or (self._is_alive(words["run"]) and not any(others)):
            run = self._run_alive(given)
            run.resume()
            print(f"{run.name} goes on")
            return None
        value = self._ip.user_ns.get(words["run"])
        model, train, evaluation, loss = others
        return session.resume(
            value if isinstance(value, StoredRun) else words["run"],
            None if model is None else model_called(model, self._ip.user_ns),
            None if train is None else self._value("loader", train),
            eval_data=None if evaluation is None else self._value("loader", evaluation),
            loss=self._loss(loss),
        )

    def _stop(self, given: ParsedCommand) -> None:
        if (search := self._search_alive(given)) is not None:
            search.stop()
            print(f"{search.name} stops after the turn in flight and keeps what it has")
            return
        run = self._run_alive(given)
        run.stop()
        print(f"{run.name} stops after the step in flight and keeps its weights")

    def _workers(self, given: ParsedCommand) -> Workers | None:
        count, profile = given.words["count"], given.words["profile"]
        if count is not None and count != "stop" and not count.isdecimal():
            raise UsageError(
                f"%ort workers: {count!r} is no number; type %ort workers 2, or %ort workers stop"
            )
        if profile is not None and (count is None or count == "stop"):
            raise UsageError("%ort workers: --profile goes with a number, as in --profile NAME 4")
        if count not in (None, "stop"):
            with _progress():
                return workers(int(count), profile=profile)
        if session.workers is None:
            print("no workers yet; %ort workers 2 starts two")
            return None
        if count is None:
            return session.workers
        session.workers.stop()
        print("the workers ended")
        return None

    def _script(self, given: ParsedCommand) -> Script:
        words, settings = given.words, dict(given.settings)
        loss = settings.pop("loss", None)
        data = None if words["data"] is None else self._value("loader", words["data"])
        return script(
            model_called(words["model"], self._ip.user_ns),
            data,
            to=words["to"] or "standalone",
            make_model=words["make_model"],
            make_data=words["make_data"],
            loss=self._loss(loss),
            **settings,
        )

    def _export(self, given: ParsedCommand) -> Exported | TrainingArtifacts:
        from ortlab.api import export

        words = given.words
        if words["trainable"] is not None:
            return self._export_training(given)
        if words["loss"] is not None:
            raise ValueError("--loss is for --trainable; a graph for inference has none")
        batch, second, data = (words[name] for name in ("batch", "second", "eval_data"))
        settings = dict(given.settings)
        web = settings.pop("web", False)
        with _progress():
            exported = export(
                model_called(words["model"], self._ip.user_ns),
                words["path"],
                None if batch is None else self._value("batch", batch),
                second=None if second is None else self._value("batch", second),
                eval_data=None if data is None else self._value("loader", data),
                **settings,
            )
        if web:
            from IPython.display import display

            display(exported.in_page())  # type: ignore[no-untyped-call]
        return exported

    def _export_training(self, given: ParsedCommand) -> TrainingArtifacts:
        from ortlab.api import export

        words = given.words
        for name in ("second", "eval_data", *given.settings):
            if words.get(name) is not None or name in given.settings:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for inference; leave it out with --trainable")
        batch, loss = words["batch"], words["loss"]
        if batch is None:
            raise ValueError("--trainable needs a batch with its labels: --batch train")
        with _progress():
            made: TrainingArtifacts = export(
                model_called(words["model"], self._ip.user_ns),
                words["path"],
                self._value("batch", batch),
                trainable=words["trainable"].split(","),
                loss=self._loss(loss),
            )
        return made

    def _zero(self, given: ParsedCommand) -> ZeroPlan:
        model, count = given.words["model"], given.words["params"]
        if (model is None) == (count is None):
            raise UsageError(
                "%ort zero plan: name a model or a number of parameters, as in --params 2.7B"
                + ("" if model is None else "; one of them")
            )
        planned = count if model is None else model_called(model, self._ip.user_ns)
        return zero_plan(planned, **given.settings)

    def _cache(self, given: ParsedCommand) -> None:
        clear = given.words["action"] == "clear"
        print(f"removed {caches.clear_graphs()}" if clear else caches.graphs())

    def _device(self, given: ParsedCommand) -> Table[Fact]:  # noqa: ARG002
        exposed = privacy.exposure()
        return device() if exposed is None else device().noted(exposed)

    def _doctor(self, given: ParsedCommand) -> Table[Finding]:  # noqa: ARG002
        return check_setup()

    def _search_alive(self, given: ParsedCommand) -> Race | Tune | None:
        """The race or search that was named, by its name or the user's, or that goes on."""
        name = given.words["run"]
        value = None if name is None else self._ip.user_ns.get(name)
        going = (search for search in session.searches if not search.over())
        return next((s for s in going if name is None or s is value or s.name == name), None)

    def _run_alive(self, given: ParsedCommand) -> Run | FollowedRun:
        """The run that was named, by its own name or the user's; ValueError when it is over."""
        run = self._run(given.words["run"])
        if run.over():
            status = run.status()
            raise ValueError(f"{run.name} is over ({status.state}) after {status.step} steps")
        return run

    def _is_alive(self, name: str) -> bool:
        """Whether this kernel has a run of that name, its own or the user's, that is not over."""
        value = self._ip.user_ns.get(name)
        known: tuple[Run | FollowedRun, ...] = (*session.runs, *session.trainers)
        return any(not r.over() and (r is value or r.name == name) for r in known)

    def _run(self, name: str | None) -> Run | FollowedRun:
        """The run of that name, its own or the user's; without one the last."""
        value = None if name is None else self._ip.user_ns.get(name)
        known = (*session.runs, *session.trainers)
        return next((run for run in known if run is value), None) or session.under_way(name)

    def _value(self, kind: str, name: str) -> Any:
        if name not in self._ip.user_ns:
            raise ValueError(
                f"nothing is called {name!r}: {unknown_name(name, self._names.of(kind))}"
            )
        return self._ip.user_ns[name]

    def _loss(self, name: str | None) -> Any:
        """The user's function of that name, before one of ortlab's."""
        value = None if name is None else self._ip.user_ns.get(name)
        return value if callable(value) else name


def _compiled(tree: ast.Module | ast.Expression, shell: InteractiveShell, name: str) -> CodeType:
    mode = "exec" if isinstance(tree, ast.Module) else "eval"
    code: CodeType = compile(tree, name, mode, flags=shell.compile.flags, dont_inherit=True)
    return code


def _size(command: str, word: str) -> tuple[str, int]:
    """A size as it is typed: batch=32."""
    name, _, number = word.partition("=")
    if not name or not number.isdecimal():
        raise UsageError(f"%ort {command}: {word!r} is no size; type NAME=NUMBER, as in batch=32")
    return name, int(number)


def _say(report: CellReport, settings: EngineSettings) -> None:
    """One line about what was wrapped; why nothing was, where nothing was."""
    wrapped = [", ".join(entry.names) for entry in report.wrapped]
    if wrapped:
        verb = "run" if len(wrapped) > 1 else "runs"
        print(f"{' and '.join(wrapped)} {verb} on engine {settings.engine!r}")
        return
    print("%%ort wrapped nothing: the cell binds no trainable model of its own")
    for left in report.left:
        print(f"  {left.name} {left.reason}")


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Prints what takes its time, the building of ORT's extension for one."""
    from ortlab.engines import base

    token = base.progress.set(print)
    try:
        yield
    finally:
        base.progress.reset(token)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """ortlab's own errors become one line; those of the user's code keep their traceback."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not _raised_by_ortlab(error):
            raise
        raise UsageError(str(error)) from error


def _raised_by_ortlab(error: BaseException) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("ortlab.")


class Extension:
    """All that ``%load_ext ortlab`` adds to a shell, and takes back."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._magics = OrtMagics(shell)
        self._calls = cells.Calls(OrtMagics.__name__)
        self._matcher = completion.matcher(completion.Names(shell))
        self._shown: weakref.WeakSet[Any] = weakref.WeakSet()
        """What the cell that is running has shown already."""
        self._live: list[Live] = []
        """What is being shown, and goes with the extension."""
        self._displays: dict[tuple[str, str], Callable[[Any], None]] = {
            ("ortlab.training.run", "Run"): self._display,
            ("ortlab.history.saved_run", "SavedRun"): self._display,
            _COMPARISON: _display_comparison,
            ("ortlab.history.listing", "History"): self._display_history,
            ("ortlab.search.comparison", "Comparison"): self._display,
            ("ortlab.search.result", "Result"): self._display_result,
            ("ortlab.graph.capture", "Graphs"): _display_graphs,
            ("ortlab.graph.capture", "Stage"): _display_stage,
            ("ortlab.graph.recompute", "RecomputePlans"): _display_plans,
        }

    def load(self) -> None:
        """Adds the magics, the form of ``%%ort`` cells, completion, and the charts."""
        shell = self._shell
        shell.register_magics(self._magics)
        shell.input_transformers_cleanup.append(cells.mark)
        shell.ast_transformers.append(self._calls)
        shell.Completer.custom_matchers.append(self._matcher)
        shell.events.register("pre_run_cell", self._forget)
        shell.events.register("pre_run_cell", cell_begins)
        session.viewers.append(self._show)
        session.waits = True
        warn_once.are_seen()
        page.register(_in_page)
        session.wrapped.namespace = shell.user_ns
        self._text_formatter().for_type_by_name(*_COMPARISON, _print_comparison)
        if _has_front_end(shell):
            for (module, name), display in self._displays.items():
                self._formatter().for_type_by_name(module, name, display)

    def unload(self) -> None:
        """Takes it all back; models stay wrapped and runs go on, unseen."""
        shell = self._shell
        shell.input_transformers_cleanup.remove(cells.mark)
        shell.ast_transformers.remove(self._calls)
        shell.Completer.custom_matchers.remove(self._matcher)
        shell.events.unregister("pre_run_cell", self._forget)
        shell.events.unregister("pre_run_cell", cell_begins)
        session.viewers.remove(self._show)
        session.waits = False
        warn_once.are_seen(by_themselves=True)
        page.register(None)
        while self._live:
            self._live.pop().close()
        session.wrapped.namespace = None
        self._text_formatter().pop(".".join(_COMPARISON), None)
        if _has_front_end(shell):
            for module, name in self._displays:
                self._formatter().pop(f"{module}.{name}", None)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("ort", None)
        del shell.magics_manager.registry[OrtMagics.__name__]

    def _formatter(self) -> Any:
        formatter = self._shell.display_formatter
        assert formatter is not None
        return formatter.ipython_display_formatter

    def _text_formatter(self) -> Any:
        formatter = self._shell.display_formatter
        assert formatter is not None
        return formatter.formatters["text/plain"]

    def _show(self, watched: Watched | Race | Tune) -> None:
        """The session's viewer: charts or a table, in the cell that is running."""
        from ortlab.notebook.views import charts, search_view
        from ortlab.search.background import Background

        self._shown.add(watched)
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

    def _display(self, run: Run | Race | Tune) -> None:
        """A run or a race as a cell's value, unless this cell has started it and shows it."""
        if run not in self._shown:
            self._show(run)

    def _display_history(self, history: History) -> None:
        """The runs that are kept, as a cell's value."""
        from ortlab.notebook.views import history_view

        live = history_view.show(history)
        if live is not None:
            self._live.append(live)

    def _display_result(self, result: Result[Any]) -> None:
        """What ``await race`` gave, unless this cell shows the race."""
        from ortlab.notebook.views import search_view

        shown = [search for search in session.searches if search in self._shown]
        if not any(repr(search.standing) == repr(result) for search in shown):
            search_view.show(result)

    def _forget(self, _: object) -> None:
        self._shown.clear()
        self._live = [one for one in self._live if not one.over()]


def _display_graphs(graphs: Graphs, stage: str | None = None) -> None:
    """Graphs as a cell's value: the view, or without its JavaScript the table."""
    from ortlab.notebook.views import graph_view

    for note in graphs.notes:
        print(note)
    try:
        graph_view.show(graphs, stage=stage)
    except RuntimeError as error:
        print(f"{error}\n{graphs!r}")


def _display_stage(stage: Stage) -> None:
    from ortlab.graph.capture import Graphs

    _display_graphs(stage.graphs or Graphs("", {stage.name: stage}), stage.name)


_COMPARISON = ("ortlab.history.comparison", "RunComparison")


def _print_comparison(comparison: RunComparison, printer: Any, cycle: bool) -> None:  # noqa: ARG001
    from ortlab.notebook.static_views import curves

    printer.text(curves.text(comparison))


def _display_comparison(comparison: RunComparison) -> None:
    from IPython.core.display_functions import publish_display_data

    from ortlab.notebook.views import comparison_view

    publish_display_data(*comparison_view.bundle(comparison))  # type: ignore[no-untyped-call]


def _display_plans(plans: RecomputePlans) -> None:
    from IPython.core.display_functions import publish_display_data

    from ortlab.notebook.views import recompute_view

    publish_display_data(recompute_view.show(plans))  # type: ignore[no-untyped-call]


def _has_front_end(shell: InteractiveShell) -> bool:
    """Whether a kernel serves this shell; a terminal shows a run's value as text."""
    return getattr(shell, "kernel", None) is not None


_extensions: dict[InteractiveShell, Extension] = {}


def _in_page(exported: Exported, form: str | None) -> Any:
    # Heavy: onnx.
    from ortlab.notebook.views.in_page import InPage

    return InPage(exported, form)


def load(shell: InteractiveShell) -> None:
    """See `ortlab.load_ipython_extension`. The second time changes nothing."""
    if shell not in _extensions:
        _extensions[shell] = Extension(shell)
        _extensions[shell].load()


def unload(shell: InteractiveShell) -> None:
    """See `ortlab.unload_ipython_extension`. Without `load` before changes nothing."""
    extension = _extensions.pop(shell, None)
    if extension is not None:
        extension.unload()
