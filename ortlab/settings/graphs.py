"""How a model is profiled, and how its recompute plans are listed."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """How a model is profiled; the options of ``%ort profile`` and ``ortlab.profile``."""

    steps: int = setting(5, minimum=1, help="steps that are timed, in each engine, after two more")


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Settings):
    """How the table of recompute plans is made; the options of ``%ort recompute``."""

    measure: bool = setting(False, help="time the model's own steps, for what each plan costs")
