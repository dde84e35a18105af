"""The parts of the documents that are generated from the code or checked against it.

``python -m tests.support.readme`` rewrites the tables of settings in docs/, and those of speed from
the benchmark that `ortlab bench engines --json tests/bench/results/engines.json` stores. It also
makes the index of the tutorials, notebooks/README.md, from their first paragraphs; a page for each
command in notebooks/reference/ from its parser's help; and the pages of the Python API, in api/
there, from the docstrings.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlab import cli
from ortlab.bench.result import EngineBench
from ortlab.engines import compatibility
from ortlab.engines.registry import _engine
from ortlab.notebook.magics.commands import COMMANDS
from ortlab.settings import Declaration, EngineSettings, FinetuneSettings
from tests.support import reference

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
ALREADY_SAID = " Run the cells from top to bottom (Shift+Enter)."
PAGES = ROOT / "notebooks" / "reference"
INDEX = ROOT / "notebooks" / "README.md"
BENCHMARK = ROOT / "tests" / "bench" / "results" / "engines.json"
TABLES = re.compile(
    r"(<!-- (settings|options|speed|together) -->\n)(.*?)(?=<!-- end of \2 -->)", re.DOTALL
)


def tables() -> dict[str, str]:
    """Return what belongs between each pair of marks in docs/, by the name of the mark."""
    made = {**_settings(), "together": _together()}
    return made | {"speed": speed(BENCHMARK)} if BENCHMARK.exists() else made


def index() -> str:
    """Return the index of the tutorials in reading order: the title and first paragraph of each."""
    lines = [
        "# Tutorials",
        "",
        "In reading order; each takes four minutes at most on two cores. Shift+Enter runs a cell.",
        "",
    ]
    for path in sorted(INDEX.parent.glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title, _, text = first.partition("\n\n")
        about = " ".join(text.partition("\n\n")[0].split()).removesuffix(ALREADY_SAID)
        lines += [
            f"{int(path.name[:2])}. **[{title.removeprefix('# ')}]({path.name})** {about}",
            "",
        ]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the pages by name: the help of each ``ortlab`` and ``%ort`` command, and the API.

    The help is formatted as by Python 3.11, at 80 columns.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        helps = {f"ortlab {name}": text for name, text in _helps(cli.parser())}
        helps |= {f"%ort {name}": command.help_all for name, command in COMMANDS.items()}
    made = {}
    lines = [
        "# Commands",
        "",
        "Written by `python -m tests.support.readme`, from what `--help` says.",
        "",
    ]
    for command, text in helps.items():
        page = command.removeprefix("%").replace(" ", "-") + ".md"
        made[page] = f"# {command}\n\n```text\n{text.rstrip()}\n```\n"
        lines.append(f"- [`{command}`]({page})")
    lines += ["", "[The Python API](api/README.md) has pages of its own."]
    api = {f"api/{name}": text for name, text in reference.pages().items()}
    return {"README.md": "\n".join([*lines, ""]), **made, **api}


def stored_pages() -> dict[str, str]:
    """Return the stored pages of notebooks/reference/."""
    files = (path for path in PAGES.rglob("*") if path.is_file())
    return {str(path.relative_to(PAGES)): path.read_text() for path in files}


def _helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the commands below `parser` that have no subcommands, with their help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                further = [(f"{name} {rest}", text) for rest, text in _helps(below)]
                yield from further or [(name, below.format_help())]


def speed(path: Path) -> str:
    """Return the tables of a stored benchmark; raise ValueError if it is unusable."""
    result = EngineBench.from_dict(json.loads(path.read_text()))
    if result.settings.quick or result.interrupted or result.machine.busy:
        raise ValueError(f"{path.name} is quick, interrupted or of a busy machine; run it again")
    return result.summary() + "\n"


def _settings() -> dict[str, str]:
    """Return a Markdown table of all settings by topic, made from the declarations.

    ORTModule's own options have a separate table, which names the source that ORTModule reads each
    one from.
    """
    of_engines = EngineSettings.declarations()
    settings = ["| option | default | what it chooses |", "| --- | --- | --- |"]
    options = ["| option | default | what it chooses | in ORTModule |", "| --- | --- | --- | --- |"]
    topic = ""
    for name, declaration in FinetuneSettings.declarations().items():
        star = "" if name in of_engines else " *"
        if declaration.topic != topic and not declaration.source:
            topic = declaration.topic
            settings.append(f"| **{topic.capitalize()}** | | |")
        flags = f"`{declaration.flag}`" + (f", `--{declaration.alias}`" * declaration.short)
        row = f"| {flags}{star} | {_default(declaration)} | {_help(declaration)} |"
        if declaration.source:
            options.append(f"{row} `{declaration.source}` |")
        else:
            settings.append(row)
    return {"settings": "\n".join(settings) + "\n", "options": "\n".join(options) + "\n"}


_WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "`zero_stage=1`": {"zero_stage": 1},
    "`zero_stage=2`": {"zero_stage": 2},
    "`zero_stage=3`": {"zero_stage": 3},
    "`tensor_parallel=2`": {"tensor_parallel": 2},
    "`pipeline_stages=2`": {"pipeline_stages": 2},
    "both, with `zero_stage=1`": {"tensor_parallel": 2, "pipeline_stages": 2, "zero_stage": 1},
}
"""Ways to train on several workers, by what the documents call them."""
_BESIDE: dict[str, dict[str, Any]] = {
    **{name: {"engine": name} for name in ("eager", "compile", "ort", "ortmodule")},
    **{name: {"precision": name} for name in ("bf16", "fp16")},
    "LAMB": {"optimizer": "lamb"},
    "Adasum of SGD": {"reduction": "adasum", "optimizer": "sgd"},
}


def _together() -> str:
    """Return a Markdown table of what goes together on eight workers, as the module decides it."""

    def goes(**chosen: Any) -> bool:
        settings = FinetuneSettings.of(**{"engine": "eager", "workers": 8, **chosen})
        engine = _engine(settings.model.engine)
        rules = (settings.model, settings.parallel)
        reason = compatibility.engine_conflict(engine.name, engine.capabilities, *rules)
        return not (reason or compatibility.ranks_conflict(settings, 8, elsewhere=True))

    lines = [f"| | {' | '.join(_BESIDE)} |", f"| --- |{' --- |' * len(_BESIDE)}"]
    for way, chosen in _WAYS.items():
        cells = ("yes" if goes(**chosen, **beside) else "no" for beside in _BESIDE.values())
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _default(declaration: Declaration) -> str:
    if declaration.type is bool:
        return "on" if declaration.default else "off"
    if declaration.default in (None, ""):
        return "none"
    return f"{declaration.default} {declaration.unit}".rstrip()


def _help(declaration: Declaration) -> str:
    choices = f": {', '.join(declaration.choices)}" if declaration.choices else ""
    return declaration.help + choices


def documents() -> list[Path]:
    """Return README.md, CONTRIBUTING.md and the pages in docs/."""
    return [README, CONTRIBUTING, *sorted(DOCS.glob("*.md"))]


def stored_tables() -> dict[str, str]:
    """Return the tables that the documents have, by the name of their marks."""
    return {
        found.group(2): found.group(3)
        for path in documents()
        for found in TABLES.finditer(path.read_text())
    }


def code_map() -> list[str]:
    """Return the paths of CONTRIBUTING.md's map, relative to the root; folders end with a slash.

    In the map, each line is a path, indented by two spaces under its folder, then a description.
    """
    block = CONTRIBUTING.read_text().split("```text", 1)[1].split("```")[0]
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
    made = tables()
    if unmarked := set(made) - set(stored_tables()):
        sys.exit(f"docs/ has no marks for {', '.join(unmarked)}: <!-- x --> and <!-- end of x -->")
    INDEX.write_text(index())
    written = pages()
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "api").mkdir(parents=True)
    for name, text in written.items():
        (PAGES / name).write_text(text)
    for path in documents():
        path.write_text(TABLES.sub(lambda m: m.group(1) + made[m.group(2)], path.read_text()))
