"""Parts of a benchmark that run in their own processes."""

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
    """Run ``python -m module words`` with these `variables`; return the JSON of its last line."""
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
    """Return environment variables for shared caches that hold nothing but the built extension.

    Runs are stored there, too.
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
