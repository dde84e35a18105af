"""Access to the data in a run's folder, for active runs and for stored ones."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.history import entry, notes
from ortlab.history.exporters import frame, write_mlflow, write_tensorboard
from ortlab.history.run_folder import Metrics, RunFolder, in_checkpoints
from ortlab.history.run_result import RunResult
from ortlab.settings import FinetuneSettings, config_file, stored, unknown_name
from ortlab.utils.errors import brief
from ortlab.utils.files import write_private
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class StoredCheckpoint:
    """Checkpoint of a run.

    Attributes:
        name: Name of the checkpoint.
        path: Its path, which ``resume_from`` accepts.
        size_bytes: Its size.
        time: Local time at which it was written.
    """

    name: str
    path: Path
    size_bytes: int
    time: datetime.datetime


class StoredRun:
    """Run with a folder; its data is read on access, and changes are written immediately.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        """Name of the run and of its folder, unique among the stored runs."""
        return self._folder.name

    @property
    def folder(self) -> Path:
        """Folder of the run; `ortlab.history.run_folder` describes its format."""
        return self._folder.path

    @property
    def began_with(self) -> dict[str, Any]:
        """Initial settings of the run by name; another version may have had others."""
        return stored.current(self._folder.read_json("settings"))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform and devices at the start of the run.

        See `ortlab.utils.environment.environment`.
        """
        return self._folder.read_json("environment")

    @property
    def about(self) -> dict[str, Any]:
        """Content of run.json; see `ortlab.history.run_folder`."""
        return self._folder.read_json("run")

    @property
    def metrics(self) -> Metrics:
        """All steps, unmerged, and all events; those of the last second may be missing."""
        return self._folder.read_metrics()

    @brief
    def result(self) -> RunResult:
        """Return the result of the run.

        Raises:
            ValueError: The run has not ended, or its process ended before it.
        """
        if (values := self.about.get("result")) is None:
            told = "it has not ended, or its process ended before it"
            raise ValueError(f"{self.name} has no result: {told}")
        return RunResult.of(values)

    @property
    def checkpoints(self) -> Table[StoredCheckpoint]:
        """Checkpoints in the run's folder, from oldest to newest."""
        found = []
        for path in in_checkpoints(self.folder):
            # A file, or a folder if the run has several workers; names with a leading dot are
            # still being written.
            if path.name.startswith(".") or path.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError):  # a run in another kernel has removed it
                size = entry.size_of(path) if path.is_dir() else path.stat().st_size
                written = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone()
                name = path.name.removesuffix(".safetensors")
                found.append(StoredCheckpoint(name, path, size, written))
        found.sort(key=lambda each: (each.time, *_order(each.name)))
        return Table(found, _COLUMNS, empty=f"{self.name} has no checkpoint")

    @brief
    def weights(self, checkpoint: str = "best") -> dict[str, Any]:
        """Return the weights and buffers of a checkpoint, for ``model.load_state_dict``.

        Args:
            checkpoint: Name of the checkpoint, as in `checkpoints`: "best", which ``keep_best``
                saves, "final", or another.

        Raises:
            ValueError: The run has no such checkpoint, or it is damaged.

        Example:
            >>> model.load_state_dict(run.weights("best"))
        """
        from ortlab.checkpoint.checkpoint import Checkpoint  # heavy: torch

        known = {each.name: each.path for each in self.checkpoints}
        if checkpoint not in known:
            told = unknown_name(checkpoint, known) if known else "it has none"
            wanted = self.began_with.get("keep_best")
            if checkpoint == "best" and wanted:
                told += f"; no evaluation after the first step had a value of {wanted}"
            elif checkpoint == "best":
                told += "; keep_best='loss' (--keep-best loss) keeps that of the best evaluation"
            raise ValueError(f"{self.name} has no checkpoint {checkpoint!r}: {told}")
        return dict(Checkpoint.load(known[checkpoint]).model)

    @property
    def notes(self) -> tuple[notes.Note, ...]:
        """Notes on the run, from oldest to newest."""
        return notes.read_notes(self.folder).notes

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run; ``%ort runs --tag`` filters by a tag."""
        return notes.read_notes(self.folder).tags

    @brief
    def note(self, text: str) -> None:
        """Add a note to the run; ``%ort runs`` shows the last one.

        Args:
            text: The note.

        Raises:
            ValueError: The note is empty.
        """
        notes.add_note(self.folder, text)

    @brief
    def tag(self, *tags: str) -> None:
        """Add tags to the run.

        Args:
            *tags: Words of up to 40 letters, digits and ``. : / - _``.

        Raises:
            ValueError: A tag contains other characters or is too long.
        """
        for each in tags:
            notes.add_tag(self.folder, each)

    def untag(self, *tags: str) -> None:
        """Remove tags from the run.

        Args:
            *tags: The tags; those that the run does not have are ignored.
        """
        for each in tags:
            notes.remove_tag(self.folder, each)

    @brief
    def save_config(self, path: str | Path | None = None) -> Path:
        """Write the settings that the run began with to a TOML file, without the defaults.

        ``%ort finetune model data --config run-3.toml`` and ``ortlab.finetune(..., config=path)``
        start a run with the same settings. A loss function of your own is no setting: the file
        says that it must be given again.

        Args:
            path: The file, which is replaced; None for one in the current folder that is named
                after the run.

        Returns:
            The path of the file.

        Raises:
            ValueError: Another version of ortlab with different settings wrote the run.
            RuntimeError: The file cannot be written.
        """
        file = Path(f"{self.name}.toml" if path is None else path).expanduser()
        text = config_file.text(FinetuneSettings.of(self.began_with), run=self.name)
        try:
            write_private(file, text.encode())
        except OSError as error:
            raise RuntimeError(f"the settings cannot be written to {file}: {error}") from error
        return file

    def to_frame(self) -> pandas.DataFrame:
        """Return all steps as a pandas DataFrame.

        Returns:
            A row per step, indexed by step, and a column per metric, named as in
            `ortlab.metrics.recorder.COLUMNS`. Columns without known values are left out.

        Raises:
            RuntimeError: pandas is not installed.
        """
        return frame(self.metrics)

    @brief
    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write the run as TensorBoard event files.

        Every step is a point at its own time.

        Args:
            folder: Parent folder; the files are written to a folder in it that is named after the
                run.

        Returns:
            The folder of the run.

        Raises:
            ValueError: The folder of the run exists already.
            RuntimeError: tensorboard is not installed.
        """
        return write_tensorboard(self, Path(folder))

    def to_mlflow(self, experiment: str = "ortlab", *, tracking_uri: str | None = None) -> str:
        """Write the run to MLflow.

        Settings and versions are written as parameters and the steps as metrics, with the tags and
        the last note.

        Args:
            experiment: Name of the experiment, which is created if it does not exist.
            tracking_uri: Tracking server; None uses MLflow's own configuration.

        Returns:
            The ID of the run in MLflow.

        Raises:
            RuntimeError: mlflow is not installed, or refuses the run.
        """
        return write_mlflow(self, experiment, tracking_uri)


_COLUMNS: Final = (
    Column[StoredCheckpoint]("checkpoint", lambda each: each.name),
    Column[StoredCheckpoint]("size", lambda each: memory(each.size_bytes), number=True),
    Column[StoredCheckpoint]("written", lambda each: f"{each.time:%Y-%m-%d %H:%M:%S}"),
    Column[StoredCheckpoint]("file", lambda each: str(each.path)),
)


def _order(name: str) -> tuple[bool, int]:
    """Return the order of checkpoints whose files have the same time, in ticks of the system."""
    number = name.removeprefix(name.rstrip("0123456789"))
    return name == "final", int(number or 0)
