"""Tests of the graph view without a browser: its messages, its use of netron, the saved page."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
import shutil
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.graph.capture import Graphs, Overlay, Stage
from ortlab.notebook.static_views import sketch
from ortlab.notebook.views import graph_view, netron, recompute_view
from tests.support.called_models import bert, called, gpt2
from tests.support.needed_engines import needs_kernels
from tests.support.notebook_outputs import execute

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return ortlab.graphs(called(*bert(), cache=False))


def told(graphs: Graphs, stage: str) -> dict[str, Any]:
    """Return the data that the browser reads."""
    outline = graph_view.outline_of(graphs, stage)
    modules = graph_view.tell_modules(graphs, outline)
    read: dict[str, Any] = json.loads(json.dumps(modules | graph_view.tell(graphs, outline)))
    return read


def stage_of(*nodes: onnx.NodeProto, **more: Any) -> Stage:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    graph = onnx.helper.make_graph(nodes, "graph", [x], [], **more)
    return Stage("exported", onnx.helper.make_model(graph))


@needs_ort
def test_the_browser_gets_the_graph_as_it_is(graphs: Graphs) -> None:
    stage = graphs.gradient
    read = told(graphs, "gradient")
    names = read["tensors"]["name"]
    places = {node.name: i for i, node in enumerate(stage.nodes)}
    for i, node in enumerate(stage.nodes):
        assert read["nodes"]["name"][i] == node.name
        assert [names[t] for t in read["nodes"]["reads"][i]] == [n for n in node.inputs if n]
        assert [names[t] for t in read["nodes"]["gives"][i]] == [n for n in node.outputs if n]
        assert read["nodes"]["of"][i] == places.get(node.of or "", -1)
        assert (i < read["split"]) == (node.phase == "forward")
    at = names.index("_original_module.bert.pooler.dense.weight")
    assert read["parameters"][str(at)] == "bert.pooler.dense.weight"
    assert read["tensors"]["kind"][at] == "float"
    assert read["tensors"]["shape"][at] == [64, 64]
    assert read["tensors"]["bytes"][at] == 4 * 64 * 64
    (gelu,) = (n for n in stage.nodes if n.op.endswith(".BiasGelu") and ".0." in n.module)
    result = names.index(gelu.outputs[0])
    assert read["tensors"]["shape"][result] == [2, 8, 128], "of the last call"
    assert read["tensors"]["bytes"][result] == 4 * 2 * 8 * 128
    assert any(isinstance(size, str) for size in read["tensors"]["sizes"][result])
    assert len(read["parameterGradients"]) == len(stage.parameter_gradients)


@needs_ort
def test_weights_are_not_told() -> None:
    sizes = []
    for width in (8, 512):
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
        wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
        wrapped(torch.randn(2, 16)).sum().backward()
        view = graph_view.GraphView(ortlab.graphs(wrapped))
        view.tell()
        sizes.append(len(view.graph))
    assert sizes[1] <= 1.05 * sizes[0] < 20_000


@needs_ort
def test_what_ort_fused_is_marked(graphs: Graphs) -> None:
    nodes = graphs.gradient.nodes
    for exported in (graphs.exported, None):
        found = [nodes[i] for i in graph_view.fused(graphs.gradient, exported)]
        ops = {node.op for node in found}
        assert {"com.microsoft.BiasGelu", "com.microsoft.BiasGeluGrad_dX"} <= ops
        assert not {"com.microsoft.YieldOp", "com.microsoft.LayerNormalizationGrad", "MatMul"} & ops
    assert not graph_view.fused(graphs.exported, graphs.exported)


@needs_ort
def test_what_was_measured_is_told(graphs: Graphs) -> None:
    name = graphs.gradient.nodes[3].name
    measured = Graphs(
        graphs.model, graphs.stages, measured=[lambda _: Overlay("time", "us", {name: 7.5})]
    )
    read = told(measured, "gradient")
    (overlay,) = read["overlays"]
    assert (overlay["name"], overlay["unit"]) == ("time", "us")
    assert overlay["values"][3] == 7.5
    assert overlay["values"].count(None) == len(overlay["values"]) - 1
    assert read["modules"][0][-2:] == [7.5, 0]
    assert read["tensors"]["bytes"].count(None) > 0, "no call, no sizes"


def test_odd_graphs_are_told() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(10_000, np.float32))
    elsewhere = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[1 << 20])
    elsewhere.data_location = onnx.TensorProto.EXTERNAL
    onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    elsewhere.external_data.extend(tensor.external_data)
    tensor = onnx.numpy_helper.from_array(np.zeros(10_000, np.float32))
    body = onnx.helper.make_graph([], "body", [], [])
    stage = stage_of(
        onnx.helper.make_node("Constant", [], ["a"], value=elsewhere),
        onnx.helper.make_node("Constant", [], ["b"], value=tensor),
        onnx.helper.make_node("Add", ["x", "", "b"], ["c"], name="</script><b>"),
        onnx.helper.make_node("If", ["c"], ["d"], name="", then_branch=body, else_branch=body),
    )
    graphs = Graphs("<i>Model</i>", {"exported": stage})
    read = told(graphs, "exported")
    assert read["nodes"]["attributes"][0]["value"] == "float[1048576] in another file"
    assert len(read["nodes"]["attributes"][1]["value"]) <= graph_view.ATTRIBUTE + 1
    assert read["nodes"]["attributes"][3] == {"then_branch": "a graph", "else_branch": "a graph"}
    assert read["nodes"]["name"] == ["", "", "</script><b>", ""]
    assert read["tensors"]["bytes"] == [None] * len(read["tensors"]["name"])
    page = graph_view.still(graphs, graph_view.outline_of(graphs, "exported"))
    assert not re.search("<i>|<b>|</script", page["text/html"] + page["image/svg+xml"])


def test_netron_is_the_version_that_the_view_knows() -> None:
    """Another version may change the internals in use: check them, then pin the new version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"netron=={importlib.metadata.version('netron')}" in project["dependencies"]


def test_netrons_modules_are_whole() -> None:
    bundle = json.loads(gzip.decompress(netron.bundle()))
    known = set(bundle["modules"])
    for name, source in bundle["modules"].items():
        imported = re.findall(r"^import .* from '\./([\w-]+\.js)'", source, re.M)
        earlier = list(bundle["modules"])[: list(bundle["modules"]).index(name)]
        assert set(imported) <= set(earlier), f"{name} needs {imported}"
    assert {"view.js", "grapher.js", "dagre.js"} <= known
    assert r"\u27e8" in bundle["modules"]["view.js"]  # a bracket that common fonts have
    assert r"\u3008" not in bundle["modules"]["view.js"]
    assert "prefers-color-scheme" not in bundle["light"] + bundle["dark"]
    assert ".node-item-type path" in bundle["light"]
    assert ".node-item-type path" in bundle["dark"]
    assert netron.categories()["Gemm"] == "Layer"


def test_a_netron_that_changed_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = netron._folder()
    for name in ("base.js", "dagre.js", "grapher.css", "grapher.js"):
        shutil.copy(here / name, tmp_path)
    monkeypatch.setattr(netron, "_folder", lambda: tmp_path)
    netron.bundle.cache_clear()
    netron.categories.cache_clear()
    view = graph_view.GraphView(Graphs("M", {"exported": stage_of()}))  # colors are optional
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda content, buffers=None: sent.append(content))
    view._receive(view, {"do": "netron"}, [])
    assert sent == [{"is": "netron", "error": f"netron {netron._version()} has no view.js"}]
    shutil.copy(here / "view.js", tmp_path)
    (tmp_path / "grapher.css").write_text(".node {}")
    with pytest.raises(netron.Unusable, match="has no dark style"):
        netron.bundle()
    netron.bundle.cache_clear()
    netron.categories.cache_clear()


@needs_ort
def test_another_stage_is_told_when_asked(graphs: Graphs) -> None:
    view = graph_view.GraphView(graphs)
    assert view.modules["stage"] == "gradient"
    assert not view.graph, "the modules come first"
    assert graphs.forward.graphs is graphs, "a stage that is shown alone offers the others"
    view._receive(view, {"do": "stage", "stage": "forward"}, [])
    assert view.modules["stage"] == "forward"
    read = json.loads(gzip.decompress(view.graph))
    assert read["nodes"]["name"] == [node.name for node in graphs.forward.nodes]


@needs_ort
@pytest.mark.parametrize("make", [bert, gpt2])
def test_the_picture_runs_down_and_up(make: Any) -> None:
    graphs = ortlab.graphs(called(*make(), cache=False))
    picture = sketch.sketch(graphs.gradient, graph_view.outline_of(graphs, "gradient"))
    labels = [row.label for row in picture.rows]
    assert len(labels) <= sketch.ROWS
    layers = [label for label in labels if re.fullmatch(r"(layer|h)\.\d", label)]
    assert layers == sorted(layers)
    assert len(layers) == 2
    first, second = (labels.index(layer) for layer in layers)
    assert (first, second) in picture.edges["forward"]
    assert (second, first) in picture.edges["backward"]
    drawn = sum(sum(row.counts.values()) for row in picture.rows)
    assert drawn + picture.between == len(graphs.gradient.nodes)
    assert all(a < b for a, b in picture.edges["forward"])
    tree = ElementTree.fromstring(sketch.svg(picture))
    assert len(sketch.svg(picture)) < 30_000
    words = {text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"forward", "gradient", *layers} <= words


def test_a_module_that_is_called_again_closes_a_circle() -> None:
    names = ["a<i>/Relu", "b/Relu", "a<i>_1/Relu"]
    nodes = [
        onnx.helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=f"/_original_module/{name}")
        for i, name in enumerate(names)
    ]
    graph = onnx.helper.make_graph(nodes, "graph", [], [])
    stage = Stage("exported", onnx.helper.make_model(graph), frozenset({"", "a<i>", "b"}))
    graphs = Graphs("", {"exported": stage})
    picture = sketch.sketch(stage, graph_view.outline_of(graphs, "exported"))
    assert [row.label for row in picture.rows] == ["a<i>", "b"]
    assert "<i>" not in sketch.svg(picture)
    assert picture.edges["forward"] == [(0, 1), (1, 0)]


@needs_ort
def test_a_saved_notebook_has_the_picture_and_the_outline(tmp_path: Path) -> None:
    model = (
        "%load_ext ortlab\nimport ortlab, torch\nfrom torch import nn\n"
        "model = ortlab.wrap(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), engine='ortmodule')\n"
        "model(torch.ones(2, 3)).sum().backward()"
    )
    book = execute(
        tmp_path, model, "%ort graph model", "%ort graph model --stage forward", "print(1)"
    )
    for cell, words in zip(
        book.cells[1:3], ("nodes with the gradient", "nodes optimized"), strict=True
    ):
        live, still = cell.outputs
        assert sorted(live.data) == ["application/vnd.jupyter.widget-view+json", "text/plain"]
        assert words in live.data["text/plain"]
        assert sorted(still.data) == ["image/svg+xml", "text/html", "text/plain"]
        assert "data:image/svg+xml;base64," in still.data["text/html"]
        assert "parameters" in still.data["text/html"]
        assert len(still.data["text/html"]) < 30_000


MARKUP = "<img src=x onerror=alert(1)>"


class Named(nn.Module):
    """A layer whose parameter name looks like markup."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(MARKUP, nn.Parameter(torch.ones(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ getattr(self, MARKUP))


class Listed(nn.Module):
    """Layers in a list with such a name."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(MARKUP, nn.ModuleList(Named() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in getattr(self, MARKUP):
            x = layer(x)
        return x


@needs_ort
def test_names_of_parameters_and_modules_stay_text() -> None:
    needs_kernels()
    model, batch = ortlab.wrap(Listed(), engine="ortmodule", kernels="torch"), torch.ones(4, 8)
    model(batch).sum().backward()
    graphs, plans = ortlab.graphs(model), ortlab.recompute_plans(model, batch)
    stills = [
        graph_view.still(graphs, graph_view.outline_of(graphs, each)) for each in graphs.stages
    ]
    memory = ortlab.memory_plan(model, batch)
    view = recompute_view.RecomputeView(plans)
    view._select(plans.layers)
    view._apply_ticks()
    assert all(not tick.description_allow_html for tick in view._ticks.values())
    pages = {
        "graph": "".join(still["text/html"] for still in stills) + graphs._repr_html_(),
        "memory": memory._repr_html_(),
        "recompute": plans._repr_html_(),
        "controls": view._said.value,
    }
    for name, page in pages.items():
        assert "<img src=x" not in page, name
        assert "&lt;img src=x onerror" in page, name
    for picture in (memory.picture(), *(still["image/svg+xml"] for still in stills)):
        root = ElementTree.fromstring(picture)
        assert not [each.tag for each in root.iter() if each.tag.endswith("}img")]
    ortlab.unwrap(model)  # the view's widgets keep it alive, and %ort would list it


def test_a_package_without_its_javascript_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_view, "STATIC", tmp_path)
    with pytest.raises(RuntimeError, match=r"graphview\.js was not built; run `pip install -e \.`"):
        graph_view.GraphView(Graphs("M", {"exported": stage_of()}))
