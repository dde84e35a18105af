"""Findings of an environment check: what was checked, the result, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: The check.
        ok: True or False; None if the check does not apply here or has no known result.
        found: The result as text.
        fix: How to fix it; empty if there is nothing to do.
        required: True if no model can be trained in ORT without it.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""
    required: bool = False


def findings_table(findings: Sequence[Finding]) -> str:
    """Format findings as text: a line each with status, check and result, then a line for the fix.

    Args:
        findings: At least one finding.
    """
    signs = {True: "ok", False: "MISSING", None: "-"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{signs[finding.ok]:8}{finding.name:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':8}{'':{width}}  -> {finding.fix}")
    return "\n".join(lines)


def package_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed.

    Args:
        distribution: Name of the distribution, as pip spells it.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, for comparison.

    Args:
        version: A version such as "2.9.1+cpu", which gives ``(2, 9)``.
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def import_or_none(name: str) -> Any:
    """Import a module, or return None if it is not installed or its installation is broken.

    For a check this is a finding, not an error.

    Args:
        name: Full name of the module.
    """
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken installation may raise anything, such as OSError
        return None
