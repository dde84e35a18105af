"""The guard detects every edit, remembers all of them, and recognizes an earlier state."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ortlab.engines.ortmodule.guard import Guard


@dataclass
class Config:
    """A configuration object that a module holds."""

    heads: int = 2
    names: list[Any] = field(default_factory=list)


class Scale:
    """A callable object."""

    factor = 2.0

    def __init__(self) -> None:
        self.offset = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


class Net(nn.Module):
    """A model with one of everything that the guard watches."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
        self.config = Config()
        self.table = {"a": 1, "inner": {"b": 2}}
        self.mask = torch.ones(4)
        self.sizes = (1, 2)
        self.widths = [1, 2]
        self.recent = collections.deque([1.0])
        self.names = {"a"}
        self.part = functools.partial(torch.clamp, min=0.0)
        self.scale = Scale()


def _set(path: str, value: Any) -> Callable[[Net], None]:
    *parents, last = path.split(".")

    def edit(net: Net) -> None:
        target: Any = net
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)

    edit.__name__ = path
    return edit


def _table(net: Net) -> None:
    net.table["inner"]["b"] = 3


def _method(net: Net) -> None:
    net.forward = lambda x: x


def _requires_grad(net: Net) -> None:
    net.body[0].bias.requires_grad_(False)


def _data(net: Net) -> None:
    net.body[0].weight.data = torch.zeros(4, 8)


def _buffer(net: Net) -> None:
    net.body[2].running_mean = torch.zeros(4)


def _child(net: Net) -> None:
    net.body.append(nn.ReLU())


def _backward_hook(net: Net) -> None:
    net.body.register_full_backward_hook(lambda *_: None)


def _list(net: Net) -> None:
    net.widths[0] = 3


def _deque(net: Net) -> None:
    net.recent[0] = 2.0


def _set_of_names(net: Net) -> None:
    net.names.add("b")


def _partial(net: Net) -> None:
    net.part.keywords["min"] = 1.0


def _plain_tensor(net: Net) -> None:
    net.mask[0] = 0.0


def _renamed_key(net: Net) -> None:
    net.table["c"] = net.table.pop("a")


def _other_class(net: Net) -> None:
    net.body[1].__class__ = nn.AlphaDropout


def _shorter(net: Net) -> None:
    net.body[0].weight.data = net.body[0].weight.data[:2]


EDITS = [
    _list,
    _deque,
    _set_of_names,
    _partial,
    _plain_tensor,
    _renamed_key,
    _other_class,
    _shorter,
    _set("scale.offset", 2.0),
    _set("training", False),
    _set("body.1.p", 0.2),
    _set("config.heads", 4),
    _set("config", Config()),
    _set("sizes", (1, 3)),
    _set("mask", torch.zeros(4)),
    _set("added", 1),
    _set("body.0.weight", nn.Parameter(torch.zeros(4, 4))),
    _table,
    _method,
    _requires_grad,
    _data,
    _buffer,
    _child,
    _backward_hook,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_changes_the_key_and_is_named(edit: Callable[[Net], None]) -> None:
    net = Net()
    guard = Guard(net)
    before = guard.key()
    assert guard.key() is before
    edit(net)
    assert guard.key() != before
    assert guard.change


def test_training_itself_changes_nothing() -> None:
    """Training changes no key: new values of weights and buffers, an optimizer's step, .grad."""
    net = Net()
    guard = Guard(net)
    before = guard.key()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.body(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert guard.key() is before


def test_an_earlier_state_has_its_earlier_key() -> None:
    """Switching back and forth creates no new keys, where the very same objects return."""
    net = Net()
    guard = Guard(net)
    train = guard.key()
    net.eval()
    evaluate = guard.key()
    net.train()
    assert guard.key() is train
    net.eval()
    assert guard.key() is evaluate


def test_a_class_whose_forward_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    guard = Guard(net)
    before = guard.key()
    monkeypatch.setattr(nn.Dropout, "forward", lambda _self, x: x)
    assert guard.key() != before


def test_a_class_attribute_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    guard = Guard(net)
    before = guard.key()
    monkeypatch.setattr(Net, "kind", "other")
    assert guard.key() != before


def test_a_hook_of_all_modules_is_noticed() -> None:
    guard = Guard(Net())
    before = guard.key()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert guard.key() != before
    finally:
        handle.remove()
    assert guard.key() is before


def test_a_value_that_cannot_be_compared_is_no_change() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError("no")

        __hash__ = None  # type: ignore[assignment]

    net = Net()
    net.odd = Odd()
    guard = Guard(net)
    before = guard.key()
    assert guard.key() is before
    net.odd = Odd()
    assert guard.key() != before


def test_what_changed_is_said_in_the_users_words() -> None:
    net = Net()
    guard = Guard(net)
    net.body[1].p = 0.5
    guard.key()
    assert guard.change == "body.1.p: 0.1 -> 0.5"
    net.body[0].weight.requires_grad_(False)
    guard.key()
    assert guard.change == "body.0.weight: float32[4, 4] on cpu -> float32[4, 4] on cpu frozen"


def test_another_hook_in_the_place_of_one_is_noticed() -> None:
    net = Net()
    handle = net.body.register_forward_hook(lambda *_: None)
    guard = Guard(net)
    before = guard.key()
    handle.remove()
    net.body.register_forward_hook(lambda *_: None)
    assert guard.key() != before


def test_a_vocabulary_is_watched_by_its_length() -> None:
    """Only the length is compared: 100,000 entries in every call would take longer than a step."""
    net = Net()
    net.vocabulary = {f"word {i}": i for i in range(100_000)}
    guard = Guard(net)
    before = guard.key()
    entries = sum(len(place.held) for place in guard._photo.places.inner)
    assert entries < 1000
    net.vocabulary["another"] = 1
    assert guard.key() != before
    assert "vocabulary" in guard.change


CELL = """
import argparse, torch
from torch import nn
from torch.nn import functional
FACTOR, TABLE, ARGS = 1.0, {"inner": {"factor": 1.0}}, argparse.Namespace(factor=1.0, seen=0)
CONSTANT = torch.ones(3)
class Constants:
    factor = 1.0
def scaled(x, by=1.0):
    return x * FACTOR * by
def within(factor):
    class Net(nn.Module):
        def forward(self, x):
            x = self.mixed(x * factor)
            return later(x) if x is None else scaled(functional.relu(x))
        def mixed(self, x):
            return x * TABLE["inner"]["factor"] * ARGS.factor * Constants.factor * CONSTANT
        def not_called_by_forward(self):
            return STEP
    return Net()
STEP = 0
net = within(1.0)
"""

ELSEWHERE = {
    "a global": "FACTOR = 2.0",
    "a table": "TABLE['inner']['factor'] = 2.0",
    "what an object is read for": "ARGS.factor = 2.0",
    "another class": "Constants.factor = 2.0",
    "a tensor": "CONSTANT.fill_(2.0)",
    "a function defined again": "def scaled(x): return x",
    "a function defined later": "def later(x): return x",
    "a default": "scaled.__defaults__ = (2.0,)",
    "a closure": "type(net).forward.__closure__[0].cell_contents = 2.0",
}


@pytest.mark.parametrize("edit", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_forward_reads_elsewhere_is_watched(edit: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, namespace)
    guard = Guard(namespace["net"])
    before = guard.key()
    assert guard.key() is before
    exec(edit, namespace)
    assert guard.key() != before
    assert guard.change


def test_a_function_of_torchs_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, namespace)
    guard = Guard(namespace["net"])
    before = guard.key()
    monkeypatch.setattr(nn.functional, "relu", torch.tanh)
    assert guard.key() != before


def test_a_function_that_a_module_of_torchs_calls_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = Guard(nn.ReLU())
    before = guard.key()
    assert guard.key() is before
    monkeypatch.setattr(nn.functional, "relu", torch.tanh)
    assert guard.key() != before
    assert guard.change.startswith("torch.nn.functional")


def test_an_environment_variable_is_watched_where_forward_reads_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(os.environ.get("ORTLAB_SCALE", "1"))

    reading, other = Guard(Reading()), Guard(nn.ReLU())
    before = reading.key(), other.key()
    monkeypatch.setenv("ORTLAB_SCALE", "3")
    assert reading.key() != before[0]
    assert reading.change == "os.environ['ORTLAB_SCALE']: absent -> changed"
    assert other.key() is before[1]


@pytest.mark.parametrize("edit", ["STEP = 1", "ARGS.seen = 1", "FACTOR, OTHER = FACTOR, 2.0"])
def test_what_forward_does_not_read_is_no_change(edit: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, namespace)
    guard = Guard(namespace["net"])
    before = guard.key()
    exec(edit, namespace)
    assert guard.key() is before


def test_another_list_of_the_same_plain_values_is_no_change() -> None:
    """Equal plain values in a new list are no change, as when save_pretrained copies a config."""
    net = Net()
    net.config.names = ["Net"]
    guard = Guard(net)
    before = guard.key()
    net.config.names = ["Net"]
    assert guard.key() is before
    net.config.names.append("Other")
    assert guard.key() != before
    net.config.names = [True]
    assert guard.key() != before
