"""Training in ONNX Runtime, live in JupyterLab.

Importing ortlab imports neither torch nor ONNX Runtime and changes nothing. The public names are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortlab._version import __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab import data, hf, optim
    from ortlab.api import (
        check,
        check_setup,
        compare_runs,
        device,
        export,
        finetune,
        graphs,
        lines,
        list_runs,
        memory_plan,
        models,
        open_run,
        profile,
        prune_runs,
        race,
        recompute_plans,
        resume,
        script,
        status,
        track,
        training_plan,
        tune,
        unwrap,
        workers,
        wrap,
        zero_plan,
    )
    from ortlab.data import squad
    from ortlab.orttrainer import ORTTrainer, ORTTrainerOptions
    from ortlab.training.callback import Callback
    from ortlab.training.run import Run

    last_run: Run | None

__all__ = [
    "Callback",
    "ORTTrainer",
    "ORTTrainerOptions",
    "__version__",
    "check",
    "check_setup",
    "compare_runs",
    "data",
    "device",
    "export",
    "finetune",
    "graphs",
    "hf",
    "last_run",
    "lines",
    "list_runs",
    "load_ipython_extension",
    "memory_plan",
    "models",
    "open_run",
    "optim",
    "profile",
    "prune_runs",
    "race",
    "recompute_plans",
    "resume",
    "script",
    "squad",
    "status",
    "track",
    "training_plan",
    "tune",
    "unload_ipython_extension",
    "unwrap",
    "workers",
    "wrap",
    "zero_plan",
]


_MODULES = {
    "data": "ortlab.data",
    "hf": "ortlab.hf",
    "keras": "ortlab.keras",
    "lightning": "ortlab.lightning",
    "optim": "ortlab.optim",
    "squad": "ortlab.data.squad",
}
"""Public modules, by the name under which they are public.

``keras`` and ``lightning`` are not in ``__all__``: with them, ``from ortlab import *`` would need
Keras and Lightning.
"""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name == "last_run":
        return importlib.import_module("ortlab.session").session.last_run
    if name in ("ORTTrainer", "ORTTrainerOptions"):
        return getattr(importlib.import_module("ortlab.orttrainer"), name)
    if name == "Callback":
        return importlib.import_module("ortlab.training.callback").Callback
    if name in __all__:
        return getattr(importlib.import_module("ortlab.api"), name)
    raise AttributeError(f"module 'ortlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics, their completion and the charts to a shell; ``%load_ext ortlab`` calls it.

    Args:
        shell: The IPython shell. Loading twice changes nothing.
    """
    from ortlab.notebook.magics import extension  # heavy: IPython

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that loading added; ``%unload_ext ortlab`` calls it.

    Models stay wrapped and runs continue.

    Args:
        shell: The IPython shell. Without loading before, nothing changes.
    """
    from ortlab.notebook.magics import extension  # heavy: IPython

    extension.unload(shell)
