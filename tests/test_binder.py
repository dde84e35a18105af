"""Tests of binder/: a dry run by mybinder.org's own builder, and the pinned versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.binder import EXTRAS, PINS, ROOT, pinned, wanted
from tests.support.waiting import HANGS_S

REPO2DOCKER = Path(sys.executable).with_name("jupyter-repo2docker")


def pins() -> dict[str, str]:
    return dict(re.findall(r"^([^#\s]+)==(\S+)$", PINS.read_text(), re.MULTILINE))


@pytest.mark.skipif(not REPO2DOCKER.exists(), reason="jupyter-repo2docker is not installed")
def test_the_dry_run() -> None:
    """The Dockerfile has a Python for which ORT has a wheel, a compiler and our scripts."""
    done = subprocess.run(
        [REPO2DOCKER, "--no-build", "--debug", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Building conda environment for python=3.11" in done.stderr
    steps = [
        "environment-2epy-2d3-2e11-2dlinux-2d64-2elock",
        "apt-get install --yes --no-install-recommends g++ ",
        '/bin/pip install --no-cache-dir -r "binder/requirements.txt"',
        "COPY --chown=0:0 src/ ${REPO_DIR}/",
        "RUN ./binder/postBuild",
    ]
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places, done.stdout
    assert places == sorted(places)


def test_its_scripts() -> None:
    script = ROOT / "binder" / "postBuild"
    assert os.access(script, os.X_OK), "postBuild is not executable"
    subprocess.run(["bash", "-n", script], check=True)
    for named in re.findall(r"\bbinder/[\w./]+", script.read_text()):
        assert (ROOT / named).exists(), named


def test_everything_is_pinned_to_a_version_that_is_allowed() -> None:
    stored = pins()
    for requirement in wanted(*EXTRAS):
        version = stored[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (
            f"{requirement}: run python -m tests.support.binder"
        )


def test_cpu_builds_alone() -> None:
    stored = pins()
    (torch,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "binder" / "requirements.txt").read_text(), re.MULTILINE
    )
    assert torch.endswith("+cpu")
    assert stored["torch"] == torch, "run python -m tests.support.binder"
    cuda = {name for name in stored if name.startswith(("nvidia-", "triton"))}
    assert cuda == {"nvidia-ml-py"}  # uses the driver and installs no CUDA libraries


def test_what_is_needed_by_what_is_needed_is_pinned() -> None:
    """The pins include indirect dependencies, read from the installed metadata."""
    found = pinned(r for r in wanted(*EXTRAS) if r.name in ("jupyterlab", "ipywidgets", "nbclient"))
    assert {"jupyter-server", "tornado", "traitlets", "widgetsnbextension"} <= set(found)
    assert set(found) <= set(pins()), "run python -m tests.support.binder"


def test_an_extra_of_our_own_is_resolved() -> None:
    named = {requirement.name for requirement in wanted(*EXTRAS)}
    assert {"jupyterlab", "ipyparallel", "deepspeed"} <= named
    assert "ortlab" not in named
