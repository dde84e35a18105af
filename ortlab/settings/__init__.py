"""Declarations of all settings, each declared once.

The options of the magics, the controls of the panel, the flags of the command line and the tables
in docs/ are generated from these declarations.
"""

from ortlab.settings.choices import (
    ATTENTION,
    AUTO,
    ENGINES,
    EXPORT_OPSETS,
    IN_ORT,
    KERNELS,
    LOG_LEVELS,
    LOSSES,
    LOWEST_LOSS_SCALE,
    OF_ANY_ENGINE,
    OPSETS,
    OPTIMIZERS,
    OWN,
    PRECISIONS,
    REFERENCE,
    SAME_ENGINE,
    is_own,
)
from ortlab.settings.declaration import Declaration, Settings, setting, unknown_name
from ortlab.settings.engine import EngineSettings, OrtModuleSettings
from ortlab.settings.export import ExportSettings
from ortlab.settings.graphs import ProfileSettings, RecomputeSettings
from ortlab.settings.history import RUN_SORTS, HistorySettings, PruneSettings
from ortlab.settings.plan import FleetSettings, PlanSettings
from ortlab.settings.search import Parallel, RaceSettings, SearchSettings, TuneSettings
from ortlab.settings.training import (
    CheckpointSettings,
    DataSettings,
    FinetuneSettings,
    LimitSettings,
    OptimSettings,
    ParallelSettings,
)

__all__ = [
    "ATTENTION",
    "AUTO",
    "ENGINES",
    "EXPORT_OPSETS",
    "IN_ORT",
    "KERNELS",
    "LOG_LEVELS",
    "LOSSES",
    "LOWEST_LOSS_SCALE",
    "OF_ANY_ENGINE",
    "OPSETS",
    "OPTIMIZERS",
    "OWN",
    "PRECISIONS",
    "REFERENCE",
    "RUN_SORTS",
    "SAME_ENGINE",
    "CheckpointSettings",
    "DataSettings",
    "Declaration",
    "EngineSettings",
    "ExportSettings",
    "FinetuneSettings",
    "FleetSettings",
    "HistorySettings",
    "LimitSettings",
    "OptimSettings",
    "OrtModuleSettings",
    "Parallel",
    "ParallelSettings",
    "PlanSettings",
    "ProfileSettings",
    "PruneSettings",
    "RaceSettings",
    "RecomputeSettings",
    "SearchSettings",
    "Settings",
    "TuneSettings",
    "is_own",
    "setting",
    "unknown_name",
]
