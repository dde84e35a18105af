"""Parts of a benchmark in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortlab.engines.ortmodule.compat import extensions


def found_by(
    module: str, *words: object, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What ``python -m module words`` prints as JSON in its last line, with these `variables`."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def nothing_cached() -> Iterator[dict[str, str]]:
    """Variables for processes to share caches that have nothing but the built extension in them.

    Runs are kept there, too.
    """
    built = extensions.cache_folder()
    with tempfile.TemporaryDirectory(prefix="ortlab-", ignore_cleanup_errors=True) as folder:
        own = Path(folder, *built.parts[-2:])
        own.parent.mkdir(mode=0o700)
        own.symlink_to(built)
        yield {
            "XDG_CACHE_HOME": folder,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "ORTLAB_HOME": f"{folder}/runs",
        }
