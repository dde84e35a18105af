"""Tests of settings files, of option errors and of Tab, typed as a user types them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter

from ortlab.notebook.magics.commands import COMMANDS
from tests.support.typed_magics import Typist

TRAIN = "run = %ort finetune net data --engine eager"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_repeated_from_its_settings_file(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN} --loss cross_entropy --lr 3e-4 --max-grad-norm off --seed 7\nawait run")
    began = ip["run"].settings
    ip("path = run.save_config()\nother = run.save_config('run.toml')")
    assert ip["path"] == Path(f"{ip['run'].name}.toml")
    text = ip["path"].read_text()
    assert tomllib.loads(text) == {
        "engine": "eager",
        "loss": "cross_entropy",
        "learning_rate": 3e-4,
        "max_grad_norm": "off",
        "seed": 7,
    }
    assert "\n# optimization\n" in text
    assert ip["path"].stat().st_mode & 0o777 == 0o600
    ip("net = Net()\nrun = %ort finetune net data --config run.toml\nawait run")
    assert ip["run"].settings == began
    ip("net = Net()\nrun = %ort finetune net data --config run.toml --lr 0.1 --seed 0\nawait run")
    assert ip["run"].settings == began.replace(learning_rate=0.1, seed=0)
    ip("import ortlab\nnet = Net()\nrun = ortlab.finetune(net, data, config='run.toml', lr=0.2)")
    ip("await run")
    assert ip["run"].settings == began.replace(learning_rate=0.2)
    ip(f"saved = ortlab.open_run('{ip['run'].name}').save_config('saved.toml')")
    assert tomllib.loads(ip["saved"].read_text())["learning_rate"] == 0.2


def test_a_loss_of_the_user_s_own_must_be_given_again(ip: Typist) -> None:
    ip("def mine(output, target):\n    return (output - 1).square().mean()")
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN} --loss mine\nawait run\npath = run.save_config('run.toml')")
    assert "# loss: a function called 'mine'; give it again" in ip["path"].read_text()
    ip("run = %ort finetune net data --config run.toml --loss mine\nawait run")
    assert ip["run"].settings.optim.loss == "mine"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rate = ", "run.toml is not TOML: Invalid value (at "),
        ("lerning_rate = 1", "run.toml: unknown setting 'lerning_rate': did you mean 'learning_"),
        ("lr = -1.0", "run.toml: learning_rate=-1.0 must be above 0"),
        ("lr = '1'", "run.toml: learning_rate='1' is str, expected float"),
        ("seed = 2026-01-01", "run.toml: seed=datetime.date(2026, 1, 1) is date, expected int"),
        ("engine = 'orc'", "run.toml: engine='orc': choose from auto, eager, "),
        ("loss = 'mine'", "run.toml: loss='mine' is not one of cross_entropy, "),
        ("lr = 1\nlearning_rate = 1", "run.toml: learning_rate is given twice"),
        ("[optim]\nlr = 1", "run.toml has a table [optim]; write its settings without a heading"),
        ("\x00", "run.toml is not TOML: "),
        ("a = " + "[" * 100_000, "run.toml is not TOML: "),
        (None, "the settings file run.toml cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_settings_file_gets_one_line(ip: Typist, text: str | None, told: str) -> None:
    if text is not None:
        Path("run.toml").write_text(text)
    ip("net = Net(); data = batches()")
    assert told in ip.refused(f"{TRAIN} --config run.toml")
    assert "cannot be read (not a regular file)" in ip.refused(f"{TRAIN} --config .")


def test_unknown_options_and_keywords_name_the_nearest_three(ip: Typist) -> None:
    ip("import ortlab\nnet = Net(); data = batches()")
    for line, offered, lists in (
        (f"{TRAIN} --lerning-rate 1", "'--learning-rate'", "%ort finetune --help-all"),
        (f"{TRAIN} --zzz 1", None, "%ort finetune --help-all"),
        ("%ort wrap net --kernel ort", "'--kernels'", "%ort wrap --help-all"),
        ("%ort finetun net data", "'finetune'", "%ort help"),
    ):
        told = ip.refused(line)
        assert f"; {lists} lists all " in told
        if offered is None:
            assert re.search(r"the nearest are --[\w-]+, --[\w-]+, --[\w-]+;", told)
        else:
            assert re.search(rf"did you mean {offered}\? also near: [\w-]+, [\w-]+;", told)
    for call in (
        "ortlab.finetune(net, data, lerning_rate=1)",
        "ortlab.wrap(net, kernel='ort')",
        "ortlab.race(net, data, lerning_rate=1)",
    ):
        _, out, err = ip.run(call)
        assert re.search(
            r"did you mean '\w+'\? also near: \w+, \w+; %ort \w+ --help-all", out + err
        )


@pytest.mark.parametrize("jedi", [True, False])
def test_tab_completes_keyword_arguments_and_their_values(ip: Typist, jedi: bool) -> None:
    ip("import ortlab\nfrom ortlab import finetune\nnet = Net(); data = batches()")
    ip(f"{TRAIN} --loss cross_entropy\nawait run")
    ip.shell.Completer.use_jedi = jedi

    def tab(text: str) -> list[str]:
        with provisionalcompleter():
            return [c.text for c in ip.shell.Completer.completions(text, len(text))]

    for call in (
        "ortlab.finetune(net, data, ",
        "finetune(net, data, ",
        "run.apply(",
        "run.resume(",
    ):
        assert tab(f"{call}learn") == ["learning_rate="]
        assert tab(f"{call}engine='ortm") == ["ortmodule"]
    assert tab("ortlab.wrap(net, eng") == ["engine="]
    assert "fresh=" in tab("ortlab.finetune(net, data, fre")
    assert tab("ortlab.wrap(net, precision='") == ["bf16", "fp16", "fp32", "tf32"]
    assert tab('ortlab.finetune(net, list(data),\n    precision="b') == ["bf16"]
    assert tab("ortlab.race(net, data, engines='eager,ortm") == ["ortmodule"]
    assert "bf16" not in tab("finetune(net, data); print(precision='b")


@pytest.mark.parametrize("jedi", [True, False])
def test_tab_completes_the_attributes_of_runs(ip: Typist, jedi: bool) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN} --loss cross_entropy\nawait run")
    ip("import ortlab\nstored = ortlab.open_run(run.name)\nwith ortlab.track(net) as loop: pass")
    ip.shell.Completer.use_jedi = jedi
    for name in ("run", "stored", "loop"):
        with provisionalcompleter():
            text = f"{name}.weig"
            found = [c.text for c in ip.shell.Completer.completions(text, len(text))]
        assert [each.removeprefix(".") for each in found] == ["weights"], name


def test_tab_completes_every_option(ip: Typist) -> None:
    Path("run.toml").touch()
    for command in COMMANDS.values():
        for flag in command.options:
            assert flag in ip.completions(f"%ort {command.name} {flag}"), (command.name, flag)
    assert ip.completions("%ort finetune net data --config ru") == ["run.toml"]
    assert ip.completions("%ort finetune net data --fre") == ["--fresh"]
