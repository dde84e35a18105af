"""Runs for other tools: pandas, TensorBoard's event files, MLflow; each with its own package.

The packages are optional and are imported when they are asked for.
"""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ortlab.metrics.recorder import COLUMNS, INDEX

if TYPE_CHECKING:
    import pandas

    from ortlab.history.notes import Note
    from ortlab.history.run_folder import Metrics
    from ortlab.metrics.recorder import Rows

_BATCH: Final = 1000
"""Metrics in one request to MLflow, and 100 parameters: as many as it takes."""
_PARAMETERS: Final = 100
_LONGEST: Final = 6000
"""Letters of a parameter's value that MLflow takes."""
_TAGS: Final = {
    "loss": "loss/train",
    "lr": "train/learning_rate",
    "epoch": "train/epoch",
    "grad_norm": "train/gradient_norm",
}
"""What TensorBoard shows a column under, where that is not its chart."""


class KeptRun(Protocol):
    """A run whose folder is read: what an exporter needs of it."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        ...

    @property
    def metrics(self) -> Metrics:
        """All steps and events."""
        ...

    @property
    def began_with(self) -> dict[str, Any]:
        """The settings that the run began with, by name."""
        ...

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform and devices that the run began with."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """The contents of run.json."""
        ...

    @property
    def notes(self) -> Sequence[Note]:
        """The notes, the last one last."""
        ...

    @property
    def tags(self) -> Sequence[str]:
        """The tags."""
        ...


def frame(metrics: Metrics) -> pandas.DataFrame:
    """See `Kept.to_frame`."""
    module = _needed("pandas")
    names = [column.name for column in _told(metrics.rows)]
    steps = module.Index(metrics.rows[:, INDEX["step"]].astype(int), name="step")
    rows = metrics.rows[:, [INDEX[name] for name in names]]
    found: pandas.DataFrame = module.DataFrame(rows, index=steps, columns=names)
    return found


def write_tensorboard(run: KeptRun, folder: Path) -> Path:
    """See `Kept.to_tensorboard`."""
    _needed("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    check_free(folder, [run.name])
    path = folder / run.name
    metrics, began_s = run.metrics, _began(run).timestamp()
    writer = EventFileWriter(str(path))
    try:
        # As it stands in a table of Markdown: what a user wrote in it stays text.
        for name, told in (("settings", run.began_with), ("environment", flat(run.environment))):
            lines = [f"| {_cell(key)} | {_cell(value)} |" for key, value in told.items()]
            text = "\n".join(["| | |", "| --- | --- |", *lines])
            writer.add_event(Event(wall_time=began_s, step=0, summary=text_pb(name, text)))
        for step, time_s, values in _points(metrics):
            tags = {_tag(name): value for name, value in values.items()}
            summary = Summary(
                value=[Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
            )
            writer.add_event(Event(wall_time=began_s + time_s, step=step, summary=summary))
    finally:
        writer.close()
    return path


def check_free(folder: Path, names: Iterable[str]) -> None:
    """ValueError where one of these runs was written into the folder before."""
    for name in names:
        if (folder / name).exists():
            raise ValueError(f"{folder / name} is there already; TensorBoard would draw it twice")


def write_mlflow(run: KeptRun, experiment: str, tracking_uri: str | None) -> str:
    """See `Kept.to_mlflow`."""
    _needed("mlflow", "mlflow-skinny")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    metrics, about = run.metrics, run.folder.name
    began_ms = round(1e3 * _began(run).timestamp())
    told = {f"settings.{name}": value for name, value in run.began_with.items()}
    told |= {f"environment.{name}": value for name, value in flat(run.environment).items()}
    parameters = [Param(name, str(value)[:_LONGEST]) for name, value in told.items()]
    points = [
        Metric(name, value, began_ms + round(1e3 * time_s), step)
        for step, time_s, values in _points(metrics)
        for name, value in values.items()
    ]
    tags = [RunTag(f"ortlab.{tag}", "yes") for tag in run.tags]
    if run.notes:
        tags.append(RunTag("mlflow.note.content", run.notes[-1].text))
    try:
        client = MlflowClient(tracking_uri=tracking_uri)
        known = client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else client.create_experiment(experiment)
        made: str = client.create_run(place, start_time=began_ms, run_name=about).info.run_id
        for first in range(0, len(parameters), _PARAMETERS):
            client.log_batch(made, params=parameters[first : first + _PARAMETERS])
        client.log_batch(made, tags=tags)
        for first in range(0, len(points), _BATCH):
            client.log_batch(made, metrics=points[first : first + _BATCH])
        state = _mlflow_state(run)
        ended_s = metrics.rows[-1, INDEX["time_s"]] if len(metrics.rows) else 0.0
        if state != "RUNNING":
            client.set_terminated(made, state, began_ms + round(1e3 * float(ended_s)))
    except MlflowException as error:
        raise RuntimeError(f"MLflow does not take {run.name}: {error}") from error
    return made


def _mlflow_state(run: KeptRun) -> str:
    from ortlab.history.entry import read_entry

    entry = read_entry(run.folder)
    state = entry.state if entry else ""
    known = {"finished": "FINISHED", "stopped": "KILLED", "running": "RUNNING"}
    return known.get(state, "FAILED")


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{before}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{before}{name}": value} if inner is None else inner
    return found


def _points(metrics: Metrics) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and the known numbers of each step, and of each evaluation."""
    columns = _told(metrics.rows)
    places = [INDEX[column.name] for column in columns]
    for row in metrics.rows.tolist():
        values = {c.name: row[at] for c, at in zip(columns, places, strict=True)}
        values.pop("time_s", None)
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        yield int(row[INDEX["step"]]), _or_zero(row[INDEX["time_s"]]), known
    for event in metrics.events:
        if event.kind == "eval":
            values = {f"held_out_{n}": v for n, v in event.values.items() if not math.isnan(v)}
            yield event.step, event.time_s, values


def _told(rows: Rows) -> list[Any]:
    """The columns, but for the step, that something is known of."""
    known = np.asarray(~np.isnan(rows).all(axis=0))
    return [c for c in COLUMNS if c.name != "step" and known[INDEX[c.name]]]


def _tag(name: str) -> str:
    if name.startswith("held_out_"):
        return f"{name.removeprefix('held_out_')}/held_out"
    column = COLUMNS[INDEX[name]]
    return _TAGS.get(name) or f"{column.chart or 'train'}/{name}"


def _began(run: KeptRun) -> datetime.datetime:
    created = str(run.about.get("created", ""))
    try:
        return datetime.datetime.fromisoformat(created)
    except ValueError:
        return datetime.datetime.fromtimestamp(0, datetime.UTC)


def _cell(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _needed(module: str, package: str = "") -> Any:
    package = package or module
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != module:
            raise  # it is there, and lacks something itself
        raise RuntimeError(f"{package} is not installed: pip install {package}") from None
