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


def all_of(kind: type[RaceSettings] | type[TuneSettings]) -> list[Declaration]:
    """Return the settings of a search, and those of a run that its set-ups share."""
    return [*kind.declarations().values(), *kind.besides().values()]


CLASSES: Mapping[str, tuple[str, Iterable[Declaration]]] = {
    "EngineKeywords": ("ortlab.wrap", EngineSettings.declarations().values()),
    "FinetuneKeywords": (
        "ortlab.finetune",
        [each for name, each in FinetuneSettings.declarations().items() if name != "loss"],
    ),
    "RaceKeywords": (
        "ortlab.race",
        [each for each in all_of(RaceSettings) if each.name != "loss"],
    ),
    "TuneKeywords": (
        "ortlab.tune",
        [each for each in all_of(TuneSettings) if each.name != "loss"],
    ),
    "ExportKeywords": ("ortlab.export", ExportSettings.declarations().values()),
    "HistoryKeywords": ("ortlab.list_runs", HistorySettings.declarations().values()),
    "ProfileKeywords": ("ortlab.profile", ProfileSettings.declarations().values()),
    "FleetKeywords": ("ortlab.zero_plan", FleetSettings.declarations().values()),
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
