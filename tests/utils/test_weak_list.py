"""Tests of the ordered list of weak references to objects that a process has started."""

from __future__ import annotations

import gc

from ortlab.utils.weak_list import Recent


class Begun:
    """An object that can be weakly referenced."""


def test_all_that_somebody_has_and_the_last() -> None:
    recent: Recent[Begun] = Recent(last=True)
    assert (list(recent), len(recent), recent.last) == ([], 0, None)
    first = Begun()
    recent.append(first)
    recent.append(Begun())
    recent.append(Begun())
    gc.collect()
    assert len(recent) == 2
    assert list(recent) == [first, recent.last]
    recent.clear()
    assert not recent
    assert recent.last is None


def test_without_a_last_one_all_go() -> None:
    recent: Recent[Begun] = Recent(last=False)
    recent.append(Begun())
    gc.collect()
    assert not recent
    assert recent.last is None
