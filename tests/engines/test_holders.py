"""Tests of the search for the places that refer to an object."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from ortlab.engines.holders import holders

HELD = nn.Linear(2, 2)
Pair = namedtuple("Pair", "name model")


class Slotted:
    """An instance without ``__dict__``."""

    __slots__ = ("model",)


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ([1, HELD], ["[1]"]),
        ((HELD, HELD), ["[0]", "[1]"]),
        ({"a": HELD, 2: HELD, (1,): HELD}, ["['a']", "[2]", "[...]"]),
        (Pair("a", HELD), ["[1]"]),
        (OrderedDict(a=HELD), ["['a']"]),
        (defaultdict(list, a=[HELD]), ["['a'][0]"]),
        (deque([HELD]), ["[0]"]),
        ({HELD}, [""]),
        (
            SimpleNamespace(model=HELD, inner=SimpleNamespace(nets=[HELD])),
            [".model", ".inner.nets[0]"],
        ),
        (nn.Sequential(nn.ReLU(), HELD), ["[1]"]),
        (nn.ModuleDict({"net": nn.Sequential(HELD)}), [".net[0]"]),
        (HELD, []),
        ([Slotted(), "text", 1, None, torch.ones(2), SimpleNamespace], []),
    ],
)
def test_each_place_is_named_by_its_code(value: object, places: list[str]) -> None:
    assert holders(HELD, {"x": value}) == [f"x{place}" for place in places]


def test_the_shortest_path_of_a_shared_container() -> None:
    models = [HELD]
    assert holders(HELD, {"far": {"deep": {"models": models}}, "models": models}) == ["models[0]"]


def test_objects_to_leave_out() -> None:
    results = {1: HELD}
    assert holders(HELD, {"Out": results, "a": [HELD]}, besides=[results]) == ["a[0]"]


def _ran(*_: object) -> NoReturn:
    raise AssertionError("code of the user ran")


class Watched:
    """Raises in whatever the search might call."""

    def __init__(self) -> None:
        object.__getattribute__(self, "__dict__")["model"] = HELD

    lazy = property(_ran)
    __getattribute__ = __getattr__ = __iter__ = __len__ = __bool__ = __eq__ = __hash__ = _ran  # type: ignore[assignment]
    __repr__ = __str__ = __dir__ = __contains__ = __getitem__ = _ran  # type: ignore[assignment]


class WatchedList(list[Any]):
    """A list whose own methods raise."""

    __iter__ = __len__ = __getitem__ = _ran  # type: ignore[assignment]


class WatchedDict(dict[Any, Any]):
    """A dictionary whose own methods raise."""

    __iter__ = __len__ = items = values = keys = __getitem__ = _ran  # type: ignore[assignment]


class Proxy:
    """Replaces ``__dict__``, as proxies of web frameworks do."""

    __dict__ = property(_ran)  # type: ignore[assignment]


class Endless:
    """An iterable without an end."""

    def __iter__(self) -> Iterator[int]:
        _ran()


def test_no_code_of_the_user_runs() -> None:
    values = {
        "watched": Watched(),
        "listed": WatchedList([HELD]),
        "mapped": WatchedDict(a=HELD),
        "proxy": Proxy(),
        "endless": [Endless()],
        "keyed": {1: Watched()},
    }
    assert holders(HELD, values) == ["watched.model", "listed[0]", "mapped['a']", "keyed[1].model"]


def test_cycles_and_deep_values_come_to_an_end() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle, "model": HELD})
    deep: list[Any] = [HELD]
    for _ in range(10_000):
        deep = [deep]
    assert holders(HELD, {"cycle": cycle, "deep": deep}) == ["cycle[0]['model']"]


def test_data_does_not_hide_a_model() -> None:
    """Ten thousand objects, and data whose complete search would never end."""
    rows = [{"x": [0], "y": [1]} for _ in range(100_000)]
    objects = {f"x{n}": SimpleNamespace(values=[n], name="x") for n in range(10_000)}
    variables = {"rows": rows, "huge": [rows] * 100_000, **objects, "models": [HELD]}
    assert holders(HELD, variables) == ["models[0]"]
