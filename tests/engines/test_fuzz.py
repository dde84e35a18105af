"""Random small graphs, with sizes of 0, 1 and more: no engine dies, none is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support import fuzz
from tests.support.needed_engines import needs

_A_TEST = 100


@pytest.mark.parametrize("engine", ["ort", "ortmodule"])
@pytest.mark.parametrize("part", range(20))
def test_random_graphs_are_right_or_refused(engine: str, part: int) -> None:
    needs(engine)
    first = _A_TEST * part
    found = list(fuzz.results(engine, first, first + _A_TEST))
    assert len(found) == _A_TEST
    assert [each for each in found if each.verdict in ("died", "wrong")] == []
    count = Counter(each.verdict for each in found)
    assert count["right"] >= (_A_TEST if engine == "ort" else 50)


def test_a_death_costs_one_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of the first seed ends itself; a new one runs the rest."""
    monkeypatch.setenv("ORTLAB_TEST_FUZZ_DIES", "1")
    found = list(fuzz.results("eager", 0, 3))
    assert [each.verdict for each in found] == ["right", "died", "right"]
