"""The magics in a kernel of Colab's IPython and ipykernel, which are older than everyone else's.

Colab's package google-colab requires these versions exactly (googlecolab/colabtools, setup.py; the
others are of googlecolab/backend-info, pip-freeze.txt, January 2026).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.readme import ROOT

PACKAGES = (
    "ipython==7.34.0",
    "ipykernel==6.17.1",
    "jupyter_client==7.4.9",
    "matplotlib-inline==0.2.1",
    "traitlets==5.7.1",
    # What these need and newer ones do not.
    "backcall==0.2.0",
    "decorator==4.4.2",
    "entrypoints==0.4",
    "ipython-genutils==0.2.0",
    "nest-asyncio==1.6.0",
    "pickleshare==0.7.5",
)


@pytest.mark.nightly
def test_the_magics_work_in_colab_s_kernel(tmp_path: Path) -> None:
    """Run tests of a kernel and of a shell with these packages, over this environment's."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(tmp_path), "platbase": str(tmp_path)})
    Path(own, "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", *PACKAGES], check=True)
    versions = "import IPython, ipykernel; print(IPython.__version__, ipykernel.__version__)"
    assert subprocess.check_output([python, "-c", versions], text=True) == "7.34.0 6.17.1\n"
    tests = (
        "tests/notebook/test_kernel.py",
        "tests/utils/test_errors.py::test_a_notebook_shows_no_traceback",
    )
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
