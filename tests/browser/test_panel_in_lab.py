"""Tests of the panel in JupyterLab: changes by mouse and keyboard; unsupported choices say why."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Opens, Takes
from tests.support.lab_views import FINETUNE, MODEL, opened

pytestmark = pytest.mark.browser

VIOLET = """canvas => {
    const { width, height } = canvas;
    const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4)
        if ([0x8c, 0x62, 0xd9, 0xff].every((value, at) => data[i + at] === value)) count++;
    return count;
}"""
CUT_OFF = """root => [...root.querySelectorAll('*')]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0
        && !e.closest('.uplot') && !['INPUT', 'SELECT', 'OPTION'].includes(e.tagName))
    .map(e => e.className)"""


def test_a_run_is_changed_while_it_is_awaited(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([MODEL, FINETUNE, "result = await run"])
    book.start()
    run = book.view()
    opened(run)
    result = run.locator(".ortlab-panel-result")
    pending = run.locator(".ortlab-panel-pending")
    # Two changes in quick succession: the answer to the first must not discard the second.
    run.get_by_label("precision", exact=True).select_option("bf16")
    run.get_by_label("learning rate", exact=True).fill("0.001")
    run.get_by_label("max grad norm", exact=True).fill("2")
    expect(pending).to_contain_text(
        "precision=bf16 (was fp32), learning_rate=0.001 (was 5e-05), max_grad_norm=2"
    )
    expect(pending).to_contain_text("rebuild: ")
    expect(pending).to_contain_text("memory: no prediction: engine")
    screenshot("panel-edited-light")
    run.get_by_role("button", name="Apply").click()
    expect(result).to_contain_text("applied after step")
    expect(run.get_by_label("learning rate", exact=True)).to_have_value("0.001")
    marks = run.locator(".ortlab-change")
    expect(marks).to_have_count(1)
    expect(marks).to_contain_text("precision=bf16 (was fp32), learning_rate=0.001 (was 5e-05)")
    expect(marks).to_contain_text("cost ")
    expect(marks).to_contain_text("samples/s ")
    canvases = run.locator("canvas")
    for index in range(4):
        assert canvases.nth(index).evaluate(VIOLET) > 100, "a line and its number in every chart"
    screenshot("panel-applied-light")
    book.theme("JupyterLab Dark")
    run.get_by_role("button", name="Undo").click()
    expect(marks).to_have_count(2)
    expect(run.get_by_label("precision", exact=True)).to_have_value("fp32")
    expect(result).to_contain_text("precision=fp32 (was bf16)")
    screenshot("panel-undone-dark")
    run.get_by_role("button", name="Checkpoint").click()
    expect(result).to_contain_text("checkpoint saved: ")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    assert "change 2, step" in book.outputs()[1][0]["data"]["text/plain"]


def test_all_of_it_by_keyboard(notebook: Opens, page: Page) -> None:
    book = notebook([MODEL, FINETUNE, "result = await run"])
    book.start()
    run = book.view()
    run.locator(".ortlab-settings-fold").focus()
    page.keyboard.press("Enter")
    precision = run.get_by_label("precision", exact=True)
    result = run.locator(".ortlab-panel-result")
    expect(precision).to_be_visible()
    page.keyboard.press("Tab")
    expect(run.get_by_label("engine", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    expect(precision).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(run.locator(".ortlab-panel-pending")).to_contain_text("precision=")
    chosen = precision.input_value()
    assert chosen != "fp32"
    page.keyboard.press("Escape")
    expect(precision).to_have_value("fp32")
    expect(run.locator(".ortlab-panel-pending")).not_to_contain_text("precision=")
    run.get_by_label("learning rate", exact=True).focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("-3")
    expect(run.get_by_text("learning_rate=-3.0 must be above 0")).to_be_visible()
    expect(run.get_by_label("learning rate", exact=True)).to_have_attribute("aria-invalid", "")
    page.keyboard.press("Enter")
    expect(result).not_to_contain_text("applied")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("0.25")
    page.keyboard.press("Enter")
    expect(result).to_contain_text("at no cost: learning_rate=0.25 (was 5e-05)")
    expect(run.get_by_label("learning rate", exact=True)).to_be_focused()
    # No shortcut of JupyterLab consumed a key: the number of cells is unchanged.
    assert page.evaluate("() => window.panel.content.widgets.length") == 3


def test_a_slider_sets_the_activation_budget(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([MODEL, "model = ortlab.wrap(model, engine='ort')\n%ort panel model"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    slider = view.get_by_label("activation budget slider", exact=True)
    text, pending = (
        view.get_by_label("activation budget", exact=True),
        view.locator(".ortlab-panel-pending"),
    )
    slider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    expect(text).to_have_value("0.5")
    expect(pending).to_contain_text("activation_budget=0.5 (was 1)")
    screenshot("panel-slider")
    text.fill("0.3")
    expect(slider).to_have_value("0.3")
    expect(pending).to_contain_text("activation_budget=0.3")
    text.press("Escape")
    expect(slider).to_have_value("1")
    slider.press("ArrowLeft")
    expect(text).to_have_value("0.95")
    slider.press("ArrowRight")
    expect(pending).not_to_contain_text("activation_budget")
    view.get_by_label("engine", exact=True).select_option("eager")
    expect(slider).to_be_disabled()


def test_a_models_panel_says_why_not_and_starts_a_run(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 700, "height": 1300})
    book = notebook([MODEL, "%ort panel model train"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    expect(view.get_by_role("button", name="Start")).to_be_visible()
    tf32 = view.get_by_label("precision", exact=True).locator("option", has_text="tf32")
    assert tf32.is_disabled()
    reason = "precision='tf32' is for CUDA devices"
    assert reason in (tf32.get_attribute("title") or "")
    expect(view.get_by_text(reason)).to_be_visible()
    zero = view.get_by_label("zero stage", exact=True)
    expect(zero).to_be_disabled()
    notes = page.locator(f"#{zero.get_attribute('aria-describedby')}")
    expect(notes).to_contain_text("needs at least 2 workers (workers=1)")
    assert view.evaluate(CUT_OFF) == []
    screenshot("panel-model-narrow")
    book.theme("JupyterLab Dark")
    view.get_by_text("more settings").click()
    view.get_by_label("engine", exact=True).select_option("eager")
    view.get_by_label("loss", exact=True).fill("cross_entropy")
    view.get_by_label("num train epochs", exact=True).fill("100000")
    line = "%ort finetune model train --engine eager --num-train-epochs 100000 --loss cross_entropy"
    expect(view.get_by_text(line)).to_be_visible()
    screenshot("panel-model-dark")
    view.get_by_label("num train epochs", exact=True).press("Enter")
    # The charts replace the panel in the same cell.
    run = page.locator(".jp-OutputArea .ortlab-run")
    expect(run.locator(".ortlab-state")).to_have_text("running")
    expect(page.locator(".ortlab-panel-view")).to_have_count(0)
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    assert sorted(book.outputs()[1][0]["data"]) == ["image/png", "text/plain"]
