"""Tests of the tools of the charts in JupyterLab: drag, slide, click, print, and open the files."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import BOTH, OWN_PAGE, SCREENSHOTS, Opens, Takes
from tests.browser.test_charts_in_lab import LONG, START, points, wait_for_step

pytestmark = [pytest.mark.browser, BOTH]

STEPS = 300
PAUSED_AT = 120
TITLE = "<i>fit</i> & 'more'"
DONE = f"""
import time
from ortlab.metrics.recorder import Event
from ortlab.notebook.views import charts
from tests.support.practice import Practice
run = Practice(steps={STEPS}, step_s=0.002, title={TITLE!r}).start()
while run.status().step < {PAUSED_AT}:
    time.sleep(0.001)
run.pause()
while run.status().state != "paused":
    time.sleep(0.001)
time.sleep(0.5)
step = run.status().step
run.recorder.event(Event("change", step, 1.0, "learning_rate=0.1 (was 0.05)", {{"cost_s": 0.0}}))
run.resume()
run.wait_over()
run.recorder.event(Event("eval", {STEPS}, 9.0, "", {{"loss": 0.1, "=1+1": 0.5, "<b>": -2}}))
charts.view(run)
"""
BLUE, VERMILLION = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
SVG = "{http://www.w3.org/2000/svg}"


def chart(run: Locator, kind: str) -> Locator:
    return run.locator(f".ortlab-chart-{kind}")


def plot(run: Locator, kind: str) -> Locator:
    return chart(run, kind).locator(".u-over")


def point(run: Locator, kind: str, share: float) -> str:
    """Move the mouse over a chart; return what it says of the place."""
    chart(run, kind).scroll_into_view_if_needed()  # the plot itself may be made anew
    box = plot(run, kind).bounding_box()
    assert box is not None
    page = run.page
    page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.3 * box["height"], steps=3)
    told = chart(run, kind).locator(".ortlab-chart-step")
    expect(told).to_have_text(re.compile("step"))
    return told.inner_text()


def step_at(run: Locator, kind: str, share: float) -> int:
    return int(point(run, kind, share).split("·")[0].split()[1].replace(",", ""))


def drag(run: Locator, kind: str, begin: float, end: float) -> None:
    point(run, kind, begin)
    run.page.mouse.down()
    point(run, kind, end)
    run.page.mouse.up()


def saved(run: Locator, kind: str, form: str, folder: Path) -> Path:
    """Save a chart as a person does."""
    chart(run, kind).locator("summary").click()
    with run.page.expect_download() as download:
        chart(run, kind).get_by_role("button", name=f"as {form}").click()
    name = download.value.suggested_filename
    assert name == f"-i-fit-i-more--{kind}.{form.lower()}"
    download.value.save_as(folder / name)
    return folder / name


def table(run: Locator, kind: str, folder: Path) -> tuple[list[str], list[list[str]]]:
    heads, *rows = csv.reader(io.StringIO(saved(run, kind, "CSV", folder).read_text()))
    return heads, rows


def texts(path: Path) -> list[str]:
    """Return the texts of an SVG, which must be well formed."""
    return [each.text or "" for each in ElementTree.parse(path).iter(f"{SVG}text")]


def pixels(run: Locator, kind: str, color: tuple[int, int, int]) -> int:
    """Return the number of pixels of a color in a chart."""
    found: int = (
        chart(run, kind)
        .locator("canvas")
        .evaluate(
            """(canvas, color) => {
                const { width, height } = canvas, near = (a, b) => Math.abs(a - b) < 6;
                const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
                let found = 0;
                for (let i = 0; i < data.length; i += 4)
                    found += data[i + 3] > 200 && color.every((c, j) => near(c, data[i + j]));
                return found;
            }""",
            list(color),
        )
    )
    return found


@pytest.fixture
def run(notebook: Opens, page: Page) -> Locator:
    """Return the charts of a run that is over, with a pause, a change and checkpoints."""
    page.set_viewport_size({"width": 1280, "height": 1300})  # all of them are visible
    book = notebook([DONE])
    book.run()
    view = book.view()
    assert points(view) == STEPS
    return view


def test_drag_zooms_all_charts_until_a_double_click(run: Locator, screenshot: Takes) -> None:
    reset = run.get_by_role("button", name="Show the whole run")
    expect(reset).to_have_attribute("aria-disabled", "true")
    assert step_at(run, "memory", 0.99) >= STEPS - 5
    drag(run, "loss", 0.25, 0.5)
    expect(reset).to_have_attribute("aria-disabled", "false")
    for kind in ("loss", "throughput", "memory", "lr", "evaluation"):
        told = [step_at(run, kind, share) for share in (0.01, 0.99)]
        wide = 50 if kind == "evaluation" else 8  # it has a point each 50 steps
        assert told == pytest.approx([STEPS / 4, STEPS / 2], abs=wide), kind
    screenshot("zoomed")
    box = plot(run, "memory").bounding_box()
    assert box is not None
    run.page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    expect(reset).to_have_attribute("aria-disabled", "true")
    assert step_at(run, "loss", 0.99) >= STEPS - 5
    drag(run, "memory", 0.5, 0.1)
    expect(reset).to_have_attribute("aria-disabled", "false")
    reset.click()
    assert step_at(run, "memory", 0.99) >= STEPS - 5


def test_the_crosshair_tells_the_step_and_every_value(run: Locator) -> None:
    latest = run.locator(".ortlab-chart .ortlab-value").all_inner_texts()
    step = step_at(run, "lr", 0.5)
    assert step == pytest.approx(STEPS / 2, abs=3)
    for kind in ("loss", "throughput", "memory", "lr"):
        told = chart(run, kind).locator(".ortlab-chart-step")
        assert int(told.inner_text().split()[1]) == pytest.approx(step, abs=1), kind
    rate = chart(run, "lr").locator(".ortlab-value").inner_text()
    assert float(rate) == pytest.approx(0.05 * (1 - (step - 1) / STEPS), rel=1e-3)
    assert run.locator(".ortlab-chart .ortlab-value").all_inner_texts() != latest
    run.page.mouse.move(5, 5)
    expect(run.locator(".ortlab-chart .ortlab-value")).to_have_text(latest)


def test_a_value_of_another_step_than_the_crosshairs_names_it(
    run: Locator, tmp_path: Path, screenshot: Takes
) -> None:
    heads, rows = table(run, "loss", tmp_path)
    trained, evaluated = heads.index("training loss"), heads.index("evaluation")
    losses = {int(row[0]): row for row in rows}
    evaluations = [int(row[0]) for row in rows if row[evaluated]]
    assert evaluations == [1, 51, 101, 151, 201, 251, 300]
    values = chart(run, "loss").locator(".ortlab-value")
    expect(values.nth(1)).to_have_text("0.1 (step 300)")  # the latest
    for share in (0.1, 0.27, 0.6):
        point(run, "memory", share)
        step = int(chart(run, "loss").locator(".ortlab-chart-step").inner_text().split()[1])
        at = min(evaluations, key=lambda each: abs(each - step))
        assert at != step
        assert float(values.nth(0).inner_text()) == pytest.approx(
            float(losses[step][trained]), rel=1e-3
        )
        told = re.fullmatch(r"(\S+) \(step (\d+)\)", values.nth(1).inner_text())
        assert told is not None
        assert int(told[2]) == at
        assert float(told[1]) == pytest.approx(float(losses[at][evaluated]), rel=1e-3)
        scores = chart(run, "evaluation")
        assert scores.locator(".ortlab-chart-step").inner_text() == f"step {at}"
        assert "(" not in scores.locator(".ortlab-value").first.inner_text()
        assert scores.locator(".ortlab-value").nth(1).inner_text() == "0.5 (step 300)"
    screenshot("crosshair-light")
    run.get_by_role("combobox", name="X axis").select_option("time")
    point(run, "memory", 0.1)
    assert re.search(r" \(step \d+\)$", values.nth(1).inner_text())


def test_smoothing_is_the_moving_average_of_the_raw_line(
    run: Locator, tmp_path: Path, screenshot: Takes
) -> None:
    sharp = pixels(run, "loss", BLUE)
    slider = run.get_by_role("slider", name="Smoothing")
    slider.focus()
    for _ in range(90):
        run.page.keyboard.press("ArrowRight")
    expect(run.locator(".ortlab-tools-number")).to_have_text("0.90")
    value = chart(run, "loss").locator(".ortlab-value").first
    expect(value).to_have_text(re.compile(r"^[\d.]+ \([\d.]+\)$"))
    expect(chart(run, "memory").locator(".ortlab-value").first).not_to_contain_text("(")
    expect(chart(run, "loss").locator(".ortlab-chart-note")).to_have_text("smoothed 0.90")
    screenshot("smoothed")
    assert pixels(run, "loss", BLUE) != sharp
    heads, rows = table(run, "loss", tmp_path)
    assert heads[3:5] == ["training loss", "training loss, smoothed 0.9"]
    raw, smooth = (np.array([float(row[at]) for row in rows]) for at in (3, 4))
    weights = 0.9 ** np.arange(STEPS)
    expected = [np.average(raw[: n + 1][::-1], weights=weights[: n + 1]) for n in range(STEPS)]
    np.testing.assert_allclose(smooth, expected, rtol=1e-6)
    picture = ElementTree.parse(saved(run, "loss", "SVG", tmp_path))
    faint = [each for each in picture.iter(f"{SVG}path") if each.get("opacity")]
    assert [each.get("stroke") for each in faint] == ["#0072b2"]


def test_the_legend_hides_a_series(run: Locator, tmp_path: Path) -> None:
    assert pixels(run, "throughput", VERMILLION) > 50
    tokens = chart(run, "throughput").get_by_role("button", name="Show or hide tokens/s")
    expect(tokens).to_have_attribute("aria-pressed", "true")
    tokens.click()
    expect(tokens).to_have_attribute("aria-pressed", "false")
    assert pixels(run, "throughput", VERMILLION) == 0
    assert "tokens/s" not in texts(saved(run, "throughput", "SVG", tmp_path))
    assert "tokens/s" not in table(run, "throughput", tmp_path)[0]
    run.get_by_role("checkbox", name="Log").check()  # the plot is made anew
    assert pixels(run, "throughput", VERMILLION) == 0
    tokens.focus()
    run.page.keyboard.press("Enter")
    expect(tokens).to_have_attribute("aria-pressed", "true")
    assert pixels(run, "throughput", VERMILLION) > 50


def test_the_loss_scale_has_an_axis_of_powers_of_two(notebook: Opens, tmp_path: Path) -> None:
    """It falls by 4096; on a linear axis all but the first values would look like zero."""
    halving = """
from tests.support import practice
plain = practice.Sample
practice.Sample = lambda **values: plain(**values, loss_scale=2.0 ** (16 - values["step"] // 25))
"""
    book = notebook([halving + DONE])
    book.run()
    written = texts(saved(book.view(), "lr", "SVG", tmp_path))
    axis = {text for text in written if re.fullmatch(r"[\d,]+", text)} - {"0"}
    assert {"131,072", "16,384", "2,048", "256"} <= axis, written


def test_axes_are_steps_time_or_samples_and_logarithmic(
    run: Locator, tmp_path: Path, screenshot: Takes
) -> None:
    drag(run, "loss", 0.5, 0.9)
    begin = step_at(run, "loss", 0.01)
    axis = run.get_by_role("combobox", name="X axis")
    axis.select_option("samples")
    found = re.fullmatch(r"step ([\d,]+) · ([\d,]+) samples", point(run, "loss", 0.01))
    assert found is not None
    step, samples = (int(each.replace(",", "")) for each in found.groups())
    assert samples == 16 * step
    assert step == pytest.approx(begin, abs=2), "the zoom stays"
    axis.select_option("time")
    assert re.fullmatch(r"step [\d,]+ · \d+ s", point(run, "memory", 0.5))
    assert "time since the start" in texts(saved(run, "lr", "SVG", tmp_path))
    heads, rows = table(run, "lr", tmp_path)
    assert heads == ["step", "time (s)", "samples", "learning rate"]
    assert begin - 3 <= int(rows[0][0]) <= begin + 3
    assert int(rows[-1][0]) == pytest.approx(0.9 * STEPS, abs=5)
    times = [float(row[1]) for row in rows]
    assert times == sorted(times)
    run.get_by_role("button", name="Show the whole run").click()
    run.get_by_role("checkbox", name="Log").check()
    expect(chart(run, "loss").locator(".ortlab-chart-note")).to_have_text("log")
    screenshot("logarithmic")
    written = texts(saved(run, "loss", "SVG", tmp_path))
    assert {"0.1", "1", "10"} <= set(written)


def test_marks_tell_what_they_mark(run: Locator, screenshot: Takes) -> None:
    key = run.locator(".ortlab-tools-key")
    expect(key).to_have_text("▲ evaluation   ■ checkpoint   ❚❚ pause")
    tip = chart(run, "loss").locator(".ortlab-tip")
    expect(tip).to_be_hidden()
    step = int(run.locator(".ortlab-change").inner_text().split("step ")[1].split(":")[0])

    def told(at: int) -> str:
        point(run, "loss", min((at - 1) / (STEPS - 1), 0.995))
        expect(tip).to_be_visible()
        return tip.inner_text()

    shown = told(step)
    assert f"step {step}: paused" in shown
    assert f"step {step}: resumed" in shown
    assert "learning_rate=0.1 (was 0.05)" in shown
    screenshot("marks")
    assert "step 240: checkpoint last-240 saved" in told(240)
    assert "step 201: evaluation · loss 0" in told(201)
    assert "<b> -2" in told(STEPS), "a name is text"


def test_a_chart_is_saved_as_it_is_seen(run: Locator, tmp_path: Path) -> None:
    written = texts(saved(run, "throughput", "SVG", tmp_path))
    assert written[:4] == [
        *("Throughput, without export, warm-up and pauses", TITLE),
        *("samples/s", "tokens/s"),
    ]
    assert {"step", "100", "200", "300", "1"} <= set(written), "ticks, and the change's number"
    heads, rows = table(run, "evaluation", tmp_path)
    assert heads == ["step", "time (s)", "samples", "accuracy", "'=1+1", "<b>"]
    assert rows[-1][-2:] == ["0.5", "-2"]
    assert [row[0] for row in rows] == ["1", "51", "101", "151", "201", "251", "300"]
    heads, rows = table(run, "memory", tmp_path)
    assert heads[3:] == ["resident size (B)", "peak resident size (B)"]
    assert len(rows) == STEPS
    path = saved(run, "loss", "PNG", tmp_path)
    width = chart(run, "loss").locator("canvas").evaluate("canvas => canvas.clientWidth")
    with Image.open(path) as picture:
        assert picture.width == 2 * width
        colors = {color[:3] for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
        assert {BLUE, VERMILLION, (255, 255, 255)} <= colors


def test_charts_are_read_by_keys(run: Locator, page: Page) -> None:
    chart(run, "loss").get_by_role("group", name="Loss: left and right").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(chart(run, "memory").locator(".ortlab-chart-step")).to_have_text("step 3")
    expect(chart(run, "loss").locator(".ortlab-tip")).to_contain_text("step 1: evaluation")
    page.keyboard.press("+")
    reset = run.get_by_role("button", name="Show the whole run")
    expect(reset).to_have_attribute("aria-disabled", "false")
    page.keyboard.press("Escape")
    expect(reset).to_have_attribute("aria-disabled", "true")
    expect(chart(run, "loss").locator(".ortlab-tip")).to_be_hidden()
    assert page.locator(".jp-mod-commandMode .ortlab-run").count() == 1, "Lab had no key of these"


def test_a_zoom_stays_while_the_run_goes_on(notebook: Opens, page: Page) -> None:
    book = notebook([START.format(options="steps=3000, title='line fit'")])
    book.start()
    run = book.view()
    wait_for_step(page, 100)
    run.scroll_into_view_if_needed()
    drag(run, "loss", 0.2, 0.6)
    run.get_by_role("slider", name="Smoothing").fill("0.5")
    expect(chart(run, "loss").locator(".ortlab-chart-note")).to_have_text("smoothed 0.50")
    last = step_at(run, "loss", 0.99)
    wait_for_step(page, 300)
    assert step_at(run, "loss", 0.99) == pytest.approx(last, abs=10)
    expect(run.locator(".ortlab-tools-number")).to_have_text("0.50")


@OWN_PAGE
def test_a_print_is_legible_at_800_pixels(run: Locator, page: Page) -> None:
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    widths = run.locator("canvas").evaluate_all("all => all.map(one => one.clientWidth)")
    assert max(widths[:4]) <= 310
    page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    page.wait_for_function("() => document.querySelector('.ortlab-run canvas').clientWidth > 400")
    page.set_viewport_size({"width": 800, "height": 1100})
    page.emulate_media(media="print")
    expect(run.get_by_role("slider")).to_be_hidden()
    expect(chart(run, "loss").locator("summary")).to_be_hidden()
    expect(run.locator(".ortlab-tools-key")).to_be_visible()
    page.wait_for_function(
        """() => [...document.querySelectorAll('.ortlab-chart')].every(chart =>
            chart.querySelector('canvas').clientWidth <= chart.clientWidth)"""
    )
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "printed.png")


def test_tools_in_the_dark(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([START.format(options=LONG)])
    book.start()
    run = book.view()
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    wait_for_step(page, 20)
    run.get_by_role("slider", name="Smoothing").fill("0.8")
    run.get_by_role("checkbox", name="Log").check()
    chart(run, "loss").locator("summary").click()
    expect(chart(run, "loss").get_by_role("button", name="as CSV")).to_be_visible()
    screenshot("tools-dark")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(chart(run, "loss").get_by_role("button", name="as CSV")).to_be_hidden()
