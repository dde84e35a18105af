"""Which runs of the history are listed, and which are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortlab.settings.choices import ENGINES
from ortlab.settings.declaration import Settings, setting

RUN_SORTS: Mapping[str, str] = {
    "started": "created",
    "name": "name",
    "state": "state",
    "model": "model",
    "engine": "engine_asked",
    "precision": "precision",
    "steps": "steps",
    "loss": "loss",
    "held-out": "held_out_loss",
    "speed": "samples_per_s",
    "memory": "peak_bytes",
    "took": "wall_s",
    "size": "size_bytes",
}
"""What the history is sorted by, and which number of `ortlab.history.entry.RunEntry` that is."""


@dataclass(frozen=True, kw_only=True)
class HistorySettings(Settings):
    """Which runs of the history; the options of ``%ort runs`` and ``ortlab.list_runs``."""

    sort: str = setting(
        "started",
        choices=tuple(RUN_SORTS),
        help="by what; low losses, high speeds and the newest come first, what is not known last",
    )
    reverse: bool = setting(False, help="the other way round")
    engine: str | None = setting(
        None, choices=ENGINES, help="those that asked for an engine, or used it"
    )
    state: str | None = setting(
        None,
        choices=("running", "finished", "stopped", "failed", "interrupted"),
        help="those in a state; interrupted are those whose process ended before they did",
    )
    model: str | None = setting(None, help="those of a model with this in its name")
    tag: str | None = setting(None, help="those with a tag, as run.tag(...) gives it")
    limit: int | None = setting(None, minimum=1, help="so many at most, the first ones")


@dataclass(frozen=True, kw_only=True)
class PruneSettings(Settings):
    """Which runs go; the options of ``%ort runs --prune`` and ``ortlab.prune_runs``."""

    older_than: str | None = setting(
        None, help="runs that began longer ago than this go, as in 12h, 30d or 8w"
    )
    keep: int | None = setting(None, minimum=0, help="so many of the newest stay, the others go")
    max_size: str | None = setting(
        None, help="what the newest may take together, as in 2GB; what is beyond goes"
    )
    yes: bool = setting(False, help="remove them; without it they are only shown")
