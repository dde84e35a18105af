"""The sweep: every cell of `specs` in its own process, and a table of the results.

Run ``python -m tests.zoo.sweep [pattern ...] [--quick] [--all-threads]``. A pattern is a cell's
name or a glob that matches several: ``'gpt*/0.1'``. The exit status is 1 when less than 98% of the
cells are ok, or when a cell that is not ok was not refused.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import multiprocessing
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from tests.zoo import specs
from tests.zoo.outcome import FAILED, OK, REFUSED, WRONG, Outcome

WANTED: Final = 0.98
_WORKERS: Final = 2
_LIMIT_S: Final = 300.0


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
    given = parser.parse_args(arguments)
    chosen = [cell for cell in specs.cells() if _matches(cell, given.patterns, given.quick)]
    if not chosen:
        parser.error(f"no cell is called {' or '.join(given.patterns)}")
    if not given.all_threads:
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    started = time.perf_counter()
    outcomes = list(_printed(run(chosen), len(chosen)))
    _summarize(outcomes, time.perf_counter() - started)
    return 0 if passed(outcomes) else 1


def _matches(cell: specs.Cell, patterns: Sequence[str], quick: bool) -> bool:
    if quick and cell.name not in specs.QUICK:
        return False
    return not patterns or any(
        fnmatch.fnmatch(cell.name, each) or cell.name.startswith(each + "/") for each in patterns
    )


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether 98% of the cells are ok and every other one is refused."""
    count = Counter(outcome.status for outcome in outcomes)
    return count[OK] + count[REFUSED] == len(outcomes) and count[OK] >= WANTED * len(outcomes)


# ---- processes -----------------------------------------------------------------------------------


def run(cells: Iterable[specs.Cell]) -> Iterator[Outcome]:
    """Yield the outcome of each cell as it ends; two cells run at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.zoo.preload"])
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        waiting = [pool.submit(in_process, context, cell) for cell in cells]
        for future in concurrent.futures.as_completed(waiting):
            yield future.result()


def _try(sender: Connection, cell: specs.Cell) -> None:
    from tests.zoo.trial import trial

    sender.send(trial(cell))


def in_process(
    context: Any,
    cell: specs.Cell,
    *,
    task: Callable[[Connection, specs.Cell], None] = _try,
    limit_s: float = _LIMIT_S,
) -> Outcome:
    """Return the outcome of `task` for `cell`, run in its own process for up to `limit_s` s."""
    started = time.perf_counter()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=task, args=(sender, cell), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            outcome: Outcome = receiver.recv()
            return outcome
        status, reason = FAILED, f"no end after {limit_s:.0f} s"
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
    print(f"{'cell':<36} {'result':<8} {'loss':>8} {'gradient':>8} {'10 steps':>8} graphs seconds")
    for number, each in enumerate(outcomes, start=1):
        errors = " ".join(
            f"{error:8.0e}" if error == error else " " * 8
            for error in (each.loss_error, each.gradient_error, each.steps_error)
        )
        row = f"{each.name:<36} {each.status:<8} {errors} {each.exports:6d} {each.seconds:7.1f}"
        print(f"{row}  {number}/{total}", flush=True)
        if each.reason:
            print(textwrap.indent(each.reason, "    "), flush=True)
        yield each


def _summarize(outcomes: Sequence[Outcome], seconds: float) -> None:
    count = Counter(outcome.status for outcome in outcomes)
    again = sum(outcome.status == OK and outcome.exports > 1 for outcome in outcomes)
    print(f"\n{len(outcomes)} cells in {seconds:.0f} s: ", end="")
    print(", ".join(f"{number} {status}" for status, number in count.most_common()), end="")
    print(f" ({count[OK] / len(outcomes):.1%} ok; {again} of them exported for each shape)")
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.status, outcome.name)):
        if outcome.status != OK:
            print(f"{outcome.status}: {outcome.name}")
            print(textwrap.indent(outcome.reason, "    "))


if __name__ == "__main__":
    sys.exit(main())
