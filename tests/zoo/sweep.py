"""The sweep: every cell of `specs` in its own process, and a table of the results.

Run ``python -m tests.zoo.sweep [pattern ...] [--engine ort] [--quick] [--all-threads]``. A pattern
is a cell's name or a glob that matches several: ``'gpt*/0.1'``. For engine ``ortmodule`` the exit
status is 1 when less than 93% of the cells are ok, or when a cell that is not ok was not refused.
For engine ``ort`` it is 1 unless every cell is ok, and 95% of the cells have 95% of their compute
nodes in ORT; for ``auto``, unless every cell is ok.

``--shard 2/5`` runs every fifth cell, from the second one on. ``--results FILE`` adds a line of
JSON to FILE for each cell as it ends. Cells that FILE has are not run again, so that a sweep that
was interrupted can be resumed; delete FILE, or lines of it, after a change of ortlab.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import json
import multiprocessing
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.zoo import specs
from tests.zoo.outcome import FAILED, OK, REFUSED, WRONG, Outcome

WANTED: Final = {"ortmodule": 0.93, "ort": 1.0, "auto": 1.0}
"""Share of the cells that must be ok, by engine.

Engine ``ortmodule`` refuses 32 of 500, whose selections might be empty and end the process."""

IN_ORT: Final = 0.95
"""Share of the compute nodes in ORT that this share of the cells must reach on engine ``ort``."""

_PRELOADED: Final = {
    "ortmodule": "tests.zoo.preload_ortmodule",
    "ort": "tests.zoo.preload",
    "auto": "tests.zoo.preload_ortmodule",
}
_WORKERS: Final = 2
_LIMITS_S: Final = {"ortmodule": 300, "ort": 900, "auto": 900}
"""Time of a cell at most. Torch alone takes minutes to capture Swin at sizes that vary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, print its table and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.sweep")
    parser.add_argument("patterns", nargs="*", help="names of cells, with * and ? (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="run the sample of cells that `make test` runs"
    )
    parser.add_argument(
        "--all-threads",
        action="store_true",
        help="use torch's number of threads instead of one per cell",
    )
    parser.add_argument("--engine", choices=sorted(WANTED), default="ortmodule")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="cells at a time")
    given = parser.parse_args(arguments)
    sample = specs.QUICK_ON_ORT if given.engine == "ort" else specs.QUICK
    chosen = [
        cell
        for cell in specs.cells()
        if _matches(cell, given.patterns) and (not given.quick or cell.name in sample)
    ]
    if not chosen:
        parser.error(f"no cell is called {' or '.join(given.patterns)}")
    chosen = chosen[given.shard[0] - 1 :: given.shard[1]]
    if not given.all_threads:
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    started = time.perf_counter()
    done = _read(given.results, chosen)
    waiting = [cell for cell in chosen if cell.name not in done]
    outcomes = _kept(run(waiting, engine=given.engine, workers=given.workers), given.results)
    found = [*done.values(), *_printed(outcomes, len(waiting))]
    _summarize(found, time.perf_counter() - started)
    return 0 if passed(found, given.engine) else 1


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def _matches(cell: specs.Cell, patterns: Sequence[str]) -> bool:
    return not patterns or any(
        fnmatch.fnmatch(cell.name, each) or cell.name.startswith(each + "/") for each in patterns
    )


def passed(outcomes: Sequence[Outcome], engine: str) -> bool:
    """Return whether enough cells are ok, every other one is refused, and enough runs in ORT."""
    count, total = Counter(outcome.status for outcome in outcomes), len(outcomes)
    if engine == "ort" and total - len(_partly_in_torch(outcomes)) < IN_ORT * total:
        return False
    return count[OK] + count[REFUSED] == total and count[OK] >= WANTED[engine] * total


def _partly_in_torch(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the cells of engine ``ort`` with less than 95% of their compute nodes in ORT."""
    return [outcome for outcome in outcomes if outcome.ort_share < IN_ORT]


# ---- results on disk -----------------------------------------------------------------------------


def _read(results: Path | None, chosen: Iterable[specs.Cell]) -> dict[str, Outcome]:
    """Return the outcomes of `chosen` cells in `results`, by name."""
    if results is None or not results.exists():
        return {}
    names = {cell.name for cell in chosen}
    found = (Outcome(**json.loads(line)) for line in results.read_text().splitlines())
    return {outcome.name: outcome for outcome in found if outcome.name in names}


def _kept(outcomes: Iterable[Outcome], results: Path | None) -> Iterator[Outcome]:
    """Add a line to `results` for each outcome."""
    for outcome in outcomes:
        if results is not None:
            keep(outcome, results)
        yield outcome


def keep(outcome: Outcome, results: Path) -> None:
    """Add a line to `results`."""
    with results.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


# ---- processes -----------------------------------------------------------------------------------


def run(cells: Iterable[specs.Cell], *, engine: str, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each cell as it ends; `workers` cells run at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED[engine]])
    task, limit = functools.partial(_try, engine), _LIMITS_S[engine]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        waiting = [
            pool.submit(in_process, context, cell, task=task, limit_s=limit) for cell in cells
        ]
        for future in concurrent.futures.as_completed(waiting):
            yield future.result()


def _try(engine: str, sender: Connection, cell: specs.Cell) -> None:
    from tests.zoo.trial import trial

    sender.send(trial(cell, engine))


def in_process(
    context: Any,
    cell: specs.Cell,
    *,
    task: Callable[[Connection, specs.Cell], None],
    limit_s: int,
) -> Outcome:
    """Return the outcome of `task` for `cell`, run in its own process for up to `limit_s` s.

    Time during which the whole sweep is suspended (SIGSTOP) does not count.
    """
    started = time.perf_counter()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=task, args=(sender, cell), daemon=True)
    process.start()
    sender.close()
    try:
        if any(receiver.poll(1) for _ in range(limit_s)):
            outcome: Outcome = receiver.recv()
            return outcome
        status, reason = FAILED, f"no end after {limit_s} s"
        process.kill()
    except EOFError:
        process.join()
        status, reason = WRONG, f"the process died (exit code {process.exitcode})"
    finally:
        receiver.close()
        process.join()
    return Outcome(cell.name, status, reason, seconds=time.perf_counter() - started)


# ---- the table -----------------------------------------------------------------------------------


def _printed(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    names = f"{'loss':>8} {'gradient':>8} {'10 steps':>8} {'in ORT':>8} graphs seconds engine"
    print(f"{'cell':<36} {'result':<8} {names}")
    for number, each in enumerate(outcomes, start=1):
        errors = " ".join(
            f"{error:8.0e}" if error == error else " " * 8
            for error in (each.loss_error, each.gradient_error, each.steps_error)
        )
        share = f"{each.ort_share:8.1%}" if each.ort_share == each.ort_share else " " * 8
        numbers = f"{errors} {share} {each.exports:6d} {each.seconds:7.1f}"
        where = f"{each.engine:<9} {number}/{total}"
        print(f"{each.name:<36} {each.status:<8} {numbers} {where}", flush=True)
        if each.reason:
            print(textwrap.indent(each.reason, "    "), flush=True)
        yield each


def _summarize(outcomes: Sequence[Outcome], seconds: float) -> None:
    count = Counter(outcome.status for outcome in outcomes)
    again = sum(outcome.status == OK and outcome.exports > 1 for outcome in outcomes)
    print(f"\n{len(outcomes)} cells in {seconds:.0f} s: ", end="")
    print(", ".join(f"{number} {status}" for status, number in count.most_common()), end="")
    print(f" ({count[OK] / len(outcomes):.1%} ok; {again} of them exported for each shape)")
    engines = Counter(outcome.engine for outcome in outcomes if outcome.engine)
    print("engines: " + ", ".join(f"{number} {name}" for name, number in engines.most_common()))
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.status, outcome.name)):
        if outcome.status != OK:
            print(f"{outcome.status}: {outcome.name}")
            print(textwrap.indent(outcome.reason, "    "))
    for outcome in _partly_in_torch(outcomes):
        print(f"{outcome.ort_share:.1%} in ORT: {outcome.name}")
        print(textwrap.indent(outcome.in_torch, "    "))


if __name__ == "__main__":
    sys.exit(main())
