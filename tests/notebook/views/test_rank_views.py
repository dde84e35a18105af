"""Tests of the ranks in the views, without a browser: messages, traits, text, picture."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ortlab.metrics import rank_metrics
from ortlab.metrics.recorder import NAN, Recorder, Sample, Status
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.static_views.drawing import COLORS
from ortlab.notebook.views import charts, rank_feed
from ortlab.notebook.views.rank_feed import RankFeed
from ortlab.settings import FinetuneSettings
from tests.support.notebook_outputs import pixels
from tests.support.waiting import HANGS_S

MIB = 1024**2


class OnRanks:
    """A run on workers that advances only when a test advances it; rank 1 computes longer."""

    interactive = True
    title = "on workers"

    def __init__(self, workers: int = 2) -> None:
        self.recorder = Recorder()
        self.current_settings = FinetuneSettings.of(workers=workers, zero_stage=1)
        self.step = 0
        self.ended = True

    def advance(self, steps: int, *, wait_ms: float = 2.0, loss: float | None = None) -> OnRanks:
        workers = self.current_settings.parallel.workers
        for _ in range(steps):
            self.step += 1
            step_ms = 12.0 + wait_ms
            self.recorder.add(
                Sample(
                    step=self.step, loss=1 / self.step, samples=4 * workers, step_ms=step_ms,
                    forward_ms=4.0, backward_ms=7.0, data_ms=0.5, optimizer_ms=0.5,
                    communication_ms=wait_ms if workers > 1 else NAN,
                )
            )  # fmt: skip
            for rank in range(workers if workers > 1 else 0):
                self.recorder.rank(rank).add(
                    Sample(
                        step=self.step,
                        loss=(loss or 1 / self.step) + rank,
                        samples=4,
                        samples_per_s=4e3 / step_ms,
                        step_ms=step_ms,
                        communication_ms=wait_ms + (4 if rank != 1 else 0),
                        parameter_bytes=10 * MIB,
                        gradient_bytes=10 * MIB,
                        optimizer_bytes=20 * MIB / workers,
                        base_bytes=100 * MIB,
                        peak_bytes=(150 + 7 * rank) * MIB,
                    )
                )
        return self

    def status(self) -> Status:
        return Status("running", self.step, None, 1.0, None)

    def over(self) -> bool:
        return self.ended

    def wait_over(self, timeout: float | None = None) -> bool:
        return self.ended

    def pause(self) -> None: ...

    resume = stop = pause


@pytest.fixture
def run() -> Iterator[OnRanks]:
    run = OnRanks()
    yield run
    run.recorder.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of a feed by a list with the current time."""
    now = [100.0]
    monkeypatch.setattr(rank_feed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rank_feed.time, "thread_time", lambda: 0.0)
    return now


def heights(line: str) -> list[int]:
    return list(base64.b64decode(line))


def test_a_message_has_a_row_a_rank(run: OnRanks) -> None:
    news = RankFeed(run.advance(40)).news()
    json.dumps(news, allow_nan=False)
    first, second = news["ranks"]
    sizes = [10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB]
    assert first[:8] == [0, "", 1, 0, 0.025, 285.7, 14, 6]
    assert first[8:12] == pytest.approx(sizes, rel=1e-3)
    assert second[:8] == [1, "", 1, 1, 1.025, 285.7, 14, 2]
    assert news["rank_notes"] == rank_metrics.standing(run.recorder, run.current_settings).notes()
    assert len(heights(first[12])) == len(heights(first[13])) == 40


def test_what_is_not_known_is_null(run: OnRanks) -> None:
    run.current_settings = FinetuneSettings.of(workers=2)
    for rank in (0, 1):
        run.recorder.rank(rank).add(Sample(step=1, step_ms=3.0))
    run.recorder.add(Sample(step=1))
    first, _ = RankFeed(run).news()["ranks"]
    assert first[4:12] == [None, None, 3, None, None, None, None, None]
    assert heights(first[12]) == heights(first[13]) == [0]


def test_lines_of_all_ranks_have_one_scale_and_gaps(run: OnRanks) -> None:
    run.advance(1, loss=1.0).advance(1, loss=2.0)
    run.current_settings = FinetuneSettings.of(workers=1)
    run.advance(1)
    run.current_settings = FinetuneSettings.of(workers=2)
    run.advance(1, loss=3.0, wait_ms=16.0)
    first, second = RankFeed(run).news()["ranks"]
    assert heights(first[12]) == [1, 86, 0, 170]
    assert heights(second[12]) == [86, 170, 0, 255]
    assert heights(first[13]) == [255, 255, 0, 128], "speed is drawn from zero"


def test_nothing_comes_without_ranks_or_news_or_too_soon(run: OnRanks, clock: list[float]) -> None:
    feed = RankFeed(run)
    run.current_settings = FinetuneSettings.of(workers=1)
    run.advance(3)
    assert feed.news() == feed.news(now=True) == {}
    run.current_settings = FinetuneSettings.of(workers=2)
    run.advance(3)
    assert set(feed.news()) == {"ranks", "rank_notes"}
    run.advance(3)
    clock[0] += 0.9 * rank_feed.PERIOD_S
    assert feed.news() == {}
    assert set(feed.news(now=True)) == {"ranks"}, "words that stay are not sent again"
    clock[0] += 60
    assert feed.news() == {}, "a pause"


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_messages_are_small(workers: int, clock: list[float]) -> None:
    """With many ranks, messages are less frequent: 1 KB a second plus Jupyter's envelope."""
    run = OnRanks(workers).advance(400)
    feed = RankFeed(run)
    feed.news()
    run.advance(50)
    clock[0] += 0.99 * max(1.0, workers / rank_feed.RANKS_A_SECOND)
    assert feed.news() == {}
    clock[0] += 0.02 * workers
    news = feed.news()
    assert set(news) == {"ranks"}
    each = len(json.dumps(news, separators=(",", ":")).encode()) / workers
    assert each <= (260 if workers == 2 else 170)
    run.recorder.close()


def test_lines_are_drawn_anew_where_they_have_another_point(run: OnRanks) -> None:
    feed = RankFeed(run.advance(480))

    def line() -> list[int]:
        return heights(feed.news(now=False)["ranks"][0][12])

    first = line()
    assert len(first) == rank_feed.POINTS
    feed._due = 0.0
    run.advance(5, loss=9.0)
    assert line() == first, "a tenth of a point"
    feed._due = 0.0
    run.advance(10, loss=9.0)
    assert line()[-1] > first[-1]
    run.advance(1, loss=99.0)
    before = feed._sent["ranks"][0][12]
    assert feed.news(now=True)["ranks"][0][12] != before, "the last has all"


def test_a_dear_message_comes_less_often(
    run: OnRanks, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = RankFeed(run.advance(3))
    used = iter([0.0, 0.01])
    monkeypatch.setattr(rank_feed.time, "thread_time", lambda: next(used))
    feed.news()
    run.advance(3)
    clock[0] += 4.9
    assert feed.news() == {}


def test_a_run_that_moved_to_one_process_keeps_them(run: OnRanks) -> None:
    run.advance(5)
    feed = RankFeed(run)
    assert [row[2] for row in feed.news()["ranks"]] == [1, 1]
    run.earlier_settings = [run.current_settings]  # type: ignore[attr-defined]
    run.current_settings = FinetuneSettings.of(workers=1)
    run.advance(5)
    news = feed.news(now=True)
    assert [row[2] for row in news["ranks"]] == [0, 0]
    assert news["rank_notes"][0].startswith("the workers trained until step 5;")
    assert news["rank_notes"][-1].startswith("ZeRO stage 1 on 2 workers")


def test_the_widget_has_them(run: OnRanks) -> None:
    view = charts.RunView(run.advance(9))
    assert view.pump.join(HANGS_S)
    assert [row[0] for row in view.ranks] == [0, 1]
    assert view.rank_notes == RankFeed(run).news()["rank_notes"]
    view.close()


def test_the_widget_ends_with_the_last_step(run: OnRanks) -> None:
    run.ended = False
    view = charts.RunView(run.advance(9))
    deadline = time.monotonic() + HANGS_S
    while not view.ranks and time.monotonic() < deadline:
        view.pump.join(0.01)
    run.advance(1, loss=7.0)
    run.ended = True
    assert view.pump.join(HANGS_S)
    assert view.ranks[0][4] == 7.0, "although a second has not passed"
    view.close()


def test_the_widget_of_one_process_has_none() -> None:
    run = OnRanks(1).advance(9)
    view = charts.RunView(run)
    assert view.pump.join(HANGS_S)
    assert view.ranks == view.rank_notes == []
    view.close()
    run.recorder.close()


def test_text_has_their_table(run: OnRanks) -> None:
    assert "communication" not in charts.text(run)
    lines = charts.text(run.advance(9)).splitlines()
    table = repr(rank_metrics.table(run.recorder, run.current_settings)).splitlines()
    assert lines[-len(table) :] == table


def test_communication_is_no_part_of_a_steps_time(run: OnRanks) -> None:
    """Communication overlaps the other parts and would be counted twice."""
    parts = plain_text.split(run.advance(9).recorder.rows())
    assert parts == {"data": 0.5, "forward": 4.0, "backward": 7.0, "optimizer": 0.5, "other": 2.0}


def coloured(image: Any, color: str, below: int) -> int:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    near = np.abs(image[below:, :, :3] - wanted).max(axis=2) < 0.02
    return int((near & (image[below:, :, 3] > 0.95)).sum())


def test_picture_has_a_row_a_rank(run: OnRanks) -> None:
    plain = OnRanks(1).advance(20)
    without = pixels(charts.picture(plain))
    plain.recorder.close()
    image = pixels(charts.picture(run.advance(20)))
    below = without.shape[0]
    inches = 0.12 + 0.5 + 2 * 0.28 + 3 * 0.22  # plus two notes in three lines
    assert image.shape[0] - below == pytest.approx(192 * inches, abs=2)
    # Bars are a tenth of an inch high: rank 1, with the highest peak, fills 1.6 inches.
    widest = 1.6 * 192 * 0.1 * 192
    legend = (0.1 * 192) ** 2
    purple = coloured(image, COLORS[3], below)
    assert purple == pytest.approx(widest * (20 + 27) / 57 + legend, rel=0.05)
    waited = 0.95 * 192 * 0.1 * 192 * (6 + 2) / 14
    assert coloured(image, COLORS[4], below) == pytest.approx(waited + legend, rel=0.05)


def test_picture_of_many_ranks_ends(run: OnRanks) -> None:
    few = pixels(charts.picture(run.advance(3))).shape[0]
    many = OnRanks(40).advance(3)
    image = pixels(charts.picture(many))
    many.recorder.close()
    more = image.shape[0] - few
    assert more == pytest.approx(192 * (14 * 0.28 + 0.22), abs=2), "16, and a note"
    # The notes are below the last of the 16 rows, so no bar is beside them.
    notes = image.shape[0] - int(192 * 4 * 0.22)
    assert coloured(image, COLORS[0], notes) == 0
    assert coloured(image, COLORS[0], notes - 50) > 0
