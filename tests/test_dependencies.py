"""Tests of the dependencies: licenses of all installed packages and known vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

PERMITTED = {
    "0BSD",
    "3-Clause BSD License",
    "Academic Free License (AFL)",
    "Apache 2.0",
    "Apache 2.0 License",
    "Apache License 2.0",
    "Apache License, Version 2.0",
    "Apache Software License",
    "Apache Software License 2.0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD License",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "ISC License (ISCL)",
    "MIT",
    "MIT License",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python Software Foundation License",
    "Zlib",
    # Copyleft applies to single files; ortlab neither contains nor changes any of them.
    "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)",
}
"""Licenses that let anyone use, change and sell products made with the package."""

UNSAID = {
    "atheris": "Apache-2.0 by the LICENSE file in its sources; tests alone use it",
    "namex": "Apache-2.0 by its own LICENSE file; Keras needs it, which tests alone use",
}
"""Packages whose metadata names no license: the license, and where it is stated."""

ACCEPTED: dict[str, str] = {}
"""Accepted advisories, by name (PYSEC-.., GHSA-.., CVE-..), with the reason."""


def tool(*arguments: str) -> tuple[Any, str]:
    """Run a command-line tool of this environment; return its parsed JSON and its messages."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=900
    )
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        pytest.fail(f"{arguments[0]} printed no JSON: {done.stderr[-2000:]}")


def licences(said: str) -> set[str]:
    """Return the licenses named in an expression or in a list of package classifiers."""
    return set(re.split(r" AND | OR |; ", said))


def test_all_packages_may_be_used_freely() -> None:
    packages, _ = tool("piplicenses", "--format=json", "--with-system")
    assert len(packages) > 100
    # NVIDIA's own license terms come only with CUDA builds of torch, which a user chooses.
    packages = [each for each in packages if not each["Name"].startswith("nvidia-")]
    refused = {
        each["Name"]: each["License"]
        for each in packages
        if not licences(each["License"]) <= PERMITTED and each["Name"] not in UNSAID
    }
    assert not refused, "read these licences; then permit them, or do without the package"
    unsaid = {each["Name"] for each in packages if each["License"] == "UNKNOWN"}
    assert unsaid <= set(UNSAID)


@pytest.mark.nightly
def test_nothing_is_known_against_the_packages(tmp_path: Path) -> None:
    """No vulnerability is known. The test also fails if the advisory service cannot be reached."""
    # Only the public part of a version is compared: no list has a local build of torch such as
    # 2.13.0+cpu.
    here = {each.name: Version(each.version).public for each in metadata.distributions()}
    pins = tmp_path / "pins.txt"
    pins.write_text(
        "".join(f"{name}=={it}\n" for name, it in sorted(here.items()) if name != "ortlab")
    )
    quiet = ("--format=json", "--progress-spinner=off")
    report, messages = tool(
        "pip_audit", *quiet, "--disable-pip", "--no-deps", "--requirement", str(pins)
    )
    packages = report["dependencies"]
    unasked = {each["name"]: each["skip_reason"] for each in packages if "skip_reason" in each}
    found = {
        f"{advisory['id']} ({each['name']} {each['version']})": advisory["description"][:200]
        for each in packages
        for advisory in each.get("vulns", ())
        if not {advisory["id"], *advisory["aliases"]} & set(ACCEPTED)
    }
    assert not found, messages
    assert not unasked, f"NOT AUDITED: {len(unasked)} of {len(packages)} packages"
    known = {
        name
        for each in packages
        for advisory in each.get("vulns", ())
        for name in (advisory["id"], *advisory["aliases"])
    }
    assert set(ACCEPTED) <= known, "an exception that nothing needs any more"
