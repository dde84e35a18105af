"""Settings that select the runs to list and the runs to remove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortlab.settings.choices import AUTO, ENGINES, SAME_ENGINE
from ortlab.settings.declaration import Settings, setting

RUN_SORTS: Mapping[str, str] = {
    "started": "created",
    "name": "name",
    "state": "state",
    "model": "model",
    "engine": "engine_asked",
    "precision": "precision",
    "lr": "learning_rate",
    "steps": "steps",
    "loss": "loss",
    "evaluation": "held_out_loss",
    "speed": "samples_per_s",
    "memory": "peak_bytes",
    "took": "wall_s",
    "size": "size_bytes",
}
"""Sort key of the history -> field of `ortlab.history.entry.RunEntry`."""


@dataclass(frozen=True, kw_only=True)
class HistorySettings(Settings):
    """Settings of the list of runs: the options of ``%ort runs`` and ``ortlab.list_runs``."""

    sort: str = setting(
        "started",
        choices=tuple(RUN_SORTS),
        renamed={"held-out": "evaluation"},
        help="sort key; lowest losses, highest speeds and newest runs come first, unknown values "
        "last",
    )
    reverse: bool = setting(False, help="reverse the order")
    engine: str | None = setting(
        None,
        choices=(AUTO, *ENGINES),
        renamed=SAME_ENGINE,
        help="only runs that requested or used this engine",
    )
    state: str | None = setting(
        None,
        choices=("running", "finished", "stopped", "failed", "interrupted"),
        help="only runs in this state; interrupted means that the process ended before the run did",
    )
    model: str | None = setting(None, help="only runs of models with this text in their name")
    tag: str | None = setting(None, help="only runs with this tag, as set by run.tag(...)")
    limit: int | None = setting(None, minimum=1, help="maximum number of runs to list")
    wide: bool = setting(
        False, help="all columns: also precision, speed, memory, duration and size"
    )


@dataclass(frozen=True, kw_only=True)
class PruneSettings(Settings):
    """Runs to remove: the options of ``%ort runs --prune`` and ``ortlab.prune_runs``."""

    older_than: str | None = setting(
        None, help="remove runs that started longer ago than this, such as 12h, 30d or 8w"
    )
    keep: int | None = setting(
        None, minimum=0, help="number of newest runs to keep; all others are removed"
    )
    max_size: str | None = setting(
        None, help="maximum total size, such as 2GB; the oldest runs beyond it are removed"
    )
    yes: bool = setting(False, help="remove the runs; without it they are only listed")
