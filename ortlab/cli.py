"""The command line: ``ortlab doctor``, ``ortlab cache``, ``ortlab --version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import ortlab


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        "ortlab", description="Training in ONNX Runtime, live in JupyterLab."
    )
    parser.add_argument("--version", action="version", version=f"ortlab {ortlab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "list what this machine has, what it lacks and how to mend it"
    doctor = commands.add_parser(
        "doctor",
        help=about,
        description=f"{about.capitalize()}; the exit status is 1 when ORTModule cannot run.",
    )
    doctor.add_argument(
        "--build", action="store_true", help="first build ORT's torch extension, where it is not"
    )
    about = "say how many exported graphs are cached, and where"
    cache = commands.add_parser("cache", help=about, description=f"{about.capitalize()}.")
    cache.add_argument("action", nargs="?", choices=["clear"], help="remove them all")
    given = parser.parse_args(arguments)
    if given.command == "cache":
        return _cache(clear=given.action == "clear")
    return _doctor(build=given.build)


def _cache(*, clear: bool) -> int:
    from ortlab.engines import cache

    print(f"removed {cache.clear()}" if clear else cache.usage())
    return 0


def _doctor(*, build: bool) -> int:
    from ortlab import compat
    from ortlab.compat import doctor, extensions

    # What keeps ORTModule from running altogether is in the table below.
    if build and doctor.obstacle() is None:
        try:
            extensions.build(print)
        except compat.OrtUnavailable as error:
            print(error, file=sys.stderr)
    findings = doctor.checks()
    print(doctor.table(findings))
    return 0 if doctor.can_run(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
