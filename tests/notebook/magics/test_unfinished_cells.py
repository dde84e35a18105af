"""Tests of ``%%ort`` cells that raise: which models they leave unwrapped, and what a rerun does."""

from __future__ import annotations

import pytest

from ortlab.session import session
from tests.support.needed_engines import needs
from tests.support.typed_magics import Typist

SAID = "not wrapped, because the cell did not finish: "


def engines() -> dict[str, str]:
    """Return the engine of each wrapped model by its names."""
    return {", ".join(entry.names): entry.settings.engine for entry in session.wrapped.entries}


def fails(ip: Typist, cell: str) -> str:
    """Run a cell that must fail; return the line below its traceback, "" if there is none."""
    result, out, _ = ip.run(cell)
    assert not result.success
    lines = [line for line in out.splitlines() if line.startswith(SAID)]
    assert lines == out.splitlines()[-1:] or not lines
    return "".join(lines).removeprefix(SAID)


@pytest.mark.parametrize("engine", ["eager", "compile", "ortmodule"])
def test_the_models_are_named_and_the_rerun_wraps_them(ip: Typist, engine: str) -> None:
    needs(engine)
    ip("wrong = True")
    cell = (
        f"%%ort --engine {engine}\nmodel, head = Net(), nn.Linear(2, 2)\nloss = nn.MSELoss()\n"
        "if wrong: 1 / 0\nlast = Net()"
    )
    assert fails(ip, cell) == (
        f"model, head; run the cell again, or %ort wrap model head --engine {engine}"
    )
    assert (type(ip["model"]), type(ip["head"])) == (ip["Net"], ip["nn"].Linear)
    assert engines() == {}
    table = ip("%ort")
    for name in ("model", "head"):
        assert f"not wrapped: {name} (belongs to a cell that did not finish)" in table
    ip("wrong = False")
    assert ip(cell) == f"model and head and last run on engine {engine!r}\n"
    assert engines() == dict.fromkeys(("model", "head", "last"), engine)
    assert "did not finish" not in ip("%ort")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import signal\nsignal.raise_signal(signal.SIGINT)", "KeyboardInterrupt"),
        ("raise SystemExit", "SystemExit"),
        ("return 3", "SyntaxError"),  # found when its statement is compiled, after the ones before
        ("import asyncio\nawait asyncio.wait_for(asyncio.sleep(9), 0.01)", "TimeoutError"),
        ("%ort pause run-x", "UsageError"),
        ("head = Net() + 1", "TypeError"),
        ("1 / 0;", "ZeroDivisionError"),
    ],
)
def test_however_it_ends(ip: Typist, end: str, shown: str) -> None:
    result, out, err = ip.run(f"%%ort --engine eager\nmodel = Net()\n{end}")
    assert not result.success
    assert shown in out + err
    assert out.endswith(f"{SAID}model; run the cell again, or %ort wrap model --engine eager\n"), (
        "below the traceback"
    )
    assert out.count(SAID) == 1
    assert ip("1") == f"Out[{ip.shell.execution_count - 1}]: 1\n", "said once"


def test_nothing_is_said_where_nothing_is_left(ip: Typist) -> None:
    assert fails(ip, "%%ort\nmodel = = 3") == ""
    assert fails(ip, "%%ort\n1 / 0\nmodel = Net()") == ""
    assert fails(ip, "%%ort\nmodel = Net().requires_grad_(False)\n1 / 0") == ""
    assert fails(ip, "%%ort --engine orc\nmodel = Net()") == ""
    ip("%%ort --engine compile\nmodel = Net()")
    wrapper = ip["model"]
    assert fails(ip, "%%ort --engine compile\n1 / 0\nmodel = Net()") == ""
    assert fails(ip, "%%ort model --engine compile\n1 / 0") == ""
    assert ip["model"] is wrapper
    assert engines() == {"model": "compile"}


def test_a_model_that_the_cell_binds_again_is_named(ip: Typist) -> None:
    ip("model, other = Net(), Net()")
    assert fails(ip, "%%ort\nmodel = model.to('cpu')\n1 / 0").startswith("model; ")
    assert fails(ip, "%%ort\nexec('other = Net()')\n1 / 0").startswith("other; ")
    assert fails(ip, "%%ort\nmodel = Net()\npart = model.inner\n1 / 0").startswith("model; ")
    assert fails(ip, "%%ort\nmodel = alias = Net()\n1 / 0").startswith("model, alias; ")


def test_the_names_of_the_line_are_named(ip: Typist) -> None:
    said = fails(ip, "%%ort net --engine compile\nnet, other = Net(), Net()\n1 / 0")
    assert said == "net; run the cell again, or %ort wrap net --engine compile"
    ip("%ort wrap net --engine compile")
    assert engines() == {"net": "compile"}
    # One of the names cannot be wrapped, so neither is.
    cell = "%%ort net loss --engine compile\nnet, loss = Net(), nn.MSELoss()"
    assert "cannot wrap loss" in ip.refused(cell)
    assert fails(ip, cell).startswith("net; ")


def test_the_command_that_is_named_has_the_options_of_the_cell(ip: Typist) -> None:
    needs("ortmodule")
    options = "--engine ortmodule --self-check off --opset 15 --save-onnx 'a model'"
    said = fails(ip, f"%%ort {options}\nmodel = Net()\n1 / 0")
    ip(said.partition(", or ")[2])
    (entry,) = session.wrapped.entries
    assert (entry.settings.engine, entry.settings["self_check"]) == ("ortmodule", False)
    assert (entry.settings["opset"], entry.settings["save_onnx"]) == (15, "a model")


def test_one_model_that_cannot_be_wrapped(ip: Typist) -> None:
    """ORTModule reads every attribute of a model, and a property of this one raises."""
    needs("ortmodule")
    ip(
        "class Lazy(Net):\n    @property\n    def labels(self):\n"
        "        if wrong: raise RuntimeError('no labels yet')\nwrong = True"
    )
    cell = "%%ort\nmodel, lazy = Net(), Lazy()"
    out = ip.raised(cell)
    assert "RuntimeError: no labels yet\nraised while wrapping lazy\n" in out
    assert out.endswith(f"{SAID}model, lazy; run the cell again, or %ort wrap model lazy\n")
    assert (type(ip["model"]), type(ip["lazy"])) == (ip["Net"], ip["Lazy"])
    assert engines() == {}
    ip("wrong = False")
    ip(cell)
    assert engines() == {"model": "ortmodule", "lazy": "ortmodule"}


def test_a_cell_that_wraps_with_other_settings(ip: Typist) -> None:
    ip("base = Net(); wrong = False")
    cell = "%%ort --engine compile --fallback {}\nmodel = base\nif wrong: 1 / 0"
    ip(cell.format("off"))
    ip("wrong = True")
    said = fails(ip, cell.format("on"))
    assert said == "model; run the cell again, or %ort wrap model --engine compile --fallback on"
    assert ip["model"] is ip["base"]
    assert engines() == {}
    ip("wrong = False")
    ip(cell.format("on"))
    (entry,) = session.wrapped.entries
    assert entry.settings["fallback"]
    assert entry.wrapper is ip["model"] is not ip["base"]


def test_a_model_on_eager_keeps_its_engine_until_the_rerun(ip: Typist) -> None:
    ip("%%ort --engine eager\nmodel = Net()")
    assert fails(ip, "%%ort --engine compile\nmodel = model\n1 / 0") == ""
    assert engines() == {"model": "eager"}
    ip("%%ort --engine compile\nmodel = model")
    assert engines() == {"model": "compile"}


@pytest.mark.parametrize("engine", ["compile", "ortmodule"])
def test_a_rerun_meets_models_that_are_wrapped(ip: Typist, engine: str) -> None:
    needs(engine)
    ip(f"wrong = True\nmodel = Net()\n%ort wrap model --engine {engine}")
    wrapper = ip["model"]
    cell = f"%%ort model head --engine {engine}\nhead = Net()\nif wrong: 1 / 0"
    assert fails(ip, cell).startswith("head; ")
    ip("wrong = False")
    assert ip(cell) == f"model and head run on engine {engine!r}\n"
    assert ip["model"] is wrapper
    assert engines() == {"model": engine, "head": engine}
    assert "cannot wrap model: it is already wrapped" in ip.refused("%%ort model --engine eager\n1")


def test_a_wrapper_that_the_cell_made_half_way(ip: Typist) -> None:
    ip("wrong = True")
    cell = (
        "%%ort --engine compile\nmodel = Net()\n%ort wrap model --engine compile\n"
        "head = Net()\nif wrong: 1 / 0"
    )
    assert fails(ip, cell).startswith("head; ")
    assert engines() == {"model": "compile"}
    ip("wrong = False")
    assert ip(cell).endswith("head runs on engine 'compile'\n")
    assert engines() == {"model": "compile", "head": "compile"}
    assert all(type(ip[name]) is not ip["Net"] for name in ("model", "head"))


def test_cells_that_run_cells(ip: Typist) -> None:
    run = "get_ipython().run_cell"
    out = ip(f"%%ort --engine compile\nmodel = Net()\n{run}('1 / 0')\n{run}(' ')\nhead = Net()")
    assert "ZeroDivisionError" in out
    assert out.endswith("model and head run on engine 'compile'\n")
    assert SAID not in out
    out = ip(f"{run}('%%ort\\ninner = Net()\\n1 / 0')\nprint('goes on')")
    assert out.splitlines()[-2].startswith(f"{SAID}inner; ")
    ip("%%capture said\n%%ort\ncaptured = Net()\n1 / 0")
    assert f"{SAID}captured; " in ip["said"].stdout
    program = "get_ipython().run_cell_magic('ort', '', 'called = Net()\\n1 / 0')"
    assert fails(ip, program).startswith("called; ")
    assert fails(ip, "%%time\n%%ort\ntimed = Net()\n1 / 0").startswith("timed; ")


def test_a_shell_that_loads_the_extension_again(ip: Typist) -> None:
    ip("%reload_ext ortlab\n%ort")
    assert fails(ip, "%%ort\nmodel = Net()\n1 / 0").startswith("model; ")
    ip("%unload_ext ortlab")
    ip("%load_ext ortlab")
    assert fails(ip, "%%ort\nmodel = Net()\n1 / 0").startswith("model; ")
