"""Tests of charts, panel and graph view in Notebook 7, as in JupyterLab."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import IN_NOTEBOOK, NEEDS_ORT, Notebook, Opens, Takes
from tests.browser.test_chart_tools_in_lab import VERMILLION, chart, drag, pixels, plot, point
from tests.support.lab_views import BERT, FINETUNE, MODEL, graph, opened, pane

pytestmark = [pytest.mark.browser, NEEDS_ORT, IN_NOTEBOOK]

BLACK = "rgb(0, 0, 0)"


@pytest.fixture
def book(notebook: Opens) -> Notebook:
    """Open a notebook that trains in one cell and shows graphs in the next."""
    return notebook([MODEL, FINETUNE, "result = await run", BERT, "%ort graph model"])


def test_charts_panel_and_graphs(book: Notebook, page: Page, screenshot: Takes) -> None:
    book.start()
    run = book.view()
    opened(run)
    grown = "n => Number(document.querySelector('.ortlab-chart').dataset.points) > n"
    page.wait_for_function(grown, arg=10)
    run.get_by_text("more settings").click()
    for topic in run.locator(".ortlab-panel-topic").all():
        topic.locator("> summary").click()
    expect(book.cell(1)).to_have_class(re.compile("jp-mod-outputsScrolled"))  # Notebook 7 does that
    boxed = "run => run.closest('.jp-OutputArea').clientHeight < run.clientHeight"
    assert not run.evaluate(boxed), "the view is in a box that scrolls"
    run.get_by_text("more settings").click()
    drag(run, "loss", 0.3, 0.7)
    reset = run.get_by_role("button", name="Show the whole run")
    expect(reset).to_have_attribute("aria-disabled", "false")
    plot(run, "memory").dblclick()
    expect(reset).to_have_attribute("aria-disabled", "true")
    run.get_by_role("slider", name="Smoothing").fill("0.6")
    expect(run.locator(".ortlab-chart-loss .ortlab-chart-note")).to_have_text("smoothed 0.60")
    run.get_by_label("learning rate", exact=True).fill("0.001")
    run.get_by_role("button", name="Apply").click()
    expect(run.locator(".ortlab-panel-result")).to_contain_text("applied after step")
    expect(run.locator(".ortlab-change")).to_contain_text("learning_rate=0.001 (was 5e-05)")
    screenshot("run-light")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    expect(page.locator(".ortlab-graph")).to_be_visible()
    edge = pane(graph(book), "forward").locator(".edge-path").first
    expect(edge).to_have_css("stroke", BLACK)
    screenshot("graph-light")
    book.theme("JupyterLab Dark")
    expect(edge).not_to_have_css("stroke", BLACK)
    screenshot("graph-dark")


def test_a_panel_starts_a_run_or_stays(book: Notebook, page: Page, screenshot: Takes) -> None:
    book.run_cell(0)
    book.run_next("%ort panel model train")
    view = page.locator(".ortlab-panel-view")
    epochs = view.get_by_label("num train epochs", exact=True)
    epochs.dblclick()
    page.keyboard.type("100000")
    page.keyboard.press("Enter")
    expect(view.get_by_text("num_train_epochs=100000 (was 1)")).to_be_visible()
    view.get_by_label("engine", exact=True).select_option("eager")
    view.get_by_role("button", name="Start").click()
    loss = view.get_by_label("loss", exact=True)
    expect(loss).to_have_attribute("aria-invalid", "true")
    expect(loss).to_be_focused()
    expect(epochs).to_have_value("100000")
    screenshot("panel")
    loss.select_option("cross_entropy")
    view.get_by_role("button", name="Start").click()
    run = page.locator(".ortlab-run")
    expect(run.locator(".ortlab-head")).to_be_in_viewport(ratio=1)
    expect(run.locator(".ortlab-state")).to_have_text("running")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()


def test_a_panels_run_has_the_charts_tools(book: Notebook, page: Page, screenshot: Takes) -> None:
    book.run_cell(0)
    book.run_next("%ort panel model train")
    panel = page.locator(".ortlab-panel-view")
    panel.get_by_text("More settings").click()
    panel.get_by_label("search settings").fill("eval steps")
    every = panel.get_by_label("eval steps", exact=True)
    every.fill("20")
    panel.get_by_label("search settings").fill("")
    panel.get_by_label("num train epochs", exact=True).fill("100000")
    panel.get_by_label("evaluation data", exact=True).select_option("valid")
    panel.get_by_label("engine", exact=True).select_option("eager")
    panel.get_by_label("loss", exact=True).select_option("cross_entropy")
    panel.get_by_role("button", name="Start").click()
    run = page.locator(".ortlab-run")
    expect(run.locator(".ortlab-head")).to_be_in_viewport(ratio=1)
    grown = "n => Number(document.querySelector('.ortlab-chart')?.dataset.points) > n"
    page.wait_for_function(grown, arg=50)
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    for sign in ("▲ evaluation", "❚❚ pause"):
        expect(run.locator(".ortlab-tools-key")).to_contain_text(sign)
    values = chart(run, "loss").locator(".ortlab-value")
    point(run, "memory", 0.5)
    expect(values.nth(1)).to_have_text(re.compile(r"\(step [\d,]+\)$"))
    evaluation = chart(run, "loss").get_by_role("button", name="Show or hide evaluation")
    assert pixels(run, "loss", VERMILLION) > 50
    evaluation.click()
    expect(evaluation).to_have_attribute("aria-pressed", "false")
    assert pixels(run, "loss", VERMILLION) == 0
    run.get_by_role("checkbox", name="Log").check()
    expect(chart(run, "loss").locator(".ortlab-chart-note")).to_have_text("log")
    run.get_by_role("combobox", name="X axis").select_option("samples")
    assert "samples" in point(run, "lr", 0.5)
    screenshot("tools-light")
    book.theme("JupyterLab Dark")
    screenshot("tools-dark")
    run.get_by_role("button", name="Stop").click()
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    screenshot("picture-dark")
