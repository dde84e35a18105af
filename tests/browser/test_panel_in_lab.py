"""Tests of the panel in JupyterLab: changes by mouse and keyboard; unsupported choices say why."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import BOTH, Opens, Takes
from tests.support.lab_views import FINETUNE, MODEL, opened

pytestmark = [pytest.mark.browser, BOTH]

VIOLET = """canvas => {
    const { width, height } = canvas;
    const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4)
        if ([0x8c, 0x62, 0xd9, 0xff].every((value, at) => data[i + at] === value)) count++;
    return count;
}"""
CUT_OFF = """root => [...root.querySelectorAll('*')].filter(e => {
        if (!e.clientWidth || e.closest('.uplot') || ['OPTION', 'SELECT'].includes(e.tagName))
            return false;
        const { left, right } = e.getBoundingClientRect(), all = root.getBoundingClientRect();
        return e.scrollWidth > e.clientWidth + 1 || left < all.left - 1 || right > all.right + 1;
    }).map(e => `${e.tagName} ${e.className}`)"""
TRACE = """() => {
    const scroller = document.querySelector('.jp-WindowedPanel-outer');
    window.ortlabTrace = [];
    const step = () => {
        const view = document.querySelector('.ortlab-run, .ortlab-panel-view');
        const cell = window.panel.content.widgets[3].node;
        const height = view?.closest('.jp-OutputArea').offsetHeight ?? 0;
        window.ortlabTrace.push([scroller.scrollTop, height, cell.getBoundingClientRect().top]);
        window.ortlabTracing = requestAnimationFrame(step);
    };
    step();
}"""
"""Record in each frame how far the page is scrolled, the height of the output, the cell below."""
TRACED = "() => { cancelAnimationFrame(window.ortlabTracing); return window.ortlabTrace; }"
WIDTHS = (1280, 800)
"""Widths of a page, in pixels, at which the panel must be legible."""
COUNTS = "() => window.panel.content.widgets.map(cell => cell.model.executionCount)"


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
    run.get_by_text("more settings").click()
    run.get_by_label("search settings").fill("max grad")
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
    page.keyboard.press("Tab")  # the loss is fixed in a run
    expect(run.get_by_label("num train epochs", exact=True)).to_be_focused()
    precision.focus()
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
    expect(run.get_by_label("learning rate", exact=True)).to_have_attribute("aria-invalid", "true")
    page.keyboard.press("Enter")
    expect(result).to_have_text("learning_rate=-3.0 must be above 0")
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


def test_the_front_of_a_models_panel(notebook: Opens, page: Page, screenshot: Takes) -> None:
    page.set_viewport_size({"width": 1280, "height": 1300})
    book = notebook([MODEL, "def focal(scores, target): return scores.sum()", "%ort panel model"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    expect(view.get_by_role("button", name="Start")).to_be_visible()
    labels = view.locator(".ortlab-panel-label:visible")
    front = [
        *("model", "training data", "evaluation data", "loss", "num train epochs", "max steps"),
        *("batch size", "learning rate", "lr scheduler type", "optimizer", "engine", "precision"),
        *("recompute", "activation budget", "workers", "zero stage"),
    ]
    assert labels.all_inner_texts() == front
    options = view.get_by_label("loss", exact=True).locator("option").all_inner_texts()
    assert options[0] == "the model's own"
    assert {"cross_entropy", "focal"} <= set(options)
    for name, blank in (("training data", "choose…"), ("evaluation data", "none")):
        data = view.get_by_label(name, exact=True)
        assert data.locator("option").all_inner_texts() == [blank, "train", "valid"]
    tf32 = view.get_by_label("precision", exact=True).locator("option", has_text="tf32")
    assert tf32.is_disabled()
    reason = "precision='tf32' is for CUDA devices"
    assert reason in (tf32.get_attribute("title") or "")
    expect(view.get_by_text(reason)).to_be_visible()
    zero = view.get_by_label("zero stage", exact=True)
    expect(zero).to_be_disabled()
    notes = page.locator(f"#{zero.get_attribute('aria-describedby')}")
    expect(notes).to_contain_text("needs at least 2 workers (workers=1)")
    view.get_by_label("engine", exact=True).select_option("eager")
    for name in ("recompute", "activation budget"):
        expect(view.get_by_label(name, exact=True)).to_be_disabled()
    expect(view.get_by_text("recompute='layers' is for engines 'ort' and")).to_be_visible()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1300})
        assert labels.all_inner_texts() == front
        assert view.evaluate(CUT_OFF) == []
        screenshot(f"panel-front-{width}-light")
    book.theme("JupyterLab Dark")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1300})
        screenshot(f"panel-front-{width}-dark")
    # A variable of a later cell is offered once the cell has run.
    book.run_next("more = train")
    expect(view.get_by_label("training data", exact=True).locator("option")).to_have_count(4)


def test_more_settings_by_topic_and_by_search(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 1280, "height": 1300})
    book = notebook([MODEL, "%ort panel model train"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    view.get_by_text("more settings").click()
    seed = view.get_by_label("seed", exact=True)
    expect(seed).not_to_be_visible()
    view.get_by_text("data", exact=True).click()
    expect(seed).to_be_visible()
    for topic in view.locator(".ortlab-panel-topic").all():
        if topic.get_attribute("open") is None:
            topic.locator("> summary").click()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1300})
        assert view.evaluate(CUT_OFF) == []
        screenshot(f"panel-more-{width}-light")
    labels = view.locator(".ortlab-panel-others .ortlab-panel-label:visible")
    search = view.get_by_label("search settings")
    search.click()
    page.keyboard.type("clip")  # a word of the help
    expect(labels).to_have_text(["max grad norm"])
    search.fill("learning rate")
    expect(view.get_by_text("above: learning rate")).to_be_visible()
    search.fill("nothing like it")
    expect(view.get_by_text("0 found")).to_be_visible()
    search.fill("checkpoint_minutes")  # a name
    expect(labels).to_have_text(["checkpoint minutes"])
    book.theme("JupyterLab Dark")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1300})
        expect(search).to_be_in_viewport()
        screenshot(f"panel-search-{width}-dark")
    search.press("Enter")
    expect(view.get_by_label("checkpoint minutes", exact=True)).to_be_focused()
    search.press("Escape")
    expect(search).to_have_value("")
    expect(seed).to_be_visible()
    expect(view.get_by_role("button", name="Start")).to_be_visible()


def test_enter_commits_a_field_and_nothing_else(notebook: Opens, page: Page) -> None:
    book = notebook([MODEL, "%ort panel model train"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    before = page.evaluate(COUNTS)
    epochs = view.get_by_label("num train epochs", exact=True)
    epochs.dblclick()
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    expect(view.get_by_text("num_train_epochs=3 (was 1)")).to_be_visible()
    expect(epochs).to_be_focused()
    expect(view.get_by_text("%ort finetune model train --num-train-epochs 3")).to_be_visible()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("0")
    page.keyboard.press("Enter")
    expect(view.get_by_text("num_train_epochs=0 must be at least 1")).to_be_visible()
    expect(epochs).to_have_attribute("aria-invalid", "true")
    for key in ("Enter", "Shift+Enter", "Control+Enter"):
        page.keyboard.press(key)
    expect(epochs).to_have_value("0")
    book.run_next("print('ready')")  # the kernel has handled what came before
    expect(page.get_by_text("ready", exact=True)).to_be_visible()
    assert page.evaluate(COUNTS)[:-1] == before, "no cell ran, none was added"
    expect(page.locator(".ortlab-run")).to_have_count(0)


def test_a_field_that_is_edited_when_its_kernel_ends(notebook: Opens, page: Page) -> None:
    """It loses the focus then, and tells nobody; the page would report an error otherwise."""
    book = notebook([MODEL, "%ort panel model train"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    view.get_by_label("batch size", exact=True).fill("9")
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    expect(view).to_have_attribute("inert", "")
    expect(view.get_by_label("batch size", exact=True)).not_to_be_focused()


def test_enter_while_a_change_is_in_flight_waits_for_it(notebook: Opens, page: Page) -> None:
    book = notebook([MODEL, FINETUNE, "result = await run"])
    book.start()
    run = book.view()
    opened(run)
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    result, pending = run.locator(".ortlab-panel-result"), run.locator(".ortlab-panel-pending")
    rate = run.get_by_label("learning rate", exact=True)
    rate.click()
    page.keyboard.press("Enter")
    expect(result).to_have_text("no setting is edited")
    for value in ("0.5", "0.25"):
        page.keyboard.press("ControlOrMeta+A")
        page.keyboard.type(value)
        page.keyboard.press("Enter")
        expect(pending).to_contain_text(f"learning_rate={value}")
        expect(result).to_contain_text("will be applied")
    run.get_by_role("button", name="Resume").click()
    expect(rate).to_have_value("0.25")
    expect(result).to_contain_text("at no cost: learning_rate=0.25 (was 0.5)")
    expect(run.locator(".ortlab-change")).to_have_count(2)
    run.get_by_role("button", name="Stop").click()


def test_a_failed_start_keeps_the_panel_and_marks_the_field(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 1280, "height": 700})
    data = "import torch\npairs = [(torch.ones(2, 3), torch.ones(2))]\nempty = []"
    book = notebook([MODEL, data, "%ort panel model"])
    book.run()
    view = page.locator(".ortlab-panel-view")
    result, start = view.locator(".ortlab-panel-result"), view.get_by_role("button", name="Start")
    train, loss = (view.get_by_label(name, exact=True) for name in ("training data", "loss"))
    rate = view.get_by_label("learning rate", exact=True)

    def marked(field: Locator, reason: str) -> None:
        expect(result).to_contain_text(f"not started: {reason}")
        expect(field).to_be_focused()
        expect(field).to_be_in_viewport()
        expect(field).to_have_attribute("aria-invalid", "true")
        beside = page.locator(f"#{field.get_attribute('aria-describedby')}")
        expect(beside).to_contain_text(reason)
        assert view.locator("[aria-invalid=true]").count() == 1
        expect(view.get_by_label("batch size", exact=True)).to_have_value("8")
        expect(rate).to_have_value("0.01")

    rate.fill("0.01")
    view.get_by_label("engine", exact=True).select_option("eager")
    batch = view.get_by_label("batch size", exact=True)
    batch.fill("8")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 700})
        train.select_option(label="choose…")
        start.click()
        marked(train, "choose the training data")
        train.select_option("empty")
        expect(train).to_have_attribute("aria-invalid", "false")
        start.click()
        marked(train, "the data is empty: the list has no elements")
        # Only the run's first step finds out that the model returns no loss.
        train.select_option("train")
        start.click()
        marked(loss, "the batch (float32[8, 64], int64[8]) does not fit forward")
        screenshot(f"panel-failed-{width}-light")
    book.theme("JupyterLab Dark")
    for width in reversed(WIDTHS):
        page.set_viewport_size({"width": width, "height": 700})
        screenshot(f"panel-failed-{width}-dark")
    # An error that is about no field is beside the button.
    loss.select_option("cross_entropy")
    train.select_option("pairs")
    expect(batch).to_be_disabled()
    start.click()
    expect(result).to_contain_text("mat1 and mat2 shapes cannot be multiplied (2x3 and 64x500)")
    expect(rate).to_have_value("0.01")
    train.select_option("train")
    view.get_by_label("num train epochs", exact=True).fill("100000")
    start.click()
    run = page.locator(".ortlab-run")
    expect(run.locator(".ortlab-state")).to_have_text("running")
    opened(run)
    expect(run.get_by_label("batch size", exact=True)).to_have_value("8")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()


def test_a_started_run_comes_into_sight_and_the_page_stays(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 1280, "height": 600})
    text = "from IPython.display import HTML\nHTML('<p>text' * 40)"
    book = notebook([MODEL, text, "%ort panel model train", text])
    book.run()
    view = page.locator(".ortlab-panel-view")
    view.get_by_label("loss", exact=True).select_option("cross_entropy")
    view.get_by_label("engine", exact=True).select_option("eager")
    view.get_by_label("num train epochs", exact=True).fill("100000")
    start = view.get_by_role("button", name="Start")
    start.scroll_into_view_if_needed()
    expect(view.locator(".ortlab-panel-title")).not_to_be_in_viewport()
    page.evaluate(TRACE)
    start.click()
    run = page.locator(".ortlab-run")
    head = run.locator(".ortlab-head")
    expect(head).to_be_in_viewport(ratio=1)
    book.view()
    page.wait_for_function(
        "() => Number(document.querySelector('.ortlab-chart').dataset.points) > 5"
    )
    trace = page.evaluate(TRACED)
    screenshot("panel-started")
    scrolls = {round(scrolled) for scrolled, _, _ in trace}
    assert len(scrolls) == 2, "it scrolls once, to the run's view"
    tallest = trace[0][1]
    assert min(height for _, height, _ in trace) >= tallest - 1, "the output never shrinks"
    expect(head).to_be_in_viewport(ratio=1)
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    expect(page.locator(".jp-OutputArea:has(img)")).to_have_attribute("style", "")


def test_a_models_panel_starts_a_run(notebook: Opens, page: Page) -> None:
    book = notebook([MODEL, "%ort panel"])  # nothing has run yet: the panel of the model
    book.run()
    view = page.locator(".ortlab-panel-view")
    view.get_by_label("training data", exact=True).select_option("train")
    view.get_by_label("evaluation data", exact=True).select_option("valid")
    view.get_by_label("engine", exact=True).select_option("eager")
    view.get_by_label("loss", exact=True).select_option("cross_entropy")
    view.get_by_label("num train epochs", exact=True).fill("100000")
    line = (
        "%ort finetune model train --eval-dataset valid --engine eager --num-train-epochs 100000 "
        "--loss cross_entropy"
    )
    expect(view.get_by_text(line)).to_be_visible()
    view.get_by_role("button", name="Start").press("Enter")
    # The charts replace the panel in the same cell.
    run = page.locator(".jp-OutputArea .ortlab-run")
    expect(run.locator(".ortlab-state")).to_have_text("running")
    expect(page.locator(".ortlab-panel-view")).to_have_count(0)
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    assert sorted(book.outputs()[1][0]["data"]) == ["image/png", "text/plain"]
