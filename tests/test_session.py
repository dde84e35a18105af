"""Tests of the session: which models are wrapped or skipped and why, and how they are unwrapped."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.session import Session
from ortlab.session import session as the_session
from ortlab.settings import ENGINES, EngineSettings
from ortlab.utils.tables import Column, Table
from tests.support import reference
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S

# torch.compile does not compile before the first call. It is therefore the fast engine whose
# wrapper is an object other than the model.
WRAPPING = EngineSettings.of(engine="compile")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


class MarginLoss(nn.Module):
    """A loss with weights of its own, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.centres).square().mean()


@pytest.fixture(params=ENGINES)
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    """Return the settings of each engine; skip with the reason if this machine lacks the engine."""
    needs(request.param)
    return EngineSettings.of(engine=request.param)


@pytest.fixture
def session() -> Session:
    session = Session()
    session.wrapped.namespace = {}
    return session


def bind(session: Session, *names: str, settings: EngineSettings = WRAPPING, **values: Any) -> Any:
    """Simulate a cell that binds `values`; `names` are the names after ``%%ort``."""
    namespace = session.wrapped.namespace
    assert namespace is not None
    namespace.update(values)
    return session.bind_cell(namespace, values, names, settings)


def reasons(session: Session) -> dict[str, str]:
    return {one.name: one.reason for one in session.wrapped.left}


def test_a_wrapped_model_computes_the_same_and_comes_back(
    session: Session, settings: EngineSettings
) -> None:
    model = Net()
    x = torch.randn(3, 4)
    expected = model(x)
    bind(session, model=model, settings=settings)
    namespace = session.wrapped.namespace
    assert namespace is not None
    wrapper = namespace["model"]
    torch.testing.assert_close(wrapper(x), expected, rtol=1e-4, atol=1e-6)
    wrapper(x).sum().backward()
    assert model.head.weight.grad is not None
    (row,) = session.wrapped.table()
    used = (
        "ortmodule" if settings.engine == "ort_fused" else settings.engine
    )  # the optimizer is the user's
    assert (row.name, row.engine_asked, row.engine_used) == ("model", settings.engine, used)
    assert (row.device, row.precision, row.parameters) == ("cpu", "float32", 4 * 8 + 8 + 8 * 2 + 2)
    assert (row.export_s > 0) == (used in ("ort", "ortmodule"))
    assert session.wrapped.unwrap(wrapper) is model
    assert namespace["model"] is model
    assert len(session.wrapped.table()) == 0


def test_two_names_share_one_wrapper_and_both_come_back(session: Session) -> None:
    model = Net()
    bind(session, model=model, alias=model)
    names = session.wrapped.namespace
    assert names is not None
    assert names["model"] is names["alias"] is not model
    names["later"] = names["model"]
    shown = names["_12"] = names["model"]  # IPython keeps a cell's value under this name
    assert session.wrapped.table()[0].name == "model, alias, later"
    session.wrapped.unwrap(names["later"])
    assert names["_12"] is shown
    assert names["model"] is names["alias"] is names["later"] is model


def test_only_the_outermost_module_is_wrapped(session: Session) -> None:
    model = Net()
    bind(session, part=model.inner, deeper=model.inner[0], model=model)
    names = session.wrapped.namespace
    assert names is not None
    assert names["model"] is not model
    assert names["part"] is model.inner
    assert reasons(session) == {"part": "is part of model", "deeper": "is part of model"}


def test_a_part_of_a_model_wrapped_before_stays_torch(session: Session) -> None:
    model = Net()
    bind(session, model=model)
    report = bind(session, part=model.inner)
    assert not report.wrapped
    assert reasons(session) == {"part": "is part of model"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (nn.CrossEntropyLoss(), "has no parameter that requires a gradient"),
        (MarginLoss(), "is a loss (MarginLoss)"),
        (Net().requires_grad_(False), "has no parameter that requires a gradient"),
        (nn.ModuleList([Net()]), "is a ModuleList, which has no forward of its own"),
        (nn.LazyLinear(3), "has lazy parameters; run one batch through it first"),
        (
            nn.Linear(2, 2, device="meta"),
            "is on the meta device, without weights; use to_empty() and load them first",
        ),
        ([Net(), Net()], "contains 2 models and is not a model itself"),
        ({"a": Net()}, "contains 1 model and is not a model itself"),
        ({"a": {"b": Net()}, "c": [(1, Net())]}, "contains 2 models and is not a model itself"),
    ],
)
def test_what_is_left_as_it_is_and_why(session: Session, value: object, reason: str) -> None:
    report = bind(session, thing=value)
    assert not report.wrapped
    assert session.wrapped.namespace == {"thing": value}
    assert reasons(session) == {"thing": reason}
    assert f"not wrapped: thing ({reason})" in repr(session.wrapped.table())


def test_values_that_are_no_modules_are_not_worth_a_word(session: Session) -> None:
    bind(session, x=torch.ones(2), n=3, Net=Net, losses=[nn.MSELoss()], text="model")
    assert reasons(session) == {}


def test_a_container_in_itself_and_a_deep_one_come_to_an_end(session: Session) -> None:
    cycle: list[Any] = [Net()]
    cycle.append({"again": cycle, "more": cycle})
    deep: list[Any] = [MarginLoss()]
    for _ in range(10_000):
        deep = [deep]
    wide = [[0] * 1000] * 1000
    bind(session, cycle=cycle, deep=deep, wide=wide, huge=[range(10**12)])
    assert reasons(session) == {"cycle": "contains 1 model and is not a model itself"}


def test_what_was_left_is_forgotten_with_its_name(session: Session) -> None:
    bind(session, criterion=nn.CrossEntropyLoss(), models=[Net()])
    names = session.wrapped.namespace
    assert names is not None
    names["criterion"] = nn.MSELoss()
    del names["models"]
    assert reasons(session) == {}


def test_a_model_in_a_model_is_wrapped_once(session: Session) -> None:
    bind(session, model=Net())
    names = session.wrapped.namespace
    assert names is not None
    bind(session, bigger=nn.Sequential(names["model"], nn.Linear(2, 2)))
    assert reasons(session) == {"bigger": "contains a wrapped model; unwrap that first"}


def test_named_models_are_wrapped_and_no_others(session: Session) -> None:
    net, other = Net(), MarginLoss()
    report = bind(session, "other", net=net, other=other)
    names = session.wrapped.namespace
    assert names is not None
    assert names["net"] is net
    assert names["other"] is not other
    assert [entry.names for entry in report.wrapped] == [("other",)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nett",
            "'nett': choose from net, criterion, part, hollow; did you mean 'net'?",
        ),
        ("Net", "Net is the class Net; create an instance of it"),
        ("many", "many is a list, not a torch.nn.Module; bind one of its models to a name"),
        ("x", "x is an int, not a torch.nn.Module"),
        ("criterion", "cannot wrap criterion: it has no parameter that requires a gradient"),
        ("part", "cannot wrap part: it is part of net; wrap one of them"),
        ("hollow", "cannot wrap hollow: it is on the meta device"),
    ],
)
def test_one_bad_name_and_nothing_is_wrapped(session: Session, name: str, message: str) -> None:
    net = Net()
    values = {
        "net": net,
        "Net": Net,
        "many": [MarginLoss()],
        "x": 1,
        "criterion": nn.CrossEntropyLoss(),
        "part": net.inner,
        "hollow": nn.Linear(2, 2, device="meta"),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        bind(session, "net", name, **values)
    assert session.wrapped.namespace == values
    assert len(session.wrapped.table()) == 0


def test_a_model_is_wrapped_once(session: Session, settings: EngineSettings) -> None:
    wrapper = session.wrapped.wrap(Net(), settings)
    with pytest.raises(ValueError, match=f"is already wrapped .engine '{settings.engine}'"):
        session.wrapped.wrap(wrapper, settings)
    others = settings.replace(fallback=not settings.fallback)
    with pytest.raises(ValueError, match="cannot wrap model: it is already wrapped"):
        bind(session, "model", model=wrapper, settings=others)
    report = bind(session, "model", model=wrapper, settings=settings)
    assert [entry.wrapper for entry in report.wrapped] == [wrapper]
    assert len(session.wrapped.table()) == 1


def test_a_cell_that_runs_again_finds_its_wrapper(session: Session) -> None:
    net = Net()
    bind(session, model=net)
    names = session.wrapped.namespace
    assert names is not None
    first = names["model"]
    bind(session, model=net)
    assert names["model"] is first
    bind(session, model=net, settings=EngineSettings.of(engine="compile", fallback=True))
    assert names["model"] is not first


def test_a_cell_that_runs_again_gives_the_old_model_back(
    session: Session, settings: EngineSettings
) -> None:
    bind(session, model=Net(), settings=settings)
    names = session.wrapped.namespace
    assert names is not None
    names["model"](torch.randn(2, 4))
    old = weakref.ref(next(names["model"].parameters()))
    bind(session, model=Net(), settings=settings)
    assert old() is None
    names["kept"] = [names.pop("model")]
    assert [row.name for row in session.wrapped.table()] == ["a Net"]
    del names["kept"]
    assert len(session.wrapped.table()) == 0


def test_what_was_left_and_is_wrapped_by_name_is_left_no_more(session: Session) -> None:
    bind(session, margin=MarginLoss())
    assert reasons(session) == {"margin": "is a loss (MarginLoss)"}
    session.wrapped.namespace = None  # as in a script, which has no namespace to search
    session.bind_cell({"margin": MarginLoss()}, ["margin"], ["margin"], WRAPPING)
    assert reasons(session) == {}


def test_a_model_with_a_loss_in_its_name_is_a_model(session: Session) -> None:
    class NetWithLoss(Net):
        pass

    assert bind(session, model=NetWithLoss()).wrapped


def test_a_model_on_eager_may_be_given_another_engine_by_its_cell(session: Session) -> None:
    net = Net()
    bind(session, model=net, settings=EngineSettings.of(engine="eager"))
    bind(session, model=net)
    assert [row.engine_asked for row in session.wrapped.table()] == ["compile"]


def test_a_deleted_model_is_collectable_and_leaves_the_table(
    session: Session, settings: EngineSettings
) -> None:
    bind(session, model=Net(), parts=[Net()], frozen=Net().requires_grad_(False), settings=settings)
    names = session.wrapped.namespace
    assert names is not None
    left = weakref.ref(names["frozen"])
    names["model"](torch.randn(2, 4))
    alive = weakref.ref(session.wrapped.unwrap(names["model"]))
    bind(session, model=names["model"], settings=settings)
    names["model"](torch.randn(2, 4))
    in_list = weakref.ref(names["parts"][0])
    names.clear()
    gc.collect()
    assert alive() is None
    assert in_list() is None
    assert left() is None
    assert len(session.wrapped.table()) == 0


def test_unwrapping_what_is_not_wrapped(session: Session) -> None:
    with pytest.raises(ValueError, match="this Net is not wrapped"):
        session.wrapped.unwrap(Net())


def test_an_engine_that_fails_to_wrap_leaves_every_name(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ortlab.engines.torch import stepper

    wrap = stepper.Compile.wrap

    def second_fails(self: Any, model: nn.Module, settings: EngineSettings) -> nn.Module:
        if isinstance(model, MarginLoss):
            raise RuntimeError("no")
        return wrap(self, model, settings)

    monkeypatch.setattr(stepper.Compile, "wrap", second_fails)
    values = {"net": Net(), "other": MarginLoss()}
    with pytest.raises(RuntimeError, match="no"):
        bind(session, "net", "other", **values)
    assert session.wrapped.namespace == values
    assert len(session.wrapped.table()) == 0


def test_the_table_is_escaped_and_reads_as_text_and_as_html(session: Session) -> None:
    model = Net()
    bind(session, model=model, **{"a<b>": nn.CrossEntropyLoss()})
    table = session.wrapped.table()
    text, page = repr(table), table._repr_html_()
    head, _, row, note = text.splitlines()
    assert head.startswith(
        "model  engine asked  engine used  device  precision  parameters  export"
    )
    assert re.split(" {2,}", row) == ["model", *["compile"] * 2, "cpu", "float32", "58", *["-"] * 3]
    assert note.startswith("not wrapped: a<b> (has no parameter")
    assert ">compile</td>" in page
    assert "a&lt;b&gt;" in page
    assert "<b>" not in page
    assert repr(Session().wrapped.table()) == "no model is wrapped"


def test_a_table_s_cells_are_escaped_and_its_records_kept() -> None:
    table = Table(["<i>", "&"], [Column("<head>", str), Column("n", lambda text: "1", number=True)])
    page = table._repr_html_()
    assert "&lt;i&gt;" in page
    assert "&lt;head&gt;" in page
    assert "<i>" not in page
    assert page.count("text-align: right") == 3
    assert page.count("text-align: right; white-space: nowrap") == 2
    assert "overflow-wrap: anywhere" not in page.partition("<table>")[2]
    path = Table(["bert.encoder." * 8, "a b " * 20], [Column("module", str)])._repr_html_()
    assert path.partition("<table>")[2].count("overflow-wrap: anywhere") == 1
    assert (len(table), list(table), table[-1], table[:1]) == (2, ["<i>", "&"], "&", ("<i>",))
    spread = Table(["<9> (7 to <8>)"], [Column("n", str, number=True)])._repr_html_()
    assert '&lt;9&gt; <span style="white-space: nowrap">(7 to &lt;8&gt;)</span></td>' in spread
    assert spread.count("nowrap") == 1


def test_the_python_twins_of_wrap_and_unwrap() -> None:
    model = Net()
    wrapper = ortlab.wrap(model, engine="compile")
    assert [row.name for row in ortlab.models()] == ["a Net"]
    assert ortlab.unwrap(wrapper) is model
    with pytest.raises(ValueError, match="did you mean 'engine'"):
        ortlab.wrap(model, engin="ortmodule")
    with pytest.raises(
        ValueError, match="engine='ort2': choose from auto, eager, compile, ort, ortmodule"
    ):
        ortlab.wrap(model, engine="ort2")
    with pytest.raises(ValueError, match="the argument is a list"):
        ortlab.wrap([model])  # type: ignore[arg-type]


def test_the_python_twin_of_doctor() -> None:
    table = ortlab.check_setup()
    assert {"Python", "torch"} <= {finding.name for finding in table}
    assert "ORT can train here" in repr(table)
    assert ">torch</td>" in table._repr_html_()


@pytest.fixture
def ort() -> EngineSettings:
    needs("ortmodule")
    return EngineSettings.of(engine="ortmodule", fallback=True)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))], ids=["copy", "pickle"]
)
def test_a_wrapper_s_copy_is_a_wrapper(session: Session, ort: EngineSettings, copied: Any) -> None:
    wrapper = session.wrapped.wrap(Net(), ort)
    first, second, third = copied(wrapper), copied(wrapper), copied(wrapper)
    original = session.wrapped.unwrap(first)
    assert type(original) is Net
    with pytest.raises(ValueError, match=r"is already wrapped .engine 'ortmodule'"):
        session.wrapped.wrap(second, ort)
    with pytest.raises(ValueError, match="contains a wrapped model; unwrap that first"):
        session.wrapped.wrap(nn.Sequential(third), ort)
    assert session.wrapped.namespace is not None
    session.wrapped.namespace["third"] = third
    assert "third" in [row.name for row in session.wrapped.table()]
    entry = session.wrapped.entry(third)
    assert entry is not None
    assert entry.settings == ort


def test_a_wrapper_s_copy_is_trained_on_its_engine(ort: EngineSettings, data: Any) -> None:
    wrapper = ortlab.wrap(Net(), engine="ortmodule", fallback=ort.fallback)
    ortlab.finetune(wrapper, data, loss="cross_entropy", learning_rate=0.1).result(timeout=HANGS_S)
    twin = copy.deepcopy(wrapper)
    run = ortlab.finetune(twin, data, loss="cross_entropy")
    assert run.result(timeout=HANGS_S).steps == 4
    assert run.engine_used == "ortmodule"
    assert run.settings.model.fallback
    assert run.settings.optim.learning_rate != 0.1, "the settings of the first run are its own"
    assert run.model is ortlab.unwrap(twin)


def test_a_model_that_could_not_be_checked_is_said_to_be(
    session: Session, ort: EngineSettings
) -> None:
    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    bind(session, model=Noisy(), settings=ort)
    names = session.wrapped.namespace
    assert names is not None
    for rows in (2, 3):
        names["model"](torch.randn(rows, 4))
    notes = [note for note in session.wrapped.table().notes if "not checked" in note]
    assert notes == ["model: not checked: forward draws random numbers besides dropout"]


def test_importing_ortlab_loads_and_changes_nothing() -> None:
    code = """
import logging, os, sys, threading, warnings
state = lambda: (dict(os.environ), threading.enumerate(), list(logging.root.handlers),
                 list(warnings.filters), sys.excepthook, sys.displayhook, list(sys.meta_path),
                 sorted(logging.root.manager.loggerDict))
before = state()
import ortlab
assert state() == before
heavy = {"torch", "onnxruntime", "onnx", "numpy", "IPython", "ipywidgets", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert {"wrap", "unwrap", "models", "finetune", "track", "last_run", "data"} <= set(dir(ortlab))
assert ortlab.last_run is None and ortlab.models and not heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_public_names_are_listed() -> None:
    assert dir(ortlab) == sorted(ortlab.__all__)


@pytest.mark.parametrize("path", [*reference.RESULTS, "session.Session"])
def test_what_functions_return_says_what_it_is(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(f"ortlab.{module}"), name)
    assert issubclass(kind, BaseException) or kind.__repr__ is not object.__repr__


def test_the_session_and_a_tracker_say_how_they_stand(session: Session) -> None:
    assert repr(session) == "<Session: 0 wrapped models, 0 runs, 0 Trainer runs, 0 searches>"
    bind(session, model=Net(), loss=nn.MSELoss())
    assert repr(session.wrapped) == "<WrappedModels: 1 wrapped, 1 not wrapped>"
    tracker = session.track([1, 2], name="mine")
    assert repr(tracker) == "<Tracker mine: starting, step 0/2>"
    assert list(tracker) == [1, 2]
    assert repr(tracker) == "<Tracker mine: finished, step 2/2>"
    assert repr(tracker.recorder) == "<Recorder: 2 steps, 1 events>"


@pytest.fixture
def data() -> Iterator[list[Any]]:
    """Yield batches for `Net`; stop the runs that were started on them afterwards."""
    yield [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    for run in the_session.runs:
        run.stop()
        assert run.wait_over(60)


def test_finetune_trains_the_user_s_model_in_place(settings: EngineSettings, data: Any) -> None:
    for wrapped in (False, True):
        model = Net()
        before = model.head.weight.detach().clone()
        given = ortlab.wrap(model, engine=settings.engine) if wrapped else model
        options = {} if wrapped else {"engine": settings.engine}
        run = ortlab.finetune(given, data, loss="cross_entropy", learning_rate=0.1, **options)
        assert ortlab.last_run is run
        result = run.result(timeout=HANGS_S)
        assert (result.state, result.steps) == ("finished", 4)
        assert run.engine_asked == run.engine_used == settings.engine
        assert not torch.equal(before, model.head.weight)
        assert ortlab.list_runs()[0].name == run.name
        assert run.name in repr(ortlab.list_runs(limit=1))
        if wrapped and settings.engine == "ortmodule":  # the run used the wrapper's own graphs
            assert ortlab.models()[-1].export_s > 0
    assert (run.folder / "checkpoints").is_dir()


def test_a_run_that_is_over_is_let_go_but_the_last(data: Any) -> None:
    def trained() -> str:
        run = ortlab.finetune(Net(), data, loss="cross_entropy", engine="eager")
        run.result(timeout=HANGS_S)
        return run.name

    name = trained()
    gc.collect()
    assert ortlab.last_run is not None
    assert ortlab.last_run.name == name
    kept = ortlab.last_run
    before = [trained(), trained()][0]
    gc.collect()
    assert kept in the_session.runs
    assert before not in {run.name for run in the_session.runs}
    with pytest.raises(ValueError, match=f"ortlab.open_run.'{before}'. opens its saved folder"):
        the_session.run(before)
    assert ortlab.open_run(before).state == "finished"
    with pytest.raises(ValueError, match="no run is called 'run-x': choose from"):
        the_session.run("run-x")


def test_the_engine_that_is_given_goes_before_the_wrapper_s(data: Any) -> None:
    wrapper = ortlab.wrap(Net(), engine="compile", fallback=True)
    run = ortlab.finetune(wrapper, data, loss="cross_entropy", engine="eager")
    assert run.result(timeout=HANGS_S).state == "finished"
    assert (run.engine_asked, run.engine_used) == ("eager", "eager")
    assert run.settings.model.fallback


def test_a_loss_of_the_user_s_own(data: Any) -> None:
    def far(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + 100

    run = ortlab.finetune(Net(), data, loss=far, engine="eager")
    assert run.result(timeout=HANGS_S).final_loss > 99
    assert run.settings.optim.loss == "far"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (lambda net, data: (data, net), {}, "the first argument is a list, not a torch.nn.Module"),
        (lambda net, data: (Net, data), {}, "the first argument is the class Net; create an inst"),
        (lambda net, data: (nn.MSELoss(), data), {}, "cannot fine-tune this MSELoss: it has no"),
        (
            lambda net, data: (net, data),
            {"loss": 3},
            "loss=3 is not a function; give loss(output, target) or",
        ),
        (lambda net, data: (net, data), {"loss": "mes"}, "did you mean 'mse'?"),
        (lambda net, data: (net, data), {"epoch": 3}, "did you mean 'num_train_epochs'?"),
        (lambda net, data: (net, data), {"lr": 0.0}, "learning_rate=0.0 must be above 0"),
        (lambda net, data: (net, []), {}, "empty"),
        (
            lambda net, data: (net, data),
            {"engine": "ortmodule", "precision": "bf16", "kernels": "ort"},
            "needs torch's kernels",
        ),
        (
            lambda net, data: (net, data),
            {"engine": "ortmodule", "precision": "fp16", "device": "cpu"},
            "choose precision='bf16', or engine='eager' to check numerics",
        ),
    ],
)
def test_what_finetune_refuses(
    arguments: Any, options: dict[str, Any], message: str, data: Any
) -> None:
    runs = [entry.name for entry in ortlab.list_runs()]
    net = Net()
    with pytest.raises(ValueError, match=re.escape(message)):
        ortlab.finetune(*arguments(net, data), **{"engine": "eager", **options})
    assert [entry.name for entry in ortlab.list_runs()] == runs


def test_track_yields_the_batches_and_shows_itself(data: Any) -> None:
    shown: list[object] = []
    session = Session()
    session.viewers.append(shown.append)
    tracker = session.track(data, name="mine")
    assert list(tracker) == data
    assert shown == [tracker]
    assert tracker.title == "mine"
    assert list(ortlab.track(data)) == data
