"""Weights of a model from before its first run in this process, and whether a run continues others.

They are a file in the folder of that run, which is removed when the model or the process ends.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors
import torch
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint, Position
from ortlab.checkpoint.checks import check_model
from ortlab.history.entry import read_entry
from ortlab.history.run_folder import RunFolder
from ortlab.training.checkpoint_writer import remove
from ortlab.utils.process_memory import memory
from ortlab.utils.rng import RandomStates

MOST_BYTES: Final = 1024**3
"""Weights that take more are not saved: few start afresh, and all would wait for the disk."""
_COMPARED: Final = 8
"""Parameters that tell whether a model still has the weights of a run, the smallest ones."""


def save(model: nn.Module, folder: Path) -> Path:
    """Write the weights and buffers of a model, for as long as it exists in this process.

    Args:
        model: The model.
        folder: Folder of the run that is about to train it.

    Returns:
        The file. Its name is its own, because another run may get the name of a removed one.

    Raises:
        NotSaved: The file cannot be written.
        ValueError: The state of the model contains an object that no file stores, or is too large.
    """
    state = model.state_dict()
    size = sum(value.nbytes for value in state.values() if torch.is_tensor(value))
    if size > MOST_BYTES:
        raise ValueError(
            f"the weights take {memory(size)}, and at most {memory(MOST_BYTES)} are saved"
        )
    start = Position(0, 0, 0, None, "samples", -1, RandomStates.now(), None, 0)
    file = folder / f"initial-{uuid.uuid4().hex[:8]}.safetensors"
    Checkpoint(state, {}, start, {}).save(file)
    weakref.finalize(model, _remove, file, os.getpid())
    return file


def _remove(file: Path, process: int) -> None:
    if os.getpid() == process:  # not a copy of the process that a loader forked
        remove(file)


def load(model: nn.Module, file: Path | None) -> Checkpoint:
    """Return the weights that `save` wrote, checked against the model.

    Args:
        model: The model; it does not change.
        file: The file; None if there is none.

    Raises:
        ValueError: If the file is gone or damaged, or the model has other parameters by now.
    """
    if file is None or not file.exists():
        raise ValueError(
            "fresh: the weights from before the first run of this model are gone with its folder, "
            "or could not be saved; create the model again"
        )
    found = Checkpoint.load(file)
    check_model(found.model, model.state_dict())
    return found


@dataclass(frozen=True)
class Trained:
    """Run that has changed the weights of a model.

    Attributes:
        folder: Folder of the run.
        steps: Steps that it had done at its end; None if its folder was removed.
    """

    folder: Path
    steps: int | None

    def __str__(self) -> str:
        """Return what the run did, by its name."""
        steps = "" if self.steps is None else f" ({self.steps:,} steps)"
        return f"{self.folder.name} trained{steps}"


def trained_by(folders: Sequence[Path]) -> Trained | None:
    """Return the last run that has changed the weights of a model; None without one.

    Args:
        folders: Folders of the runs of the model, in order.
    """
    for folder in reversed(folders):
        entry = read_entry(folder)
        if entry is None or entry.steps:
            return Trained(folder, None if entry is None else entry.steps)
    return None


def are_of(run: Trained, model: nn.Module) -> bool:
    """Return whether a model still has the weights from the end of a run, as far as is known.

    Args:
        run: The run.
        model: The model.
    """
    weights = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    smallest = sorted(weights, key=lambda each: each[1].numel())[:_COMPARED]
    file = RunFolder(run.folder).checkpoint_path("final")
    if not file.is_file():  # of several workers, or removed
        return True
    try:
        with safetensors.safe_open(file, "pt") as saved:
            known = set(saved.keys())
            return all(
                torch.equal(saved.get_tensor(name), parameter.detach().cpu())
                for name, parameter in smallest
                if name in known
            )
    except (OSError, RuntimeError, safetensors.SafetensorError):
        return True
