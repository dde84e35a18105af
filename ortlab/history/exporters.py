"""Export of runs to pandas, TensorBoard and MLflow.

Their packages are optional and are imported on use.
"""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ortlab.history.entry import read_entry
from ortlab.metrics.recorder import COLUMNS, INDEX

if TYPE_CHECKING:
    import pandas

    from ortlab.history.notes import Note
    from ortlab.history.run_folder import Metrics
    from ortlab.metrics.recorder import Rows

_BATCH: Final = 1000
"""Maximum number of metrics in a request to MLflow; of parameters it is 100."""
_PARAMETERS: Final = 100
_LONGEST: Final = 6000
"""Maximum length of a parameter's value in MLflow."""
_EVALUATION: Final = "evaluation"
"""Prefix of the metrics of evaluations."""
_TAGS: Final = {
    "loss": "loss/train",
    "lr": "train/learning_rate",
    "epoch": "train/epoch",
    "grad_norm": "train/gradient_norm",
}
"""TensorBoard tags of the columns whose tag is not derived from their chart."""


class KeptRun(Protocol):
    """Stored run, as an exporter needs it."""

    @property
    def name(self) -> str:
        """Name of the run."""
        ...

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        ...

    @property
    def metrics(self) -> Metrics:
        """All steps and events."""
        ...

    @property
    def began_with(self) -> dict[str, Any]:
        """Initial settings of the run, by name."""
        ...

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, platform and devices at the start of the run."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """Content of run.json."""
        ...

    @property
    def notes(self) -> Sequence[Note]:
        """Notes, from oldest to newest."""
        ...

    @property
    def tags(self) -> Sequence[str]:
        """Tags of the run."""
        ...


def frame(metrics: Metrics) -> pandas.DataFrame:
    """See `StoredRun.to_frame`."""
    module = _needed("pandas")
    names = [column.name for column in _told(metrics.rows)]
    steps = module.Index(metrics.rows[:, INDEX["step"]].astype(int), name="step")
    rows = metrics.rows[:, [INDEX[name] for name in names]]
    found: pandas.DataFrame = module.DataFrame(rows, index=steps, columns=names)
    return found


def write_tensorboard(run: KeptRun, folder: Path) -> Path:
    """See `StoredRun.to_tensorboard`."""
    _needed("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event  # optional: tensorboard
    from tensorboard.compat.proto.summary_pb2 import Summary  # optional: tensorboard
    from tensorboard.plugins.text.summary import text_pb  # optional: tensorboard
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # optional

    check_free(folder, [run.name])
    path = folder / run.name
    metrics, began_s = run.metrics, _began(run).timestamp()
    writer = EventFileWriter(str(path))
    try:
        # Escaped for a Markdown table, so that the user's text stays text.
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
    """Check that none of the runs has been written to a TensorBoard folder before.

    Args:
        folder: Folder of the event files.
        names: Names of the runs.

    Raises:
        ValueError: A run is in the folder already.
    """
    for name in names:
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name} already exists, and TensorBoard would show the run twice; use "
                "another folder"
            )


def write_mlflow(run: KeptRun, experiment: str, tracking_uri: str | None) -> str:
    """See `StoredRun.to_mlflow`."""
    _needed("mlflow", "mlflow-skinny")
    from mlflow import MlflowClient  # optional: mlflow
    from mlflow.entities import Metric, Param, RunTag  # optional: mlflow
    from mlflow.exceptions import MlflowException  # optional: mlflow

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
        raise RuntimeError(f"{run.name} cannot be written to MLflow: {error}") from error
    return made


def _mlflow_state(run: KeptRun) -> str:
    entry = read_entry(run.folder)
    state = entry.state if entry else ""
    known = {"finished": "FINISHED", "stopped": "KILLED", "running": "RUNNING"}
    return known.get(state, "FAILED")


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries.

    Args:
        values: The nested dictionaries.
        before: Prefix of the names.

    Returns:
        One dictionary with names joined by dots.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{before}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{before}{name}": value} if inner is None else inner
    return found


def _points(metrics: Metrics) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield step, time and known metrics of each step, and of each evaluation."""
    columns = _told(metrics.rows)
    places = [INDEX[column.name] for column in columns]
    for row in metrics.rows.tolist():
        values = {c.name: row[at] for c, at in zip(columns, places, strict=True)}
        values.pop("time_s", None)
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        yield int(row[INDEX["step"]]), _or_zero(row[INDEX["time_s"]]), known
    for event in metrics.events:
        if event.kind == "eval":
            values = {f"{_EVALUATION}_{n}": v for n, v in event.values.items() if not math.isnan(v)}
            yield event.step, event.time_s, values


def _told(rows: Rows) -> list[Any]:
    """Return the columns with known values, except the step."""
    known = np.asarray(~np.isnan(rows).all(axis=0))
    return [c for c in COLUMNS if c.name != "step" and known[INDEX[c.name]]]


def _tag(name: str) -> str:
    if name.startswith(f"{_EVALUATION}_"):
        return f"{name.removeprefix(f'{_EVALUATION}_')}/{_EVALUATION}"
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
            raise  # it is installed, but one of its own dependencies is missing
        raise RuntimeError(f"{package} is not installed: pip install {package}") from None
