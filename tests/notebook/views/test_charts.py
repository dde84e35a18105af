"""Tests of the charts without a browser: messages, pump, text, picture, and the saved notebook."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import ortlab
from ortlab.engines.base import NotFinite
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.recorder import (
    COLUMNS,
    INDEX,
    Event,
    Recorder,
    Rows,
    Sample,
    Status,
    merged,
)
from ortlab.metrics.setting_changes import Change, changes
from ortlab.notebook import build
from ortlab.notebook.static_views import picture, plain_text
from ortlab.notebook.views import charts, display, run_feed
from ortlab.notebook.views.pump import Pump
from ortlab.notebook.views.run_feed import WIRE, Feed, Update
from ortlab.utils.process_memory import memory
from tests.browser.bench_update import LIMIT_BYTES, measure
from tests.support.notebook_outputs import execute, pixels
from tests.support.practice import Practice
from tests.support.waiting import HANGS_S


class Still:
    """A run that advances only when a test advances it."""

    interactive = True

    def __init__(self, title: str = "still") -> None:
        self.title = title
        self.recorder = Recorder()
        self.now = Status("running", 0, 1000, 0.0, None)

    def status(self) -> Status:
        return self.now

    def over(self) -> bool:
        return self.now.state == "finished"

    def wait_over(self, timeout: float | None = None) -> bool:
        return self.over()

    def pause(self) -> None: ...

    resume = stop = pause

    def advance(self, steps: int, **values: float) -> None:
        first = self.now.step + 1
        for step in range(first, first + steps):
            self.recorder.add(
                Sample(
                    step=step, loss=1 / step, lr=1e-4, samples=8, step_ms=4.0, samples_per_s=2000,
                    **values,
                )
            )  # fmt: skip
        self.now = Status("running", first + steps - 1, 1000, 0.004 * first, 3.0)


@pytest.fixture
def run() -> Iterator[Still]:
    run = Still()
    yield run
    run.recorder.close()


def rows(update: Update) -> list[dict[str, float]]:
    """Return the rows of a message as the browser reads them."""
    names = [c.name for bit, c in enumerate(WIRE) if update.content.get("m", 0) >> bit & 1]
    numbers = np.frombuffer(update.rows, "<f4").reshape(-1, len(names) or 1)
    return [dict(zip(names, row.tolist(), strict=True)) for row in numbers]


def fresh(feed: Feed) -> Update:
    update = feed.fresh()
    assert update is not None
    json.dumps(update.content, allow_nan=False)
    return update


def test_a_message_has_the_new_points_only(run: Still) -> None:
    feed = Feed(run)
    feed.whole()
    run.advance(2)
    assert [row["step"] for row in rows(fresh(feed))] == [1, 2]
    run.advance(1)
    (row,) = rows(fresh(feed))
    assert set(row) == {"step", "samples", "loss", "lr", "step_ms", "samples_per_s"}
    assert row["loss"] == pytest.approx(1 / 3)
    assert row["samples_per_s"] == pytest.approx(2000)


@pytest.mark.parametrize("before", [100, 100_000])
def test_many_steps_are_merged_into_a_small_message(run: Still, before: int) -> None:
    feed = Feed(run)
    run.advance(before)
    feed.whole()
    run.advance(700)
    update = fresh(feed)
    assert len(update.rows) <= run_feed.UPDATE_BYTES
    assert rows(update)[-1]["step"] == before + 700
    first, last = before + 1, before + 700
    merged = [row["loss"] for row in rows(update)]
    assert 1 / last < merged[-1] < merged[0] < 1 / first


def test_the_whole_has_every_step_merged_and_starts_anew(run: Still) -> None:
    feed = Feed(run)
    run.advance(30_000)
    whole = feed.whole()
    assert whole.content["a"] == 1
    assert len(rows(whole)) <= run_feed.WHOLE_ROWS
    steps = [row["step"] for row in rows(whole)]
    assert steps == sorted(steps)
    assert steps[-1] == 30_000
    assert feed.fresh() is None, "what the whole had is not sent again"


def test_nothing_new_is_no_message(run: Still) -> None:
    feed = Feed(run)
    run.advance(1)
    first, second = fresh(feed), feed.fresh()
    assert "i" in first.content
    assert second is None
    run.advance(1)
    assert "i" not in fresh(feed).content, "badges and lines go out when they change"
    run.now = Status("paused", 2, 1000, 5.0, 3.0, badges=("fallback: torch",))
    assert fresh(feed).content["i"] == {"badges": ["fallback: torch"]}
    run.now = Status("paused", 2, 1000, 95.0, 3.0, badges=("fallback: torch",))
    assert feed.fresh() is None, "while a run is paused, time alone is no news"


def test_rows_give_way_to_words_once(run: Still) -> None:
    """A run held early has few steps: rows without space in a message are delayed, not merged."""
    feed = Feed(run)
    feed.whole()
    run.advance(5)
    run.now = Status("paused", 5, 1000, 5.0, 3.0, badges=("held",))
    first = fresh(feed)
    assert first.content["i"] == {"badges": ["held"]}
    assert first.rows == b""
    assert [row["step"] for row in rows(fresh(feed))] == [1, 2, 3, 4, 5]
    assert feed.fresh() is None
    came = 0
    for number in range(6):  # words with every message
        run.advance(5)
        run.now = Status("running", 5, 1000, 5.0, 3.0, badges=(f"{number}",))
        came += len(fresh(feed).rows) > 0
    assert came == 3


def test_rows_come_right_after_the_words_that_they_gave_way_to(run: Still) -> None:
    feed = Feed(run)
    feed.whole()
    came = 0
    for number in range(6):  # like a run that is evaluated between any two updates
        run.advance(5)
        run.now = Status("running", 5, 1000, 5.0, 3.0, lines=(f"held out {number}",))
        assert fresh(feed).rows == b""
        assert feed.waiting
        came += len(rows(fresh(feed)))
        assert not feed.waiting
    assert came == 30


def test_a_view_sends_them_in_the_same_update(run: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def send(_: object, content: dict[str, Any], __: object = None) -> None:
        sent.append(content)

    monkeypatch.setattr(charts.RunView, "send", send)
    view = charts.RunView(run)
    view.pump.close()
    view._greeted()
    view._send_fresh()  # the complete data, as requested
    sent.clear()
    run.advance(5)
    run.now = Status("running", 5, 1000, 5.0, 3.0, lines=("held out",))
    view._send_fresh()
    assert [("i" in each, "m" in each) for each in sent] == [(True, False), (False, True)]
    view.close()


def test_an_evaluation_is_sent_once_and_nan_is_no_number(run: Still) -> None:
    feed = Feed(run)
    run.recorder.event(Event("eval", 0, 0.1, values={"loss": 2.5, "accuracy": 0.1}))
    assert fresh(feed).content["e"] == [[0, 2.5, {"accuracy": 0.1}]]
    run.advance(1)
    values = {"loss": float("nan"), "accuracy": float("nan"), "f1": 0.2}
    run.recorder.event(Event("eval", 1, 0.2, values=values))
    assert fresh(feed).content["e"] == [[1, None, {"f1": 0.2}]]
    assert feed.whole().content["e"] == [[0, 2.5, {"accuracy": 0.1}], [1, None, {"f1": 0.2}]]


def test_a_page_gets_as_many_scores_as_its_chart_has_colors(run: Still) -> None:
    feed = Feed(run)
    values = {"loss": 1.0} | {f"m{i}": float(i) for i in range(9)}
    run.recorder.event(Event("eval", 0, 0.1, values=values))
    assert list(fresh(feed).content["e"][0][2]) == [f"m{i}" for i in range(6)]


def change(run: Still, text: str, cost_s: float = 0.5) -> None:
    run.recorder.event(Event("change", run.now.step, 1e-3, text, {"cost_s": cost_s}))


def test_a_change_is_sent_when_it_is_made_and_when_its_figures_are_known(run: Still) -> None:
    feed = Feed(run)
    run.advance(20)
    fresh(feed)
    change(run, "precision=bf16 (was fp32)")
    told = [1, 20, "precision=bf16 (was fp32)", 0.5, 2000, None, None, None]
    assert fresh(feed).content["c"] == [told]
    assert feed.fresh() is None, "once"
    run.advance(3)
    assert fresh(feed).content["c"] == [[*told[:5], 2000, None, None]]
    run.advance(700)
    fresh(feed)
    run.advance(1)
    assert "c" not in fresh(feed).content, "what is known is not sent again"
    assert feed.whole().content["c"] == [[*told[:5], 2000, None, None]]


def test_changes_keep_a_message_small_and_all_of_them_come(run: Still) -> None:
    feed = Feed(run)
    run.advance(20)
    fresh(feed)
    for _ in range(3):
        run.advance(50)
        change(run, "memory_plans=" + "x" * 4000)
    got = []
    while (update := feed.fresh()) is not None:
        assert len(json.dumps(update.content)) + len(update.rows) < 500
        got += update.content.get("c", [])
    assert {number for number, *_ in got} == {1, 2, 3}
    assert all(len(text) == run_feed.CHANGE_LETTERS and text[-1] == "…" for _, _, text, *_ in got)


def test_an_update_reads_few_changes_however_many_were_made(
    run: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(recorder: Recorder, **which: Any) -> list[Change]:
        found = changes(recorder, **which)
        read.append(len(found))
        return found

    monkeypatch.setattr(run_feed, "changes", counted)
    feed, told = Feed(run), 0
    feed.whole()
    read.clear()
    for number in range(100):
        run.advance(20)
        change(run, f"lr={number}")
        told += len(fresh(feed).content["c"])
    assert told == 100
    assert max(read) <= 2


def test_the_whole_has_the_last_changes_and_the_others_are_not_sent_after_it(run: Still) -> None:
    feed = Feed(run)
    for number in range(run_feed.WHOLE_CHANGES + 5):
        run.advance(3)
        change(run, f"lr={number}")
    run.advance(700)
    told = feed.whole().content["c"]
    assert [number for number, *_ in told] == list(range(6, run_feed.WHOLE_CHANGES + 6))
    assert feed.fresh() is None


def test_marks_are_sent_once_and_few_at_a_time(run: Still) -> None:
    feed = Feed(run)
    feed.whole()
    for step in range(1, 6):
        run.recorder.event(Event("checkpoint", step, step * 1.0, f"checkpoint last-{step}"))
    run.recorder.event(Event("pause", 5, 6.0, "paused: " + 200 * "x"))
    run.recorder.event(Event("note", 5, 7.0, "not a mark"))
    first, second = fresh(feed), fresh(feed)
    marks = [*first.content["k"], *second.content["k"]]
    assert [mark[:2] for mark in marks] == [*(["checkpoint", n] for n in range(1, 6)), ["pause", 5]]
    assert marks[0][2] == "checkpoint last-1"
    assert len(marks[5][2]) == run_feed.MARK_LETTERS
    assert max(len(json.dumps(each.content["k"])) for each in (first, second)) < 400
    assert feed.fresh() is None
    assert feed.whole().content["k"] == marks


def test_text_tells_a_change(run: Still) -> None:
    run.advance(20)
    change(run, "precision=bf16 (was fp32)")
    change(run, "lr=1 (was 2)", cost_s=0)
    lines = charts.text(run).splitlines()
    assert lines[1].startswith("change 1, step 20: precision=bf16 (was fp32) · cost 500 ms · ")
    assert "samples/s 2,000 → …" in lines[1]
    assert "memory" not in lines[1], "nobody measured it"
    assert lines[2].startswith("change 2, step 20: lr=1 (was 2) · free")


def test_picture_marks_a_change_in_every_chart_and_tells_it_above(run: Still) -> None:
    run.advance(80, peak_bytes=plain_text.GIB)
    plain = pixels(charts.picture(run))
    change(run, "precision=bf16 (was fp32)")
    run.advance(80, peak_bytes=plain_text.GIB)
    marked = pixels(charts.picture(run))
    assert marked.shape[0] == plain.shape[0] + round(0.24 * 192), "a line of heading more"
    violet = np.abs(marked[:, :, :3] - np.array([0x8C, 0x62, 0xD9]) / 255).max(axis=2) < 0.05
    violet &= marked[:, :, 3] > 0.9
    top = int(192 * 0.24 * 4)  # below the heading
    rows, columns = (size // 2 for size in (marked.shape[0] - top, marked.shape[1]))
    for y in (top, top + rows):
        for x in (0, columns):
            assert violet[y : y + rows, x : x + columns].sum() > 200


def test_picture_tells_the_last_of_many_changes(run: Still) -> None:
    run.advance(80)
    for number in range(30):
        change(run, f"memory_plans={'x' * 50 * number} (was None)")
    few = pixels(charts.picture(run)).shape[0]
    for number in range(30, 60):
        change(run, f"memory_plans={'x' * 50 * number} (was None)")
    assert pixels(charts.picture(run)).shape[0] <= few + 192


def test_pump_sends_the_last_and_finishes_in_its_own_thread() -> None:
    run = Practice(steps=20, step_s=0.01).start()
    drawn: list[int] = []
    threads: list[str] = []
    pump = Pump(
        run,
        lambda: drawn.append(run.status().step),
        lambda: threads.append(threading.current_thread().name),
    )
    assert pump.join(HANGS_S)
    assert drawn[-1] == 20
    assert threads == ["ortlab-view"]


def test_pump_can_be_closed_while_the_run_goes_on() -> None:
    run = Practice(steps=None).start()
    finished: list[bool] = []
    pump = Pump(run, lambda: None, lambda: finished.append(True))
    pump.close()
    pump.close()
    assert pump.join(0)
    assert not finished
    assert not run.over()
    run.stop()
    assert run.wait_over(HANGS_S)


def test_pump_slows_down_where_drawing_is_dear() -> None:
    began: list[float] = []

    def draw() -> None:
        began.append(time.monotonic())
        until = time.thread_time() + 4 * Pump.PERIOD_S * Pump.SHARE
        while time.thread_time() < until:
            pass

    run = Practice(steps=None).start()
    pump = Pump(run, draw, lambda: None)
    deadline = time.monotonic() + HANGS_S
    while len(began) < 6 and time.monotonic() < deadline:
        pump.join(0.05)
    pump.close()
    run.stop()
    gaps = np.diff(began)
    assert gaps[-1] > max(1.5 * Pump.PERIOD_S, gaps[0]), "one dear update does not slow it yet"


def test_rates_of_merged_rows_are_samples_over_time() -> None:
    recorder = Recorder()
    for step, step_ms in enumerate((1.0, 1.0, 98.0), 1):
        recorder.add(Sample(step=step, samples=10, step_ms=step_ms, samples_per_s=1e4 / step_ms))
    rate = INDEX["samples_per_s"]
    rows = recorder.rows()
    assert plain_text.with_rates(rows, 1)[:, rate] == pytest.approx([1e4, 1e4, 1e4 / 98])
    assert plain_text.with_rates(rows, 3)[-1, rate] == pytest.approx(300)
    assert merged(rows, 3)[:, rate] == pytest.approx([300])
    assert recorder.rate("samples") == pytest.approx(300)
    recorder.close()


def test_a_step_that_exports_is_in_no_rate() -> None:
    recorder = Recorder()
    recorder.add(Sample(step=1, samples=10, step_ms=9000.0))
    assert recorder.rate("samples") == pytest.approx(10 / 9), "a run of one step has only that"
    for step in range(2, 7):
        recorder.add(Sample(step=step, samples=10, step_ms=10.0, samples_per_s=1e3))
    rows, rate = recorder.rows(), INDEX["samples_per_s"]
    assert recorder.rate("samples") == pytest.approx(1e3)
    assert merged(rows, 2)[:, rate] == pytest.approx([1e3] * 3)
    assert plain_text.with_rates(rows, 3)[1:, rate] == pytest.approx([1e3] * 5)
    assert np.isnan(plain_text.with_rates(rows, 3)[0, rate])
    recorder.close()


def test_text_says_the_numbers() -> None:
    run = Practice(steps=60, step_s=0.001, title="line fit", badges=("fallback: torch",)).start()
    assert run.wait_over(20)
    lines = charts.text(run).splitlines()
    assert lines[0].startswith("line fit · finished · step 60 of 60 (100%)")
    assert lines[0].endswith("[fallback: torch]")
    labels = ["training loss", "samples/s", "tokens/s", "resident size", "peak resident size"]
    labels += ["learning rate", "step time"]
    for label in labels:
        assert any(line.startswith(label) for line in lines), label
    (loss,) = (line for line in lines if line.startswith("training loss"))
    first, last = known(run.recorder.rows(), "loss")[[0, -1]]
    assert loss.endswith(f"{plain_text.number(first)} → {plain_text.number(last)}")


def test_a_loss_scale_is_charted_where_there_is_one(run: Still) -> None:
    """The loss scale is charted beside the learning rate, with a separate axis of powers of two."""
    feed = Feed(run)
    feed.whole()
    run.advance(3)
    assert "loss_scale" not in rows(fresh(feed))[0]
    assert "loss scale" not in charts.text(run)
    run.advance(2, loss_scale=2.0**16, skipped=0.0)
    run.advance(2, loss_scale=2.0**15, skipped=1.0)
    assert [row["loss_scale"] for row in rows(fresh(feed))] == [2.0**16] * 2 + [2.0**15] * 2
    (line,) = (line for line in charts.text(run).splitlines() if line.startswith("loss scale"))
    assert line.endswith("65,536 → 32,768")
    figure = Figure()
    FigureCanvasAgg(figure)
    picture._draw(figure.add_subplot(), "lr", run.recorder.rows(), run.recorder)
    rate, scale = figure.axes
    assert [line.get_label() for line in rate.lines] == ["learning rate"]
    assert scale.lines[0].get_ydata().tolist() == [2.0**16] * 2 + [2.0**15] * 2
    assert rate.get_title("right") == "loss scale"
    assert (rate.get_yscale(), scale.get_yscale()) == ("linear", "log")
    assert all(math.log2(tick).is_integer() for tick in scale.get_yticks())


def test_a_run_that_failed_in_its_first_step_has_no_empty_charts(
    run: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = [], picture._draw

    def noted(axes: Any, name: str, *data: Any) -> None:
        drawn.append(name)
        draw(axes, name, *data)
        assert axes.lines

    monkeypatch.setattr(picture, "_draw", noted)
    run.recorder.add(Sample(step=1, loss=math.nan, lr=1e-4, samples=8, step_ms=4.0))
    picture.png(run)
    assert drawn == ["lr"]
    run.recorder.event(Event("eval", 0, 0.0, "loss 1", {"loss": 1.0}))
    picture.png(run)
    assert drawn[1:] == ["loss", "lr"]


def test_a_long_badge_is_whole_in_the_picture(run: Still) -> None:
    told = (
        "metric f1 raised ValueError: Classification metrics can't handle a mix of binary and "
        "continuous targets (evaluation at step 0)"
    )
    run.now = dataclasses.replace(run.now, badges=(told,))
    heading = picture._heading(run, run.status(), run.recorder.rows(), [])
    badge = [line for line in heading if line[2] == "bold"][1:]
    assert " ".join(text.strip() for text, _, _ in badge) == told
    figure = Figure(figsize=(picture.WIDTH_IN, 1), dpi=picture.DPI)
    FigureCanvasAgg(figure)
    for line in badge:
        picture._write(figure, 0.1 / picture.WIDTH_IN, 0.5, line)
    assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in figure.texts)


def known(rows: Rows, name: str) -> Any:
    return plain_text.known(rows, name)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.04, "0.04"), (5e-5, "5e-5"), (1.5e-4, "1.5e-4"), (787.94, "787.9"),
     (50423, "50,423"), (1800, "1,800"), (-2.5, "-2.5"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_read_well(value: float, shown: str) -> None:
    assert plain_text.number(value) == shown


@pytest.mark.parametrize("steps", [0, 1, 80])
def test_picture_of_any_length(steps: int) -> None:
    run = Still(r"a title with $\frac{$ and <b>")
    run.advance(steps)
    run.now = Status("failed", steps, None, 1.0, None, ("fallback: torch",), ("a line",), "no $\nx")
    image = pixels(charts.picture(run))
    height, width, channels = image.shape
    assert (width, channels) == (1920, 4)
    # No charts and one heading line less if nothing was measured.
    inches = 5.35 + 0.24 * 6 if steps else 0.1 + 0.24 * 5
    assert height == pytest.approx(192 * inches, abs=1)
    assert image[:, :, 3].min() == 1, "it is on white on dark pages too"
    assert image[0, 0].tolist() == [1, 1, 1, 1]
    assert image[:, :, :3].min(axis=2).min() < 0.3, "with dark letters"
    run.recorder.close()


def test_picture_is_on_white_whatever_the_users_figures_are_on(run: Still) -> None:
    run.advance(3)
    plain = charts.picture(run)
    with matplotlib.rc_context({"figure.facecolor": "black", "axes.facecolor": "black"}):
        assert charts.picture(run) == plain


def test_peak_memory_is_the_same_number_wherever_it_is_told() -> None:
    network, digits = nn.Linear(64, 10), ortlab.data.digits()[0]
    run = ortlab.finetune(network, digits, engine="eager", loss="cross_entropy", max_steps=5)
    result = run.result()
    run.wait_over()
    told = f"peak memory {memory(result.peak_bytes)}"
    assert told in str(result)
    for shown in (run, ortlab.open_run(run.name), SavedRun(run.folder)):
        assert told in picture.summary(shown, shown.recorder.rows())
    listed = repr(ortlab.list_runs(wide=True))
    (line,) = (line for line in listed.splitlines() if run.name in line)
    assert "peak memory" in listed.splitlines()[0]
    assert memory(result.peak_bytes) in line


def test_a_loop_without_a_result_has_the_peak_memory_of_its_steps(run: Still) -> None:
    run.advance(2, peak_bytes=3 * plain_text.GIB)
    run.advance(2, peak_bytes=2 * plain_text.GIB)
    assert "peak memory 3.00 GiB" in picture.summary(run, run.recorder.rows())
    run.advance(1, peak_bytes=3 * plain_text.GIB, cuda_peak_bytes=plain_text.GIB)
    told = picture.summary(run, run.recorder.rows())
    assert told.endswith("peak memory 1.00 GiB"), "one number, on CUDA that of its allocator"


def test_picture_leaves_matplotlib_as_it_was() -> None:
    code = (
        "import sys, matplotlib as m; before = dict(m.rcParams)\n"
        "from ortlab.notebook.views import charts; from tests.support.practice import Practice\n"
        "run = Practice(steps=3, step_s=0).start(); run.wait_over(); charts.picture(run)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert dict(m.rcParams) == before"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_terminal_gets_lines(capfd: pytest.CaptureFixture[str]) -> None:
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.user_ns.update(charts=charts, run=Practice(steps=40, title="line fit").start())
    try:
        shell.run_cell("charts.show(run); run.wait_over(20)")
        shown = capfd.readouterr().out.splitlines()
        assert not shell.events.callbacks["post_run_cell"], "the hook is gone with the run"
    finally:
        InteractiveShell.clear_instance()
    assert shown[0].startswith("line fit · ")
    assert any(line.startswith("line fit · finished · step 40 of 40") for line in shown)
    assert any(line.startswith("training loss") for line in shown)


START = (
    "from pathlib import Path; from ortlab.notebook.views import charts; "
    "from tests.support.practice import "
    "Practice; run = Practice(steps=60, folder=Path('.')).start(); charts.show(run)"
)


@pytest.mark.parametrize(
    "wait",
    [
        "import asyncio\nwhile not run.over(): await asyncio.sleep(0.01)",
        "run.wait_over(); print('over')",
    ],
    ids=["awaiting", "blocking"],
)
def test_a_saved_notebook_has_the_picture(tmp_path: Path, wait: str) -> None:
    book = execute(tmp_path, START, wait)
    output, still = book.cells[0].outputs
    assert sorted(output.data) == ["image/png", "text/plain"], "no widget, which a file cannot show"
    assert still.data == {"text/html": "", "text/plain": ""}, "the picture is there in its place"
    assert "practice · finished · step 60 of 60" in output.data["text/plain"]
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")


def test_pages_without_a_kernel_have_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[dict[str, str]] = []
    for name in ("publish", "republish"):
        monkeypatch.setattr(charts, name, lambda data, *_, **__: published.append(data))
    monkeypatch.setattr(charts, "STILL_S", 0.0)
    run = Practice(steps=3, title="<b>mine</b>").start()
    still = charts.Still(run, "mark")
    still.show(update=False)
    run.wait_over()
    still.tell("finished")
    assert "finished · step 3 of 3" in published[-1]["text/plain"]
    assert "&lt;b&gt;mine&lt;/b&gt;" in published[-1]["text/html"]
    assert 'data-ortlab-still="mark"' in published[-1]["text/html"]
    still.close()
    still.tell("finished")  # a page asks an ended view for the run again
    assert published[-1] == {"text/html": "", "text/plain": ""}


class Spoiled(nn.Linear):
    """A model that makes NaN in its third step, and not of its data."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) * (math.nan if self.calls == 3 else 1.0)


@pytest.mark.parametrize(
    ("model", "third", "advice"),
    [
        (nn.Linear, math.nan, "run.resume() skips the data"),
        (Spoiled, 1.0, "run.resume(learning_rate=5e-06) continues with these settings"),
    ],
)
def test_pages_without_a_kernel_name_no_buttons(
    model: type[nn.Linear], third: float, advice: str
) -> None:
    data = [(torch.full((2, 4), value), torch.zeros(2).long()) for value in (1.0, 1.0, third)]
    run = ortlab.finetune(model(4, 2), data, loss="cross_entropy", engine="eager", hold=True)
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    assert " button" in raised.value.__notes__[-1]
    told = charts.Still(run, "mark")._bundle()
    assert advice in told["text/plain"]
    assert " button" not in told["text/plain"]
    assert " button" not in told["text/html"].rpartition("<pre")[2]
    run.stop()
    assert run.wait_over(HANGS_S)


def test_a_finished_run_is_shown_as_its_picture(tmp_path: Path) -> None:
    book = execute(tmp_path, START + "; run.wait_over()", "charts.show(run)")
    assert sorted(book.cells[1].outputs[0].data) == ["image/png", "text/plain"]


@pytest.mark.parametrize(("step", "updates", "per_update"), [(100, 60, 3), (100_000, 60, 12)])
def test_an_update_costs_little(step: int, updates: int, per_update: int) -> None:
    cost = measure(step, updates, per_update, cuda=True)
    print(cost)
    assert cost["bytes_max"] <= LIMIT_BYTES
    assert cost["calls"] <= 600
    assert cost["allocated_bytes"] <= 48 * 1024, "the steps before it are not copied"


def test_every_chart_column_crosses_the_wire() -> None:
    assert [c.name for c in WIRE[:3]] == ["step", "time_s", "samples"], "the x axes"
    assert {c.name for c in WIRE[3:]} == {c.name for c in COLUMNS if c.chart}
    assert len(WIRE) < 53, "the mask of columns is one number of JavaScript"


def test_a_package_without_its_javascript_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(display, "STATIC", tmp_path)
    with pytest.raises(RuntimeError, match=r"runview.js was not built; run `pip install -e \.`"):
        charts.view(Still())
    gc.collect()
    assert not unraisable, "what was made of the widget is closed in peace"


def sources(root: Path) -> Path:
    folder = root / build.SOURCES
    (folder / "src").mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    (folder / "src" / "runview.js").write_text("")
    return folder


def test_a_bundle_is_fresh_until_a_source_changes(tmp_path: Path) -> None:
    folder = sources(tmp_path)
    assert not build.fresh(tmp_path)
    (tmp_path / build.BUNDLE).mkdir()
    for name in build.MADE:
        (tmp_path / build.BUNDLE / name).write_text("")
    assert build.fresh(tmp_path)
    later = time.time() + 10
    os.utime(folder / "src" / "runview.js", (later, later))
    assert not build.fresh(tmp_path)


def test_a_failing_npm_is_one_line(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text(
        "#!/bin/sh\necho 'npm error code E404' >&2\necho 'npm error no uplot' >&2\nexit 1\n"
    )
    npm.chmod(0o755)
    said: list[str] = []
    build.npm([str(npm)], ["ci"], sources(tmp_path), said.append)
    assert said == [
        "cannot build the views: `npm ci` in ortlab/notebook/js failed: code E404 no uplot; "
        "check that the npm registry can be reached, then install again"
    ]


def test_an_old_node_is_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("npm", ""), ("node", "v12.22.9")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert build.system_npm() is None
    (tmp_path / "node").write_text("#!/bin/sh\necho v18.0.0\n")
    assert build.system_npm() == [str(tmp_path / "npm")]


def test_the_lock_names_no_machine() -> None:
    lock = json.loads((Path(build.__file__).parent / "js" / "package-lock.json").read_text())
    packages = [entry for name, entry in lock["packages"].items() if name]
    assert all("integrity" in entry and "resolved" not in entry for entry in packages)
