"""The command line: ``ortlab doctor``, ``ortlab cache``, ``ortlab bench``, ``ortlab --version``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ortlab
from ortlab.bench import BenchSettings
from ortlab.bench.models import MODELS
from ortlab.settings import Declaration


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
    bench = _add_bench(commands)
    given = parser.parse_args(arguments)
    if given.command == "cache":
        return _cache(clear=given.action == "clear")
    if given.command == "bench" and given.what == "kernels":
        return _bench_kernels()
    if given.command == "bench":
        return _bench_engines(bench, given)
    return _doctor(build=given.build)


_BENCH = """\
Train fixed models in every engine and precision, side by side, and say how fast each is.

All cells of a model take turns, in an order that is shuffled in each round, and each is compared
with eager torch in fp32 within the round: what else the machine does meets all of them. Every cell
has a copy of the same weights, the same batch, dropout of 0.1, sdpa attention and fused AdamW.
Told are medians and quartiles, the seconds to the first step (with nothing cached on disk, the
libraries loaded), and how far loss and gradients are from eager torch's, by which a fast engine
that computes something else shows. A cell that cannot run says why.

The whole takes minutes for each model, most of them torch.compile's; it needs about 10 GB of memory
and a machine that does nothing else. Ctrl-C ends it with what was measured so far.
"""


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    """Adds ``bench engines``, with an option for each of `BenchSettings`; returns its parser."""
    about = "say how fast each engine trains here"
    bench = commands.add_parser("bench", help=about, description=f"{about.capitalize()}.")
    models = "\n".join(f"  {name:16} {model.about}" for name, model in MODELS.items())
    parts = bench.add_subparsers(dest="what", required=True)
    about = "ORT's operators beside the kernels that may take their place, as measured here so far"
    parts.add_parser("kernels", help=about, description=f"{about}.")
    engines: argparse.ArgumentParser = parts.add_parser(
        "engines",
        help="all engines and precisions on fixed models",
        description=_BENCH,
        epilog=f"models:\n{models}\n\nIn Python: from ortlab import bench; bench.engines(rounds=5)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, declaration in BenchSettings.declarations().items():
        if declaration.type is bool:
            engines.add_argument(declaration.flag, action="store_true", help=declaration.help)
        else:
            engines.add_argument(declaration.flag, metavar=name.upper(), help=_help(declaration))
    engines.add_argument(
        "--json", metavar="FILE", help="write every figure to FILE too; - prints them, and no table"
    )
    return engines


def _bench_kernels() -> int:
    from ortlab.kernels import choice

    print(choice.table())
    return 0


def _help(declaration: Declaration) -> str:
    """What it chooses, from what, and what holds where nothing is chosen."""
    default, choices = declaration.default, ", ".join(declaration.choices)
    listed = f": {choices}" if choices and declaration.choices != tuple(MODELS) else ""
    if declaration.many and default == ",".join(declaration.choices):
        default = "all"
    return f"{declaration.help}{listed}" + (f" (default: {default})" if default else "")


def _bench_engines(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """130, as of a program that Ctrl-C ended, where it did; what was measured is told all the same.

    What cannot be done with the options is said before anything is measured.
    """
    from ortlab import bench
    from ortlab.engines.base import progress

    declared = BenchSettings.declarations()
    typed = {name: getattr(given, name) for name in declared if getattr(given, name) is not None}
    file = None if given.json in (None, "-") else Path(given.json)
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        parser.error(f"--json {file}: cannot be written there")
    progress.set(lambda line: print(line, file=sys.stderr, flush=True))
    try:
        chosen = {n: declared[n].parse(v) if isinstance(v, str) else v for n, v in typed.items()}
        result = bench.engines(**chosen)
    except ValueError as error:
        parser.error(str(error))
    figures = json.dumps(result.as_dict(), indent=1)
    print(figures if given.json == "-" else result.markdown(), flush=True)
    if file is not None:
        file.write_text(f"{figures}\n")
    return 130 if result.interrupted else 0


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
