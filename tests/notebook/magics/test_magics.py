"""Tests of the magics, typed as a user types them, in IPython's own shell."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from IPython.core import completer

import ortlab
from ortlab.engines.ortmodule import compat, graph_cache
from ortlab.notebook.magics import completion
from ortlab.session import session
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.past_runs import kept
from tests.support.typed_magics import Typist
from tests.support.waiting import until

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@needs_ort
def test_a_cell_s_model_is_wrapped_in_ort_and_listed(ip: Typist) -> None:
    out = ip("%%ort\nmodel = Net()\ncriterion = nn.CrossEntropyLoss()")
    assert out == (
        "model runs on engine 'ortmodule'\nengine auto: chose ortmodule, which runs here\n"
    )
    ip("x, y = batches()[0]\ncriterion(model(x), y).backward()")
    lines = ip("%ort").splitlines()
    assert lines[3].split() == ["model", "Net", "auto", "ortmodule", "1", "-", "-", "-"]
    assert lines[4:6] == [
        "model: engine auto: chose ortmodule, which runs here",
        "not wrapped: criterion (has no parameter that requires a gradient)",
    ]
    row = ip("import ortlab\nortlab.models()").splitlines()[3].split()
    assert row[:6] == ["model", "auto", "ortmodule", "cpu", "float32", "58"]
    *times, fallback = row[6:]
    export, check = (float(value) for value in times[::2])
    assert export > 0
    assert check > 0
    assert set(times[1::2]) <= {"s", "ms"}
    assert fallback == "-"
    ip("%ort unwrap model")
    assert type(ip["model"]) is ip["Net"]
    assert "no model is wrapped" in ip("%ort")


def test_names_after_the_magic_choose(ip: Typist) -> None:
    ip("%%ort net other --engine compile\nnet, other, third = Net(), Net(), Net()")
    assert type(ip["third"]) is ip["Net"]
    assert type(ip["net"]) is type(ip["other"]) is not ip["Net"]


def test_the_line_form_wraps_what_is_there(ip: Typist) -> None:
    ip("net = Net(); alias = net")
    assert ip("%ort wrap net alias --engine compile") == "net, alias runs on engine 'compile'\n"
    assert ip["net"] is ip["alias"]
    assert "is already wrapped" in ip.refused("%ort wrap net")


@pytest.mark.parametrize(
    "body",
    [
        "model = model",
        "for model in [model]: pass",
        "(model := model)",
        "def make():\n    global model\n    model = Net()\nmake()",
        "exec('model = Net()')",
        "%time model = Net()",
        "%%time\nmodel = Net()",
        "from math import *\nclass model(Net): pass\nmodel = model()",
        "import asyncio\nawait asyncio.sleep(0)\nmodel = Net()",
        "async with asyncio.Lock() as _: model = Net()",
        "from __future__ import annotations\nmodel: Net = Net()",
    ],
)
def test_however_a_cell_binds_its_model(ip: Typist, body: str) -> None:
    ip("import asyncio\nmodel = Net()\nuntouched = Net()")
    assert "model runs on engine 'compile'" in ip(f"%%ort --engine compile\n{body}")
    assert session.wrapped.entry(ip["model"]) is not None
    assert type(ip["untouched"]) is ip["Net"]


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    model = Net()\nf()",
        "[model for model in [Net()]]",
        "class K:\n    model = Net()",
        "model.inner = nn.Linear(4, 8)",
        "del model",
        "lambda model=Net(): model",
        "_ = Net()",
    ],
)
def test_what_a_cell_does_not_bind(ip: Typist, body: str) -> None:
    ip("model = Net()")
    assert "wrapped nothing" in ip(f"%%ort --engine compile\n{body}")
    assert not session.wrapped.entries


def test_a_cell_shows_and_remembers_what_a_plain_cell_would(ip: Typist) -> None:
    ip(
        "shown = []\nget_ipython().display_formatter.formatters['text/plain'].for_type("
        "complex, lambda value, p, cycle: (shown.append(value), p.text('complex'))[0]);"
    )
    number = ip.shell.execution_count
    assert f"Out[{number}]: complex" in ip("%%ort --engine eager\nmodel = Net()\n1j")
    assert ip["shown"] == [1j]
    assert ip["_"] == 1j == ip["Out"][number]
    assert ip[f"_i{number}"] == "%%ort --engine eager\nmodel = Net()\n1j"
    assert "Out" not in ip("%%ort --engine eager\nmodel = Net()\n2j;")
    assert ip["_"] == 1j
    assert "Out" not in ip("%%ort --engine eager\nmodel = Net()")
    assert ip["_"] == 1j
    ip("%config InteractiveShell.ast_node_interactivity = 'all'")
    try:
        assert ip("%%ort --engine eager\n3j\nmodel = Net()\n4j").count("complex") == 2
    finally:
        ip.shell.ast_node_interactivity = "last_expr"


def test_a_cell_that_raises_keeps_its_traceback_and_wraps_nothing(ip: Typist) -> None:
    out = ip.raised("%%ort --engine compile\nmodel = Net()\n\n1 / 0\nother = Net()")
    assert "ZeroDivisionError" in out
    assert "line 4" in out
    assert "ortlab" not in out
    assert type(ip["model"]) is ip["Net"]
    assert "other" not in ip.shell.user_ns
    assert "SyntaxError" in ip.run("%%ort\nmodel = = 3")[1]
    assert "no model is wrapped" in ip("%ort")
    ip("%%ort --engine compile\nmodel = Net()")
    assert len(session.wrapped.entries) == 1


def test_a_magic_that_is_called_by_a_program(ip: Typist) -> None:
    ip(
        "value = get_ipython().run_cell_magic('ort', '--engine compile',"
        " 'from __future__ import annotations\\nmodel = Net()\\n42')"
    )
    assert ip["value"] == 42
    assert len(session.wrapped.entries) == 1
    out = ip.raised("get_ipython().run_cell_magic('ort', '', 'model = Net()\\n1 / 0')")
    assert "ZeroDivisionError" in out


def test_within_other_cell_magics(ip: Typist) -> None:
    ip("%%time\n%%ort --engine compile\nmodel = Net()")
    ip("%%capture said\n%%ort --engine compile\nother = Net()")
    assert "other runs on engine 'compile'" in ip["said"].stdout
    assert [entry.names for entry in session.wrapped.entries] == [("model",), ("other",)]


def test_comments_and_blank_lines_around_a_magic(ip: Typist) -> None:
    ip("\n  %%ort net --engine compile  # see --help\n  net, other = Net(), Net()")
    assert [entry.names for entry in session.wrapped.entries] == [("net",)]
    assert "net" in ip("%ort      # table: name, engine asked for / used")


def test_variables_are_expanded_as_in_every_magic(ip: Typist) -> None:
    ip("kind, name = 'compile', 'model'\n")
    ip("%%ort $name --engine {kind}\nmodel, other = Net(), Net()")
    assert [entry.names for entry in session.wrapped.entries] == [("model",)]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "%%ort --engin ort\nbound = Net()",
            "has no option --engin: did you mean '--engine'? also near: --tuning, --attention;",
        ),
        (
            "%%ort --engine orc\nbound = Net()",
            "choose from auto, eager, compile, ort, ortmodule, ort_fused; did you mean 'ort'?",
        ),
        ("%%ort --self-check maybe\nbound = Net()", "--self-check takes on or off, not 'maybe'"),
        ("%%ort 'net\nbound = Net()", '%ort: No closing quotation in "\'net"'),
        ("%%ort", "%%ort must be the first line of a cell that makes a model"),
        ("%%ort\n\n", "%%ort must be the first line of a cell that makes a model"),
        ("%ort finetun net data", "did you mean 'finetune'?"),
        ("%ort net", "%ort has no command 'net'; to wrap it: %ort wrap net"),
        ("%ort wrap", "%ort wrap: name a model"),
        ("%ort wrap nett", "no model is called 'nett': choose from net, loss; did you mean 'net'?"),
        ("%ort wrap Net", "Net is the class Net; create an instance of it"),
        ("%ort wrap data", "data is a list, not a torch.nn.Module"),
        ("%ort wrap loss", "cannot wrap loss: it has no parameter that requires a gradient"),
        ("%ort unwrap net", "net is not wrapped"),
        ("%ort unwrap", "the following arguments are required: NAME"),
        ("%ort finetune net", "the following arguments are required: TRAIN"),
        (
            "%ort finetune net dat",
            "nothing is called 'dat': choose from data, empty; did you mean 'data'?",
        ),
        (
            "%ort finetune net [data]*2",
            "'[data]*2' is not the name of a variable; bind the value to one before, as in "
            "x = [data]*2, and give x",
        ),
        ("%ort finetune net data --eval-dataset dat", "did you mean 'data'?"),
        ("%ort finetune net data more", "does not know what to do with 'more'"),
        ("%ort finetune net data --epoch 3", "did you mean '--num-train-epochs'?"),
        (
            "%ort finetune net data --epochs some",
            "--num-train-epochs takes a whole number, not 'some'",
        ),
        ("%ort finetune net data --epochs 0", "num_train_epochs=0 must be at least 1"),
        ("%ort finetune net data --lr -1", "learning_rate=-1.0 must be above 0"),
        ("%ort finetune net data --loss mes", "did you mean 'mse'?"),
        ("%ort finetune data net", "data is a list, not a torch.nn.Module"),
        ("%ort finetune net empty --engine eager", "no"),
        ("%ort stop", "there is no run yet"),
        ("%ort zero", "the following arguments are required: plan"),
        ("%ort zero plan", "name a model or a number of parameters"),
        ("%ort zero plan net --params 2.7B", "as in --params 2.7B; not both"),
        (
            "%ort zero plan --params 2.7X",
            "'2.7X' is not a number of parameters; use one such as 350M",
        ),
        ("%ort zero plan --params=-3B", "'-3B' is not a number of parameters"),
        ("%ort zero plan --params 1B --gpus 0", "gpus=0 must be at least 1"),
        ("%ort zero plan --params 1B --memory 40XB", "'40XB' is not a memory size"),
        ("%ort zero plan --params 1B --memory -40GiB", "expected one argument"),
        ("%ort zero plan --params 1B --hidden 8 --layers 2", "there is no sequence, batch"),
        ("%ort zero plan --params 1B --batch 8", "which also need hidden and layers"),
        ("%ort zero plan data", "data is a list, not a torch.nn.Module"),
    ],
)
def test_bad_input_gets_one_line_and_changes_nothing(ip: Typist, cell: str, message: str) -> None:
    ip("net = Net(); data = batches(); empty = []; loss = nn.MSELoss()")
    before = dict(ip.shell.user_ns)
    assert message in ip.refused(cell)
    assert "bound" not in ip.shell.user_ns
    assert all(ip.shell.user_ns[name] is before[name] for name in ("net", "data", "loss"))
    assert not session.wrapped.entries
    assert not session.runs


def test_an_engine_that_is_missing_is_said_before_the_body_runs(
    ip: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # torch.compile needs a C++ compiler
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "needs a C++ compiler" in ip.refused("%%ort --engine compile\nmodel = Net()")
    assert "model" not in ip.shell.user_ns


def test_help_for_everything(ip: Typist) -> None:
    for cell in ("%ort?", "%%ort?", "%ort --help"):
        page = ip(cell)
        for command in ("wrap", "unwrap", "finetune", "runs", "pause", "resume", "stop", "doctor"):
            assert f"%ort {command}" in page
    page = ip("%ort finetune --help")
    assert "--batch-size N" in page
    assert "micro-batch size; default 16 samples" in page
    assert "--learning-rate N, --lr N" in page
    assert "--accumulation" not in page, "a former name is accepted and not shown"
    assert "<adamw|sgd|lamb>" not in page, "few people set it"
    assert len(page.splitlines()) <= 40, "it fits a screen"
    everything = ip("%ort finetune --help-all")
    assert "<adamw|sgd|lamb>" in everything
    assert all(each.flag in everything for each in FinetuneSettings.declarations().values())
    assert "--engine" in ip("%%ort --help\nmodel = Net()")
    assert "model" not in ip.shell.user_ns
    assert "--engine" in ip("%%ort --help")


def test_finetune_returns_at_once_and_is_awaited(ip: Typist) -> None:
    ip("net = Net(); data = batches()\nbefore = net.head.weight.detach().clone()")
    out = ip(
        "run = %ort finetune net data --eval-dataset data --loss cross_entropy --engine eager "
        "--lr 0.01"
    )
    assert "Out[" not in out
    assert ortlab.last_run is ip["run"]
    ip("result = await run")
    assert ip["result"].state == "finished"
    assert ip["result"].steps == 4
    assert ip["result"].after.loss < ip["result"].before.loss
    assert not ip["torch"].equal(ip["before"], ip["net"].head.weight)
    assert type(ip["net"]) is ip["Net"]
    lines = ip("%ort runs --limit 1").splitlines()
    (line,) = (line for line in lines if line.startswith(ip["run"].name))
    assert line.split()[:6] == [ip["run"].name, "finished", "Net", "eager", "0.01", "4"]
    assert f"{ip['run'].name} is over (finished) after 4 steps" in ip.refused("%ort stop")


def test_a_finetune_that_is_refused_before_its_first_step_leaves_no_run(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    before = [entry.name for entry in ortlab.list_runs()]
    ip("run = %ort finetune net data --engine eager")
    assert "if its last element is the targets, name a loss" in ip.run("await run")[1]
    refused = ip["run"]
    assert not refused.folder.exists()
    assert refused not in session.runs
    assert [entry.name for entry in ortlab.list_runs()] == before
    ip("run = %ort finetune net data --engine eager --loss cross_entropy\nresult = await run")
    assert ip["run"].name == refused.name
    ip("def broken(output, target): raise ValueError('not done yet')")
    ip("run = %ort finetune net data --engine eager --loss broken")
    assert "not done yet" in ip.run("await run")[1]
    assert ortlab.list_runs()[0].name == ip["run"].name, "the user's own error is kept"


def test_finetune_computes_metrics_of_the_notebook(ip: Typist) -> None:
    ip("net = Net(); data = batches()\ndef rows(predictions, targets): return len(predictions)")
    train = "run = %ort finetune net data --loss cross_entropy --engine eager --eval-dataset data "
    ip(train + "--metrics rows --keep-best rows --keep-best-mode max\nresult = await run")
    assert ip["result"].after.metrics == {"rows": sum(len(x) for x, _ in ip["data"])}
    assert "nothing is called 'row'" in ip.refused(train + "--metrics row")
    assert "say whether more or less" in ip.refused(train + "--metrics rows --keep-best rows")
    ip("scores = [rows]; text = 'rows'; numbers = [1]")
    assert ip.completions("%ort finetune net data --metrics ") == ["batches", "rows", "scores"]


def test_finetune_takes_optimizer_and_scheduler_of_the_notebook(ip: Typist) -> None:
    ip("import functools; from torch.optim import SGD, lr_scheduler; net = Net(); data = batches()")
    ip("opt = SGD(net.parameters(), lr=0.5); halve = lr_scheduler.StepLR(opt, 2, 0.5)")
    ip("def adamw(parameters): return SGD(parameters, lr=0.25)\ndef pack(samples): return samples")
    train = "run = %ort finetune net data --loss cross_entropy --engine eager --epochs 1 "
    ip(train + "--optimizer opt --lr-scheduler halve\nresult = await run")
    settings = ip["run"].settings
    assert (settings.optim.optimizer, settings.optim.lr_scheduler_type) == (
        "own SGD",
        "own StepLR",
    )
    assert settings.optim.learning_rate == 0.5
    steps = ip["result"].steps
    assert ip["opt"].param_groups[0]["lr"] == 0.5 * 0.5 ** (steps // 2)
    ip(train + "--optimizer adamw --schedule constant\nresult = await run")
    assert ip["run"].settings.optim.learning_rate == 0.25, "the variable, not the name"
    ip(train + "--optimizer sgd\nresult = await run")
    assert ip["run"].settings.optim.optimizer == "sgd"
    assert "optimizer='optt': choose from adamw, sgd, lamb" in ip.refused(
        train + "--optimizer optt"
    )
    assert "nothing is called 'half'" in ip.refused(train + "--lr-scheduler half")
    assert "is bound to an optimizer" in ip.refused(train + "--lr-scheduler halve")
    refused = ip.refused(train + "--optimizer opt --lr 0.1")
    assert "learning_rate=0.1 is given besides optimizer" in refused
    assert "makes its own batches" in ip.refused(train + "--collate-fn pack")
    offered = ip.completions("%ort finetune net data --optimizer ")
    assert {"adamw", "sgd", "lamb", "opt"} <= {*offered}
    assert "halve" not in offered
    assert "halve" in ip.completions("%ort finetune net data --lr-scheduler ")


def test_resume_takes_an_optimizer_of_the_notebook(ip: Typist) -> None:
    ip("from torch.optim import SGD; net = Net(); opt = SGD(net.parameters(), lr=0.5)")
    ip(
        "class Stopping(list):\n"
        "    def __iter__(self):\n"
        "        for number, batch in enumerate(super().__iter__()):\n"
        "            if number == 2: ortlab.last_run.stop()\n"
        "            yield batch\n"
        "import ortlab; data = Stopping(batches())"
    )
    ip("run = %ort finetune net data --loss cross_entropy --engine eager --optimizer opt")
    ip("result = await run\ndata = batches()\nopt = SGD(Net().parameters(), lr=0.5)")
    assert ip["result"].state == "stopped"
    assert "that are not this Net's" in ip.refused(f"%ort resume {ip['run'].name}")
    ip("other = SGD(net.parameters(), lr=0.5)")
    ip(f"run = %ort resume {ip['run'].name} --optimizer other")
    ip("result = await run")
    assert ip["result"].state == "finished"
    assert ip["run"].settings.optim.optimizer == "own SGD"


def test_an_unassigned_run_is_shown_once_and_kept(ip: Typist) -> None:
    shown: list[Any] = []
    session.viewers.append(shown.append)
    ip("net = Net(); data = batches()")
    try:
        ip("%ort finetune net data --loss cross_entropy --engine eager")
    finally:
        session.viewers.remove(shown.append)
    assert shown == [ortlab.last_run]
    assert "Out[5]: 4" in ip("import ortlab\n(await ortlab.last_run).steps")


def test_a_wrapped_model_trains_on_its_own_engine(ip: Typist) -> None:
    ip("%%ort --engine compile\nnet = Net()")
    ip("data = batches()\nrun = %ort finetune net data --loss cross_entropy --engine eager")
    ip("result = await run")
    assert (ip["run"].engine_asked, ip["result"].state) == ("eager", "finished")
    ip("other = Net()\n%ort wrap other --engine eager")
    ip("run = %ort finetune other data --loss cross_entropy")
    assert ip["run"].engine_asked == "eager"
    assert ip["run"].wait_over(60)


@needs_ort
def test_finetune_goes_on_from_a_checkpoint(ip: Typist, tmp_path: Path) -> None:
    ip("net = nn.Linear(4, 2)\ndata = batches()")
    ip("run = %ort finetune net data --loss cross_entropy --engine eager --epochs 2\nawait run")
    run = ip["run"]
    path = tmp_path / "a checkpoint"
    ip(f"path = %ort checkpoint run --to '{path}'")
    assert ip["path"] == path
    assert "final.safetensors" in ip("%ort checkpoint")
    ip(f"again = %ort finetune net data --resume-from '{path}' --epochs 3\nawait again")
    assert ip["again"].settings == run.settings.replace(num_train_epochs=3)
    assert ip["again"].step == run.step / 2 * 3
    text = tmp_path / "text"
    text.write_text("nothing")
    assert "is not a checkpoint" in ip.refused(f"%ort finetune net data --resume-from {text}")


def test_finetune_in_ort_from_a_wrapped_and_from_a_raw_model(ip: Typist) -> None:
    ip("%%ort\nwrapped = Net()")
    ip("raw = Net(); data = batches()\nbefore = raw.head.weight.detach().clone()")
    for name in ("wrapped", "raw"):
        ip(f"run = %ort finetune {name} data --loss cross_entropy --lr 0.1\nresult = await run")
        assert (ip["run"].engine_asked, ip["run"].engine_used) == ("auto", "ortmodule")
        assert ip["result"].steps == 4
    assert type(ip["raw"]) is ip["Net"]
    assert not ip["torch"].equal(ip["before"], ip["raw"].head.weight)


def test_a_loss_of_the_user_s_may_be_called_off(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    typed = "run = %ort finetune net data --loss off --engine eager\nresult = await run"
    ip(f"def off(output, target):\n    return (output - 1).square().mean()\n\n{typed}")
    assert ip["run"].settings.optim.loss == "off"
    ip("off = 3")  # not a function: the model's own loss is used, and it has none
    assert "does not fit forward" in ip.run(typed)[1]


def test_the_user_s_own_loss(ip: Typist) -> None:
    ip("def mine(output, target):\n    return (output - 1).square().mean()")
    ip("net = Net(); data = batches()")
    ip("run = %ort finetune net data --loss mine --engine eager\nresult = await run")
    assert ip["run"].settings.optim.loss == "mine"


SLOW = """
import threading
gate = threading.Event()
class Slow:
    def __len__(self): return 1000
    def __iter__(self):
        for batch in batches(1000):
            gate.wait(5)
            yield batch
slow = Slow()
net = Net()
"""


def test_a_model_is_trained_by_one_run_at_a_time_and_runs_are_stopped(ip: Typist) -> None:
    ip(SLOW)
    ip("run = %ort finetune net slow --loss cross_entropy --engine eager")
    name = ip["run"].name
    again = "%ort finetune {} slow --loss cross_entropy --engine eager --epochs 2"
    assert f"{name} is training this model" in ip.refused(again.format("net"))
    ip("bigger = nn.Sequential(net, nn.Linear(2, 2))")
    assert f"{name} is training this model" in ip.refused(again.format("bigger"))
    assert f"no run is called 'run-x': choose from {name}" in ip.refused("%ort pause run-x")
    ip(f"%ort pause {name}\ngate.set()")
    assert ip("%ort resume run") == f"{name} resumed\n"
    assert ip("%ort stop") == f"{name} stops after the step in flight and keeps its weights\n"
    assert ip["run"].wait_over(60)
    assert ip["run"].state == "stopped"
    ip("run = %ort finetune net slow --loss cross_entropy --engine eager --max-steps 2\nawait run")


def test_a_run_that_was_stopped_goes_on_by_its_names(ip: Typist) -> None:
    ip(SLOW)
    ip("run = %ort finetune net slow --loss cross_entropy --engine eager\ngate.set()\n%ort stop")
    run = ip["run"]
    assert run.wait_over(60)
    ip("other = Net(); other_data = slow; del slow")
    missing = ip.refused(f"%ort resume {run.name}")
    assert f"{run.name} cannot continue without slow (its data)" in missing
    assert ip.completions(f"%ort resume {run.name} oth") == ["other"]
    assert run.name in ip.completions("%ort resume ")
    assert "nothing is called 'none'" in ip.refused(f"%ort resume {run.name} other none")
    ip(f"named = %ort resume {run.name} other other_data\n%ort stop")
    assert ip["named"].wait_over(60)
    assert ip["named"].model is ip["other"]
    ip("slow = other_data\nagain = %ort resume run\n%ort stop")
    assert ip["again"].wait_over(60)
    assert ip["again"].model is ip["net"]
    assert f"continues {run.name}" in ip("import ortlab\nprint(ortlab.list_runs())")


def test_the_user_s_own_errors_keep_their_traceback(ip: Typist) -> None:
    ip(
        "class Broken:\n    def __len__(self): raise ValueError('mine')\n"
        "    def __iter__(self): return iter(())\nbroken = Broken(); net = Net()"
    )
    out = ip.raised("%ort finetune net broken --engine eager --loss mse")
    assert "ValueError: mine" in out
    ip("data = [(torch.zeros(2, 3), torch.zeros(2))] * 2")
    ip("run = %ort finetune net data --engine eager --loss mse")
    result, out, _ = ip.run("await run")
    assert isinstance(result.error_in_exec, RuntimeError)
    assert "shapes cannot be multiplied" in out


def test_tab_in_an_ipython_without_context_matchers(
    ip: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older than 8.6, as Colab's; tests/notebook/test_colab.py has one."""
    monkeypatch.delattr(completer, "context_matcher")
    matches = completion.matcher(completion.Names(ip.shell))
    ip.shell.Completer.text_until_cursor = "%ort finetune --ba"
    assert matches("--ba") == ["--batch-size"]
    ip.shell.Completer.text_until_cursor = "ba"
    assert matches("ba") == []


def test_tab_completes_commands_options_choices_and_names(ip: Typist) -> None:
    ip("model = Net(); model_b = Net(); module_loss = nn.MSELoss(); text = 'model'")
    ip(
        "train_data = batches(); train_text = 'x'; valid_data = batches()\n"
        "def my_loss(output, target): ..."
    )
    assert ip.completions("%ort f") == ["finetune"]
    assert set(ip.completions("%ort ")) >= {"wrap", "unwrap", "finetune", "device", "doctor"}
    assert ip.completions("%ort finetune mod") == ["model", "model_b", "module_loss"]
    assert ip.completions("run = %ort finetune model train") == ["train_data"]
    assert ip.completions("%ort finetune model train_data --eval-dataset va") == ["valid_data"]
    assert ip.completions("%ort finetune --ba") == ["--batch-size"]
    assert ip.completions("%ort finetune model train_data --optimizer ") == ["adamw", "lamb", "sgd"]
    assert ip.completions("%ort finetune model train_data --loss m") == [
        "module_loss",
        "mse",
        "my_loss",
    ]
    assert ip.completions("%ort finetune --epochs 3 model train") == ["train_data"]
    assert "--epochs" not in ip.completions("%ort finetune --epochs 3 --e")
    assert ip.completions("%%ort --engine co") == ["compile"]
    assert ip.completions("%%ort --self-check o") == ["off", "on"]
    assert ip.completions("%%ort model model") == ["model_b"]
    ip("%ort wrap model_b --engine compile")
    assert ip.completions("%ort unwrap ") == ["model_b"]
    assert ip.completions("%ort nonsense mod") == ip.completions("%other mod")
    assert "finetune" not in ip.completions("x = 'ort f")


def test_loading_twice_and_unloading_leave_no_trace(ip: Typist) -> None:
    shell = ip.shell
    assert len(session.viewers) == 1

    def traces() -> dict[str, Any]:
        return {
            "line": dict(shell.magics_manager.magics["line"]),
            "cell": dict(shell.magics_manager.magics["cell"]),
            "registry": dict(shell.magics_manager.registry),
            "transformers": [*shell.input_transformers_cleanup, *shell.ast_transformers],
            "matchers": list(shell.Completer.custom_matchers),
            "events": {name: list(hooks) for name, hooks in shell.events.callbacks.items()},
            "viewers": list(session.viewers),
        }

    loaded = traces()
    ortlab.load_ipython_extension(shell)
    assert traces() == loaded
    ip("%reload_ext ortlab")
    assert {name: len(value) for name, value in traces().items()} == {
        name: len(value) for name, value in loaded.items()
    }
    ip("%%ort --engine compile\nmodel = Net()")
    ip("%unload_ext ortlab")
    text = str(traces())
    assert "ortlab" not in text
    assert "not found" in ip.run("%ort")[2]
    assert session.wrapped.namespace is None
    assert session.wrapped.entry(ip["model"]) is not None
    ortlab.unload_ipython_extension(shell)
    ip("%load_ext ortlab")
    assert "model" in ip("%ort")


def test_unloading_ends_what_is_shown_and_no_run(ip: Typist) -> None:
    events = ip.shell.events.callbacks["post_run_cell"]
    before = list(events)
    ip(
        "import time\n"
        "class Slow(Net):\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.05)\n"
        "        return super().forward(x)\n"
        "model, data = Slow(), batches()\n"
        "run = %ort finetune model data --engine eager --loss cross_entropy --epochs 1000"
    )
    assert views()
    assert len(events) == len(before) + 1
    ip("%unload_ext ortlab")
    assert not views()
    assert "ortlab" not in str(events)
    assert not ip["run"].over()


def views() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ortlab-view"]


def test_a_model_that_the_user_deletes_is_collected(ip: Typist) -> None:
    ip("%%ort --engine compile\nmodel = Net()")
    ip("%ort")
    ip("data = batches()\nrun = %ort finetune model data --engine eager --loss cross_entropy")
    ip("result = await run")
    alive = weakref.ref(ortlab.unwrap(ip["model"]))
    ip("del model")
    gc.collect()
    assert alive() is None


def test_a_terminal_asks_for_more_lines(ip: Typist) -> None:
    complete = ip.shell.input_transformer_manager.check_complete
    assert complete("%%ort --engine compile\n")[0] == "incomplete"
    assert complete("%%ort\nmodel = Net()\n")[0] == "incomplete"
    assert complete("%%ort\nmodel = Net()\n\n")[0] == "complete"


@needs_ort
def test_cache_shows_its_size_and_clears(ip: Typist) -> None:
    assert ip("%ort cache").startswith("0 exported graphs, 0.0 MiB, in ")
    ip("%%ort\nnet = Net()")
    ip("net(torch.randn(4, 4)).sum().backward()")
    one = ip("%ort cache")
    assert one.startswith("1 exported graph, 0.0 MiB, in ")
    assert str(graph_cache.folder()) in one
    assert ip("%ort cache clear") == f"removed {one}"
    assert ip("%ort cache").startswith("0 exported graphs")
    assert "'clear'" in ip.refused("%ort cache claer")
    assert ip.completions("%ort cache ") == ["clear"]


@pytest.mark.parametrize("engine", ["ort", "ortmodule"])
def test_check_compares_the_next_call_with_eager_torch(ip: Typist, engine: str) -> None:
    needs(engine)
    ip(f"model = Net()\n%ort wrap model --engine {engine}")
    waiting = "waiting: the next call of Net is compared with eager torch"
    assert waiting in ip("check = %ort check model\ncheck")
    ip("model(torch.randn(3, 4)).sum().backward()")
    found = ip("check")
    assert "1 output " in found
    assert "4 gradients " in found
    assert "right: 1 output within " in found
    assert "for inputs of shape [3, 4]" in found
    assert ip.completions("%ort chec") == ["check", "checkpoint"]
    assert ip.completions("%ort check ") == ["model"]
    assert "next call" in ip("%ort check --help")
    ip("other = Net()")
    assert "wrap it" in ip.refused("%ort check other")


def test_the_table_of_models_shows_graph_breaks_and_operators_in_torch(ip: Typist) -> None:
    needs("ort")
    cell = ip.shell.execution_count
    ip(
        "class Broken(Net):\n"
        "    def forward(self, x):\n"
        "        h = self.inner(x)\n"
        "        torch._dynamo.graph_break()\n"
        "        return self.head(torch.special.erfcx(h))\n"
    )
    ip("model = Broken()\n%ort wrap model --engine ort\nmodel(torch.randn(3, 4)).sum().backward()")
    shown = ip("%ort")
    assert re.search(r"model: ORT \d+\.\d% of the step \(forward and backward\)", shown)
    assert f"model: graph break at cell {cell}, line 4: User-inserted graph break." in shown
    assert f"aten.special_erfcx at cell {cell}, line 5 in torch: no rule" in shown


@needs_ort
def test_graph_shows_what_ort_made(ip: Typist) -> None:
    ip("model = Net()\n%ort wrap model --cache off\nmodel(torch.randn(3, 4)).sum().backward()")
    stages = ip("%ort graph model")
    assert repr(ortlab.graphs(ip.shell.user_ns["model"])) in stages
    operators = ip("%ort graph model --stage gradient")
    assert "ReluGrad" in operators
    assert "ReluGrad" in ip("%ort graph model --since forward --stage gradient")
    assert ip.completions("%ort graph model --stage g") == ["gradient"]
    assert ip.completions("%ort graph ") == ["model"]
    assert "did you mean 'forward'" in ip.refused("%ort graph model --stage forwards")
    assert "no eval graph" in ip.refused("%ort graph model --stage eval")
    ip("other = Net()")
    assert "wrap it" in ip.refused("%ort graph other")


@needs_ort
def test_profile_tells_where_a_step_goes(ip: Typist) -> None:
    ip("model = Net()\n%ort wrap model --cache off\nx, batch = torch.randn(3, 4), batches()[0][:1]")
    assert "give a batch for forward(x)" in ip.refused("%ort profile model")
    given = ip("%ort profile model --batch x --steps 1")
    assert "Net: a step without its optimizer takes" in given
    assert "a single step each" in given
    assert "made-up" not in given
    made_up = ip("kept = %ort profile model\nkept")
    assert "made-up values in the shapes of the last call: float32[3, 4]" in made_up
    assert repr(ip["kept"]) in made_up
    assert {node.module for node in ip["kept"].nodes} >= {"inner.0", "inner.1", "head"}
    assert "inner.0" in ip("%ort profile model --batch batch --steps 1")
    assert ip.completions("%ort profile ") == ["model"]
    assert ip.completions("%ort profile model --ba") == ["--batch"]
    assert ip.completions("%ort profile model --batch ") == ["batch", "x"]
    assert "--steps N" in ip("%ort profile --help")


@needs_ort
def test_memory_of_a_step(ip: Typist) -> None:
    ip("model = Net()\n%ort wrap model --cache off\nx = torch.randn(3, 4)")
    assert "give a batch for forward(x)" in ip.refused("%ort memory model")
    ip("model(x)")
    assert "for batch 3," in ip("%ort memory model")
    assert "for batch 500," in ip("%ort memory model batch=500")
    assert "with sgd" in ip("%ort memory model --optimizer sgd")
    ip("plan = %ort memory model --budget 1MiB")
    process = ip["plan"].process_bytes()
    assert process <= 2**20 < 1.05 * process
    assert "is the largest that fits into 1MiB" in ip("%ort memory model --budget 1MiB")
    assert ip.completions("%ort memory ") == ["model"]
    assert ip.completions("%ort memory model b") == ["batch="]
    assert "did you mean 'batch'" in ip.refused("%ort memory model bach=3")
    assert "type NAME=NUMBER" in ip.refused("%ort memory model batch=many")
    assert "not a memory size" in ip.refused("%ort memory model --budget lots")
    ip("other = Net()")
    assert "wrap it" in ip.refused("%ort memory other")


def test_zero_plan(ip: Typist) -> None:
    out = ip("%ort zero plan --params 2.7B --gpus 16 --memory 40GiB")
    assert "2,700,000,000 parameters, 16 GPUs" in out
    assert "stage 1 is the cheapest that fits into 40.00 GiB" in out
    ip("model = Net()\nplan = %ort zero plan model --gpus 4 --optimizer sgd")
    assert ip["plan"].parameters == sum(p.numel() for p in ip["model"].parameters())
    assert ip["plan"].settings.optimizer == "sgd"
    assert "<svg" in ip["plan"].picture()
    assert ip.completions("%ort zero ") == ["plan"]
    assert ip.completions("%ort zero plan ") == ["model"]
    assert ip.completions("%ort zero plan model --prec") == ["--precision"]
    assert ip.completions("%ort zero plan model --precision ") == ["fp32", "mixed"]


def test_training_plan(ip: Typist, tmp_path: Path) -> None:
    out = ip("plan = %ort plan 7B --gpus 64 --zero 1\nplan")
    assert "6.66B parameters, 64 a100-80gb" in out
    assert {one.layout.zero for one in ip["plan"].shown} == {1}
    ip(
        "config = dict(model_type='gpt2', n_embd=768, n_layer=12, n_head=12, vocab_size=50257)\n"
        f"small = %ort plan config --gpus 8 --script {tmp_path}"
    )
    assert ip["small"].model.layers == 12
    assert (tmp_path / "launch.sh").exists()
    assert "Llama 3 405B, 16384 GPUs" in ip("%ort plan published")
    assert "the nearest number is gpus=16" in ip.refused("%ort plan 7B --gpus 13")
    assert "not a number of parameters" in ip.refused("%ort plan nosuch --gpus 8")
    ip("class Own(nn.Module): pass\nown = Own()")
    assert "Own has no config" in ip.refused("%ort plan own --gpus 8")
    assert ip.completions("%ort plan 7B --hardware h2") == ["h200-141gb"]
    assert ip.completions("%ort plan 7B --tens") == ["--tensor"]


@needs_ort
def test_recompute(ip: Typist) -> None:
    ip(
        "def layer():\n    return nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))\n"
        "class Deep(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(layer() for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = x + layer(x)\n"
        "        return x\n"
        "model = Deep()\n%ort wrap model --kernels torch\nx = torch.randn(3, 4)"
    )
    assert ip.completions("%ort recompute model --choose ") == ["off"]
    table = ip("%ort recompute model --batch x")
    assert "layers.*" in table
    assert "for batch 3:" in table
    assert "not measured yet" in table
    assert "for batch 500:" in ip("%ort recompute model batch=500")
    assert ip.completions("%ort recompute model --choose l") == ["layers", "layers.*"]
    assert ip.completions("%ort recompute model b") == ["batch="]
    assert "layers.* from the next step on" in ip("%ort recompute model --choose layers.*")
    assert "active: layers.*" in ip("model(x).sum().backward()\n%ort recompute model")
    assert "off from the next step on" in ip("%ort recompute model batch=9 --budget 1GiB")
    ip("plans = %ort recompute model --measure")
    assert ip["plans"].savings("layers.*").cost_s > 0
    assert ip.completions("%ort recompute model --s") == ["--subgraphs"]
    listed = ip("%ort recompute model batch=100 --subgraphs")
    row = next(line for line in listed.splitlines() if "Gelu+:1:-1" in line)
    assert row.split() == [
        "Gelu+:1:-1", "recompute", "3", "batch", "x", "64", "75.0", "KiB", "768*batch",
    ]  # fmt: skip
    assert "a step takes at least" in ip.refused("%ort recompute model --budget 1KiB")
    assert "did you mean 'layers'" in ip.refused("%ort recompute model --choose layer")
    both = "%ort recompute model --choose off --budget 1GiB"
    assert "--budget and --choose both choose a plan" in ip.refused(both)
    assert "%ort recompute: 'many'" in ip.refused("%ort recompute model many")


@needs_ort
def test_a_batch_makes_the_graphs_of_a_new_model(ip: Typist) -> None:
    ip("model = Net()\n%ort wrap model --cache off\nx = torch.randn(3, 4)")
    assert "gradient" in ip("%ort graph model --batch x --stage gradient")
    assert "does not fit forward" in ip.refused("y = x, x, x, x\n%ort graph model --batch y")


def test_lines_show_the_code_of_a_cell(ip: Typist) -> None:
    ip(
        "class Own(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.sin(super().forward(x))\n"
        "model, other = Own(4, 2), Own(4, 2)\n"
        "x = torch.randn(3, 4)\n"
        "%ort wrap model --engine ort"
    )
    assert "wrap it with engine='ort'" in ip.refused("%ort lines other")
    assert "give a batch" in ip.refused("%ort lines model")
    given = ip("kept = %ort lines model --batch x --steps 1\nkept")
    assert "Own.forward in cell " in given
    assert re.search(r"ORT +3      return torch\.sin\(super\(\)\.forward\(x\)\)$", given, re.M)
    assert {node.op for node in ip["kept"].lines[0].nodes} >= {"Sin", "Gemm"}
    assert ip.completions("%ort lines ") == ["model"]
    assert "--steps N" in ip("%ort lines --help")


@needs_ort
def test_profile_refuses_in_a_line(ip: Typist) -> None:
    ip("model, other = Net(), Net()\n%ort wrap model --cache off\ndata = batches()")
    ip("x = torch.randn(3, 4)\nmodel(x).sum().backward()")
    assert "wrap it" in ip.refused("%ort profile other")
    assert "did you mean 'model'" in ip.refused("%ort profile modle")
    assert "nothing is called 'y'" in ip.refused("%ort profile model --batch y")
    assert "steps=0 must be at least 1" in ip.refused("%ort profile model --steps 0")
    assert "takes a whole number" in ip.refused("%ort profile model --steps few")
    assert "does not fit forward" in ip.refused("%ort profile model --batch data")
    ip("loader = torch.utils.data.DataLoader(data)")
    assert "next(iter(loader))" in ip.refused("%ort profile model --batch loader")


def test_doctor_lists_every_check(ip: Typist) -> None:
    out = ip("%ort doctor")
    assert repr(ortlab.check_setup()) in out
    for name in ("Python", "torch", "onnx"):
        assert name in out


def test_the_magics_import_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell as S\n"
        "ip = S.instance()\nassert ip.run_cell('%load_ext ortlab').success\n"
        "assert ip.run_cell('%ort').success\nassert ip.run_cell('%ort?').success\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store three finished runs, none of them of a running kernel."""
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    for loss, days in ((0.5, 90), (0.25, 40), (0.75, 0)):
        kept(tmp_path / "runs", loss=loss, days=days, lr=loss)
    return tmp_path


def test_the_history_is_listed_as_it_is_asked_for(ip: Typist, history: Path) -> None:
    def first(line: str) -> list[str]:
        return [row.split()[0] for row in ip(line).splitlines() if row.startswith("run-")]

    assert first("%ort runs") == ["run-3", "run-2", "run-1"]
    assert first("%ort runs --sort loss") == ["run-2", "run-1", "run-3"]
    assert first("%ort runs --sort loss --reverse --limit 2 --state finished --engine eager") == [
        *("run-3", "run-1"),
    ]
    assert "no run has engine 'ortmodule'" in ip("%ort runs --engine ortmodule")
    assert "did you mean 'loss'" in ip.refused("%ort runs --sort los")
    ip("import ortlab; p = ortlab.open_run(2); p.note('seen')")
    ip("found = %ort runs")
    assert ip["found"][1].note == "seen"
    assert "run-2" in ip("p")
    assert ip.completions("%ort runs --sort st") == ["started", "state", "steps"]
    assert ip.completions("%ort runs --state fi") == ["finished"]
    assert ip.completions("%ort compare run-") == ["run-1", "run-2", "run-3"]
    assert ip.completions("%ort compare run-3 run-") == ["run-1", "run-2"]


def test_runs_are_compared_by_name_number_and_variable(ip: Typist, history: Path) -> None:
    ip("import ortlab; p = ortlab.open_run(2)")
    told = ip("%ort compare 1 run-3 p")
    assert re.search(r"settings +learning_rate +0.5 +0.75 +0.25\n", told)
    assert re.search(r"Training loss +run-3 · lr 0.75 [▁-█]+ +1.5 → 0.75\n", told)
    assert "no run is called 'run-4'" in ip.refused("%ort compare 1 4")
    assert "choose 2 to 8" in ip.refused("%ort compare 1")


def test_runs_are_pruned_when_it_is_said_twice(ip: Typist, history: Path) -> None:
    left = lambda: sorted(path.name for path in (history / "runs").glob("run-*"))  # noqa: E731
    assert "2 of 3 runs" in ip("%ort runs --prune --older-than 30d")
    assert left() == ["run-1", "run-2", "run-3"]
    assert "no limit for removing runs is set" in ip.refused("%ort runs --prune --yes")
    assert "--yes removes runs; add --prune" in ip.refused("%ort runs --keep 1 --yes")
    assert "--limit cannot be combined with --prune" in ip.refused(
        "%ort runs --prune --keep 1 --limit 1"
    )
    assert "--tensorboard cannot be combined with --prune" in ip.refused(
        "%ort runs --prune --keep 1 --tensorboard x"
    )
    assert left() == ["run-1", "run-2", "run-3"]
    assert "removed 1 of 3 runs" in ip("%ort runs --prune --older-than 8w --yes")
    assert left() == ["run-2", "run-3"]


def test_runs_are_written_for_tensorboard(ip: Typist, history: Path) -> None:
    pytest.importorskip("tensorboard")
    board = history / "a board"
    told = ip(f"%ort runs --tensorboard '{board}' --sort loss --limit 1")
    assert f"tensorboard --logdir '{board}'" in told
    assert [path.name for path in board.iterdir()] == ["run-2"]
    assert "already exists" in ip.refused(f"%ort runs --tensorboard '{board}'")
    assert [path.name for path in board.iterdir()] == ["run-2"], "some were written, some not"


TRAINER = """
import threading, torch
from transformers import TrainingArguments
from ortlab import hf
from tests.support import tiny
rows = [{"input_ids": torch.full((6,), n), "labels": n % 2} for n in range(32)]
args = TrainingArguments(
    FOLDER, max_steps=100_000, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = hf.Trainer(tiny.bert(), args, train_dataset=rows, engine="eager")
thread = threading.Thread(target=trainer.train)
"""


def test_a_trainer_s_run_is_paused_and_stopped_by_name(ip: Typist, tmp_path: Path) -> None:
    """The Trainer runs in a thread, as in `train_async`; unsupported operations are refused."""
    ip(TRAINER.replace("FOLDER", repr(str(tmp_path))))
    ip("thread.start()")
    until(lambda: any(run.recorder.count > 2 for run in session.trainers))
    run = session.trainers.last
    assert run is not None
    assert run.name in completion.Names(ip.shell).of("run")
    assert ip("%ort pause").startswith(f"{run.name} pauses after the step in flight")
    assert run.status().state == "paused"
    assert ip(f"%ort resume {run.name}") == f"{run.name} resumed\n"
    assert run.status().state == "running"
    own = f"{run.name} is a Trainer's run: "
    assert ip.refused("%ort apply --lr 1e-4") == own + "stop it, and train with other arguments"
    assert ip.refused("%ort undo") == own + "its arguments cannot change while it trains"
    assert ip.refused("%ort checkpoint").startswith(own)
    ip("net = trainer.model")
    refused = ip.refused("%ort finetune net rows --engine eager")
    assert f"{run.name} is training this model" in refused, "both would move its weights"
    ip("other = trainer.run")
    ip("%ort stop other")
    ip("thread.join()")
    assert run.status().state == "stopped"
    assert ip.refused("%ort stop").startswith(f"{run.name} is over (stopped) after ")


def test_a_trainer_in_the_main_thread_has_no_pause(ip: Typist, tmp_path: Path) -> None:
    """Nothing could resume it, so a pause is refused; a callback requests it during training."""
    ip(TRAINER.replace("FOLDER", repr(str(tmp_path))).replace("100_000", "2"))
    ip(
        "from transformers import TrainerCallback\n"
        "said = []\n"
        "class Asks(TrainerCallback):\n"
        "    def on_step_end(self, *told, **held):\n"
        "        try:\n"
        "            get_ipython().run_line_magic('ort', 'pause')\n"
        "        except Exception as error:\n"
        "            said.append(str(error))\n"
        "trainer.add_callback(Asks)\n"
        "trainer.train()"
    )
    assert [each.split("; ")[1] for each in ip["said"]] == ["await trainer.train_async()"] * 2
