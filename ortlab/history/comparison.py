"""Comparison of runs: differences in settings, versions and results, and their curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortlab.history.entry import RunEntry
from ortlab.history.exporters import flat
from ortlab.history.listing import FIELDS, figure, live_entry
from ortlab.history.live_run import LiveRun
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.recorder import NAN
from ortlab.metrics.user_metrics import direction
from ortlab.settings import FinetuneSettings
from ortlab.utils.tables import Column, Table, escaped
from ortlab.utils.wording import shortened

MOST: Final = 8
"""Maximum number of runs whose curves can be distinguished."""
_RESULTS: Final = (
    *("state", "engine", "steps", "loss", "samples/s", "peak memory", "took"),
    *("started", "note"),
)
_LONGEST: Final = 60
_NAMED: Final = 2
"""Number of settings in the label of a run."""
_BEST: Final = " *"
"""Mark of the best run by a metric."""
_SHORT: Final = 24
"""Maximum length of a value in the label of a run."""


@dataclass(frozen=True)
class Difference:
    """Setting or version that differs between runs, or a result.

    Attributes:
        part: "settings", "versions" or "result".
        name: Name of the setting, version or result.
        values: Value of each run as text, in the order of the runs.
    """

    part: str
    name: str
    values: tuple[str, ...]


class RunComparison:
    """Comparison of two to eight runs; a notebook shows it with their curves overlaid.

    Args:
        runs: The runs.

    Attributes:
        runs: The runs.
        differences: Table of the settings and versions that differ, and of all results.
        labels: Name of each run with the settings that differ, such as "run-3 · lr 0.001".

    Raises:
        ValueError: A run is given twice or was removed, or there are fewer than two or more than
            eight runs.
    """

    def __init__(self, runs: Sequence[LiveRun | SavedRun]) -> None:
        names = [run.name for run in runs]
        if len(set(names)) != len(names):
            raise ValueError(f"{', '.join(names)}: a run is given twice; choose different runs")
        if not 2 <= len(runs) <= MOST:
            given = f"{len(runs)} run{'s' * (len(runs) != 1)}"
            raise ValueError(f"{given} cannot be compared; choose 2 to {MOST} runs")
        for run in runs:
            if not run.folder.is_dir():
                raise ValueError(f"{run.name} was removed: {run.folder} no longer exists")
        self.runs = tuple(runs)
        self.differences: Table[Difference] = self._differences()
        self.labels = tuple(self._label(place) for place in range(len(runs)))

    def _label(self, place: int) -> str:
        """Return the name of a run with the settings that differ, the common options first."""
        declared = FinetuneSettings.declarations()
        found = [each for each in self.differences if each.part == "settings"]
        found = [each for each in found if each.name in declared]
        found.sort(key=lambda each: not declared[each.name].common)
        told = [
            f"{declared[each.name].alias or each.name} {shortened(each.values[place], _SHORT)}"
            for each in found[:_NAMED]
        ]
        more = ["…"] if found[_NAMED:] else []
        return escaped(" · ".join([self.runs[place].name, *told, *more]))

    def _differences(self) -> Table[Difference]:
        settings = [_with_last(run) for run in self.runs]
        versions = [flat(run.environment) for run in self.runs]
        found = [*_differing("settings", settings), *_differing("versions", versions)]
        same = [
            f"{part}: the same"
            for part in ("settings", "versions")
            if not any(each.part == part for each in found)
        ]
        entries = [_entry(run) for run in self.runs]
        evaluations = _evaluations(entries)
        for field in FIELDS:
            if field.key == "held_out_loss":
                found += evaluations
            elif field.head in _RESULTS:
                values = tuple(field.text(entry) for entry in entries)
                if set(values) - {"-", ""}:
                    found.append(Difference("result", field.head, values))
        columns = [
            Column[Difference]("", lambda each: each.part),
            Column[Difference]("", lambda each: each.name),
            *(
                Column[Difference](run.name, lambda each, at=place: each.values[at])  # type: ignore[misc]
                for place, run in enumerate(self.runs)
            ),
        ]
        if any(value.endswith(_BEST) for each in evaluations for value in each.values):
            same.append("* best of these runs")
        return Table(found, columns, notes=same)

    def __repr__(self) -> str:
        return repr(self.differences)

    def _repr_html_(self) -> str:
        return self.differences._repr_html_()


def _with_last(run: LiveRun | SavedRun) -> dict[str, Any]:
    """Return the initial settings of a run, and each change of them."""
    settings = dict(run.began_with)
    changed = [f"step {e.step}: {e.text}" for e in run.recorder.events("change")]
    return settings | ({"changed during the run": "; ".join(changed)} if changed else {})


def _entry(run: LiveRun | SavedRun) -> RunEntry:
    return run.entry if isinstance(run, SavedRun) else live_entry(run)


def _evaluations(entries: Sequence[RunEntry]) -> list[Difference]:
    """Return loss, accuracy and the user's metrics of each run's best evaluation."""
    scores = [
        {"loss": entry.held_out_loss, "accuracy": entry.held_out_accuracy, **entry.scores}
        for entry in entries
    ]
    names = dict.fromkeys(name for each in scores for name in each)
    found = {name: _marked(name, [each.get(name, NAN) for each in scores]) for name in names}
    return [
        Difference("result", f"evaluation {name} (best)", values)
        for name, values in found.items()
        if set(values) != {"-"}
    ]


def _marked(name: str, values: Sequence[float]) -> tuple[str, ...]:
    """Return the values of a metric as text, the best of several with a mark."""
    known = [value for value in values if not math.isnan(value)]
    way = direction(name)
    best = None if way is None or len(known) < 2 else max(known) if way == "max" else min(known)
    return tuple(f"{figure(value)}{_BEST if value == best else ''}" for value in values)


def _differing(part: str, values: Sequence[Mapping[str, Any]]) -> list[Difference]:
    names = dict.fromkeys(name for each in values for name in each)
    return [
        Difference(part, name, tuple(_text(each.get(name)) for each in values))
        for name in names
        if any(each.get(name) != values[0].get(name) for each in values)
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = f"{value:g}" if isinstance(value, float) else value
    return shortened(text if isinstance(text, str) else json.dumps(text), _LONGEST)
