"""Tests of the start of a run: its settings, its loss, and the user's names for its parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.training.resume import Beginning
from ortlab.training.start import RunRequest, choose_settings, loss_called


def checkpoint(**settings: Any) -> Checkpoint:
    return Checkpoint({}, {}, cast("Any", SimpleNamespace(step=3)), settings, versions={})


def request(begin: Any = None, loss: Any = None, **settings: Any) -> RunRequest:
    return RunRequest(nn.Linear(2, 2), [], begin=begin, loss=loss, settings=settings)


def test_given_settings_come_first_then_preferred_ones_then_the_wrapper_s() -> None:
    own = {"engine": "compile", "precision": "bf16"}
    chosen = choose_settings(
        request(learning_rate=0.5), own, {"learning_rate": 0.1, "precision": "fp32"}
    )
    settings = chosen.settings
    assert (settings.model.engine, settings.model.precision, settings.optim.learning_rate) == (
        "compile",
        "fp32",
        0.5,
    )
    assert (chosen.loss, settings.optim.loss, chosen.warnings) == (None, None, [])


def test_a_checkpoint_s_settings_take_the_place_of_preferred_ones() -> None:
    begin = checkpoint(
        learning_rate=0.25, num_train_epochs=7, gone="of another version", self_check=False
    )
    chosen = choose_settings(
        request(begin, num_train_epochs=9), {"engine": "eager"}, {"learning_rate": 0.1}
    )
    assert (chosen.settings.optim.learning_rate, chosen.settings.limits.num_train_epochs) == (
        0.25,
        9,
    )
    assert chosen.settings.model.self_check, "a check is left out by this session only"
    (warning,) = chosen.warnings
    assert warning == (
        "self_check=True, not False: a checkpoint does not restore self_check; give the value you "
        "want"
    )
    given = choose_settings(request(begin, self_check=True), {}, {})
    assert given.warnings == []


def test_a_damaged_checkpoint_is_a_warning() -> None:
    taken = checkpoint(learning_rate=0.25)
    begin = Beginning(taken, Path("x"), {"learning_rate": 0.5}, "last-6 is no use")
    asked = request(begin)
    assert asked.checkpoint is taken
    chosen = choose_settings(asked, {}, {})
    assert chosen.warnings == ["last-6 is no use"]
    assert chosen.settings.optim.learning_rate == 0.5, "the settings that held last"


def test_a_loss_is_a_name_a_function_or_that_of_the_checkpoint() -> None:
    def mine(output: Any, target: Any) -> Any:
        return output - target

    assert loss_called(None) == (None, None)
    function, name = loss_called("mse")
    assert callable(function)
    assert name == "mse"
    assert loss_called(mine) == (mine, "mine")
    assert loss_called(nn.MSELoss())[1] == "MSELoss"
    assert loss_called(None, "mse")[1] == "mse"
    assert loss_called(mine, "gone") == (mine, "mine")
    with pytest.raises(ValueError, match=r"a function called 'gone', .* once more: loss=\.\.\."):
        loss_called(None, "gone")
    with pytest.raises(ValueError, match=r"loss=3 is not a function; give loss\(output, target\)"):
        loss_called(cast("Any", 3))


def test_the_user_s_names_are_recorded() -> None:
    def mine(output: Any, target: Any) -> Any:
        return output - target

    model, data = nn.Linear(2, 2), [1]
    namespace = {"_": model, "net": model, "also": model, "train": data}
    asked = RunRequest(model, data, loss=mine)
    assert asked.names(namespace) == {"model": "net", "train": "train", "loss": "mine"}
    assert asked.names({**namespace, "fn": mine})["loss"] == "fn"
    assert RunRequest(model, data, eval_dataset=[2], loss="mse").names(namespace) == {
        "model": "net",
        "train": "train",
    }
