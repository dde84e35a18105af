"""View of a model's graphs: netron's drawing, an outline of the modules, and a search.

This is the kernel's side, which sends each stage once, compressed. The browser's side is
js/src/graphview.js, which folds, colors and searches on its own, because the kernel may be busy
training.
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
from typing import Any, Protocol

import anywidget
import onnx
import traitlets
from IPython.display import publish_display_data

from ortlab.graph.capture import Graphs, Overlay, Stage
from ortlab.graph.module_tree import Outline
from ortlab.notebook.static_views import sketch
from ortlab.notebook.views import display, netron
from ortlab.notebook.views.closing import close_all, ends_with_cell

STATIC = Path(__file__).parents[1] / "static"
ATTRIBUTE = 200
"""Maximum length of an attribute's value."""


class Code(Protocol):
    """A model's code in HTML and, by `repr`, as text."""

    def _repr_html_(self) -> str: ...


class GraphView(anywidget.AnyWidget):
    """Forward and gradient graphs side by side, with the outline below.

    Bytes are computed for ``graphs.sizes``, and times come from ``graphs.measured``.

    Args:
        graphs: Graphs of a model.
        stage: Name of the stage to show first; by default `main_stage`. The view offers the others.
        folded: Whether to fold modules until the drawing is small enough to read.
        still: Mark of the static picture that this view hides.
        code: HTML of the model's code, to be shown above. A click on an element with the attribute
            ``data-line``, such as "model.py:12", selects the nodes of that line in both graphs.

    Attributes:
        outline: Outline of the stage that is shown.

    Raises:
        RuntimeError: If the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    modules: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    graph = traitlets.Bytes().tag(sync=True)
    folded = traitlets.Bool().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    code = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        graphs: Graphs,
        *,
        stage: str | None = None,
        folded: bool = True,
        still: str = "",
        code: str = "",
    ) -> None:
        self._graphs = graphs
        self.outline = outline_of(graphs, stage or main_stage(graphs))
        super().__init__(
            _esm=_bundled("graphview.js"),
            _css=_bundled("graphview.css"),
            modules=tell_modules(graphs, self.outline),
            folded=folded,
            still=still,
            code=code,
        )
        self.on_msg(self._receive)

    def tell(self) -> None:
        """Send the nodes; the page has the modules by then."""
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


def show(
    graphs: Graphs, *, stage: str | None = None, folded: bool = True, code: Code | None = None
) -> None:
    """Show the graphs of a model in the running cell.

    A picture and the outline are displayed too, for pages without a kernel: a saved notebook, an
    HTML page, a printed one. They are a separate output, because JupyterLab shows no other form of
    a closed widget; the live view hides them.

    Args:
        graphs: Graphs of a model.
        stage: Name of the stage to show first; by default `main_stage`.
        folded: Whether to fold modules until the drawing is small enough to read.
        code: Code of the model, to be shown above; pages without a kernel show it alone.
    """
    mark = uuid.uuid4().hex
    stage = stage or main_stage(graphs)
    with _without_collections():
        html = "" if code is None else code._repr_html_()
        view = GraphView(graphs, stage=stage, folded=folded, still=mark, code=html)
        ends_with_cell(lambda: close_all(view))
        data, metadata = view._repr_mimebundle_() or ({}, {})
        count = len(graphs.stage(stage).nodes)
        words = f"{graphs.model or 'the model'}: {count} nodes {graphs.about[stage]}"
        _publish({**data, "text/plain": words}, metadata)
        view.tell()
        _publish(still(graphs, view.outline, mark) if code is None else _still_code(code, mark), {})


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection while hundreds of thousands of objects are created.

    All of them stay alive, and each collection would also scan torch's objects, which takes a third
    of the time for ten thousand nodes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def still(graphs: Graphs, outline: Outline, mark: str = "") -> dict[str, str]:
    """Return the MIME bundle for pages without a kernel: the folded graph and the outline.

    The picture is an image in HTML, because JupyterLab shows no plain SVG in untrusted notebooks.

    Args:
        graphs: Graphs of a model.
        outline: Outline of the stage.
        mark: Mark by which the live view finds and hides it.
    """
    picture = sketch.svg(sketch.sketch(graphs.stage(outline.name), outline))
    address = "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()
    alt = f"The {outline.name} graph, folded to its outermost modules"
    page = f'<img src="{address}" alt="{alt}">{outline._repr_html_()}'
    return {
        "text/html": display.still(mark, "ortlab-graph", page),
        "image/svg+xml": picture,
        "text/plain": repr(outline),
    }


def _still_code(code: Code, mark: str) -> dict[str, str]:
    """Return the MIME bundle for pages without a kernel: the code with its figures."""
    page = display.still(mark, "ortlab-graph", code._repr_html_())
    return {"text/html": page, "text/plain": repr(code)}


def main_stage(graphs: Graphs) -> str:
    """Return the gradient stage, which has both forward and backward, or else the first stage.

    Args:
        graphs: Graphs of a model.
    """
    return next(name for name in ("gradient", *graphs.stages) if name in graphs.stages)


def outline_of(graphs: Graphs, stage: str) -> Outline:
    """Return the outline of a stage, with the sizes of the last call and the measured times.

    Args:
        graphs: Graphs of a model.
        stage: Name of the stage.
    """
    return Outline(
        graphs.stage(stage),
        exported=graphs.stages.get("exported") or graphs.stages.get("captured"),
        sizes=graphs.sizes,
        time=next((each for each in graphs.overlays(stage) if each.name == "time"), None),
    )


def _publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    publish_display_data(data, metadata)  # type: ignore[no-untyped-call]


def tell_modules(graphs: Graphs, outline: Outline) -> dict[str, Any]:
    """Return the data that the browser needs to show the outline.

    Args:
        graphs: Graphs of a model.
        outline: Outline of the stage.
    """
    return {
        "model": graphs.model or "the model",
        "stage": outline.name,
        "stages": {name: graphs.about[name] for name in graphs.stages},
        "modules": [
            [m.name, m.parent, m.calls, m.forward, m.backward, m.parameters,
             m.activation_bytes, m.forward_us, m.backward_us]
            for m in outline.modules
        ],
    }  # fmt: skip


def tell(graphs: Graphs, outline: Outline) -> dict[str, Any]:
    """Return the other data that the browser needs to draw the outline's stage.

    Nodes and tensors are identified by index; the first `split` nodes belong to forward.

    Args:
        graphs: Graphs of a model.
        outline: Outline of the stage.
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
    """Return the indices of nodes that ORT fused from several others, and of their gradients.

    In forward, these are operators that the exported graph does not have, or, without an exported
    graph, operators of ORT's own domain. The gradient always has operators of its own, so its nodes
    count by name or by the forward node they belong to.

    Args:
        stage: The stage.
        exported: The exported stage, if there is one.
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
    """Return the name of a tensor's element type; empty if the graph does not specify it."""
    kind, _ = stage.tensors.get(tensor, (onnx.TensorProto.UNDEFINED, ()))
    return onnx.TensorProto.DataType.Name(kind).lower() if kind else ""


def _categories() -> Mapping[str, str]:
    try:
        return netron.categories()
    except netron.Unusable:
        return {}  # they only set colors; the view itself reports that netron cannot be used


def _bundled(name: str) -> str:
    try:
        return (STATIC / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"the graph view's {name} was not built; run `pip install -e .` in ortlab's repository"
        ) from None
