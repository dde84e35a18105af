"""Pinned versions of the packages that Binder installs.

``python -m tests.support.binder`` rewrites binder/constraints.txt.

The versions are those of this environment, in which the tests ran: ortlab[demo,ortmodule] and its
dependencies, as the packages' own metadata declare them.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = ROOT / "binder" / "constraints.txt"
EXTRAS = "demo", "ortmodule"
"""Extras that binder/postBuild installs."""

HEAD = (
    f"# Written by `python -m tests.support.binder`: ortlab[{','.join(EXTRAS)}] as it was tested.\n"
)


def project() -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def wanted(*extras: str) -> list[Requirement]:
    """Return pyproject.toml's dependencies with some extras; ortlab's own extras are resolved."""
    table = project()
    lines = [
        *table["dependencies"],
        *(x for e in extras for x in table["optional-dependencies"][e]),
    ]
    found = []
    for requirement in map(Requirement, lines):
        if requirement.name == "ortlab":
            found += wanted(*requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def pinned(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Return name to version of these packages and of all their dependencies."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = importlib.metadata.version(name)
            for line in importlib.metadata.requires(name) or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    left.append(needed)
    return found


def text() -> str:
    """Return the contents of the file for this environment."""
    pins = pinned(wanted(*EXTRAS))
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


if __name__ == "__main__":
    PINS.write_text(text())
