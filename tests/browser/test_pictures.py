"""Test that README.md's pictures can be retaken and are not empty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import pictures
from tests.browser.lab import NEEDS_ORT

pytestmark = [pytest.mark.browser, pytest.mark.nightly]


@NEEDS_ORT
@pytest.mark.usefixtures("installed")
def test_the_pictures_of_the_readme_can_be_taken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.browser.pictures", str(tmp_path)],
        cwd=pictures.FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in tmp_path.iterdir()} == set(pictures.PICTURES)
    for path in tmp_path.iterdir():
        assert path.stat().st_size < pictures.MOST_BYTES, path.name
        with Image.open(path) as picture:
            assert len(picture.getcolors() or []) > 16, f"{path.name} is blank"
