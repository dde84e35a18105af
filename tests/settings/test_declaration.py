"""Tests of declared settings: aliases, former choices, bounds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ortlab.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class Own(Settings):
    """Two settings whose names and choices have changed."""

    learning_rate: float = setting(0.1, alias="lr", above=0, help="the highest rate")
    engine: str = setting(
        "fast", choices=("fast", "plain"), renamed={"quick": "fast"}, help="what runs"
    )


def test_an_alias_is_accepted_and_not_shown() -> None:
    assert Own.of({"lr": 2}).as_dict() == {"learning_rate": 2.0, "engine": "fast"}
    assert Own().replace(lr=3).learning_rate == 3.0
    assert list(Own.declarations()) == ["learning_rate", "engine"]


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate is given twice"):
        Own.of({"lr": 1, "learning_rate": 2})


def test_an_alias_is_checked_as_its_setting() -> None:
    with pytest.raises(ValueError, match=r"learning_rate=0\.0 must be above 0"):
        Own.of({"lr": 0})
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        Own.of({"learning_rat": 1})


def test_a_former_choice_means_the_present_one() -> None:
    assert Own.of({"engine": "quick"}).engine == "fast"
    assert Own(engine="quick") == Own(engine="fast")
    with pytest.raises(ValueError, match="choose from fast, plain"):
        Own(engine="slow")
