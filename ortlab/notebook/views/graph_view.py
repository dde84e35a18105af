"""The graphs of a model in the notebook: netron's drawing, an outline of the modules, a search.

The kernel's side of the view: what is told of a stage, once, compressed. The browser's side is
js/src/graphview.js, which folds, colours and searches by itself: the kernel may be training.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import gzip
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import onnx
import traitlets
from IPython.core.display_functions import publish_display_data

from ortlab.graph import STAGES
from ortlab.graph.capture import Graphs, Overlay, Stage
from ortlab.graph.module_tree import Outline
from ortlab.notebook.static_views import sketch
from ortlab.notebook.views import netron
from ortlab.notebook.views.closing import close_all, ends_with_cell

STATIC = Path(__file__).parents[1] / "static"
# A widget that is gone leaves a line of JupyterLab's, in the output before that of the picture.
_NO_DEAD_LINE = (
    '<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child [data-ortlab-still="{mark}"])'
    ":not(:has(.ortlab-graph)) {{display: none}}</style>"
)
ATTRIBUTE = 200
"""Characters of an attribute's value that are shown."""


class GraphView(anywidget.AnyWidget):
    """Forward and gradient side by side, with the outline below.

    It shows the stage called ``stage``, or the one that trains, and offers the others. Bytes are
    told for ``graphs.sizes``, and the figures of ``graphs.measured``. Modules are folded until the
    drawing is easy to take in, or with ``folded=False`` not at all. ``still`` is the mark of a
    picture on the page that the view takes the place of. RuntimeError where the package was
    installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    modules: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    graph = traitlets.Bytes().tag(sync=True)
    folded = traitlets.Bool().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)

    def __init__(
        self, graphs: Graphs, *, stage: str | None = None, folded: bool = True, still: str = ""
    ) -> None:
        self._graphs = graphs
        self.outline = outline_of(graphs, stage or main_stage(graphs))
        super().__init__(
            _esm=_bundled("graphview.js"),
            _css=_bundled("graphview.css"),
            modules=tell_modules(graphs, self.outline),
            folded=folded,
            still=still,
        )
        self.on_msg(self._receive)

    def tell(self) -> None:
        """Sends the nodes after the modules, which are on the page by then."""
        told = json.dumps(tell(self._graphs, self.outline), separators=(",", ":"))
        self.graph = gzip.compress(told.encode(), 3, mtime=0)

    def _choose(self, stage: str) -> None:
        self.outline = outline_of(self._graphs, stage)
        with self.hold_sync():
            self.modules = tell_modules(self._graphs, self.outline)
            self.tell()

    def _receive(self, _: GraphView, content: dict[str, Any], __: list[bytes]) -> None:
        if content["do"] == "stage":
            self._choose(content["stage"])
        elif content["do"] == "netron":
            self._send_netron()

    def _send_netron(self) -> None:
        try:
            self.send({"is": "netron"}, [netron.bundle()])
        except netron.Unusable as error:
            self.send({"is": "netron", "error": str(error)})


def show(graphs: Graphs, *, stage: str | None = None, folded: bool = True) -> None:
    """Shows the view in the cell that is running; the arguments are those of `GraphView`.

    With it go a picture and the outline, which a page shows that has no kernel: a saved notebook,
    an HTML page, a printed one. They are an output of their own, since JupyterLab shows no other
    form of a widget that is gone; the living view hides them.
    """
    mark = uuid.uuid4().hex
    stage = stage or main_stage(graphs)
    with _without_collections():
        view = GraphView(graphs, stage=stage, folded=folded, still=mark)
        ends_with_cell(lambda: close_all(view))
        data, metadata = view._repr_mimebundle_() or ({}, {})
        count = len(graphs.stage(stage).nodes)
        words = f"{graphs.model or 'the model'}: {count} nodes {STAGES[stage]}"
        _publish({**data, "text/plain": words}, metadata)
        view.tell()
        _publish(still(graphs, view.outline, mark), {})


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python's collector away for the moment in which hundreds of thousands of objects arise.

    All of them stay, and each time it would look through all of torch's as well: a third of the
    time for ten thousand nodes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def still(graphs: Graphs, outline: Outline, mark: str = "") -> dict[str, str]:
    """The folded graph as a picture, with the outline: what a page without a kernel has.

    As an image in HTML, since JupyterLab shows no bare SVG in a notebook that is not trusted.
    """
    picture = sketch.svg(sketch.sketch(graphs.stage(outline.name), outline))
    address = "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()
    alt = f"The {outline.name} graph, folded to its outermost modules"
    page = f'<div data-ortlab-still="{mark}"><img src="{address}" alt="{alt}">'
    return {
        "text/html": f"{_NO_DEAD_LINE.format(mark=mark)}{page}{outline._repr_html_()}</div>",
        "image/svg+xml": picture,
        "text/plain": repr(outline),
    }


def main_stage(graphs: Graphs) -> str:
    """The gradient graph where there is one, for it has all: forward, backward, their modules."""
    return next(name for name in ("gradient", *graphs.stages) if name in graphs.stages)


def outline_of(graphs: Graphs, stage: str) -> Outline:
    """The outline of a stage, with the sizes of the last call and the time that was measured."""
    return Outline(
        graphs.stage(stage),
        exported=graphs.stages.get("exported"),
        sizes=graphs.sizes,
        time=next((each for each in graphs.overlays(stage) if each.name == "time"), None),
    )


def _publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    publish_display_data(data, metadata)  # type: ignore[no-untyped-call]


def tell_modules(graphs: Graphs, outline: Outline) -> dict[str, Any]:
    """What the browser needs to show the outline."""
    return {
        "model": graphs.model or "the model",
        "stage": outline.name,
        "stages": {name: STAGES[name] for name in graphs.stages},
        "modules": [
            [m.name, m.parent, m.calls, m.forward, m.backward, m.parameters,
             m.activation_bytes, m.forward_us, m.backward_us]
            for m in outline.modules
        ],
    }  # fmt: skip


def tell(graphs: Graphs, outline: Outline) -> dict[str, Any]:
    """What the browser needs besides to draw the outline's stage.

    Nodes and tensors are known by their place; those of forward come first, `split` of them.
    """
    shown = graphs.stage(outline.name)
    exported = graphs.stages.get("exported")
    sizes = graphs.sizes if set(shown.dims) <= set(graphs.sizes) else None
    places = {node.name: i for i, node in enumerate(shown.nodes) if node.name}
    tensors: dict[str, int] = {}

    def place(names: Sequence[str]) -> list[int]:
        return [tensors.setdefault(name, len(tensors)) for name in names if name]

    def named(parameters: Mapping[str, str]) -> dict[int, str]:
        return {tensors[t]: name for name, t in parameters.items() if t in tensors}

    reads = [place(node.inputs) for node in shown.nodes]
    gives = [place(node.outputs) for node in shown.nodes]
    inputs = place([value.name for value in shown.model.graph.input])
    outputs = place([value.name for value in shown.model.graph.output])
    categories = _categories()
    return {
        "split": sum(node.phase == "forward" for node in shown.nodes),
        "nodes": {
            "name": [node.name for node in shown.nodes],
            "op": [node.op for node in shown.nodes],
            "module": outline.module_of,
            "of": [places.get(node.of or "", -1) for node in shown.nodes],
            "reads": reads,
            "gives": gives,
            "attributes": [_attributes(node) for node in shown.model.graph.node],
            "source": [node.source for node in shown.nodes],
        },
        "tensors": {
            "name": list(tensors),
            "kind": [_kind(shown, name) for name in tensors],
            "sizes": [shown.tensors.get(name, (0, None))[1] for name in tensors],
            "shape": [shown.shape_of(name, graphs.sizes) for name in tensors],
            "bytes": [None if sizes is None else shown.bytes_of(name, sizes) for name in tensors],
        },
        "inputs": inputs,
        "outputs": outputs,
        "parameters": named(shown.parameters),
        "parameterGradients": named(shown.parameter_gradients),
        "categories": {op: categories[op] for op in shown.ops if op in categories},
        "fused": fused(shown, exported),
        "recompute": [i for i, n in enumerate(shown.nodes) if n.name.endswith("_recompute")],
        "overlays": [_figures(overlay, shown) for overlay in graphs.overlays(shown.name)],
    }


def fused(stage: Stage, exported: Stage | None) -> list[int]:
    """The places of the nodes that ORT put in for several others, and of those of their gradients.

    In forward these are operators that the export does not have, or without the export ORT's own;
    the gradient has operators of its own in any case.
    """
    found: dict[str, int] = {}
    for i, node in enumerate(stage.nodes):
        domain, _, name = node.op.rpartition(".")
        if node.phase == "backward":
            made = node.of in found or name.startswith("Fused")
        elif exported is None:
            made = domain == "com.microsoft"
        else:
            made = node.op not in exported.ops
        if made and name != "YieldOp":
            found[node.name] = i
    return list(found.values())


def _figures(overlay: Overlay, stage: Stage) -> dict[str, Any]:
    values = [overlay.values.get(node.name) for node in stage.nodes]
    return {"name": overlay.name, "unit": overlay.unit, "values": values}


def _attributes(node: onnx.NodeProto) -> dict[str, str]:
    return {each.name: _value(each) for each in node.attribute}


def _value(attribute: onnx.AttributeProto) -> str:
    if attribute.type == onnx.AttributeProto.TENSOR:
        tensor = attribute.t
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        shape = f"{kind}[{', '.join(map(str, tensor.dims))}]"
        if onnx.external_data_helper.uses_external_data(tensor):
            return f"{shape} in another file"
        text = f"{shape} {onnx.numpy_helper.to_array(tensor).ravel()[:ATTRIBUTE].tolist()}"
    elif attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        return "a graph"
    else:
        value = onnx.helper.get_attribute_value(attribute)
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= ATTRIBUTE else f"{text[:ATTRIBUTE]}…"


def _kind(stage: Stage, tensor: str) -> str:
    """The name of a tensor's element type, or nothing where the graph does not tell."""
    kind, _ = stage.tensors.get(tensor, (onnx.TensorProto.UNDEFINED, ()))
    return onnx.TensorProto.DataType.Name(kind).lower() if kind else ""


def _categories() -> Mapping[str, str]:
    try:
        return netron.categories()
    except netron.Unusable:
        return {}  # colours only; the view says by itself that netron cannot be used


def _bundled(name: str) -> str:
    try:
        return (STATIC / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"the graph view's {name} was not built; run `pip install -e .` in ortlab's repository"
        ) from None
