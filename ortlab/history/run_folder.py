"""The store of runs: one folder a run, settled here for everything that reads it later.

A root (`runs_root`) holds one folder a run, named after it; folders have mode 0700, files 0600.

    run.json          form, name, model, parameters, created; names: what the user calls model,
                      train, eval_data and loss, as far as that is known; continues: the run that
                      this one goes on with, whose steps its metrics begin with, or null; state
                      "running" from the start, at the end the final state with steps, error, result
    settings.json     the settings by name: ``FinetuneSettings.of`` takes them back
    environment.json  versions of Python and packages, platform, processors; no host, user or path
    metrics.jsonl     append-only, one JSON value a line:
                      an object {"form", "columns"}: the names of the numbers in the lines below it
                      an array: a step, null where a number is unknown
                      an object {"event", "step", "time_s", "text", "values"}: see `telemetry.Event`
    rank-N.jsonl      of a run on workers: the same of each rank
    notes.jsonl       append-only, what was said of the run: {"note", "time"}, {"tag"}, {"untag"}
    run.lock          empty; locked by the process that trains until the run is over
    checkpoints/      NAME.safetensors, or of a run on workers a folder NAME: see
                      `ortlab.checkpoint`; ``final`` is what a run ended with, the last good weights
                      among it; ``last-N`` and ``best``: see `ortlab.training.checkpoint_writer`
    charts.png        the charts, where a view showed them

A crash can tear the last line of metrics.jsonl and nothing else: readers skip lines that are not
whole, and who appends later begins on a line of its own and writes the columns again. Other files
are written beside their name, synced and renamed. JSON and safetensors only: reading runs no code.
"""

from __future__ import annotations

import contextlib
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
    """Where runs are kept: $ORTLAB_HOME/runs, else ortlab/runs in the user's data directory."""
    home = os.environ.get("ORTLAB_HOME")
    if home:
        return Path(home) / "runs"
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "ortlab" / "runs"


class RunFolder:
    """One run's folder; see the module for its form."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)

    @classmethod
    def create(cls, name: str | None = None, *, root: Path | None = None) -> RunFolder:
        """A new folder: ``run-1``, ``run-2``, ..., or `name`, numbered where that is taken."""
        root = root or runs_root()
        if name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError(f"name={name!r}: letters, digits, '.', '-' and '_' make a run's name")
        try:
            files.private(root)
            path = _new_folder(root, name)
            (path / "checkpoints").mkdir(mode=0o700)
        except OSError as error:
            raise RuntimeError(
                f"the run cannot be kept: {error}; ORTLAB_HOME names another folder for runs"
            ) from error
        return cls(path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def hold(self) -> None:
        """Says that this process works on the run, until `release` or the end of the process."""
        self._lock.acquire()

    def release(self) -> None:
        """Says that nobody works on the run any more."""
        self._lock.release()

    def held(self) -> bool:
        """Whether a living process works on the run, this one or another."""
        if not Path(self._lock.lock_file).exists():  # asking must not make it
            return False
        try:
            with _lock(self.path):
                return False
        except (filelock.Timeout, OSError):  # where it cannot be asked, nobody may take it away
            return True

    def write_json(self, file: str, values: Mapping[str, Any]) -> None:
        """Writes ``file``.json; NaN and infinity become null."""
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
        ended: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes run.json: with what is known when the run has `ended`, or while it goes on."""
        about = {
            "form": FORM,
            "name": self.name,
            "model": model,
            "parameters": parameters,
            "created": created,
            "state": state,
            "names": dict(names or {}),
            "continues": continues,
        }
        self.write_json("run", {**about, **(ended or {})})

    def read_json(self, file: str) -> dict[str, Any]:
        """What ``file``.json holds; OSError and ValueError as `folders.read_object` has them."""
        return files.read_object(self.path / f"{file}.json")

    def metrics(self, rank: int | None = None) -> MetricsFile:
        """A sink that appends to metrics.jsonl, or to that of a rank."""
        name = "metrics" if rank is None else f"rank-{rank}"
        return MetricsFile(self.path / f"{name}.jsonl")

    def read_metrics(self) -> Metrics:
        """Everything in metrics.jsonl that was written whole."""
        return read_metrics(self.path / "metrics.jsonl")

    def checkpoint_path(self, name: str = "final") -> Path:
        """The file of the checkpoint called `name`."""
        return self.path / "checkpoints" / f"{name}.safetensors"

    def read_checkpoint(self, name: str = "final") -> Checkpoint:
        """The checkpoint that was kept as `name`; ValueError as `Checkpoint.load` gives."""
        from ortlab.checkpoint.checkpoint import Checkpoint

        return Checkpoint.load(self.checkpoint_path(name))


def in_checkpoints(run: Path) -> list[Path]:
    """What lies in checkpoints/ of a run's folder, half-written ones too; nothing in a link.

    That leads to files that are not the run's.
    """
    folder = run / "checkpoints"
    with contextlib.suppress(OSError):
        return [] if folder.is_symlink() else list(folder.iterdir())
    return []


def _lock(path: Path) -> filelock.BaseFileLock:
    """The system lets go of it when its process dies, however that comes."""
    return filelock.FileLock(path / "run.lock", timeout=0, mode=0o600, thread_local=False)


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
        except FileExistsError:  # a name given twice, or another process was faster
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
# Nine digits give a float32 back; counts and bytes are whole.
_FORMATS = ["%.15g" if column.unit == "B" else "%.9g" for column in COLUMNS]


def _lines(rows: Rows) -> str:
    """A line for every step. NaN and infinity, which JSON lacks, become null.

    The writer's thread shares the interpreter with the training, so this is made to be cheap:
    json.dumps takes 9 microseconds a step, formats 3.5, and 2.8 where the columns that do not
    change in these rows, unknown ones among them, are formatted once.
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
    """Appends to a metrics file; a `telemetry.Sink`."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        # Open as long as the run is; without a buffer, which would keep what a full disk refused.
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115
        head = json.dumps(_HEAD).encode() + b"\n"
        # What was torn by a crash must not spoil the first line of now.
        if os.fstat(descriptor).st_size:
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":
                head = b"\n" + head
        self._append(head)

    def write(self, rows: Rows, events: Sequence[Event]) -> None:
        """See `telemetry.Sink.write`: handed to the system, so a crash of Python loses nothing.

        OSError where the disk takes only a part of it, which is taken away again.
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
        self._append((_lines(rows) + "".join(f"{line}\n" for line in lines)).encode())

    def _append(self, data: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """See `telemetry.Sink.close`: what was written is on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


@dataclass(frozen=True)
class Metrics:
    """What a metrics file tells. ``rows`` have the columns of `telemetry.COLUMNS`.

    ``torn`` counts the lines that were not written whole.
    """

    rows: Rows
    events: tuple[Event, ...]
    torn: int = 0


def read_metrics(path: Path) -> Metrics:
    """Everything in a metrics file that was written whole; columns unknown today are left out.

    A line that is no step and no event is torn, whoever wrote it.
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
    """The last steps of a metrics file, up to some hundred, without reading the others."""
    with open(path, "rb", opener=files.plain) as file:
        head = file.readline(_BLOCK)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _BLOCK, len(head)))
        # What is left of the line that the block begins in counts as torn.
        return _metrics(_read([head, *file.read().split(b"\n")])).rows


_BLOCK = 65536


def _values(path: Path) -> Iterator[Any]:
    """The JSON value of every line, None for one that is not whole, or has no end."""
    with open(path, "rb", opener=files.plain) as file:
        yield from _read(iter(lambda: file.readline(files.MOST_BYTES), b""))


def _read(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _numbers(lines: Sequence[Sequence[float | None]], width: int) -> Rows:
    """Lines of numbers as an array, null as NaN; those with something else in them are left out."""
    try:
        return np.array(lines, dtype=float).reshape(len(lines), width)
    except (TypeError, ValueError, OverflowError):
        if len(lines) == 1:
            return np.empty((0, width))
        return np.concatenate([_numbers([line], width) for line in lines])


def _columns(value: Any) -> list[str] | None:
    """The names of the numbers in the lines below; None where `value` does not say them."""
    names = value.get("columns") if isinstance(value, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return names


def _event(value: Any) -> Event | None:
    """The event that a line tells of, None where it tells of none."""
    try:
        numbers = {
            str(name): math.nan if number is None else float(number)
            for name, number in value["values"].items()
        }
        kind, text = str(value["event"]), str(value["text"])
        return Event(kind, int(value["step"]), float(value["time_s"]), text, numbers)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
