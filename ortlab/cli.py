"""Command line: ``ortlab lab``, ``doctor``, ``cache``, ``kernelspec``, ``bench``, ``plan``."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab import bench
from ortlab._version import __version__
from ortlab.bench import BenchSettings, PaperSettings
from ortlab.bench.claims import CLAIMS, claim_of
from ortlab.bench.models import MODELS
from ortlab.bench.papers import PAPERS
from ortlab.engines import caches, doctor
from ortlab.engines.base import progress
from ortlab.plan.published_runs import published_table
from ortlab.plan.result import training_plan
from ortlab.settings import Declaration, PlanSettings, Settings
from ortlab.utils import contention, warn_once
from ortlab.utils.findings import findings_table
from ortlab.utils.plain_onnxruntime import NO_TELEMETRY

if TYPE_CHECKING:
    from ortlab.bench.claims.claim import ClaimBench
    from ortlab.bench.paper_report import PaperBench
    from ortlab.bench.result import EngineBench


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words of the command line; None for those of this process.

    Returns:
        The exit status.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:2] == ["bench", "step"]:
        print("ortlab bench step was removed; use ortlab bench engines --profile", file=sys.stderr)
        return 2
    given, others = parser().parse_known_args(words)
    if given.command == "lab":
        return _lab(others)
    if others:
        parser().parse_args(words)  # refuses them
    if given.command == "cache":
        return _cache(clear=given.action == "clear")
    warn_once.are_seen()  # the tables of benchmarks show these warnings
    if given.command in ("bench", "kernelspec", "plan"):
        run: Callable[[argparse.Namespace], int] = given.run
        return run(given)
    return _doctor(build=given.build)


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``ortlab`` with all its commands."""
    parser = argparse.ArgumentParser(
        "ortlab", description="Training in ONNX Runtime, live in JupyterLab."
    )
    parser.add_argument("--version", action="version", version=f"ortlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "open JupyterLab, with threads that leave a busy machine's cores to others"
    commands.add_parser(
        "lab",
        help=about,
        description=f"{about.capitalize()}. It listens on this machine only. Options and paths of "
        "`jupyter lab` may follow.",
    )
    about = "list what this machine has, what it lacks and how to fix it"
    doctor = commands.add_parser(
        "doctor",
        help=about,
        description=f"{about.capitalize()}; the exit status is 1 when ORTModule cannot run.",
    )
    doctor.add_argument(
        "--build", action="store_true", help="first build the C++ extensions that are missing"
    )
    about = "show how many exported graphs are cached, and where"
    cache = commands.add_parser("cache", help=about, description=f"{about.capitalize()}.")
    cache.add_argument("action", nargs="?", choices=["clear"], help="remove them all")
    _add_kernelspec(commands)
    _add_bench(commands)
    _add_plan(commands)
    return parser


_PLAN = """\
Plan the training of a transformer on a fleet of GPUs: the ten fastest layouts with the memory of a
rank, the time of a step and its parts, GPU hours and cost, and why other layouts do not fit.

It is arithmetic: nothing is run, and no weights are needed. Give --gpus, or --tokens and --days for
the fewest GPUs that train the tokens within the days.
"""


def _add_plan(commands: Any) -> None:
    about = "plan the training of a transformer on a fleet of GPUs"
    parser = commands.add_parser(
        "plan",
        help=about,
        description=_PLAN,
        epilog='In Python: ortlab.training_plan("175B", gpus=1024, tokens="300B")',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="parameters such as 175B, or a config.json of Hugging Face's transformers",
    )
    parser.add_argument(
        "--published", action="store_true", help="compare plans with published runs"
    )
    parser.add_argument(
        "--script", metavar="FOLDER", help="write the files to launch the fastest layout"
    )
    _add_options(parser, PlanSettings.declarations())
    parser.set_defaults(run=functools.partial(_plan, parser))


def _plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Print a plan, or the published runs; return 1 if nothing fits."""
    if given.published:
        print(published_table())
        return 0
    if given.model is None:
        parser.error("name a model, as in ortlab plan 7B --gpus 64, or use --published")
    try:
        plan = training_plan(given.model, **_typed(given, PlanSettings))
    except ValueError as error:
        return _refused(parser, error)
    print(plan)
    if given.script is not None and plan.best is not None:
        try:
            written = plan.write(given.script)
        except (ValueError, OSError) as error:
            return _refused(parser, error)
        print("\n".join(["", *(f"wrote {path}" for path in written)]))
    return 0 if plan.best is not None else 1


_LAB = (
    "--ip=127.0.0.1",
    # A run that ends with its kernel writes a checkpoint first.
    "--KernelManager.shutdown_wait_time=60",
)
"""Options of ``jupyter lab``, which those that are given replace."""
_KERNELSPEC = """\
Make a Jupyter kernel that runs in this environment, for JupyterLab, Notebook and VS Code.

The kernel uses this Python, as many threads as it has cores, and %ort without %load_ext. A kernel
for the CPU sees no GPU. With --gpu, torch's allocator uses expandable segments, and the kernel gets
this shell's settings of CUDA (LD_LIBRARY_PATH, CUDA_HOME, PYTORCH_CUDA_ALLOC_CONF).
"""


def _add_kernelspec(commands: Any) -> None:
    about = "make, list and remove Jupyter kernels of this environment"
    parser = commands.add_parser("kernelspec", help=about, description=f"M{about[1:]}.")
    parts = parser.add_subparsers(dest="what", required=True)
    install = parts.add_parser(
        "install",
        help="make a kernel",
        description=_KERNELSPEC,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    install.add_argument(
        "--name", help="name that notebooks store (default: ortlab, or ortlab-gpu)"
    )
    install.add_argument("--display-name", metavar="TEXT", help="name that the launcher shows")
    install.add_argument("--gpu", action="store_true", help="train on the GPU; not tested")
    install.add_argument(
        "--threads", type=int, metavar="N", help="threads of torch (default: the number of cores)"
    )
    place = install.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for this user; the default")
    place.add_argument("--prefix", metavar="FOLDER", help="in FOLDER/share/jupyter/kernels")
    place.add_argument(
        "--sys-prefix",
        dest="prefix",
        action="store_const",
        const=sys.prefix,
        help="in this Python's environment",
    )
    install.set_defaults(run=functools.partial(_install_kernel, install))
    about = "list the kernels that ortlab made"
    listed = parts.add_parser("list", help=about, description=f"{about.capitalize()}.")
    listed.set_defaults(run=_list_kernels)
    about = "remove a kernel that ortlab made"
    remove = parts.add_parser("remove", help=about, description=f"{about.capitalize()}.")
    remove.add_argument("name", help="its name in `ortlab kernelspec list`")
    remove.set_defaults(run=functools.partial(_remove_kernel, remove))


def _install_kernel(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    from ortlab.notebook import kernelspec  # heavy: jupyter_client

    try:
        kernel = kernelspec.install(
            given.name,
            gpu=given.gpu,
            display_name=given.display_name,
            threads=given.threads,
            prefix=given.prefix,
        )
    except (ValueError, OSError) as error:
        return _refused(parser, error)
    print(f"{kernel.display_name!r}, the kernel {kernel.name}, is in {kernel.folder}")
    print(" ".join(f"{name}={value}" for name, value in kernel.environment.items()))
    if kernel.name not in (each.name for each in kernelspec.installed()):
        print(f"Jupyter finds it only if JUPYTER_PATH contains {kernel.folder.parents[1]}")
    provider = doctor.cuda_provider() if given.gpu else None
    if provider is not None and provider.ok is False:
        print(f"{provider.name}: {provider.found}\n-> {provider.fix}")
    return 0


def _list_kernels(given: argparse.Namespace) -> int:  # noqa: ARG001 - it has no options
    from ortlab.notebook import kernelspec  # heavy: jupyter_client

    print(kernelspec.installed())
    return 0


def _remove_kernel(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    from ortlab.notebook import kernelspec  # heavy: jupyter_client

    try:
        print(f"removed {kernelspec.remove(given.name)}")
    except (ValueError, OSError) as error:
        return _refused(parser, error)
    return 0


def _refused(parser: argparse.ArgumentParser, error: Exception) -> int:
    """Print the reason only, as the doctor does, and return exit status 1."""
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 1


_ENGINES = """\
Train fixed models in every engine and precision, side by side, and show how fast each one is.

All cells of a model take turns in an order that is shuffled in each round, and each one is compared
with eager torch in fp32 within the round, so that other load on the machine affects all of them.
Every cell has a copy of the same weights, the same batch, dropout of 0.1, sdpa attention and fused
AdamW. The table shows medians and quartiles, the seconds to the first step (with empty caches on
disk and loaded libraries), and the differences of loss and gradients from eager torch, which reveal
a fast engine that computes something else. A cell that cannot run shows the reason.

It takes minutes for each model, most of them for torch.compile, and needs about 10 GB of memory and
an otherwise idle machine. Ctrl-C ends it with the results so far.
"""


_PAPERS = """\
Run the benchmarks that were published for ORT's training, and show both tables side by side.

They are the pre-training of BERT-Large in both phases, GPT-2 Medium at sequence 1024, and the
fine-tuning table of ORT's training examples. A GPU uses the published shapes and fp16, which is not
tested; a CPU uses smaller models, so that only speedups can be compared, and with care. The method
is that of `ortlab bench engines`. Each published figure is quoted with its address, or "not found".

With --claim it measures another claim of ORT's papers, and prints ORT's result here, eager torch's,
and the published figure. Options that a claim does not have are refused.
"""


def _add_bench(commands: Any) -> None:
    """Add the benchmarks; ``run`` of the parsed arguments executes them."""
    about = "show how fast each engine trains here, and where the time of a step goes"
    parser = commands.add_parser("bench", help=about, description=f"{about.capitalize()}.")
    parts = parser.add_subparsers(dest="what", required=True)
    about = "ORT's operators next to the kernels that may replace them, as measured here so far"
    kernels = parts.add_parser("kernels", help=about, description=f"{about}.")
    kernels.set_defaults(run=_bench_kernels)
    _add_benchmark(
        parts,
        "engines",
        about="all engines and precisions on fixed models",
        description=_ENGINES,
        call="bench.engines(rounds=5)",
        settings=BenchSettings,
        run=functools.partial(_bench, bench.engines, BenchSettings),
    )
    papers = _add_benchmark(
        parts,
        "papers",
        about="the published benchmarks of ORT's training, next to the published figures",
        description=_PAPERS,
        call="bench.papers(rounds=5)",
        settings=PaperSettings,
        run=_bench_papers,
        models={name: paper.title for name, paper in PAPERS.items()},
    )
    _add_claims(papers)


def _add_benchmark(
    parts: Any,
    name: str,
    *,
    about: str,
    description: str,
    call: str,
    settings: type[Settings],
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int],
    models: Mapping[str, str] | None = None,
) -> argparse.ArgumentParser:
    """Add one benchmark with an option for each of `settings`; `call` is the same in Python."""
    about_models = models or {name: model.about for name, model in MODELS.items()}
    width = max(map(len, about_models)) + 2
    listed = "\n".join(f"  {name:{width}}{about_models[name]}" for name in about_models)
    parser: argparse.ArgumentParser = parts.add_parser(
        name,
        help=about,
        description=description,
        epilog=f"models:\n{listed}\n\nIn Python: from ortlab import bench; {call}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser, settings.declarations())
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write all figures to FILE; - prints them instead of the table",
    )
    parser.set_defaults(run=functools.partial(run, parser))
    return parser


def _add_claims(parser: argparse.ArgumentParser) -> None:
    """Add ``--claim`` to ``papers``, and the options that only claims have."""
    listed = "; ".join(f"{name}: {claim.title}" for name, claim in CLAIMS.items())
    group = parser.add_argument_group("claims")
    group.add_argument("--claim", metavar="NAME", help=f"another claim to measure. {listed}")
    own: dict[str, Declaration] = {}
    for claim in CLAIMS.values():
        own |= claim.settings.declarations()
    papers = PaperSettings.declarations()
    _add_options(group, {name: each for name, each in own.items() if name not in papers})


def _add_options(parser: Any, declared: Mapping[str, Declaration]) -> None:
    """Add an option for each of the declared settings."""
    for name, declaration in declared.items():
        if declaration.type is bool:
            parser.add_argument(declaration.flag, action="store_true", help=declaration.help)
        else:
            parser.add_argument(declaration.flag, metavar=name.upper(), help=_help(declaration))


def _bench_kernels(given: argparse.Namespace) -> int:  # noqa: ARG001 - it has no options
    print(caches.kernel_timings())
    return 0


def _help(declaration: Declaration) -> str:
    """Return the help text of an option with its choices and its default."""
    default, choices = declaration.default, ", ".join(declaration.choices)
    below = declaration.choices in (tuple(MODELS), tuple(PAPERS))
    listed = f": {choices}" if choices and not below else ""
    if declaration.many and default == ",".join(declaration.choices):
        default = "all"
    return f"{declaration.help}{listed}" + (f" (default: {default})" if default else "")


def _bench(
    measure: Callable[..., EngineBench | PaperBench | ClaimBench],
    settings: type[Settings],
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
) -> int:
    """Run a benchmark; return 130, like a program ended by Ctrl-C, if it was interrupted.

    Results up to the interrupt are printed. Wrong options are reported before anything is measured.
    """
    chosen = _chosen(parser, given, settings)
    try:
        result = measure(**chosen)
    except ValueError as error:
        parser.error(str(error))
    _tell(result, given)
    return 130 if result.interrupted else 0


def _bench_papers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Run the published benchmarks, or measure a claim; see `_bench`."""
    if given.claim is None:
        settings: type[Settings] = PaperSettings
        whose = "without --claim"
    else:
        try:
            settings = claim_of(given.claim).settings
        except ValueError as error:
            parser.error(str(error))
        whose = f"with --claim {given.claim}"
    allowed = {"command", "what", "run", "json", "claim", *settings.declarations()}
    for name, value in vars(given).items():
        if name not in allowed and value not in (None, False):
            parser.error(f"--{name.replace('_', '-')} has no effect {whose}; leave it out")
    return _bench(functools.partial(bench.papers, claim=given.claim), settings, parser, given)


def _chosen(
    parser: argparse.ArgumentParser, given: argparse.Namespace, settings: type[Settings]
) -> dict[str, Any]:
    """Return the typed options of a benchmark, whose progress goes to standard error.

    A value that cannot be read, or a file that cannot be written, ends the program.
    """
    file = _file(given)
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        parser.error(f"--json {file}: the file cannot be written")
    progress.set(lambda line: print(line, file=sys.stderr, flush=True))
    try:
        return _typed(given, settings)
    except ValueError as error:
        parser.error(str(error))


def _typed(given: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """Return the values of the options that were typed.

    Raises:
        ValueError: If one cannot be read.
    """
    declared = settings.declarations()
    typed = {name: getattr(given, name) for name in declared if getattr(given, name) is not None}
    return {n: declared[n].parse(v) if isinstance(v, str) else v for n, v in typed.items()}


def _file(given: argparse.Namespace) -> Path | None:
    return None if given.json in (None, "-") else Path(given.json)


def _tell(result: EngineBench | PaperBench | ClaimBench, given: argparse.Namespace) -> None:
    """Print the tables or the figures, and write the figures to the file that was named."""
    figures = json.dumps(result.as_dict(), indent=1)
    print(figures if given.json == "-" else result.markdown(), flush=True)
    file = _file(given)
    if file is not None:
        file.write_text(f"{figures}\n")


def _lab(arguments: Sequence[str]) -> int:
    """Run JupyterLab in this process's place, with the given arguments of its own."""
    if find_spec("jupyterlab") is None:
        print("ortlab lab: JupyterLab is not installed: pip install jupyterlab", file=sys.stderr)
        return 1
    from ortlab.notebook.privacy import HOW  # heavy: ipykernel

    given = {word.partition("=")[0] for word in arguments}
    options = [word for word in (*_LAB, HOW) if word.partition("=")[0] not in given]
    if hasattr(os, "getuid") and os.getuid() == 0:  # JupyterLab refuses root without it
        options.append("--allow-root")
    environment = dict(os.environ)
    for name, value in {**contention.SLEEPING, **NO_TELEMETRY}.items():
        environment[name] = environment.get(name) or value  # OpenMP refuses an empty one
    command = [sys.executable, "-m", "jupyterlab", *options, *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def _cache(*, clear: bool) -> int:
    print(f"removed {caches.clear_graphs()}" if clear else caches.graphs())
    return 0


def _doctor(*, build: bool) -> int:
    if build and (failure := doctor.build(print)) is not None:
        print(failure, file=sys.stderr)
    findings = doctor.checks()
    print(findings_table(findings))
    return 0 if doctor.can_run(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
