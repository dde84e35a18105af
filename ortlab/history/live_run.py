"""Interface of a run in this process, as the history uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ortlab.metrics.recorder import Recorder
from ortlab.settings import FinetuneSettings


class LiveRun(Protocol):
    """Run of this process; its own state may be newer than its folder."""

    @property
    def current_settings(self) -> FinetuneSettings:
        """Settings in effect."""
        ...

    @property
    def name(self) -> str:
        """Name of the run, unique among all runs."""
        ...

    @property
    def folder(self) -> Path:
        """Folder that the run writes to."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Recorder with the samples and events so far."""
        ...

    @property
    def began_with(self) -> Mapping[str, Any]:
        """Initial settings of the run, by name."""
        ...

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions, platform and devices at the start of the run."""
        ...

    @property
    def engine_asked(self) -> str:
        """Engine in the current settings."""
        ...

    @property
    def engine_used(self) -> str:
        """Engine that executes the model."""
        ...

    @property
    def fallback_reason(self) -> str | None:
        """Reason for a fallback to another engine; None without one."""
        ...

    def over(self) -> bool:
        """Return True if the run has ended."""
        ...

    def so_far(self) -> Any:
        """Return the current result; its ``as_dict()`` has the form of the result in run.json."""
        ...
