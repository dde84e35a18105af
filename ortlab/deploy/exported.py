"""Result of an export: its files with their sizes and differences, and a way to run the model."""

from __future__ import annotations

import copy
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortlab.checkpoint.sharded import fingerprint
from ortlab.deploy import check, folder, page, weights
from ortlab.deploy.graph import Port
from ortlab.utils.tables import Column, Table

MODEL = "model.onnx"
_MOST = 2**63
"""Exclusive upper bound of a file's size in bytes."""


@dataclass(frozen=True)
class ExportedFile:
    """One precision of the model, with its size and its difference from torch.

    Attributes:
        name: Precision: fp32, fp16 or int8.
        file: Name of the file in the export's folder.
        bytes: Size of the file with its external data.
        difference: Largest difference of all outputs in all trials; NaN or infinite if an output
            is not finite.
        relative: Largest difference relative to an output's largest value.
        worst: Output and trial of the largest relative difference.
        accuracy: Accuracy on labeled data; None if none was given.
        torch_accuracy: Accuracy of eager torch on the same data; None if none was given.
    """

    name: str
    file: str
    bytes: int
    difference: float
    relative: float
    worst: str
    accuracy: float | None = None
    torch_accuracy: float | None = None


class Exported:
    """An exported model.

    ``exported["fp16"]`` returns one of its files, ``exported(input_ids=...)`` runs the model in
    full precision in onnxruntime.

    Attributes:
        path: Folder of the export.
        forms: Files of the model, one per precision; full precision comes first.
        inputs: Inputs of the graph.
        outputs: Outputs of the graph.
        opset: Version of ONNX's operators.
        model: Name of the model's class.
        tried: Names of the inputs on which the files were compared with torch.
        notes: Remarks of the export.
    """

    def __init__(
        self,
        path: Path,
        forms: Sequence[ExportedFile],
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        *,
        opset: int,
        tried: Sequence[str],
        notes: Sequence[str] = (),
        model: str = "",
    ) -> None:
        self.path = path
        self.forms = tuple(forms)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.opset = opset
        self.model = model
        self.tried = tuple(tried)
        self.notes = tuple(notes)
        self._sessions: dict[str, Any] = {}

    @classmethod
    def load(cls, path: str | Path) -> Exported:
        """Load an export from its folder.

        Args:
            path: Folder of the export.

        Raises:
            ValueError: If the folder has no export, or a file was changed.
        """
        at = Path(path)
        facts = folder.read(at)
        try:
            found = cls(
                at,
                [ExportedFile(**each) for each in facts["forms"]],
                [Port(p["name"], p["type"], tuple(p["shape"])) for p in facts["inputs"]],
                [Port(p["name"], p["type"], tuple(p["shape"])) for p in facts["outputs"]],
                opset=facts["opset"],
                tried=facts["tried"],
                notes=facts["notes"],
                model=facts["model"],
            )
            found._check_types()
            listed = {name: each["sha256"] for name, each in facts["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{at} has no readable export: {error!r}; export again") from None
        for form in found.forms:
            if Path(form.file).name != form.file:
                raise ValueError(
                    f"{at} refers to {form.file!r}, which is outside the folder and is not read; "
                    "export again"
                )
            digest = fingerprint(at / form.file)
            if not digest or digest != listed.get(form.file):
                raise ValueError(f"{at / form.file} was changed after the export; export again")
        return found

    def _check_types(self) -> None:
        """Raise TypeError if a value of export.json has a type that `as_dict` never writes."""
        words = [self.model, *self.tried, *self.notes]
        words += [word for port in (*self.inputs, *self.outputs) for word in (port.name, port.type)]
        words += [word for form in self.forms for word in (form.name, form.file, form.worst)]
        whole = [self.opset, *(form.bytes for form in self.forms)]
        sizes = [size for port in (*self.inputs, *self.outputs) for size in port.shape]
        numbers = [number for form in self.forms for number in (form.difference, form.relative)]
        known = [number for f in self.forms for number in (f.accuracy, f.torch_accuracy)]
        for values, wanted in (
            (words, str),
            (whole, int),
            (sizes, int | str),
            (numbers, float),
            (known, float | None),
        ):
            for value in values:
                if not isinstance(value, wanted):
                    raise TypeError(f"{reprlib.repr(value)} is not {wanted}")
        if not self.forms or max(whole) >= _MOST or min(whole) < 0:
            raise TypeError("no file of the model, or an impossible file size")

    def at(self, path: Path) -> Exported:
        """Return the same export in another folder.

        Args:
            path: The other folder.
        """
        moved = copy.copy(self)
        moved.path, moved._sessions = path, {}
        return moved

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of export.json."""
        return {
            "model": self.model,
            "opset": self.opset,
            "inputs": [port.as_dict() for port in self.inputs],
            "outputs": [port.as_dict() for port in self.outputs],
            "forms": [asdict(form) for form in self.forms],
            "tried": list(self.tried),
            "notes": list(self.notes),
        }

    @property
    def file(self) -> Path:
        """Path of the model in full precision."""
        return self.path / MODEL

    @property
    def difference(self) -> float:
        """Largest difference between the model in full precision and torch."""
        return self.forms[0].difference

    def __getitem__(self, name: str) -> ExportedFile:
        """Return the file of a precision: fp32, fp16 or int8."""
        for form in self.forms:
            if form.name == name:
                return form
        raise KeyError(f"{name!r}: choose from {', '.join(form.name for form in self.forms)}")

    def __call__(self, form: str | None = None, /, **inputs: Any) -> dict[str, np.ndarray]:
        """Run the model in onnxruntime.

        Args:
            form: Precision: fp32, fp16 or int8; None for full precision.
            **inputs: Arrays, tensors or lists by input name.

        Returns:
            The outputs by name.
        """
        return self.timed(form, inputs)[0]

    def timed(
        self, form: str | None, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], float]:
        """Run the model in onnxruntime and measure the time.

        Args:
            form: Precision: fp32, fp16 or int8; None for full precision.
            inputs: Arrays, tensors or lists by input name.

        Returns:
            The outputs by name, and the elapsed time in milliseconds.

        Raises:
            ValueError: If an input is missing or unknown.
        """
        chosen = self.forms[0] if form is None else self[form]
        known = {port.name: port for port in self.inputs}
        if set(inputs) != set(known):
            raise ValueError(
                f"the model takes {', '.join(known)}, not {', '.join(inputs) or 'no inputs'}"
            )
        session = self._sessions.get(chosen.file)
        if session is None:
            session = self._sessions[chosen.file] = check.session(self.path / chosen.file)
        taken = {each.name for each in session.get_inputs()}
        feeds = {n: np.asarray(v, known[n].type) for n, v in inputs.items() if n in taken}
        names = [each.name for each in session.get_outputs()]
        started = time.perf_counter()
        found = session.run(names, feeds)
        took_ms = 1e3 * (time.perf_counter() - started)
        return dict(zip(names, found, strict=True)), took_ms

    def in_page(self, form: str | None = None) -> Any:
        """Return a widget that runs the model in the browser with WebAssembly.

        It has fields for the inputs, a button, and the outputs of the browser and of the kernel.

        Args:
            form: Precision: fp32, fp16 or int8; None for full precision.

        Raises:
            ValueError: If a browser cannot run the model.
            RuntimeError: If the widget's files are not installed, or before %load_ext ortlab.
        """
        return page.registered()(self, form)

    def files(self) -> list[Path]:
        """Return the paths of all graphs and their external data."""
        return [each for form in self.forms for each in weights.files(self.path / form.file)]

    def table(self) -> Table[ExportedFile]:
        """Return a table of the files with their sizes and differences."""
        columns = [
            Column[ExportedFile]("form", lambda form: form.name),
            Column[ExportedFile]("file", lambda form: str(self.path / form.file)),
            Column[ExportedFile]("size", lambda form: size(form.bytes), number=True),
            Column[ExportedFile](
                "largest difference", lambda form: f"{form.difference:.1e}", number=True
            ),
            Column[ExportedFile]("relative", lambda form: f"{form.relative:.1e}", number=True),
            Column[ExportedFile]("at", lambda form: form.worst),
        ]
        if any(form.accuracy is not None for form in self.forms):
            columns.append(Column("accuracy (torch)", _accuracies, number=True))
        ports = [f"in: {port}" for port in self.inputs] + [f"out: {port}" for port in self.outputs]
        tried = f"opset {self.opset}; compared with eager torch on {', '.join(self.tried)}"
        return Table(self.forms, columns, notes=[*ports, tried, *self.notes])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def size(number: int) -> str:
    """Return a number of bytes with its unit.

    Args:
        number: Number of bytes.
    """
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"


def _accuracies(form: ExportedFile) -> str:
    if form.accuracy is None or form.torch_accuracy is None:
        return "-"
    return f"{form.accuracy:.4f} ({form.torch_accuracy:.4f})"
