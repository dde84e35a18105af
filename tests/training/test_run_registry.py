"""Tests of the registry of runs: the run a command means, a model's trainer, remembered runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ortlab.training.run import Run
from ortlab.training.run_registry import RunRegistry


class Standing:
    """A run as the registry sees one."""

    def __init__(self, name: str, model: nn.Module | None = None, state: str = "running") -> None:
        self.name, self.model, self.state = name, model, state
        self.folder = Path(name)
        self.applied: dict[str, Any] = {}

    def over(self) -> bool:
        return self.state in ("finished", "stopped", "failed")

    def status(self) -> Any:
        return SimpleNamespace(state=self.state)

    def apply(self, **changes: Any) -> None:
        self.applied |= changes


def add(registry: RunRegistry, run: Standing, model: nn.Module, data: Any = ()) -> None:
    wrapped: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
    registry.add(cast("Run", run), model=model, data=data, wrapped=wrapped)


def trainer(registry: RunRegistry, run: Standing) -> None:
    registry.trainers.append(cast("Any", run))


@pytest.fixture
def registry() -> RunRegistry:
    return RunRegistry()


def test_without_a_name_the_last_run_is_meant(registry: RunRegistry) -> None:
    with pytest.raises(ValueError, match=r"there is no run yet; ortlab\.finetune and %ort"):
        registry.run()
    model = nn.Linear(2, 2)
    first, last = Standing("run-x1", model, "finished"), Standing("run-x2", model)
    add(registry, first, model)
    add(registry, last, model)
    assert cast("Any", registry.run()) is cast("Any", registry.last_run) is last
    assert cast("Any", registry.run("run-x1")) is first
    with pytest.raises(ValueError, match="no run is called 'run-x3': choose from run-x1, run-x2"):
        registry.run("run-x3")
    assert repr(registry) == "<RunRegistry: 2 runs, 0 Trainer runs, 0 searches>"


def test_a_trainer_is_meant_where_no_other_run_is_active(registry: RunRegistry) -> None:
    model = nn.Linear(2, 2)
    of_trainer, run = Standing("run-t"), Standing("run-x")
    trainer(registry, of_trainer)
    assert cast("Any", registry.under_way()) is of_trainer
    add(registry, run, model)
    assert cast("Any", registry.under_way()) is run
    assert cast("Any", registry.under_way("run-t")) is of_trainer
    run.state = "finished"
    assert cast("Any", registry.under_way()) is of_trainer
    of_trainer.state = "finished"
    assert cast("Any", registry.under_way()) is run


def test_shared_weights_are_trained_by_one_run(registry: RunRegistry) -> None:
    part = nn.Linear(2, 2)
    whole = nn.Sequential(part, nn.ReLU())
    run = Standing("run-x", whole)
    add(registry, run, whole)
    assert cast("Any", registry.training(part)) is run
    with pytest.raises(ValueError, match="run-x is training this model; await it or stop it"):
        registry.check_free(part)
    part.requires_grad_(False)
    registry.check_free(part)
    part.requires_grad_(True)
    run.state = "stopped"
    registry.check_free(part)
    of_trainer = Standing("run-t", whole)
    trainer(registry, of_trainer)
    with pytest.raises(ValueError, match="run-t is training this model"):
        registry.check_free(part)
    assert registry.training(part) is None, "settings of a Trainer's run cannot be changed"


@pytest.mark.parametrize("state", ["starting", "running", "stopping"])
def test_nothing_else_may_be_active_beside_a_search(registry: RunRegistry, state: str) -> None:
    registry.check_idle()
    model = nn.Linear(2, 2)
    run = Standing("run-x", model, state)
    add(registry, run, model)
    with pytest.raises(ValueError, match=r"run-x is active, .*: await it, or %ort stop run-x"):
        registry.check_idle()
    run.state = "paused"
    registry.check_idle()
    search = Standing("race-x")
    registry.searches.append(cast("Any", search))
    with pytest.raises(ValueError, match="race-x is active"):
        registry.check_idle()


def test_data_is_remembered_as_long_as_it_exists(registry: RunRegistry) -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2)])

    model = nn.Linear(2, 2)
    assert registry.last_data(model) is None
    loader = Loader()
    add(registry, Standing("run-x"), model, loader)
    assert registry.last_data(model) is loader
    del loader
    gc.collect()
    assert registry.last_data(model) is None
    batches = [torch.ones(2), torch.zeros(2)]
    add(registry, Standing("run-y"), model, batches)
    (first,) = registry.last_data(model)
    assert first is batches[0]
    add(registry, Standing("run-z"), model, (batch for batch in batches))
    assert registry.last_data(model) is None, "a generator is read only once"


def test_the_best_settings_go_to_the_active_run_or_to_the_next_one(registry: RunRegistry) -> None:
    model = nn.Linear(2, 2)
    prefer = registry.prefer(model)
    told = prefer({"engine": "ortmodule"}, {"engine": "ortmodule", "lr": 0.1, "loss": "mse"})
    assert told == "the next finetune of this Linear uses engine=ortmodule by default"
    assert registry.preferred(model) == {"engine": "ortmodule", "lr": 0.1}
    run = Standing("run-x", model)
    add(registry, run, model)
    assert prefer({"engine": "eager"}, {"engine": "eager"}) == "run-x continues with engine=eager"
    assert run.applied == {"engine": "eager"}
    assert registry.preferred(model) == {"engine": "ortmodule", "lr": 0.1}


def test_no_model_is_kept_alive(registry: RunRegistry) -> None:
    model = nn.Linear(2, 2)
    alive, prefer = weakref.ref(model), registry.prefer(model)
    prefer({}, {"lr": 0.1})
    run = Standing("run-x", state="finished")
    add(registry, run, model, [torch.ones(2)])
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(ValueError, match="the model no longer exists"):
        prefer({}, {})
