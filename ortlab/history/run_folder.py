"""Format of a run's folder on disk, with its reader and writer.

The root (`runs_root`) contains one folder per run, named after it. Folders have mode 0700, files
0600.

    run.json          form, name, model, parameters, created; names: the user's variables of model,
                      train, eval_dataset and loss, if known; continues: the run that this one
                      continues, whose steps its metrics begin with, or null; resumed: where it
                      resumes from, in words; engine_asked: "auto" or the engine that the user
                      named; state: "running" from the start, and at the end the final state with
                      steps, error and result
    settings.json     settings by name, as ``FinetuneSettings.of`` accepts them
    environment.json  versions of Python and packages, platform, processors; no host, user or path
    metrics.jsonl     append-only, one JSON value per line:
                      an object {"form", "columns"}: names of the numbers in the lines below it
                      an array: a step, with null for unknown numbers
                      an object {"event", "step", "time_s", "text", "values"}: an event, see
                      `ortlab.metrics.recorder.Event`
    rank-N.jsonl      the same for each rank of a run on several workers
    notes.jsonl       append-only, notes and tags: {"note", "time"}, {"tag"}, {"untag"}
    run.lock          empty; locked by the process that trains the run until it is over
    checkpoints/      NAME.safetensors, or a folder NAME of a run on several workers, see
                      `ortlab.checkpoint`; ``final`` is the state at the end of the run, with the
                      last good weights; for ``last-N`` and ``best`` see
                      `ortlab.training.checkpoint_writer`
    initial-X.safetensors  weights of the model from before its first run in this process, as long
                      as the model exists there; see `ortlab.training.initial_weights`
    charts.png        the charts, if a view showed them

A crash can only truncate the last line of metrics.jsonl. Readers skip incomplete lines; a later
writer starts a new line and writes the columns again. All other files are written to a temporary
name, synced and renamed. All data is JSON or safetensors, so reading it never runs code.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from ortlab.metrics.recorder import COLUMNS, Event, Rows, State
from ortlab.utils import files
from ortlab.utils.files import write_private

if TYPE_CHECKING:
    from ortlab.checkpoint.checkpoint import Checkpoint

FORM = 1


def runs_root() -> Path:
    """Return the folder of all runs: $ORTLAB_HOME/runs, or ortlab/runs in the user's data folder.

    The user's data folder is $XDG_DATA_HOME, or ~/.local/share.
    """
    home = os.environ.get("ORTLAB_HOME")
    if home:
        return Path(home) / "runs"
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "ortlab" / "runs"


def private_home() -> Path:
    """Return the folder that contains `runs_root`, created for this user only."""
    return files.private(runs_root().parent)


class RunFolder:
    """Folder of one run; the module describes its format.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = files.owners_lock(path / "run.lock")

    @classmethod
    def create(cls, name: str | None = None, *, root: Path | None = None) -> RunFolder:
        """Create the folder of a new run.

        Args:
            name: Name of the run, which gets a number if it is taken; None gives ``run-1``,
                ``run-2`` and so on.
            root: Folder of the runs; None is `runs_root`.

        Raises:
            ValueError: `name` contains other characters than letters, digits, ".", "-" and "_", or
                is longer than 100 characters.
            RuntimeError: The folder cannot be created.
        """
        root = root or runs_root()
        if name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError(
                f"name={name!r} is not a run's name; use up to 100 letters, digits, '.', '-' and "
                "'_', beginning with a letter, digit or '_'"
            )
        try:
            files.private(root)
            path = _new_folder(root, name)
            (path / "checkpoints").mkdir(mode=0o700)
        except OSError as error:
            raise _not_created(error) from error
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    def hold(self) -> None:
        """Lock the run for this process, until `release` or the end of the process.

        Raises:
            RuntimeError: The lock's file cannot be created.
        """
        try:
            self._lock.acquire()
        except OSError as error:
            raise _not_created(error) from error

    def release(self) -> None:
        """Release the lock of the run."""
        self._lock.release()

    def held(self) -> bool:
        """Return True if this or another process has locked the run."""
        if not Path(self._lock.lock_file).exists():  # the check must not create it
            return False
        try:
            with files.owners_lock(self.path / "run.lock"):
                return False
        except (filelock.Timeout, OSError):  # an error counts as locked, to be safe
            return True

    def write_json(self, file: str, values: Mapping[str, Any]) -> None:
        """Write ``file``.json; NaN and infinity become null.

        Args:
            file: Name of the file without its suffix.
            values: The content.
        """
        text = json.dumps(_plain(values), indent=2, allow_nan=False) + "\n"
        write_private(self.path / f"{file}.json", text.encode())

    def write_about(
        self,
        *,
        model: str,
        parameters: int,
        created: str,
        state: State,
        names: Mapping[str, str] | None = None,
        continues: str | None = None,
        resumed: str = "",
        engine_asked: str = "",
        ended: Mapping[str, Any] | None = None,
    ) -> None:
        """Write run.json, at the start or the end of the run.

        Args:
            model: Class of the model.
            parameters: Number of parameters.
            created: Time of the start, in UTC and ISO 8601.
            state: State of the run.
            names: The user's variables of model, data and loss.
            continues: Name of the run that this one continues.
            resumed: Where the run resumes from, in words; "" for a new run.
            engine_asked: Engine that the user asked for.
            ended: Further content at the end of the run, such as its result.
        """
        about = {
            "form": FORM,
            "name": self.name,
            "model": model,
            "parameters": parameters,
            "created": created,
            "state": state,
            "names": dict(names or {}),
            "continues": continues,
            "resumed": resumed,
            "engine_asked": engine_asked,
        }
        self.write_json("run", {**about, **(ended or {})})

    def read_json(self, file: str) -> dict[str, Any]:
        """Read ``file``.json.

        Args:
            file: Name of the file without its suffix.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is damaged.
        """
        return files.read_object(self.path / f"{file}.json")

    def metrics(self, rank: int | None = None) -> MetricsFile:
        """Return a sink that appends to metrics.jsonl, or to the file of a rank.

        Args:
            rank: Number of the rank; None is the run.
        """
        name = "metrics" if rank is None else f"rank-{rank}"
        return MetricsFile(self.path / f"{name}.jsonl")

    def read_metrics(self) -> Metrics:
        """Read all complete lines of metrics.jsonl."""
        return read_metrics(self.path / "metrics.jsonl")

    def checkpoint_path(self, name: str = "final") -> Path:
        """Return the path of a checkpoint file.

        Args:
            name: Name of the checkpoint.
        """
        return self.path / "checkpoints" / f"{name}.safetensors"

    def read_checkpoint(self, name: str = "final") -> Checkpoint:
        """Load a checkpoint of the run.

        Args:
            name: Name of the checkpoint.

        Raises:
            ValueError: The checkpoint is missing or damaged; see `Checkpoint.load`.
        """
        from ortlab.checkpoint.checkpoint import Checkpoint  # heavy: torch

        return Checkpoint.load(self.checkpoint_path(name))


def told_taken(name: str, wanted: str | None) -> str:
    """Return a line about the number that a run's name got.

    Args:
        name: Name of the run.
        wanted: Name that the user gave; None for none.

    Returns:
        The line; "" if the run has the name that was wanted.
    """
    if wanted in (None, name):
        return ""
    return f"the run is called {name}, because there is a run {wanted} already"


def _not_created(error: OSError) -> RuntimeError:
    return RuntimeError(
        f"the run's folder cannot be created: {error}; set ORTLAB_HOME to another folder"
    )


def in_checkpoints(run: Path) -> list[Path]:
    """Return the entries of checkpoints/ in a run's folder, including incomplete ones.

    If checkpoints/ is a link, nothing is returned, since its files are not the run's.

    Args:
        run: Folder of the run.
    """
    folder = run / "checkpoints"
    with contextlib.suppress(OSError):
        return [] if folder.is_symlink() else list(folder.iterdir())
    return []


def _new_folder(root: Path, name: str | None) -> Path:
    stem = name or "run"
    number = 1 if name is None else 0
    taken = re.compile(rf"{re.escape(stem)}-(\d+)")
    if name is None:
        matches = (taken.fullmatch(entry.name) for entry in root.iterdir())
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
    while True:
        path = root / (f"{stem}-{number}" if number else stem)
        try:
            path.mkdir(mode=0o700)
            return path
        except FileExistsError:  # the name is taken, or another process was faster
            number = number + 1 if number else 2


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_HEAD = {"form": FORM, "columns": [column.name for column in COLUMNS]}
# Nine digits represent a float32 exactly; counts and bytes are integers.
_FORMATS = ["%.15g" if column.unit == "B" else "%.9g" for column in COLUMNS]


def _lines(rows: Rows) -> str:
    """Format steps as lines; NaN and infinity, which JSON lacks, become null.

    The writer thread shares the interpreter with the training, so this is optimized: json.dumps
    takes 9 microseconds per step, format strings take 3.5, and 2.8 if columns that are constant or
    unknown in these rows are formatted only once.
    """
    if not len(rows):
        return ""
    moves = ~((rows == rows[0]) | np.isnan(rows) & np.isnan(rows[0])).all(axis=0)
    line = "[{}]\n".format(
        ",".join(
            form if moving else form % value
            for form, moving, value in zip(_FORMATS, moves, rows[0].tolist(), strict=True)
        )
    )
    text = "".join([line % tuple(row) for row in rows[:, moves].tolist()])
    return text.replace("nan", "null").replace("-inf", "null").replace("inf", "null")


class MetricsFile:
    """Sink that appends to a metrics file (see `ortlab.metrics.recorder.Sink`).

    Args:
        path: The file, which is created if it does not exist; by `write` if that fails before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):  # a full disk: `write` raises it as long as it lasts
            self._file = self._opened()

    def _opened(self) -> io.FileIO:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        # Open until the run ends. Unbuffered: a buffer would retain data that a full disk refused.
        file = io.FileIO(descriptor, "ab")
        head = json.dumps(_HEAD).encode() + b"\n"
        # A line that a crash truncated must not damage the first new line.
        if os.fstat(descriptor).st_size:
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":
                head = b"\n" + head
        try:
            _append(file, head)
        except OSError:
            file.close()
            raise
        return file

    def write(self, rows: Rows, events: Sequence[Event]) -> None:
        """See `ortlab.metrics.recorder.Sink.write`.

        The data is passed to the system, so a crash of Python loses nothing. If only a part can be
        written, it is removed again before OSError is raised.
        """
        lines = [
            json.dumps(
                {
                    "event": event.kind,
                    "step": event.step,
                    "time_s": round(event.time_s, 3),
                    "text": event.text,
                    "values": _plain(event.values),
                }
            )
            for event in events
        ]
        if self._file is None:
            self._file = self._opened()
        _append(self._file, (_lines(rows) + "".join(f"{line}\n" for line in lines)).encode())

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()


def _append(file: io.FileIO, data: bytes) -> None:
    before = os.fstat(file.fileno()).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(before)
        raise


@dataclass(frozen=True)
class Metrics:
    """Content of a metrics file.

    Attributes:
        rows: Steps of shape [steps, len(`ortlab.metrics.recorder.COLUMNS`)].
        events: Events.
        torn: Number of incomplete or invalid lines.
    """

    rows: Rows
    events: tuple[Event, ...]
    torn: int = 0


def read_metrics(path: Path) -> Metrics:
    """Read all complete lines of a metrics file.

    Unknown columns are left out. A line that is neither a step nor an event counts as torn.

    Args:
        path: The file.
    """
    return _metrics(_values(path))


def _metrics(values: Iterable[Any]) -> Metrics:
    index = {column.name: place for place, column in enumerate(COLUMNS)}
    blocks: list[Rows] = []
    lines: list[list[float | None]] = []
    events: list[Event] = []
    places: list[int | None] = []
    torn = 0

    def finish_block() -> None:
        nonlocal torn
        numbers = _numbers(lines, len(places))
        torn += len(lines) - len(numbers)
        rows = np.full((len(numbers), len(COLUMNS)), np.nan)
        for source, place in enumerate(places):
            if place is not None:
                rows[:, place] = numbers[:, source]
        blocks.append(rows)
        lines.clear()

    for value in values:
        if isinstance(value, list) and len(value) == len(places):
            lines.append(value)
        elif (names := _columns(value)) is not None:
            finish_block()
            places = [index.get(name) for name in names]
        elif (event := _event(value)) is not None:
            events.append(event)
        else:
            torn += 1
    finish_block()
    return Metrics(np.concatenate(blocks), tuple(events), torn)


def read_last(path: Path) -> Rows:
    """Read the last steps of a metrics file, up to a few hundred, without reading the rest.

    Args:
        path: The file.

    Returns:
        Steps of shape [steps, len(`ortlab.metrics.recorder.COLUMNS`)].
    """
    with open(path, "rb", opener=files.plain) as file:
        head = file.readline(_BLOCK)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _BLOCK, len(head)))
        # The rest of the line in which the block begins counts as torn.
        return _metrics(_read([head, *file.read().split(b"\n")])).rows


_BLOCK = 65536


def _values(path: Path) -> Iterator[Any]:
    """Yield the JSON value of every line; None for an incomplete or overlong line."""
    with open(path, "rb", opener=files.plain) as file:
        yield from _read(iter(lambda: file.readline(files.MOST_BYTES), b""))


def _read(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _numbers(lines: Sequence[Sequence[float | None]], width: int) -> Rows:
    """Convert lines of numbers to an array, null to NaN; lines with other values are skipped."""
    try:
        return np.array(lines, dtype=float).reshape(len(lines), width)
    except (TypeError, ValueError, OverflowError):
        if len(lines) == 1:
            return np.empty((0, width))
        return np.concatenate([_numbers([line], width) for line in lines])


def _columns(value: Any) -> list[str] | None:
    """Return the column names in `value`; None if it has none."""
    names = value.get("columns") if isinstance(value, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return names


def _event(value: Any) -> Event | None:
    """Return the event in `value`; None if it is not an event."""
    try:
        numbers = {
            str(name): math.nan if number is None else float(number)
            for name, number in value["values"].items()
        }
        kind, text = str(value["event"]), str(value["text"])
        return Event(kind, int(value["step"]), float(value["time_s"]), text, numbers)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
