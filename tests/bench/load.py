"""Benchmark of training steps on a busy machine.

Run ``OMP_WAIT_POLICY=passive python -m tests.bench.load``.

The load is six processes of ``while True: pass``. In each round every engine has a turn on the
quiet machine and a turn beside them. The figure is (loaded / quiet step of the engine) / (loaded /
quiet step of eager torch), by medians within a round, with quartiles over the rounds; at most 1.5.
The slowest step is compared with the quiet one; at most 10 times. A loop in Python that takes as
long as eager torch's step shows what the scheduler does to a thread that never waits by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ortlab.bench import models
from ortlab.bench.interleaved import Spread
from ortlab.engines.registry import engine
from ortlab.settings import FinetuneSettings
from ortlab.utils import contention

BAR, SLOWEST = 1.5, 10
PROCESSES = 6
LOOP = "python loop"
_QUIET_S, _LOADED_S, _SETTLES_S = 2.0, 6.0, 1.0


def task(name: str) -> tuple[nn.Module, Any, Any]:
    """Return the model, the loss function and the batch of that name."""
    if name != "mlp":
        model, batch = models.build(name)
        return model, None, batch
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, nn.functional.cross_entropy, (torch.randn(32, 64), torch.randint(10, (32,)))


def steps(name: str, engines: list[str]) -> dict[str, Callable[[], object]]:
    """Return a function for each engine that makes one step."""
    model, loss, batch = task(name)
    found: dict[str, Callable[[], object]] = {}
    for each in engines:
        settings = FinetuneSettings.of({"engine": each, "device": "cpu"})
        stepper = engine(each).prepare(copy.deepcopy(model), loss, settings)
        found[each] = functools.partial(stepper.step, [batch], lr=0.0)
        turn(found[each], _SETTLES_S)
    wanted_ms, count = statistics.median(turn(found["eager"], _SETTLES_S)), 100
    found[LOOP] = functools.partial(_loop, count)
    while statistics.median(turn(found[LOOP], 0.1)) < wanted_ms:
        count = int(1.2 * count)
        found[LOOP] = functools.partial(_loop, count)
    return found


def _loop(count: int) -> int:
    return sum(range(count))


def turn(step: Callable[[], object], seconds: float) -> list[float]:
    """Return the milliseconds of each step in a time, of ten steps at least."""
    taken: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken) < 10:
        began = time.perf_counter()
        step()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep the machine busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(PROCESSES)]
    try:
        time.sleep(_SETTLES_S)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        time.sleep(_SETTLES_S)


def measure(name: str, engines: list[str], rounds: int) -> bool:
    """Print a line for each engine; return whether all are within the limits."""
    each_step = steps(name, engines)
    quiet: dict[str, list[float]] = {each: [] for each in each_step}
    loaded: dict[str, list[float]] = {each: [] for each in each_step}
    slowdowns: dict[str, list[float]] = {each: [] for each in each_step}
    drawn = random.Random(0)
    for _ in range(rounds):
        order = drawn.sample(list(each_step), len(each_step))
        alone = {each: turn(each_step[each], _QUIET_S) for each in order}
        with load():
            beside = {each: turn(each_step[each], _LOADED_S) for each in order}
        for each in order:
            quiet[each] += alone[each]
            loaded[each] += beside[each]
            slowdowns[each].append(statistics.median(beside[each]) / statistics.median(alone[each]))
    met = True
    for each in each_step:
        usual_ms = statistics.median(quiet[each])
        pairs = zip(slowdowns[each], slowdowns["eager"], strict=True)
        figure = Spread.of([ours / theirs for ours, theirs in pairs])
        slowest = max(loaded[each]) / usual_ms
        within = figure.median <= BAR and slowest <= SLOWEST
        met &= within or each == LOOP
        print(
            f"{name}, {each}: quiet {usual_ms:.2f} ms, loaded {statistics.median(loaded[each]):.2f}"
            f" ms (mean {statistics.fmean(loaded[each]):.2f}), over eager's slowdown "
            f"{figure.median:.2f} ({figure.low:.2f} to {figure.high:.2f}); slowest of "
            f"{len(loaded[each])} loaded steps {slowest:.0f} times the quiet one"
            f"{'' if within or each == LOOP else ' MISSED'}",
            flush=True,
        )
    return met


def main() -> int:
    """Print the figures; return 1 where a limit is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="mlp,bert-128")
    parser.add_argument("--engines", default="eager,ortmodule")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    if contention.spinning():
        parser.error("set OMP_WAIT_POLICY=passive, as in the kernels of ortlab")
    found = [
        measure(name, given.engines.split(","), given.rounds) for name in given.models.split(",")
    ]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
