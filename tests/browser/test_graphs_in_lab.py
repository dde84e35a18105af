"""Tests of the graphs in JupyterLab: a person looks, clicks, searches, folds, saves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import FrameLocator, Locator, Page, expect

from tests.browser.lab import NEEDS_ORT, OWN_PAGE, Lab, Opens, Takes
from tests.support.lab_views import BERT, drawn, graph, pane

pytestmark = [pytest.mark.browser, NEEDS_ORT]

STAGE = """
%load_ext ortlab
import onnx
from ortlab.graph.capture import Graphs, Stage
def stage(names, weights=()):
    nodes = [onnx.helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=name)
             for i, name in enumerate(names)]
    nodes += [onnx.helper.make_node("Add", ["t1", weight], [f"w{i}"], name=f"add {i}")
              for i, weight in enumerate(weights)]
    x = onnx.helper.make_tensor_value_info("t0", onnx.TensorProto.FLOAT, ["n"])
    kept = [onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [1], [1.0]) for name in weights]
    graph = onnx.helper.make_graph(nodes, "g", [x], [], initializer=kept)
    return Stage("exported", onnx.helper.make_model(graph), frozenset(names) | {""})
"""
SHOW = "%ort graph model"


def node(frame: FrameLocator, text: str) -> Locator:
    """Return a node of the drawing by its label, in which netron draws its own dot character."""
    return frame.locator(".graph-node", has_text=text.replace(".", "\u2024")).first


def row(view: Locator, name: str) -> Locator:
    """Return a row of the outline by its module's path."""
    return view.locator("tr", has=view.page.get_by_role("button", name=name, exact=True))


def test_a_click_selects_the_partner(notebook: Opens, screenshot: Takes) -> None:
    book = notebook([BERT, SHOW])
    book.run()
    view = graph(book)
    forward, gradient = pane(view, "forward"), pane(view, "backward")
    screenshot("graph-light")
    layer = "bert.encoder.layer.1"
    click(view.get_by_role("button", name=f"Fold {layer}", exact=True))
    drawn(view)
    click(node(forward, "layer.1"))
    expect(node(forward, "layer.1")).to_have_class("node graph-node select")
    expect(node(gradient, "layer.1")).to_have_class("node graph-node select")
    expect(gradient.locator(".graph-node.select")).to_have_count(1)
    expect(row(view, layer)).to_have_class("ortlab-selected")
    expect(view.locator(".ortlab-path")).to_have_text(layer)

    reveal(view, "BiasGelu")
    click(node(forward, "BiasGelu"))
    expect(view.locator(".ortlab-kind")).to_have_text("com.microsoft.BiasGelu")
    expect(gradient.locator(".graph-node.select")).to_have_count(2)  # of the input and of the bias
    details = view.locator(".ortlab-details")
    expect(details).to_contain_text("float[2, 8, 128]")
    expect(details).to_contain_text("8 KiB of results")
    screenshot("graph-selected")
    click(details.get_by_role("button", name="BiasGelu_Grad/BiasGeluGrad_dX", exact=False))
    expect(view.locator(".ortlab-kind")).to_have_text("com.microsoft.BiasGeluGrad_dX")
    expect(forward.locator(".graph-node.select")).to_have_count(1)
    expect(forward.locator(".graph-node.select")).to_contain_text("BiasGelu")


LINES = """
%load_ext ortlab
import torch, ortlab
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 8))
    def forward(self, x):
        x = self.inner(x)
        return torch.sin(x)  # <b>
model = ortlab.wrap(Net(), engine="ort")
batch = torch.randn(4, 16)
"""


def test_a_click_on_a_line_of_code_selects_its_nodes_in_both_graphs(
    notebook: Opens, screenshot: Takes
) -> None:
    book = notebook([LINES, "%ort lines model --batch batch"])
    book.run()
    view = graph(book)
    forward, gradient = pane(view, "forward"), pane(view, "backward")
    code = view.locator(".ortlab-code")
    click(code.locator("summary", has_text="self.inner(x)"))
    drawn(view)
    for shown in (forward, gradient):
        selected = shown.locator(".graph-node.select")
        expect(selected.filter(has_text="Gemm").first).to_be_visible()
        expect(selected.filter(has_text="Sin")).to_have_count(0)
    screenshot("lines")
    click(code.locator("summary", has_text="# <b>"))
    expect(forward.locator(".graph-node.select")).to_have_text(re.compile("^Sin"))
    details = view.locator(".ortlab-details")
    expect(details).to_contain_text("return torch.sin(x)  # <b>")
    click(details.get_by_role("button", name="Cos"))
    click(details.get_by_text("return torch.sin(x)"))
    expect(view.locator(".ortlab-kind")).to_have_text("line")
    expect(book.page.locator("[data-ortlab-still]").filter(has_text="self.inner")).to_be_hidden()
    evaluated = 'model = ortlab.wrap(Net(), engine="ort").eval()\n%ort lines model --batch batch'
    book.run_next(evaluated)
    expect(book.page.locator(".ortlab-graph")).to_have_count(2)
    view = graph(book, 1)
    click(view.locator(".ortlab-code summary", has_text="# <b>"))
    selected = pane(view, "forward").locator(".graph-node.select")
    expect(selected).to_have_text(re.compile("^Sin"))


@OWN_PAGE
def test_a_closed_view_leaves_no_graph_in_the_page(notebook: Opens, page: Page) -> None:
    """A closed view releases its graph, although JupyterLab keeps the models of closed widgets."""
    book = notebook([BERT, SHOW])
    book.run()
    watched = page.context.new_cdp_session(page)
    watched.send("Performance.enable")

    def buffers() -> float:
        graph(book)
        watched.send("HeapProfiler.collectGarbage")
        held = watched.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in held if each["name"] == "ArrayBufferContents")

    counted = []
    for _ in range(9):
        counted.append(buffers())
        book.run_cell(1)
    assert counted[-1] - counted[2] < 3, counted


def click(what: Locator) -> None:
    """Click once the page has settled: a frame that was there before would still take the click."""
    what.scroll_into_view_if_needed()
    for _ in range(2):
        what.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
        )
    what.click()


def reveal(view: Locator, text: str) -> None:
    """Unfold the module that contains the first hit of a search."""
    view.get_by_role("searchbox").fill(text)
    view.get_by_role("searchbox").press("Enter")
    drawn(view)


def fill(shown: Locator) -> str:
    color: str = shown.locator(".node-item path").first.evaluate("e => getComputedStyle(e).fill")
    return color


def test_colours(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([BERT, SHOW])
    book.run()
    view = graph(book)
    choose = view.get_by_label("color by")
    legend = view.get_by_label("legend")
    offered = choose.locator("option")
    expect(offered).to_have_text(["operator", "phase", "bytes of results", "fusion"])
    expect(legend).to_contain_text("normalization")
    reveal(view, "BiasGelu")
    choose.select_option("phase")
    forward = node(pane(view, "forward"), "BiasGelu")
    gradient = node(pane(view, "backward"), "DropoutGrad")
    expect(legend).to_have_text("forwardbackward")
    blue, orange = fill(forward), fill(gradient)
    assert blue != orange
    assert fill(node(pane(view, "forward"), "embeddings")) == blue
    choose.select_option("fusion")
    expect(legend).to_contain_text("fused by ORT from several nodes")
    assert fill(forward) != fill(gradient)
    assert fill(forward) != blue
    # A measure without data is not offered; once it is profiled, the next view has it.
    book.run_next("%ort profile model --steps 1")
    book.run_next(SHOW)
    expect(page.locator(".ortlab-graph")).to_have_count(2)
    later = graph(book, 1)
    expect(later.get_by_label("color by").locator("option")).to_contain_text(["time"])
    later.get_by_label("color by").select_option("time")
    expect(later.get_by_label("legend")).to_contain_text("µs")
    expect(later.locator("thead")).to_contain_text("backward time")
    later.scroll_into_view_if_needed()
    screenshot("graph-time")


def test_search_and_folding(notebook: Opens, page: Page, screenshot: Takes) -> None:
    count = "print(sum('com.microsoft.BiasGelu' in n.op for n in nodes))"
    book = notebook([BERT, SHOW, f"nodes = ortlab.graphs(model).gradient.nodes\n{count}"])
    book.run()
    view = graph(book)
    forward = pane(view, "forward")
    forward_pane = view.locator(".ortlab-pane[data-phase=forward]")
    click(view.get_by_role("button", name="Draw only the model's outermost modules"))
    drawn(view)
    folded = int(forward_pane.get_attribute("data-drawn") or 0)
    assert folded < 12
    expect(node(forward, "bert")).to_be_visible()
    search = view.get_by_role("searchbox")
    search.fill("COM.microsoft.BiasGelu")  # matches only operator names
    hits = view.locator(".ortlab-hits li")
    found = book.outputs()[2][0]["text"].strip()
    expect(view.locator(".ortlab-details")).to_contain_text(f"{found} found")
    expect(hits).to_have_count(int(found))
    screenshot("graph-search")
    search.fill("intermediate_act")
    expect(hits.first).to_have_text(
        "bert.\u200bencoder.\u200blayer.\u200b0.\u200bintermediate.\u200bintermediate_act_fn module"
    )
    search.fill("BiasGelu")
    expect(hits.first).to_contain_text("com.microsoft.BiasGelu")
    click(hits.first.get_by_role("button"))
    expect(forward.locator(".graph-node.select")).to_contain_text("BiasGelu")
    expect(row(view, "Fold bert.encoder.layer.0.intermediate")).to_be_visible()
    # The outline folds the graph, and the graph folds the outline.
    click(view.get_by_role("button", name="Fold bert.encoder.layer.0", exact=True))
    expect(node(forward, "layer.0")).to_be_visible()
    expect(forward.locator(".graph-node", has_text="BiasGelu")).to_have_count(0)
    node(forward, "layer.0").dblclick()
    expect(view.get_by_role("button", name="Fold bert.encoder.layer.0", exact=True)).to_be_visible()
    click(view.get_by_role("button", name="Draw every node"))
    drawn(view)
    total = "print(sum(n.phase == 'forward' for n in nodes))"
    book.run_next(total)
    page.wait_for_function("() => window.panel.content.widgets.at(-1).model.outputs.length > 0")
    assert forward_pane.get_attribute("data-drawn") == book.outputs()[-1][0]["text"].strip()
    view.get_by_label("stage").select_option("exported")
    expect(view).to_have_attribute("data-outlined", "exported")
    drawn(view)
    expect(view.locator(".ortlab-pane")).to_have_count(1)


@OWN_PAGE
def test_nothing_leaves_the_page(notebook: Opens, page: Page, lab: Lab) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    sent: list[int] = []

    def received(frame: str | bytes) -> None:
        raw = frame.encode() if isinstance(frame, str) else frame
        if b'"is": "netron"' in raw:
            sent.append(len(raw))

    page.on("websocket", lambda socket: socket.on("framereceived", received))
    book = notebook([BERT, SHOW, SHOW])
    book.run()
    graph(book, 0)
    graph(book, 1)
    own = lab.address("").split("/lab/")[0]
    assert [url for url in asked if not url.startswith((own, "blob:", "data:", "about:"))] == []
    assert len(sent) == 1, "netron travels once for a page"
    assert sent[0] < 150_000
    for frame in page.frames[1:]:
        assert frame.evaluate("() => window.origin") == "null"
        assert frame.evaluate("() => fetch('/').then(() => 'open', () => 'closed')") == "closed"
        assert frame.evaluate("() => document.body.innerText").count("cookies") == 0


@OWN_PAGE  # in which no view has netron
@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("netron.MODULES += ('gone.js',)", "netron 9.3.3 has no gone.js"),
        (
            "import gzip, json\nwhole = json.loads(gzip.decompress(netron.bundle()))\n"
            "whole['modules']['view.js'] = 'export const View = 1;'\n"
            "netron.bundle = lambda: gzip.compress(json.dumps(whole).encode())",
            "View is not a constructor",
        ),
    ],
    ids=["missing", "changed"],
)
def test_without_netron_there_is_the_outline(
    notebook: Opens, screenshot: Takes, breaks: str, says: str
) -> None:
    show = "Graphs('Net', {'exported': stage(['/_original_module/relu/Relu'])})"
    book = notebook([STAGE, f"from ortlab.notebook.views import netron\n{breaks}", show])
    book.run()
    view = book.page.locator(".ortlab-graph")
    expect(view.get_by_role("status").first).to_contain_text("The graph is not drawn: ")
    expect(view.get_by_role("status").first).to_contain_text(says)
    expect(view.locator("iframe")).to_have_count(0)
    click(view.get_by_role("button", name="Net", exact=True))
    expect(view.locator(".ortlab-kind")).to_have_text("module")
    screenshot(f"graph-without-netron-{len(says)}")


def test_odd_graphs(notebook: Opens, page: Page) -> None:
    named = "['</script><b>x</b>', '', '<img src=x>'], ['<img src=y onerror=alert(1)>']"
    odd = f"Graphs('<b>Net</b>', {{'exported': stage({named})}})"
    flat = "Graphs('Flat', {'exported': stage([''] * 50_000)})"
    book = notebook([STAGE, odd, flat])
    book.run()
    page.wait_for_function("() => document.querySelectorAll('.ortlab-graph').length === 2")
    first, second = page.locator(".ortlab-graph").first, page.locator(".ortlab-graph").last
    relus = pane(first, "forward").locator(".graph-node")
    expect(relus).to_have_count(4)
    click(relus.last)
    expect(first).to_contain_text("<img src=y onerror=alert(1)>")
    click(relus.first)
    expect(first.locator(".ortlab-path")).to_have_text("</script><b>x</b>")
    click(relus.nth(1))
    expect(first.locator(".ortlab-path")).to_have_text("unnamed")
    assert first.locator("b, img").count() == 0
    assert pane(first, "forward").locator("b, img").count() == 0
    expect(second.locator(".ortlab-pane")).to_contain_text("50,000 nodes as 1")
    second.scroll_into_view_if_needed()  # a graph is drawn once it is in sight, and moves the rows
    expect(second.locator(".ortlab-pane")).to_have_attribute("data-drawn", "1")
    click(second.get_by_role("button", name="Unfold Flat", exact=True))
    expect(second.locator(".ortlab-pane")).to_contain_text("50,000 nodes are too many to draw")
    expect(second.locator("tbody tr")).not_to_have_count(50_000)
    expect(second.locator("tbody")).to_contain_text("Relu")


def test_a_saved_page_has_the_picture(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([BERT, SHOW])
    book.run()
    graph(book)
    picture = page.locator("[data-ortlab-still] img")
    expect(picture).to_be_hidden()
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    dark = pane(page.locator(".ortlab-graph"), "forward").locator("style").nth(-1)
    assert dark.evaluate("e => e.disabled") is False
    screenshot("graph-dark")
    book.save()
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    book.reload()
    expect(picture).to_be_visible()
    assert picture.evaluate("e => e.naturalWidth") > 300
    expect(page.locator(".ortlab-table")).to_contain_text("parameters")
    expect(page.get_by_text("Loading widget")).to_be_hidden()
    screenshot("graph-saved-dark")


@OWN_PAGE
def test_nothing_is_cut_off_on_a_narrow_page(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    page.set_viewport_size({"width": 760, "height": 1200})
    book = notebook([BERT, SHOW])
    book.run()
    view = graph(book)
    click(node(pane(view, "forward"), "embeddings"))
    screenshot("graph-narrow")
    wide = """view => [...view.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1
        && e.clientWidth > 0 && !e.closest('.ortlab-outline') && !e.closest('.ortlab-pane-head')
    ).map(e => `${e.tagName} ${e.className}`)"""
    assert view.evaluate(wide) == []


@OWN_PAGE  # in which no view has netron
def test_a_busy_kernel_is_waited_for(notebook: Opens, page: Page, tmp_path: Path) -> None:
    free = tmp_path / "free"
    show = "Graphs('Net', {'exported': stage(['a', 'b'])})"
    wait = f"import time, pathlib\nwhile not pathlib.Path({str(free)!r}).exists(): time.sleep(0.05)"
    book = notebook([STAGE, f"display({show})\n{wait}"])
    book.start()
    view = page.locator(".ortlab-graph")
    expect(view.locator("tbody")).to_contain_text("Net")
    expect(view.get_by_role("status").first).to_contain_text("drawn when the kernel is free")
    free.touch()
    assert graph(book).locator(".ortlab-pane").count() == 1
    expect(view.get_by_role("status").first).to_be_hidden()
