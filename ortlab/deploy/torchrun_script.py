"""The training of a run as a plain script for torchrun, with PyTorch and DeepSpeed, without ortlab.

The script takes the same steps as `ortlab.training.trainer` and
`ortlab.engines.distributed.data_parallel`: the same batches in the same order, split in the same
way, with the same learning rates.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.deploy import script_inputs, script_parts
from ortlab.deploy.lab import Lab
from ortlab.deploy.source_code import Sources
from ortlab.engines import wrapped_models
from ortlab.settings import IN_ORT, LOSSES, FinetuneSettings

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Script:
    """A written script.

    Attributes:
        path: Path of the script.
        command: Shell command that starts it.
        open: Descriptions of what the user must fill in before it runs.
        notes: Remarks.
    """

    path: Path
    command: str
    open: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"{self.path}: {self.command}"]
        lines += [f"fill in {each}" for each in self.open]
        return "\n".join([*lines, *self.notes])


def script(
    lab: Lab,
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    to: str | Path = "standalone",
    make_model: str | None = None,
    make_data: str | None = None,
    loss: Any = None,
    **settings: Any,
) -> Script:
    """See `ortlab.api.script`; `lab` knows which models are wrapped."""
    module = wrapped_models.check_model("the first argument", model)
    entry = lab.wrapped.entry(module)
    original = module if entry is None else entry.engine.unwrap(module)
    own = {} if entry is None else entry.settings.as_dict()
    named = {"loss": loss} if isinstance(loss, str) else {}
    chosen = FinetuneSettings.of({**own, **settings, **named})
    _refuse(chosen)
    folder = Path(to)
    if (folder / "train.py").exists():
        raise ValueError(f"{folder / 'train.py'} already exists; name another folder with to=...")
    sources = Sources(lab.wrapped.namespace or vars(sys.modules["__main__"]))
    for code in (make_model, make_data):
        if code is not None:
            sources.add_code(code)
    writer = _Writer(original, chosen, folder, sources, loss)
    folder.mkdir(parents=True, exist_ok=True)
    text = writer.text(data, make_model, make_data)
    (folder / "train.py").write_text(text)
    command = f"torchrun --standalone --nproc-per-node {chosen.workers} {shlex.quote(str(folder))}"
    return Script(
        folder / "train.py", f"{command}/train.py", tuple(writer.open), tuple(writer.notes)
    )


def _refuse(settings: FinetuneSettings) -> None:
    """Raise ValueError for settings that a plain script does not support."""
    if settings.reduction != "mean":
        raise ValueError(
            f"reduction={settings.reduction!r} needs ortlab, and a plain script does without it; "
            "choose reduction='mean'"
        )
    if settings.precision == "fp16":
        raise ValueError(
            "precision='fp16' needs loss scaling, which the script does not have; choose 'bf16'"
        )
    if settings.param_dtype != "fp32":
        raise ValueError(
            f"param_dtype={settings.param_dtype!r} is not supported, as the script trains fp32 "
            "weights; choose param_dtype='fp32', or add DeepSpeed's bf16 block to your own script"
        )
    if settings.offload_optimizer:
        raise ValueError(
            "offload_optimizer=True is not supported, as the script's optimizer runs on the "
            "device; choose offload_optimizer=False"
        )
    if settings.recompute != "off":
        raise ValueError(
            f"recompute={settings.recompute!r} needs ORT's graph, which the script does not have; "
            "choose recompute='off', and use torch.utils.checkpoint in the model"
        )
    if settings.zero_stage > 1 and (settings.precision == "bf16" or settings.engine == "compile"):
        what = "engine='compile'" if settings.engine == "compile" else "precision='bf16'"
        raise ValueError(
            f"{what} cannot be combined with zero_stage={settings.zero_stage}, as DeepSpeed "
            "compiles and casts on its own; choose engine='eager' and precision='fp32', or "
            "zero_stage=1"
        )
    if settings.optimizer == "lamb" and settings.zero_stage > 1:
        raise ValueError(
            f"optimizer='lamb' cannot be combined with zero_stage={settings.zero_stage}, as its "
            "trust ratios need whole tensors and DeepSpeed partitions them; choose zero_stage=1, "
            "or optimizer='adamw'"
        )


class _Writer:
    """Writer of one script; `open` and `notes` are as in `Script`."""

    def __init__(
        self,
        model: nn.Module,
        settings: FinetuneSettings,
        folder: Path,
        sources: Sources,
        loss: Any,
    ) -> None:
        self.open: list[str] = []
        self.notes: list[str] = []
        self._model = model
        self._settings = settings
        self._folder = folder
        self._sources = sources
        self._loss = self._loss_called(loss)

    def text(self, data: Any, make_model: str | None, make_data: str | None) -> str:
        """Return the script and write the files that it reads."""
        settings, sources = self._settings, self._sources
        model, no_arguments = script_inputs.model_code(
            self._model, self._folder, sources, make_model
        )
        steps = self._steps(data)
        reading, no_data = script_inputs.data_code(data, self._folder, make_data)
        self.open += [each for each in (no_arguments, no_data) if each is not None]
        self.open += [f"{name}, which the code uses" for name in sources.missing]
        self._add_notes(steps)
        parts = [
            script_parts.head(
                settings,
                model_name=type(self._model).__name__,
                steps=steps,
                imports=sources.imports,
            ),
            *[part for part in sources.definitions if part],
            model,
            reading,
            script_parts.batch_split(self._model, self._loss),
            script_parts.objective(self._loss),
            script_parts.learning_rate(settings, steps),
            script_parts.optimizer(settings),
            script_parts.main(settings),
            'if __name__ == "__main__":\n    main()\n',
        ]
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _steps(self, data: Any) -> int | None:
        """Return the number of optimizer steps; None if it depends on data that is not given."""
        from ortlab.training.data_loading import batches  # heavy: torch
        from ortlab.training.schedule import total_steps  # heavy: torch

        if data is None:
            return self._settings.max_steps
        return total_steps(batches(data, self._settings), self._settings)

    def _add_notes(self, steps: int | None) -> None:
        settings = self._settings
        if settings.engine in IN_ORT:
            self.notes.append("the script trains in eager torch, without ONNX Runtime")
        if settings.zero_stage > 1:
            self.notes.append(
                "the script needs DeepSpeed (pip install deepspeed), which on a CPU compiles for a "
                "minute at its first start"
            )
        if steps is None and settings.schedule != "constant":
            self.notes.append(
                f"the learning rate is constant: the {settings.schedule} schedule needs the number "
                "of steps; give --max-steps"
            )

    def _loss_called(self, loss: Any) -> str | None:
        """Return the loss function as the script calls it; None for the model's own loss."""
        name = loss if isinstance(loss, str) else self._settings.loss
        if loss is None and name is None:
            return None
        if isinstance(name, str):
            from ortlab.engines.losses import loss_function  # heavy: torch

            return f"functional.{loss_function(name).__name__}" if name in LOSSES else name
        called = getattr(loss, "__name__", "")
        if not called.isidentifier():
            raise ValueError(
                f"loss is a {type(loss).__name__} without a name; define a function with def"
            )
        self._sources.add(called, loss)
        return called
