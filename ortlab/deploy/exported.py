"""What an export gave: its files, sizes and differences, as a table; and the model run again."""

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
"""What the bytes of a file stay below."""


@dataclass(frozen=True)
class ExportedFile:
    """The model in one file, with what it takes and how far it is from torch.

    ``difference`` is the largest of all outputs in all trials, ``relative`` the largest relative to
    an output's size; NaN where one is not finite. ``accuracy`` is of labelled data, in the file and
    in torch, None without.
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
    """A model that left: ``path`` is its folder, ``forms`` are its files.

    ``exported["fp16"]`` is one of them, ``exported(input_ids=...)`` runs the first in onnxruntime.
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
        """The class of the model."""
        self.tried = tuple(tried)
        """What the files were tried on."""
        self.notes = tuple(notes)
        self._sessions: dict[str, Any] = {}

    @classmethod
    def load(cls, path: str | Path) -> Exported:
        """An export of an earlier time; ValueError where the folder holds none, or another file."""
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
            raise ValueError(f"{at} holds no export that can be read: {error!r}") from None
        for form in found.forms:
            if Path(form.file).name != form.file:
                raise ValueError(f"{at} names {form.file!r}, which is not in it: it is not read")
            digest = fingerprint(at / form.file)
            if not digest or digest != listed.get(form.file):
                raise ValueError(f"{at / form.file} is not the file that was exported")
        return found

    def _check_types(self) -> None:
        """TypeError where what export.json says is of other types than `as_dict` gives it."""
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
            raise TypeError("no form of the model, or a size that no file has")

    def at(self, path: Path) -> Exported:
        """The same in another folder."""
        moved = copy.copy(self)
        moved.path, moved._sessions = path, {}
        return moved

    def as_dict(self) -> dict[str, Any]:
        """As export.json holds it."""
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
        """The model in full precision."""
        return self.path / MODEL

    @property
    def difference(self) -> float:
        """The largest difference of the model in full precision from torch."""
        return self.forms[0].difference

    def __getitem__(self, name: str) -> ExportedFile:
        """The form called `name`: fp32, fp16 or int8."""
        for form in self.forms:
            if form.name == name:
                return form
        raise KeyError(f"{name!r}: there is {', '.join(form.name for form in self.forms)}")

    def __call__(self, form: str | None = None, /, **inputs: Any) -> dict[str, np.ndarray]:
        """onnxruntime's outputs by name, for arrays, tensors or lists by the inputs' names."""
        return self.timed(form, inputs)[0]

    def timed(
        self, form: str | None, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], float]:
        """The outputs and the milliseconds that onnxruntime took for them.

        ValueError for names that it has no input of, or that are missing.
        """
        chosen = self.forms[0] if form is None else self[form]
        known = {port.name: port for port in self.inputs}
        if set(inputs) != set(known):
            raise ValueError(f"the model takes {', '.join(known)}, not {', '.join(inputs) or '-'}")
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
        """Return a widget that runs the model in the notebook's page, by WebAssembly.

        It has fields for the inputs, a button, and the outputs of the page and of the kernel.

        Raises:
            ValueError: If a page cannot take the model.
            RuntimeError: If ortlab has no widget here, or before %load_ext ortlab.
        """
        return page.registered()(self, form)

    def files(self) -> list[Path]:
        """Every file that the model's forms are in."""
        return [each for form in self.forms for each in weights.files(self.path / form.file)]

    def table(self) -> Table[ExportedFile]:
        """The files, with sizes and differences."""
        columns = [
            Column[ExportedFile]("form", lambda form: form.name),
            Column[ExportedFile]("file", lambda form: str(self.path / form.file)),
            Column[ExportedFile]("size", lambda form: size(form.bytes), number=True),
            Column[ExportedFile](
                "largest difference", lambda form: f"{form.difference:.1e}", number=True
            ),
            Column[ExportedFile]("of its size", lambda form: f"{form.relative:.1e}", number=True),
            Column[ExportedFile]("at", lambda form: form.worst),
        ]
        if any(form.accuracy is not None for form in self.forms):
            columns.append(Column("accuracy (torch)", _accuracies, number=True))
        ports = [f"in: {port}" for port in self.inputs] + [f"out: {port}" for port in self.outputs]
        tried = f"opset {self.opset}; beside eager torch on {', '.join(self.tried)}"
        return Table(self.forms, columns, notes=[*ports, tried, *self.notes])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def size(number: int) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"


def _accuracies(form: ExportedFile) -> str:
    if form.accuracy is None or form.torch_accuracy is None:
        return "-"
    return f"{form.accuracy:.4f} ({form.torch_accuracy:.4f})"
