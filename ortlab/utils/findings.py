"""Findings of a check-up: what was looked for, what was found and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What a check found. ``ok`` is None where it does not matter here or cannot be known.

    ``required`` findings decide whether ORTModule can run.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""
    required: bool = False


def findings_table(findings: Sequence[Finding]) -> str:
    """The findings as lines of text: a sign, the check, what was found, and the fix below it."""
    signs = {True: "ok", False: "MISSING", None: "-"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{signs[finding.ok]:8}{finding.name:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':8}{'':{width}}  -> {finding.fix}")
    return "\n".join(lines)


def package_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def import_or_none(name: str) -> Any:
    """The module, or None when it is not installed or broken, which is a finding and no error."""
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken install raises anything, OSError among it
        return None
