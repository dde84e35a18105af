"""Tests of settings that change repeatedly during a run: at random steps, to random values.

Such a run is compared with a chain of runs: each has its own model and stepper and begins with the
file that the previous one saved at the step where the first run changed its settings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.registry import engine_for
from ortlab.settings import FinetuneSettings
from tests.support import tiny
from tests.support.changed_runs import Course
from tests.support.needed_engines import needs
from tests.support.resuming import Tokens, bert

pytestmark = pytest.mark.usefixtures("one_thread")

CHANGES = 10
"""Number of changes of each setting, with twelve layers."""
EPOCHS = 12
MICRO_BATCHES = 5
"""Micro-batches of an epoch of `Tokens`."""
COLUMNS = ("step", "loss", "grad_norm", "lr", "samples", "loss_scale", "skipped")

BEGIN = {
    "device": "cpu",
    "cache": True,
    "seed": 3,
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-3,
}
"""Settings with which every run begins."""

Values = Mapping[str, Sequence[Any]]
Toggles = Mapping[int, dict[str, Any]]
"""Changes after a step, by the number of the step."""

FREE: Values = {
    "gradient_accumulation_steps": (1, 2, 3),
    "learning_rate": (1e-4, 3e-4, 1e-3),
    "max_grad_norm": (None, 0.01, 1.0),
    "weight_decay": (0.0, 0.01, 0.3),
}
"""Settings that take effect at the next step without a new stepper."""
PLANS = ("off", "layers", "bert.encoder.layer.*.attention")
IN_TORCH: Values = {**FREE, "precision": ("fp32", "bf16", "fp16")}
IN_ORT: Values = {
    **FREE,
    "precision": ("fp32", "bf16"),
    "kernels": ("measured", "torch", "ort"),
    "recompute": PLANS,
    "arena": (True, False),
}
IN_ORT_ANYWHERE: Values = {
    **IN_TORCH,
    "recompute": PLANS,
    "activation_budget": (1.0, 0.5, 0.2),
}
OF_AN_ENGINE: Mapping[str, Values] = {
    "eager": IN_TORCH,
    "compile": IN_TORCH,
    "ortmodule": IN_ORT,
    "ort_fused": IN_ORT,
    "ort": IN_ORT_ANYWHERE,
}
ENGINES: Values = {"engine": tuple(OF_AN_ENGINE)}
SAME_ARITHMETIC = ("arena", "recompute")


class Read(Tokens):
    """Tokens that record which of them were read, in order."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return super().__getitem__(index)


class Part:
    """A run with `toggles`, from its start or from `begin` on, and its results."""

    def __init__(
        self,
        model: nn.Module,
        settings: Mapping[str, Any],
        toggles: Toggles,
        begin: Path | None = None,
        end: tuple[int, Path] | None = None,
    ) -> None:
        data = Read()
        self.samples: list[list[int]] = []
        """Indices of the samples of each step."""
        before = 0
        done_before = Checkpoint.load(begin).position.step if begin else 0

        def each(course: Course, done: int) -> None:
            nonlocal before
            step = done_before + done
            self.samples.append(data.read[before:])
            before = len(data.read)
            if step in toggles:
                # Saving the state restarts ORT's generator. Free changes do not restart it by
                # themselves, but the run that begins here does.
                course.loop.checkpoint()
                course.control.apply(toggles[step])
            if end is not None and step == end[0]:
                course.loop.checkpoint().save(end[1])
                course.control.stop()

        self.course = Course(
            model,
            data,
            Checkpoint.load(begin) if begin else None,
            each=each,
            stop=-1,
            **{**BEGIN, "num_train_epochs": EPOCHS, **settings},
        )
        assert not self.course.told("warning")
        self.columns = {name: self.course.column(name) for name in COLUMNS}
        self.state = self.course.loop.state()


def drawn(values: Values, settings: Mapping[str, Any], *, seed: int, changes: int) -> Toggles:
    """Draw as many changes that an engine accepts, at steps that any accumulation reaches.

    The settings take turns in an order of their own; one that cannot change at a step waits.
    """
    draw, now = random.Random(seed), FinetuneSettings.of({**BEGIN, **settings})
    fewest = EPOCHS * -(-MICRO_BATCHES // max(FREE["gradient_accumulation_steps"]))
    waiting = draw.sample(sorted(values), len(values))
    toggles: dict[int, dict[str, Any]] = {}
    for step in sorted(draw.sample(range(1, fewest), changes)):
        name, value = next(
            (name, value)
            for name in waiting
            for value in draw.sample(values[name], len(values[name]))
            if value != now[name] and taken(now, name, value)
        )
        waiting.append(waiting.pop(waiting.index(name)))
        now = now.replace(**{name: value})
        toggles[step] = {name: value}
    return toggles


def taken(settings: FinetuneSettings, name: str, value: object) -> bool:
    """Return whether an engine accepts the settings with this change."""
    try:
        engine_for(settings.replace(**{name: value}))
    except ValueError:
        return False
    return True


def compare(
    make: Callable[[], nn.Module], settings: dict[str, Any], toggles: Toggles, folder: Path
) -> Part:
    """Check that the run with `toggles` equals the chain of runs; return it."""
    toggled = Part(make(), settings, toggles)
    chain: list[Part] = []
    begin: Path | None = None
    for step, changes in [*toggles.items(), (None, {})]:
        end = None if step is None else (step, folder / f"{step}.ckpt")
        chain.append(Part(make(), settings, {}, begin, end))
        settings = {**settings, **changes}
        begin = end[1] if end else None
    assert len(toggled.course.recorder.events("change")) == len(toggles)
    for name, values in toggled.columns.items():
        # Compared as text, where NaN equals NaN.
        assert str(values) == str([v for part in chain for v in part.columns[name]]), name
    assert toggled.columns["step"] == list(range(1, len(toggled.samples) + 1))
    assert toggled.samples == [samples for part in chain for samples in part.samples]
    read = [index for samples in toggled.samples for index in samples]
    epochs = [sorted(read[at : at + 20]) for at in range(0, len(read), 20)]
    assert epochs == [list(range(20))] * EPOCHS, "every sample once in each epoch"
    assert_same(toggled.state, chain[-1].state)
    assert toggled.course.loop.settings == chain[-1].course.loop.settings
    return toggled


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    for name, value in expected.model.items():
        assert torch.equal(found.model[name], value), name
    assert found.optimizer["param_groups"] == expected.optimizer["param_groups"]
    for number, states in expected.optimizer["state"].items():
        for name, value in states.items():
            assert torch.equal(found.optimizer["state"][number][name], value), (number, name)
    assert str(found.loss_scale) == str(expected.loss_scale)


def test_a_run_that_changes_again_and_again_is_a_chain_of_runs(tmp_path: Path) -> None:
    """Every setting changes in turn, with dropout."""
    needs("ortmodule")
    values = {**IN_ORT, "engine": ("eager", "ortmodule")}
    settings = {"engine": "eager", "kernels": "torch"}
    toggles = drawn(values, settings, seed=11, changes=12)
    assert {name for changes in toggles.values() for name in changes} == {*values}
    compare(lambda: bert(0.1), settings, toggles, tmp_path)


# ---- twelve layers -------------------------------------------------------------------------------


def deep(dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 256}
        return tiny.bert(dropout, **sizes)


@pytest.fixture(scope="module")
def compiled_or_failed() -> Iterator[None]:
    """Fail instead of falling back to eager torch when too many graphs were compiled before."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "name"),
    [(engine, name) for engine, values in OF_AN_ENGINE.items() for name in (*values, "engine")],
)
def test_every_setting_ten_times(
    engine: str, name: str, tmp_path: Path, compiled_or_failed: None
) -> None:
    """With dropout; each case has different steps and values."""
    needs(*(OF_AN_ENGINE if name == "engine" else [engine]))
    values = {**OF_AN_ENGINE[engine], **ENGINES}
    settings = {"engine": engine}
    seed = [*OF_AN_ENGINE].index(engine) * 100 + [*values].index(name)
    toggles = drawn({name: values[name]}, settings, seed=seed, changes=CHANGES)
    compare(lambda: deep(0.1), settings, toggles, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME_ARITHMETIC)
def test_what_changes_no_arithmetic_changes_no_bit(name: str) -> None:
    needs("ortmodule")
    settings = {"engine": "ortmodule"}
    toggles = drawn({name: IN_ORT[name]}, settings, seed=1, changes=CHANGES)
    toggled, plain = Part(deep(0.0), settings, toggles), Part(deep(0.0), settings, {})
    assert str(toggled.columns) == str(plain.columns)
    assert toggled.samples == plain.samples
    assert_same(toggled.state, plain.state)


@pytest.mark.nightly
def test_engines_that_take_turns_train_as_eager_torch_does(compiled_or_failed: None) -> None:
    """Without dropout, in fp32, losses agree within 1e-4 and gradient norms within 1e-3."""
    needs(*OF_AN_ENGINE)
    toggles = drawn(ENGINES, {"engine": "eager"}, seed=2, changes=CHANGES)
    toggled = Part(deep(0.0), {"engine": "eager"}, toggles)
    plain = Part(deep(0.0), {"engine": "eager"}, {})
    assert toggled.samples == plain.samples
    assert toggled.columns["lr"] == plain.columns["lr"]
    assert toggled.columns["loss"] == pytest.approx(plain.columns["loss"], rel=1e-4)
    assert toggled.columns["grad_norm"] == pytest.approx(plain.columns["grad_norm"], rel=1e-3)
