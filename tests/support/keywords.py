"""Writer of ``ortlab/settings/keywords.py``, the types of the settings as keyword arguments.

``python -m tests.support.keywords`` writes it anew; a test compares it with the declarations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ortlab.settings import (
    Declaration,
    EngineSettings,
    ExportSettings,
    FinetuneSettings,
    FleetSettings,
    HistorySettings,
    PlanSettings,
    ProfileSettings,
    RaceSettings,
    TuneSettings,
)

FILE = Path(__file__).parents[2] / "ortlab" / "settings" / "keywords.py"

HEAD = '''\
"""Types of the settings as keyword arguments, for type checkers and completion in editors.

Generated from the declarations by ``python -m tests.support.keywords``; do not edit.
"""

from __future__ import annotations

from typing import Literal, TypedDict
'''


def plain(declared: Mapping[str, Declaration], *arguments: str) -> list[Declaration]:
    """Return the settings that a function takes as ``**settings``; its loss is an argument."""
    return [each for name, each in declared.items() if name not in ("loss", *arguments)]


CLASSES: Mapping[str, tuple[str, Iterable[Declaration]]] = {
    "EngineKeywords": ("ortlab.wrap", plain(EngineSettings.declarations())),
    "FinetuneKeywords": ("ortlab.finetune", plain(FinetuneSettings.declarations(), "optimizer")),
    "ScriptKeywords": ("ortlab.script", plain(FinetuneSettings.declarations())),
    "RaceKeywords": ("ortlab.race", plain(RaceSettings.accepted())),
    "TuneKeywords": ("ortlab.tune", plain(TuneSettings.accepted())),
    "ExportKeywords": ("ortlab.export", plain(ExportSettings.declarations())),
    "HistoryKeywords": ("ortlab.list_runs", plain(HistorySettings.declarations())),
    "ProfileKeywords": ("ortlab.profile", plain(ProfileSettings.declarations())),
    "FleetKeywords": ("ortlab.zero_plan", plain(FleetSettings.declarations())),
    "PlanKeywords": ("ortlab.training_plan", plain(PlanSettings.declarations())),
}
"""Name of the class -> the function that takes the settings, and the settings."""


def text() -> str:
    """Return the content of the file, as ruff formats it."""
    written = HEAD + "".join(_class(name, *CLASSES[name]) for name in CLASSES)
    ruff = [sys.executable, "-m", "ruff", "format", "-"]
    return subprocess.run(ruff, input=written, text=True, capture_output=True, check=True).stdout


def _class(name: str, function: str, declared: Iterable[Declaration]) -> str:
    lines = [f"    {each.name}: {_type(each)}" for each in declared]
    docstring = f'    """Settings of `{function}`."""'
    return "\n".join(["", "", f"class {name}(TypedDict, total=False):", docstring, "", *lines, ""])


def _type(declaration: Declaration) -> str:
    plain = declaration.type.__name__
    if declaration.choices and not declaration.many:
        plain = f"Literal[{', '.join(f'{choice!r}' for choice in declaration.choices)}]"
    return (plain + (" | None" if declaration.optional else "")).replace("'", '"')


if __name__ == "__main__":
    FILE.write_text(text())
