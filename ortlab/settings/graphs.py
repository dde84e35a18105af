"""Settings of the profile of a model and of the list of its recompute plans."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """Settings of a profile: the options of ``%ort profile`` and ``ortlab.profile``."""

    steps: int = setting(5, minimum=1, help="steps to time in each engine, after two warm-up steps")


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Settings):
    """Settings of the table of recompute plans: the options of ``%ort recompute``."""

    measure: bool = setting(
        False, help="measure the cost of each plan in steps of the model itself"
    )
    subgraphs: bool = setting(
        False,
        help="list the subgraphs that ORT's own plans recompute, with frequency, shapes and bytes "
        "saved; on engine ortmodule",
    )
