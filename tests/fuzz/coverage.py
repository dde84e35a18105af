"""Coverage-guided fuzzing of one target with atheris.

Run ``python -m tests.fuzz.coverage TARGET CORPUS [libFuzzer's options]``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ortlab"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run until libFuzzer's limits are reached; an exception from the target ends the process."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    root = Path(tempfile.mkdtemp(prefix="ortlab-fuzz-"))
    os.environ["XDG_CACHE_HOME"] = str(root)

    def once(data: bytes) -> None:
        target.run(data, root)

    atheris.Setup([sys.argv[0], *options], once)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
