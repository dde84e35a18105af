"""A trained model for inference elsewhere: exported, checked beside torch, put into a folder."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from ortlab.deploy import (
    accuracy,
    axes,
    check,
    examples,
    folder,
    graph,
    inputs,
    on_device_training,
    quantize,
    weights,
)
from ortlab.deploy import readme as readme_of
from ortlab.deploy.axes import Axes
from ortlab.deploy.call import ModelCall
from ortlab.deploy.check import Difference, Expected, SizeFailed
from ortlab.deploy.exported import MODEL, Exported, ExportedFile
from ortlab.deploy.graph import Port
from ortlab.deploy.lab import Lab
from ortlab.deploy.on_device_training import TrainingArtifacts
from ortlab.deploy.trace import trace
from ortlab.engines import wrapped_models
from ortlab.engines.base import LossFunction, is_ortmodule, tell
from ortlab.engines.batch import loss_function, to_device
from ortlab.engines.torchscript import decisions
from ortlab.engines.torchscript.isolation import NotInGraph, undisturbed
from ortlab.settings import ExportSettings

_HALF = (torch.float16, torch.bfloat16)


def export(
    lab: Lab,
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    second: Any = None,
    eval_data: Iterable[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    loss: str | LossFunction | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    **settings: Any,
) -> Exported | TrainingArtifacts:
    """See `ortlab.api.export`; `lab` knows which models are wrapped and what they were given."""
    chosen = ExportSettings.of(settings)
    function = loss_function(loss) if isinstance(loss, str) else loss
    given = wrapped_models.check_model("the first argument", model)
    target = Path(path).expanduser()
    folder.check(target)
    module = original(lab, given)
    if (busy := lab.training(module)) is not None and busy.state != "paused":
        raise ValueError(
            f"{busy.name} is training this model; await it, or pause it (%ort pause {busy.name}), "
            "to export the model"
        )
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        raise ValueError(f"this {type(module).__name__} is on the meta device, without weights")
    if trainable is not None:
        if batch is None:
            raise ValueError("trainable needs a batch with its labels: batch=...")
        on_cpu = to_device(examples.first(batch), torch.device("cpu"))
        return on_device_training.export(
            module,
            target,
            on_cpu,
            trainable,
            loss=function,
            optimizer=optimizer,
            weight_decay=weight_decay,
        )
    if loss is not None:
        raise ValueError("loss is for trainable=...; a graph for inference has none")
    example = examples.of(lab, given, module, batch)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    call = ModelCall.of(module, to_device(example, device))
    find = axes.tried
    if second is not None:
        other = ModelCall.of(module, to_device(examples.first(second), device))
        find = functools.partial(axes.of_two, other=other.tensors)
    with _evaluating(module), folder.filled(target) as made:
        exported = _Writer(module, call, find, chosen, made).write(eval_data)
    return exported.at(target)


def one_file(module: nn.Module, call: ModelCall, found: Axes, file: str | Path) -> None:
    """Writes the graph of `call`, which evaluates `module`, into `file`, checked as by `export`.

    `found` are the sizes that vary. What was at `file` stays where the check
    fails. ValueError for weights of 2 GiB and more, which take a folder.
    """
    target = Path(file)
    with tempfile.TemporaryDirectory(dir=_parent(target)) as scratch, _evaluating(module):
        made = Path(scratch)
        _Writer(module, call, lambda _: found, ExportSettings(), made).write(None)
        if (data := made / f"{MODEL}.data").exists():
            raise ValueError(
                f"the weights are too large for one file ({data.stat().st_size} bytes); use "
                "ortlab.export, which writes a folder"
            )
        (made / MODEL).replace(target)


def _parent(file: Path) -> Path:
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"{file} cannot be a file: name one in a folder that is there")
    return file.parent


def original(lab: Lab, model: nn.Module) -> nn.Module:
    """The user's own module in what an engine, ORTModule or torch.compile made of it."""
    entry = lab.wrapped.entry(model)
    if entry is not None:
        return entry.engine.unwrap(model)
    if is_ortmodule(model):
        inner: nn.Module = model.module  # type: ignore[assignment]
        return inner
    compiled: nn.Module = getattr(model, "_orig_mod", model)
    return compiled


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode; it ends with each part, buffer and attribute as it was."""
    with undisturbed(module):
        module.eval()
        yield


class _Writer:
    """One export, into a folder that is there."""

    def __init__(
        self,
        module: nn.Module,
        call: ModelCall,
        found: Callable[[ModelCall], Axes],
        settings: ExportSettings,
        made: Path,
    ) -> None:
        self._module, self._settings, self._folder = module, settings, made
        self._call = call
        with decisions.reads() as known:
            try:
                self._call(self._call.tensors)
            except Exception as error:
                error.add_note(
                    f"exporting calls forward with {', '.join(self._call.tensors)} alone"
                )
                raise
        self._known = frozenset(known)
        tell(f"looking which sizes of {', '.join(self._call.tensors)} may vary")
        self._axes = found(self._call)
        self._references: list[Expected] = []
        self._read: set[str] = set()
        """The inputs that the graph has: those that forward reads."""

    def write(self, eval_data: Iterable[Any] | None) -> Exported:
        """The model's files, its README and the manifest."""
        file, found = self._checked()
        ports = self._ports()
        forms = [_form("fp32", file, found)]
        forms += [self._smaller(name) for name in ("fp16", "int8") if getattr(self._settings, name)]
        if eval_data is not None:
            forms = accuracy.measured(self._call, self._folder, forms, eval_data)
        exported = Exported(
            self._folder,
            forms,
            *ports,
            opset=self._settings.opset,
            tried=list(dict.fromkeys(each.trial.name for each in self._references)),
            notes=self._notes(),
            model=type(self._module).__name__,
        )
        (self._folder / "README.md").write_text(readme_of.text(exported, self._references[0]))
        folder.describe(self._folder, exported.as_dict())
        return exported

    def _ports(self) -> tuple[list[Port], list[Port]]:
        return graph.ports(self._call, self._axes, self._references, self._read)

    def _notes(self) -> list[str]:
        notes = list(self._axes.notes)
        if self._call.left_out:
            notes.append(f"left out: {', '.join(self._call.left_out)} (a cache for generating)")
        if unread := [name for name in self._call.tensors if name not in self._read]:
            notes.append(f"no input: {', '.join(unread)}, which forward does not read")
        kept = [f"{name}={value!r}" for name, value in self._call.fixed.items()]
        if kept:
            notes.append(f"in the graph as in the example: {', '.join(kept)}")
        return notes

    def _checked(self) -> tuple[Path, list[Difference]]:
        """The file in full precision, right in all trials.

        Sizes at which the graph is wrong and torch is not, it keeps as the example has them.
        """
        file = self._folder / MODEL
        half = any(each.dtype in _HALF for each in self._module.parameters())
        tolerance = check.HALF_TOLERANCE if half else check.TOLERANCE
        while True:
            trials = inputs.trials(self._call, self._axes)
            self._references = list(check.expected(self._call, trials))
            self._write_graph(file)
            tell(f"checking it in onnxruntime on {len(self._references)} inputs")
            try:
                return file, check.compare(check.session(file), self._references, tolerance)
            except check.NotRun as error:
                raise NotInGraph(f"onnxruntime cannot load the graph: {error}") from error
            except SizeFailed as error:
                self._axes = self._axes.without_or_joined(error.axis, error.why)

    def _write_graph(self, file: Path) -> None:
        opset = self._settings.opset
        traced, axes = trace(self._module, self._call, self._axes, opset=opset, known=self._known)
        if axes is not self._axes:
            self._axes = axes
            self._references = [each for each in self._references if each.trial.axis is None]
        self._read = {each.name for each in traced.model.graph.input} & set(self._call.tensors)
        graph.finish(traced.model, *self._ports(), type(self._module).__name__, opset)
        tell("writing it")
        weights.write(traced.model, traced.weights, file, external=self._settings.external_data)
        self._check_form(file)

    def _check_form(self, file: Path) -> None:
        try:
            onnx.checker.check_model(str(file))
        except onnx.checker.ValidationError as error:
            said = str(error).strip().splitlines()[0]
            raise NotInGraph(
                f"what became of {type(self._module).__name__} in {file.name} is no valid graph at "
                f"opset {self._settings.opset} ({said}); try another opset"
            ) from error

    def _smaller(self, name: str) -> ExportedFile:
        tell(f"converting it to {name}")
        source, file = self._folder / MODEL, self._folder / f"model.{name}.onnx"
        {"fp16": quantize.to_fp16, "int8": quantize.to_int8}[name](source, file)
        self._check_form(file)
        try:
            found = check.differences(check.session(file), self._references)
        except check.NotRun as error:
            raise RuntimeError(
                f"onnxruntime cannot run the model in {name} ({error}); leave {name} out"
            ) from error
        return _form(name, file, found)


def _form(name: str, file: Path, found: list[Difference]) -> ExportedFile:
    worst = max(found, key=lambda each: each.relative)
    size = sum(each.stat().st_size for each in weights.files(file))
    largest = max(each.largest for each in found)
    at = f"{worst.output}, {worst.trial}"
    return ExportedFile(name, file.name, size, largest, worst.relative, at)
