"""Tests of the signatures of functions that take settings, and of their types for checkers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mypy import api as mypy

import ortlab
from ortlab.settings import (
    EngineSettings,
    ExportSettings,
    FinetuneSettings,
    RaceSettings,
    Settings,
    TuneSettings,
)
from ortlab.settings.signatures import takes
from tests.support import keywords
from tests.support.readme import ROOT


def test_the_types_are_those_of_the_declarations() -> None:
    assert keywords.FILE.read_text() == keywords.text(), "run python -m tests.support.keywords"


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (ortlab.wrap, EngineSettings),
        (ortlab.finetune, FinetuneSettings),
        (ortlab.resume, FinetuneSettings),
        (ortlab.script, FinetuneSettings),
        (ortlab.race, RaceSettings),
        (ortlab.tune, TuneSettings),
        (ortlab.export, ExportSettings),
    ],
    ids=lambda value: value.__name__,
)
def test_a_signature_lists_every_setting_with_its_default(
    function: Callable[..., Any], settings: type[Settings]
) -> None:
    parameters = inspect.signature(function).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    for name, declared in settings.declarations().items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if not (declared.own and parameters[name].default is None):  # None: the setting's default
            assert parameters[name].default == declared.default
    assert not {"lr", "epochs", "eval_data", "accumulation"} & set(parameters), "former names"
    assert "'" not in f"{inspect.signature(function)}".split("= '")[0], "annotations have no quotes"


def test_a_former_name_of_an_argument_is_accepted_once() -> None:
    @takes((), renamed={"eval_data": "eval_dataset"})
    def function(*, eval_dataset: int | None = None, **others: Any) -> tuple[int | None, Any]:
        return eval_dataset, others

    assert function(eval_data=3) == (3, {})
    with pytest.raises(ValueError, match="eval_dataset is given twice, also as eval_data"):
        function(eval_data=3, eval_dataset=4)


def test_a_type_checker_finds_a_misspelt_setting(tmp_path: Path) -> None:
    code = tmp_path / "user.py"
    code.write_text(
        "import ortlab\n"
        "from torch import nn\n"
        "net = nn.Linear(2, 2)\n"
        "run = ortlab.finetune(net, [], learning_rate=1e-3, engine='eager', loss='mse')\n"
        "ortlab.finetune(net, [], lerning_rate=1e-3)\n"
        "ortlab.wrap(net, engine='egaer')\n"
        "ortlab.race(net, [], rounds='three')\n"
        "ortlab.export(net, 'out', fp61=True)\n"
    )
    # With the configuration and the cache of `make lint`, which makes it a matter of seconds.
    found, failed, _ = mypy.run(
        [
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--cache-dir={ROOT / '.mypy_cache'}",
            str(code),
        ]
    )
    assert not failed
    lines = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert lines == {5, 6, 7, 8}, found
    assert '"lerning_rate" for "finetune"; did you mean "learning_rate"?' in found
