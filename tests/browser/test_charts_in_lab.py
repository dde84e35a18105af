"""Tests of the charts in JupyterLab: a person opens a notebook, watches, clicks, saves."""

from __future__ import annotations

import base64
import time

import pytest
from playwright.sync_api import Locator, Page, WebSocket, expect

from tests.browser.lab import OWN_PAGE, Opens, Takes

pytestmark = pytest.mark.browser

START = """
from tests.support.practice import Practice
from ortlab.notebook.views import charts
run = Practice({options}).start()
charts.show(run)
"""
WAIT = """
import asyncio
while not run.over():
    await asyncio.sleep(0.05)
print("state:", run.status().state)
"""
STEP_S = 0.2
REACTION_S = 1.0 + STEP_S  # limit of the reaction to a click: one second plus the step in flight
GROWN = "n => Number(document.querySelector('.ortlab-chart').dataset.points) > n + 10"
LONG = f"steps=3000, step_s={STEP_S}, title='line fit'"


def step_of(run: Locator) -> int:
    """Return the step that the page shows."""
    words = run.locator(".ortlab-numbers").inner_text().split()
    return int(words[words.index("step") + 1].replace(",", ""))


def wait_for_step(page: Page, step: int) -> None:
    """Wait until the page shows this step or a later one."""
    page.wait_for_function(
        """step => parseInt(document.querySelector('.ortlab-numbers').textContent
            .match(/step ([\\d,]+)/)[1].replaceAll(',', '')) >= step""",
        arg=step,
    )


def test_points_grow_while_the_cell_waits(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([START.format(options="steps=3000, title='line fit'"), WAIT])
    book.start()
    run = book.view()
    expect(run.locator(".ortlab-state")).to_have_text("running")
    for _ in range(3):
        page.wait_for_function(GROWN, arg=points(run))
    assert page.locator(".ortlab-value", has_text="tokens").count() == 0  # shown by its label
    screenshot("live-light")


def test_points_grow_while_a_cell_hears_nothing(notebook: Opens, page: Page) -> None:
    # The user's own loop blocks the kernel, which does not notice any browser until the cell ends.
    book = notebook([START.format(options="steps=3000, interactive=False") + "run.wait_over()"])
    book.start()
    run = book.view()
    for _ in range(3):  # not to given steps: the page may be far behind, and then get many at once
        page.wait_for_function(GROWN, arg=points(run))
        expect(run.locator(".ortlab-state")).to_have_text("running")


def test_a_click_pauses_and_another_goes_on(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([START.format(options=LONG), WAIT])
    book.start()
    run = book.view()
    wait_for_step(page, 3)
    clicked = time.monotonic()
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    took = time.monotonic() - clicked
    print(f"click to paused: {took:.2f} s")
    assert took <= REACTION_S
    step = step_of(run)
    screenshot("paused")
    page.wait_for_timeout(3 * 1000 * STEP_S)  # enough time for three steps; none may happen
    assert step_of(run) == step
    run.get_by_role("button", name="Resume").click()
    wait_for_step(page, step + 2)


def test_a_click_stops_and_the_picture_is_saved(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([START.format(options=LONG), WAIT])
    book.start()
    run = book.view()
    wait_for_step(page, 3)
    clicked = time.monotonic()
    run.get_by_role("button", name="Stop").click()
    page.wait_for_function(
        "() => window.panel.content.widgets[1].model.outputs.length > 0", polling=20
    )
    took = time.monotonic() - clicked
    print(f"click to stopped: {took:.2f} s")
    assert took <= REACTION_S
    assert book.outputs()[1][0]["text"] == "state: stopped\n"
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    screenshot("stopped-light")
    data = book.save().cells[0].outputs[0].data
    assert sorted(data) == ["image/png", "text/plain"]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "stopped" in data["text/plain"]


FINETUNE = [
    "%load_ext ortlab\nimport ortlab\nfrom torch import nn",
    "model = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))\n"
    "train, valid = ortlab.data.digits()",
    "run = %ort finetune model train --eval-dataset valid --loss cross_entropy --engine eager "
    "--epochs 10000 --eval-steps 200",
    "result = await run\nprint(result.state, run.step == result.steps)",
]


def test_a_real_run_is_paused_and_stopped_while_it_is_awaited(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    updates: list[int] = []

    def received(frame: str | bytes) -> None:
        raw = frame.encode() if isinstance(frame, str) else frame
        if b'"method": "custom"' in raw and b'"a": 1' not in raw:
            updates.append(len(raw))

    def listen(socket: WebSocket) -> None:
        socket.on("framereceived", received)

    page.on("websocket", listen)
    book = notebook(FINETUNE)
    book.start()
    run = book.view()
    wait_for_step(page, 300)
    clicked = time.monotonic()
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    paused_s = time.monotonic() - clicked
    screenshot("finetune-paused")
    run.get_by_role("button", name="Resume").click()
    expect(run.locator(".ortlab-state")).to_have_text("running")
    clicked = time.monotonic()
    run.get_by_role("button", name="Stop").click()
    expect(run.locator(".ortlab-state")).to_have_text("stopped")
    stopped_s = time.monotonic() - clicked
    print(f"click to paused: {paused_s:.2f} s, click to stopped: {stopped_s:.2f} s")
    print(f"{len(updates)} updates, {max(updates)} bytes at most")
    assert len(updates) >= 3
    assert max(updates) <= 1280
    assert max(paused_s, stopped_s) < 5  # a step takes milliseconds; the machine may be busy
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    page.wait_for_function("() => window.panel.content.widgets[3].model.outputs.length > 0")
    screenshot("finetune-stopped")
    saved = book.save()
    assert saved.cells[3].outputs[0].text == "stopped True\n"
    assert sorted(saved.cells[2].outputs[0].data) == ["image/png", "text/plain"]
    page.remove_listener("websocket", listen)


def test_buttons_work_from_the_keyboard(notebook: Opens, page: Page) -> None:
    book = notebook([START.format(options=LONG), WAIT])
    book.start()
    run = book.view()
    wait_for_step(page, 2)
    run.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Space")
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    page.keyboard.press("Enter")
    expect(run.locator(".ortlab-state")).to_have_text("running")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".jp-OutputArea img")).to_be_visible()


SILENT = (
    START.format(options=LONG)
    + """
import os, subprocess
kernel = os.getpid()
still = f"sleep 3; kill -STOP {kernel}; sleep 24; kill -CONT {kernel}"
_ = subprocess.Popen(["sh", "-c", still], start_new_session=True)
"""
)


def test_a_kernel_that_says_nothing_is_told(notebook: Opens, page: Page, screenshot: Takes) -> None:
    """A silent kernel is reported as dead: a run in training sends a message every second."""
    book = notebook([SILENT])
    book.run_cell(0)
    silence = book.view().locator(".ortlab-silence")
    expect(silence).to_be_hidden()
    expect(silence).to_contain_text("No message from the kernel")
    expect(silence).to_be_visible()
    screenshot("silent")
    expect(silence).to_be_hidden()


def test_dark_theme(notebook: Opens, page: Page, screenshot: Takes) -> None:
    options = "steps=3000, title='line fit', badges=('fallback: torch',)"
    book = notebook([START.format(options=options)])
    book.start()
    run = book.view()
    light = axis_color(run)
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    assert max(light) < 150 < min(axis_color(run)), "the axes' words follow the theme"
    screenshot("live-dark")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    screenshot("stopped-dark")


def axis_color(run: Locator) -> tuple[int, int, int]:
    """Return the most opaque color in the lower left corner of a chart, where tick labels are."""
    red, green, blue = (
        run.locator("canvas")
        .nth(2)
        .evaluate(
            """canvas => {
            const { width, height } = canvas, ratio = devicePixelRatio;
            const strip = canvas.getContext('2d').getImageData(0, 0, 40 * ratio, height).data;
            let best = [0, 0, 0, 0];
            for (let i = 0; i < strip.length; i += 4)
                if (strip[i + 3] > best[3]) best = [...strip.slice(i, i + 4)];
            return best.slice(0, 3);
        }"""
        )
    )
    return red, green, blue


def points(run: Locator) -> int:
    """Return the number of rows that a view has."""
    return int(run.locator(".ortlab-chart").first.get_attribute("data-points") or 0)


@OWN_PAGE
def test_a_late_view_gets_the_whole(notebook: Opens, page: Page) -> None:
    book = notebook([START.format(options="steps=3000")])
    book.start()
    book.view()
    wait_for_step(page, 150)
    book.run_next("charts.show(run)")
    late = page.locator(".ortlab-run").nth(1)
    expect(late.locator("canvas")).to_have_count(5)
    assert points(late) >= 150
    ran = "() => Object.keys(globalThis).filter((name) => name.startsWith('ortlab ')).length"
    assert page.evaluate(ran) == 1, "both views are of one module, which is never let go of"
    # A page without any state, while the kernel keeps running.
    book.reload()
    expect(page.locator(".ortlab-run canvas")).to_have_count(10)
    for run in page.locator(".ortlab-run").all():
        assert points(run) >= 150
        assert step_of(run) >= 150


def test_charts_of_a_finished_run_come_back(notebook: Opens, page: Page) -> None:
    book = notebook([START.format(options="steps=60"), WAIT])
    book.run()
    assert page.locator(".ortlab-run").count() == 0
    book.run_next("charts.view(run)")
    run = book.view()
    expect(run.locator(".ortlab-state")).to_have_text("finished")
    for name in ("Pause", "Resume", "Stop"):
        expect(run.get_by_role("button", name=name)).to_have_count(0)
    assert run.locator(".ortlab-chart").first.get_attribute("data-points") == "60"
    expect(run.locator(".ortlab-numbers")).to_contain_text("step 60 of 60 (100%) · took")


def test_a_failure_is_shown_as_it_is(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([START.format(options="steps=600, fail_at=40, title='<i>x</i>'"), WAIT])
    book.run()
    book.run_next("charts.view(run)")
    run = book.view()
    error = run.get_by_role("alert")
    expect(error).to_have_text("ValueError: <b>step 40</b>: the loss is not a number")
    expect(run.locator(".ortlab-title")).to_have_text("<i>x</i>")
    assert run.locator("b, i").count() == 0
    screenshot("failed")


@OWN_PAGE
def test_nothing_is_cut_off_on_a_narrow_page(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 700, "height": 1100})
    options = "steps=3000, interactive=False, badges=('fallback: torch', 'self-check off')"
    book = notebook([START.format(options=options)])
    book.start()
    run = book.view()
    wait_for_step(page, 40)
    expect(run.get_by_text("■ button")).to_be_visible()
    assert (
        run.evaluate(
            """run => [...run.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1
            && e.clientWidth > 0 && !e.closest('.uplot')).map(e => e.className)"""
        )
        == []
    )
    screenshot("narrow")


FAILS = [
    "%load_ext ortlab\nimport torch, ortlab",
    "class Ratio(torch.nn.Module):\n"
    "    def forward(self, inputs):\n"
    "        return inputs / (inputs.abs().max() < 20)",
    "inputs = torch.randn(4096, 4)\n"
    "inputs[7] = 50\n"
    "data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))\n"
    "model = torch.nn.Sequential(Ratio(), torch.nn.Linear(4, 16), torch.nn.Linear(16, 3))",
    "run = %ort finetune model data --loss cross_entropy --engine eager --batch-size 4",
    "print('has', run.state)",
]


def test_a_run_that_is_held_says_why_and_a_click_goes_on(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook(FAILS)
    book.start()
    run = book.view()
    expect(run.locator(".ortlab-badge")).to_have_text("held: not finite")
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    error = run.locator(".ortlab-error")
    expect(error).to_contain_text("the output of 0 (Ratio) is the first infinite value")
    expect(error).to_contain_text("no weight goes into it")
    screenshot("held")
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    screenshot("held-dark")
    run.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    screenshot("held-finished")
