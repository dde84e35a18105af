"""ortlab works where the operating system lacks what Linux has, tried in a process without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needed_engines import needs
from tests.support.readme import ROOT


@pytest.mark.parametrize("system", ["macos", "windows"])
def test_ortlab_trains_without_what_only_linux_has(system: str, tmp_path: Path) -> None:
    """This covers what Python lacks there, not torch's and onnxruntime's own builds."""
    needs("ort")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.without_linux", system],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ORTLAB_HOME": str(tmp_path), "USERNAME": "user"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception in thread" not in done.stderr
