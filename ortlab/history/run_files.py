"""What a run's folder gives, of a run in training and of one that was opened again alike."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.history import entry, notes
from ortlab.history.run_folder import Metrics, RunFolder, in_checkpoints
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of a run. ``path`` is what ``resume_from`` takes; ``time`` is local."""

    name: str
    path: Path
    size_bytes: int
    time: datetime.datetime


class StoredRun:
    """A run by its folder. All is read when it is asked for; what is written is written at once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        """The run's name, unique among the runs that are kept: that of its folder."""
        return self._folder.name

    @property
    def folder(self) -> Path:
        """Where the run is kept; `ortlab.history.run_folder` describes the form."""
        return self._folder.path

    @property
    def began_with(self) -> dict[str, Any]:
        """The settings that the run began with, by name, as this or another version wrote them."""
        return self._folder.read_json("settings")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform and devices that the run began with; see `history.environment`."""
        return self._folder.read_json("environment")

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says of the run; see `ortlab.history.run_folder`."""
        return self._folder.read_json("run")

    @property
    def metrics(self) -> Metrics:
        """All steps, none merged, and all events; those of the last second may not be there yet."""
        return self._folder.read_metrics()

    @property
    def checkpoints(self) -> Table[StoredCheckpoint]:
        """The checkpoints in the run's folder, the newest last."""
        found = []
        for path in in_checkpoints(self.folder):
            # A file, or of a run on workers a folder; what begins with a dot is being written.
            if path.name.startswith(".") or path.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError):  # a run in another kernel has trimmed it
                size = entry.size_of(path) if path.is_dir() else path.stat().st_size
                written = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone()
                name = path.name.removesuffix(".safetensors")
                found.append(StoredCheckpoint(name, path, size, written))
        found.sort(key=lambda each: (each.time, each.name))
        return Table(found, _COLUMNS, empty=f"{self.name} has kept no checkpoint")

    @property
    def notes(self) -> tuple[notes.Note, ...]:
        """What was noted, the last one last."""
        return notes.read_notes(self.folder).notes

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the run has; ``%ort runs --tag`` chooses by one."""
        return notes.read_notes(self.folder).tags

    def note(self, text: str) -> None:
        """Keeps a note with the run; the last one stands in ``%ort runs``."""
        notes.add_note(self.folder, text)

    def tag(self, *tags: str) -> None:
        """Gives the run tags, words of letters, digits and ``. : / - _``."""
        for each in tags:
            notes.add_tag(self.folder, each)

    def untag(self, *tags: str) -> None:
        """Takes tags away."""
        for each in tags:
            notes.remove_tag(self.folder, each)

    def to_frame(self) -> pandas.DataFrame:
        """All steps as a pandas DataFrame: a row a step, indexed by it, a column a number.

        Columns are called as in `telemetry.COLUMNS`, without those that nothing is known of.
        RuntimeError where pandas is not installed.
        """
        from ortlab.history.exporters import frame

        return frame(self.metrics)

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Writes the run as TensorBoard's event files into ``folder``/NAME, and returns that.

        Every step has its own point, at its own time. ValueError where NAME is there already,
        RuntimeError where tensorboard is not installed.
        """
        from ortlab.history.exporters import write_tensorboard

        return write_tensorboard(self, Path(folder))

    def to_mlflow(self, experiment: str = "ortlab", *, tracking_uri: str | None = None) -> str:
        """Writes the run to MLflow and returns the id that it has there.

        It goes to the experiment of that name, at `tracking_uri` or where MLflow's own settings
        say: settings and versions as parameters, every step's numbers as metrics, tags and the
        last note. RuntimeError where mlflow is not installed, or does not take it.
        """
        from ortlab.history.exporters import write_mlflow

        return write_mlflow(self, experiment, tracking_uri)


_COLUMNS: Final = (
    Column[StoredCheckpoint]("checkpoint", lambda each: each.name),
    Column[StoredCheckpoint]("size", lambda each: memory(each.size_bytes), number=True),
    Column[StoredCheckpoint]("written", lambda each: f"{each.time:%Y-%m-%d %H:%M:%S}"),
    Column[StoredCheckpoint]("file", lambda each: str(each.path)),
)
