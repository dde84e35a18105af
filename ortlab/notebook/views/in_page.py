"""View that runs an exported model in the browser, with onnxruntime compiled to WebAssembly.

The browser's side is js/src/inpage.js, which documents the messages. The page receives onnxruntime
and the model over the notebook's own connection; nothing is fetched and no port is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anywidget
import numpy as np
import onnx
import traitlets

from ortlab.deploy import snippets, weights
from ortlab.deploy.exported import Exported, size
from ortlab.deploy.graph import Port
from ortlab.notebook.views import display

MOST_BYTES: Final = 64 * 2**20
_MOST_VALUES: Final = 250_000
"""Maximum number of output values: JupyterLab drops messages above its rate limit."""
_SIZES: Final = {"batch": 1}
_SIZE: Final = 8
_WASM: Final = "ort-wasm-simd-threaded.wasm.gz"


class InPage(anywidget.AnyWidget):
    """Form for an exported model's inputs, with the outputs and times of browser and kernel.

    Args:
        exported: The export.
        form: Precision: fp32, fp16 or int8; None for full precision.

    Raises:
        ValueError: If a browser cannot run the model.
        RuntimeError: If ortlab was installed without onnxruntime's WebAssembly.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    ports: traitlets.List[Any] = traitlets.List().tag(sync=True)
    wasm = traitlets.Bytes().tag(sync=True)
    graph = traitlets.Bytes().tag(sync=True)

    def __init__(self, exported: Exported, form: str | None = None) -> None:
        self._exported, self._form = exported, form
        chosen = exported.forms[0] if form is None else exported[form]
        foreign = [p for p in (*exported.inputs, *exported.outputs) if not snippets.in_browser(p)]
        if foreign:
            raise ValueError(
                f"JavaScript has no array type for {foreign[0]}; convert it in forward"
            )
        file = exported.path / chosen.file
        _check_size(file, [file])  # before it is read
        weights.check_places(file)
        _check_size(file, weights.files(file))
        super().__init__(
            _esm=_bundled("inpage.js"),
            _css=_bundled("inpage.css"),
            ports=[_field(port) for port in exported.inputs],
            wasm=_wasm(),
            graph=onnx.load_model(str(file)).SerializeToString(),
        )
        self.on_msg(self._receive)

    def _repr_mimebundle_(self, **chosen: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, with the export's table for terminals and pages without a kernel."""
        data, metadata = super()._repr_mimebundle_(**chosen) or ({}, {})
        told = {"text/plain": repr(self._exported), "text/html": self._exported._repr_html_()}
        return {**data, **told}, metadata

    def _receive(self, _: InPage, content: dict[str, Any], __: list[bytes]) -> None:
        """Run the page's inputs; errors are shown on the page instead of raised in a cell."""
        try:
            found, took_ms = self._run(content["inputs"])
        # The inputs come from the user, and onnxruntime may reject them with any exception.
        except Exception as error:  # noqa: BLE001
            self.send({"is": "refused", "why": f"{type(error).__name__}: {error}"[:500]})
            return
        told = [{"name": name, "shape": list(value.shape)} for name, value in found.items()]
        values = [np.ascontiguousarray(value, np.float64).tobytes() for value in found.values()]
        self.send({"is": "outputs", "outputs": told, "ms": took_ms}, values)

    def _run(self, given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], float]:
        types = {port.name: port.type for port in self._exported.inputs}
        inputs = {
            name: np.array(each["values"]).astype(types[name]).reshape(each["shape"])
            for name, each in given.items()
        }
        found, took_ms = self._exported.timed(self._form, inputs)
        count = sum(value.size for value in found.values())
        if count > _MOST_VALUES:
            raise ValueError(
                f"the outputs have {count:,} values, too many to compare in a page; give smaller "
                "inputs"
            )
        return found, took_ms


def _check_size(model: Path, files: Sequence[Path]) -> None:
    """Raise ValueError if the files of a model are too large for a page.

    The sizes are read from disk, because the sizes in an export's manifest are not trusted.
    """
    found = sum(file.stat().st_size for file in files)
    if found > MOST_BYTES:
        raise ValueError(
            f"{model.name} has {size(found)}, and a page can load up to {size(MOST_BYTES)}; "
            "run it with onnxruntime-web from your own server"
        )


def _field(port: Port) -> dict[str, Any]:
    """Return the initial state of an input's field."""
    shape = [each if isinstance(each, int) else _SIZES.get(each, _SIZE) for each in port.shape]
    return {
        "name": port.name,
        "type": port.type,
        "dims": list(port.shape),
        "value": str(snippets.fill(port)),
        "shape": shape,
    }


def _bundled(name: str) -> str:
    try:
        return display.bundled(name)
    except RuntimeError:
        raise RuntimeError(_MISSING) from None


def _wasm() -> bytes:
    try:
        return (display.STATIC / _WASM).read_bytes()
    except FileNotFoundError:
        raise RuntimeError(_MISSING) from None


_MISSING: Final = (
    "the views were built without onnxruntime's WebAssembly; in ortlab's repository, run "
    "pip install -e . again"
)
