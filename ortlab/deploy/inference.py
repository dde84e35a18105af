"""Export of a trained model for inference: graph, comparison with eager torch, and files."""

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
from ortlab.engines.batch import to_device
from ortlab.engines.losses import loss_function
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
    eval_dataset: Iterable[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    loss: str | LossFunction | None = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    **settings: Any,
) -> Exported | TrainingArtifacts:
    """See `ortlab.api.export`; `lab` knows the wrapped models and the batches they have seen."""
    chosen = ExportSettings.of(settings)
    function = loss_function(loss) if isinstance(loss, str) else loss
    given = wrapped_models.check_model("the first argument", model)
    target = Path(path).expanduser()
    folder.check(target)
    module = original(lab, given)
    if (busy := lab.training(module)) is not None and busy.state != "paused":
        raise ValueError(
            f"{busy.name} is training this model; wait until it ends, or pause it "
            f"(%ort pause {busy.name}), then export the model"
        )
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"this {type(module).__name__} is on the meta device, without weights; load them first"
        )
    if trainable is not None:
        if batch is None:
            raise ValueError("trainable needs a batch with its labels; give batch=...")
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
        raise ValueError(
            "loss has no effect without trainable=...: a graph for inference has no loss; leave it "
            "out"
        )
    example = examples.of(lab, given, module, batch)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    call = ModelCall.of(module, to_device(example, device))
    find = axes.tried
    if second is not None:
        other = ModelCall.of(module, to_device(examples.first(second), device))
        find = functools.partial(axes.of_two, other=other.tensors)
    with _evaluating(module), folder.filled(target) as made:
        exported = _Writer(module, call, find, chosen, made).write(eval_dataset)
    return exported.at(target)


def one_file(module: nn.Module, call: ModelCall, found: Axes, file: str | Path) -> None:
    """Write the inference graph of a model into one file, with the same check as `export`.

    If the check fails, an earlier file of that name is unchanged.

    Args:
        module: The model.
        call: The call to export.
        found: Sizes that vary.
        file: Where to write the graph.

    Raises:
        ValueError: If the weights have 2 GiB or more, which do not fit into one file, or if the
            folder does not exist.
    """
    target = Path(file)
    with tempfile.TemporaryDirectory(dir=_parent(target)) as scratch, _evaluating(module):
        made = Path(scratch)
        _Writer(module, call, lambda _: found, ExportSettings(), made).write(None)
        if (data := made / f"{MODEL}.data").exists():
            raise ValueError(
                f"the weights do not fit into one file ({data.stat().st_size} bytes); use "
                "ortlab.export, which writes a folder"
            )
        (made / MODEL).replace(target)


def _parent(file: Path) -> Path:
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"{file} cannot be a file; name a file in an existing folder")
    return file.parent


def original(lab: Lab, model: nn.Module) -> nn.Module:
    """Return the user's module inside the wrapper of an engine, ORTModule or torch.compile.

    Args:
        lab: The session, which knows the wrapped models.
        model: A wrapped or a plain model.
    """
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
    """Set a module to evaluation mode, and restore its modes, buffers and attributes at the end."""
    with undisturbed(module):
        module.eval()
        yield


class _Writer:
    """Writer of one export into an existing folder."""

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
                    f"the export calls forward with {', '.join(self._call.tensors)} only"
                )
                raise
        self._known = frozenset(known)
        tell(f"determining which sizes of {', '.join(self._call.tensors)} may vary")
        self._axes = found(self._call)
        self._references: list[Expected] = []
        self._read: set[str] = set()
        """Names of the graph's inputs: the tensors that forward reads."""

    def write(self, eval_dataset: Iterable[Any] | None) -> Exported:
        """Write the model's files, the README and the manifest."""
        file, found = self._checked()
        ports = self._ports()
        forms = [_form("fp32", file, found)]
        forms += [self._smaller(name) for name in ("fp16", "int8") if getattr(self._settings, name)]
        if eval_dataset is not None:
            forms = accuracy.measured(self._call, self._folder, forms, eval_dataset)
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
            notes.append(f"not exported: {', '.join(self._call.left_out)} (a cache for generation)")
        if unread := [name for name in self._call.tensors if name not in self._read]:
            notes.append(f"not an input: {', '.join(unread)}, which forward does not read")
        kept = [f"{name}={value!r}" for name, value in self._call.fixed.items()]
        if kept:
            notes.append(f"constant in the graph: {', '.join(kept)}")
        return notes

    def _checked(self) -> tuple[Path, list[Difference]]:
        """Write the file in full precision and compare it with torch in all trials.

        A size at which only the graph is wrong is fixed to the example's.
        """
        file = self._folder / MODEL
        half = any(each.dtype in _HALF for each in self._module.parameters())
        tolerance = check.HALF_TOLERANCE if half else check.TOLERANCE
        while True:
            trials = inputs.trials(self._call, self._axes)
            self._references = list(check.expected(self._call, trials))
            self._write_graph(file)
            tell(f"checking the graph in onnxruntime on {len(self._references)} inputs")
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
        tell("writing the graph")
        weights.write(traced.model, traced.weights, file, external=self._settings.external_data)
        self._check_form(file)

    def _check_form(self, file: Path) -> None:
        try:
            onnx.checker.check_model(str(file))
        except onnx.checker.ValidationError as error:
            said = str(error).strip().splitlines()[0]
            raise NotInGraph(
                f"the graph of {type(self._module).__name__} in {file.name} is not valid at opset "
                f"{self._settings.opset} ({said}); try another opset"
            ) from error

    def _smaller(self, name: str) -> ExportedFile:
        tell(f"converting the graph to {name}")
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
