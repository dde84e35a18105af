"""The parts of README.md that are made from, or checked against, the code.

``python -m tests.readme`` writes the settings table into README.md anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from ortlab.settings import EngineSettings, FinetuneSettings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SETTINGS = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def settings_table() -> str:
    """Every setting as a row of a Markdown table, from the declarations."""
    of_engines = EngineSettings.declarations()
    rows = ["| option | default | what it chooses |", "| --- | --- | --- |"]
    for name, declaration in FinetuneSettings.declarations().items():
        star = "" if name in of_engines else " *"
        default = declaration.default
        if declaration.type is bool:
            default = "on" if default else "off"
        elif default is None:
            default = "none"
        choices = f": {', '.join(declaration.choices)}" if declaration.choices else ""
        unit = f" {declaration.unit}" if declaration.unit and default != "none" else ""
        rows.append(
            f"| `{declaration.flag}`{star} | {default}{unit} | {declaration.help}{choices} |"
        )
    return "\n".join(rows) + "\n"


def stored_table() -> str:
    """The settings table as README.md has it."""
    found = SETTINGS.search(README.read_text())
    assert found, "README.md has no block between <!-- settings --> and <!-- end of settings -->"
    return found.group()


def code_map() -> list[str]:
    """The paths of README.md's map, relative to the root; a folder ends with a slash.

    In the map each line is a path, indented by two spaces under its folder, then what it is.
    """
    block = README.read_text().split("## Map of the code", 1)[1].split("```")[1]
    folders: list[str] = []
    paths = []
    for line in block.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        del folders[depth:]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


if __name__ == "__main__":
    README.write_text(SETTINGS.sub(lambda _: settings_table(), README.read_text()))
