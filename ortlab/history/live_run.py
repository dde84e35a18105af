"""The run of this process that trains, as the history sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ortlab.metrics.recorder import Recorder
from ortlab.settings import FinetuneSettings


class LiveRun(Protocol):
    """A run of this process; its folder may be behind what it says itself."""

    @property
    def current_settings(self) -> FinetuneSettings:
        """Settings in effect."""
        ...

    @property
    def name(self) -> str:
        """The name of the run, unique among all runs."""
        ...

    @property
    def folder(self) -> Path:
        """The folder that the run writes to."""
        ...

    @property
    def recorder(self) -> Recorder:
        """The samples and events so far."""
        ...

    @property
    def began_with(self) -> Mapping[str, Any]:
        """The settings that the run began with, by name."""
        ...

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions, platform and devices that the run began with."""
        ...

    @property
    def engine_asked(self) -> str:
        """The engine that the settings name now."""
        ...

    @property
    def engine_used(self) -> str:
        """The engine that executes the model."""
        ...

    @property
    def fallback_reason(self) -> str | None:
        """Why another engine than the one asked for is used; None where it is not."""
        ...

    def over(self) -> bool:
        """Return whether nothing more will come."""
        ...

    def so_far(self) -> Any:
        """Return the result as it is now; ``as_dict()`` is what its file would hold."""
        ...
