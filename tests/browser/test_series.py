"""Tests of the browser's data of a run: ortlab/notebook/js/src/series.js in a Chromium."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

import ortlab

pytestmark = pytest.mark.browser

SOURCE = Path(ortlab.__file__).parent / "notebook" / "js" / "src" / "series.js"
COLUMNS = [
    {"name": "step", "merge": "last"},
    {"name": "loss", "merge": "mean"},
    {"name": "peak_bytes", "merge": "max"},
    {"name": "step_ms", "merge": "mean"},
    {"name": "samples_per_s", "merge": "mean"},
    {"name": "time_s", "merge": "last"},
    {"name": "samples", "merge": "mean"},
]
NAMES = [column["name"] for column in COLUMNS]
FEED = """async ([source, columns, messages]) => {
    const { Series } = await import(`data:text/javascript;base64,${source}`);
    const series = new Series(columns);
    for (const [mask, numbers] of messages)
        series.append(new DataView(new Float32Array(numbers).buffer), mask);
    const axes = ['step', 'time', 'samples'];
    return { measures: axes.filter((axis) => series.measures(axis)),
        places: [1.5, 3].map((step) => axes.map((axis) => series.place(step, axis))),
        steps: axes.map((axis) => series.step(series.place(3, axis), axis)),
        averaged: series.averaged(series.values('loss'), 0.5),
        data: series.data, speed: series.smoothed('samples_per_s'),
        has: series.has('peak_bytes'), recent: series.recent('loss', 2),
        overall: series.overall('loss') };
}"""

Feeds = Callable[..., dict[str, Any]]


@pytest.fixture
def feed(chromium: Browser) -> Feeds:
    """Return a function that returns the state of a series after messages of a mask and rows."""

    def fed(*messages: tuple[int, Sequence[Sequence[float]]]) -> dict[str, Any]:
        source = base64.b64encode(SOURCE.read_bytes()).decode()
        sent = [[mask, np.ravel(rows).tolist()] for mask, rows in messages]
        page = chromium.new_page()
        try:
            found: dict[str, Any] = page.evaluate(FEED, [source, COLUMNS, sent])
        finally:
            page.close()
        return {**found, "data": dict(zip(NAMES, found["data"], strict=True))}

    return fed


def test_a_mask_says_which_columns_a_row_has(feed: Feeds) -> None:
    found = feed((0b00011, [[1, 0.5], [2, 0.25]]), (0b00101, [[3, 7]]))
    assert found["data"]["step"] == [1, 2, 3]
    assert found["data"]["loss"] == [0.5, 0.25, None]
    assert found["data"]["peak_bytes"] == [None, None, 7]
    assert found["has"]
    assert found["recent"] == 0.25


def test_a_mean_over_the_run_leaves_out_steps_that_warm_up(feed: Feeds) -> None:
    rates = 0b10011  # step, loss, samples_per_s
    assert [c["name"] for c in COLUMNS][4] == "samples_per_s"
    found = feed((rates, [[1, 8, float("nan")], [2, 2, 7], [3, 4, 7], [5, 1, 7]]))
    assert found["overall"] == (2 + 4 + 2 * 1) / 4  # the last row covers two steps


def test_what_is_not_a_number_is_a_gap(feed: Feeds) -> None:
    found = feed((0b00111, [[1, float("nan"), 3], [2, float("inf"), 4]]))
    assert found["data"]["loss"] == [None, None]


def test_steps_that_are_known_are_not_taken_twice(feed: Feeds) -> None:
    found = feed((0b00011, [[1, 0.5], [2, 0.25]]), (0b00011, [[2, 9], [3, 0.125]]))
    assert found["data"]["step"] == [1, 2, 3]
    assert found["data"]["loss"] == [0.5, 0.25, 0.125]


def test_a_long_run_is_thinned(feed: Feeds) -> None:
    steps = np.arange(1, 2402)
    found = feed((0b00111, np.stack([steps, steps, steps], axis=1).tolist()))
    data = found["data"]
    assert len(data["step"]) == 1201
    assert (data["step"][0], data["loss"][0], data["peak_bytes"][0]) == (2, 1.5, 2)
    assert data["step"][-2:] == [2400, 2401]


def test_speed_is_smoothed_by_time_over_a_fiftieth_of_the_steps(feed: Feeds) -> None:
    # Every step has ten samples; one step takes a hundred times as long.
    times = [1.0] * 150
    times[75] = 100.0
    found = feed((0b11001, [[i + 1, ms, 1e4 / ms] for i, ms in enumerate(times)]))
    assert found["speed"][:75] == pytest.approx([1e4] * 75)
    assert found["speed"][75] == pytest.approx(1e3 * 3 * 10 / 102, rel=1e-3)
    assert found["speed"][-1] == pytest.approx(1e4, rel=1e-3)


def test_a_step_has_its_place_on_each_axis(feed: Feeds) -> None:
    # Rows of step, time_s and samples; the second one covers two steps, of 16 samples each.
    found = feed((0b1100001, [[1, 0.5, 8], [3, 1.5, 16], [4, 2.5, 16]]))
    assert found["measures"] == ["step", "time", "samples"]
    assert found["places"] == [[1.5, 0.75, 16], [3, 1.5, 40]]
    assert found["steps"] == [3, 3, 3]
    assert feed((0b11, [[1, 0.5]]))["measures"] == ["step"]


def test_an_average_begins_with_the_first_value_and_counts_steps(feed: Feeds) -> None:
    found = feed((0b11, [[1, 4.0], [2, 0.0], [3, 2.0]]))
    assert found["averaged"] == pytest.approx([4, 4 / 3, 12 / 7])
    # The second row covers two steps, the others one.
    found = feed((0b11, [[1, 1.0], [3, 2.0], [4, 3.0]]))
    usual = 1.5
    kept = [0.5 ** (steps / usual) for steps in (usual, 2, 1)]
    total = weight = 0.0
    expected = []
    for value, each in zip([1.0, 2.0, 3.0], kept, strict=True):
        total, weight = total * each + value * (1 - each), weight * each + 1 - each
        expected.append(total / weight)
    assert found["averaged"] == pytest.approx(expected)
