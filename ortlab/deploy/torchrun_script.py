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
from ortlab.engines import compatibility, wrapped_models
from ortlab.settings import AUTO, IN_ORT, LOSSES, FinetuneSettings

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
    chosen = FinetuneSettings.of({**own, **FinetuneSettings.canonical(settings), **named})
    if (reason := compatibility.script_conflict(chosen)) is not None:
        raise ValueError(reason)
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
    workers = chosen.parallel.workers
    (folder / "job.sbatch").write_text(script_parts.job(workers))
    command = f"torchrun --standalone --nproc-per-node {workers} {shlex.quote(str(folder))}"
    return Script(
        folder / "train.py", f"{command}/train.py", tuple(writer.open), tuple(writer.notes)
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
            script_parts.learning_rate(settings.optim, steps),
            script_parts.optimizer(settings),
            script_parts.meeting(settings),
            script_parts.main(settings),
            'if __name__ == "__main__":\n    main()\n',
        ]
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _steps(self, data: Any) -> int | None:
        """Return the number of optimizer steps; None if it depends on data that is not given."""
        from ortlab.training.data_loading import batches  # heavy: torch
        from ortlab.training.schedule import total_steps  # heavy: torch

        if data is None:
            return self._settings.limits.max_steps
        return total_steps(batches(data, self._settings), self._settings)

    def _add_notes(self, steps: int | None) -> None:
        settings = self._settings
        if settings.model.engine in (AUTO, *IN_ORT):
            self.notes.append("the script trains in eager torch, without ONNX Runtime")
        if settings.parallel.zero_stage > 1:
            self.notes.append(
                "the script needs DeepSpeed (pip install deepspeed), which on a CPU compiles for a "
                "minute at its first start"
            )
        schedule = settings.optim.lr_scheduler_type
        if steps is None and schedule != "constant":
            self.notes.append(
                f"the learning rate is constant: the {schedule} schedule needs the number of "
                "steps; give max_steps=N (--max-steps N)"
            )

    def _loss_called(self, loss: Any) -> str | None:
        """Return the loss function as the script calls it; None for the model's own loss."""
        name = loss if isinstance(loss, str) else self._settings.optim.loss
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
