"""Benchmark of live charts beside training: ``python -m tests.bench.charts [engine] [rounds]``.

A kernel trains ``bert-128`` of `ortlab.bench.models`. In each round the run is a while without and
a while with charts that look for news `HZ` times a second, more often than in use, in random order.
The share of charts is the additional CPU time of the kernel's own threads (views, messages) per
wall time, which a busy machine hardly changes, unlike the time of a step; a step takes more than a
core's CPU time. Exits with 1 if the median share of a core is above `LIMIT`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
from jupyter_client.manager import start_new_kernel

from tests.browser.bench_update import run_code

HZ, LIMIT = 10, 0.01

SETUP = """
import json, random, threading, time
from pathlib import Path
import ortlab
from ortlab.bench import models
from ortlab.notebook.views import charts
from ortlab.notebook.views.pump import Pump
from ortlab.session import session

Pump.PERIOD_S, Pump.SHARE = 1 / {hz}, float("inf")
session.show = lambda watched: None    # the charts of this benchmark alone
model, batch = models.build("bert-128")
run = ortlab.finetune(model, [batch] * 1000, engine={engine!r}, epochs=1000, device="cpu")
while run.step < 50:
    time.sleep(0.1)
updates = []
send = charts.RunView.send
charts.RunView.send = lambda *given, **named: (updates.append(1), send(*given, **named))[1]

def cpu_s():
    "CPU time of the kernel's threads but the training one and those without Python."
    names = {{t.native_id: t.name for t in threading.enumerate()}}
    used = 0.0
    for task in Path("/proc/self/task").iterdir():
        own = names.get(int(task.name), (task / "comm").read_text())
        if own.startswith("ZMQ") or (int(task.name) in names and own != training):
            used += int((task / "schedstat").read_text().split()[0]) / 1e9
    return used

training = run._worker.thread.name

def turn(with_charts):
    view = charts.view(run) if with_charts else None
    if view:
        view._receive(view, {{"do": "hello"}}, [])    # as a browser does
    time.sleep(0.5)
    updates.clear()
    at = time.perf_counter(), cpu_s(), run.step, time.process_time()
    time.sleep({seconds})
    wall, own, steps, whole = (
        now - then for now, then in zip(
            (time.perf_counter(), cpu_s(), run.step, time.process_time()), at
        )
    )
    sent = len(updates)
    if view:
        view.close()
    return dict(share=own / wall, step_ms=1e3 * wall / steps, cpu_ms=1e3 * whole / steps,
                hz=sent / wall)
"""

MEASURE = """
found = []
for _ in range({rounds}):
    arms = [True, False]
    random.shuffle(arms)
    found.append({{str(arm): turn(arm) for arm in arms}})
run.stop()
run.wait_over(60)
print("RESULT " + json.dumps([found, run.engine_used]))
"""


def measure(engine: str, rounds: int, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return the figures of each round, with and without charts, and the engine that ran."""
    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    try:
        run_code(client, SETUP.format(hz=HZ, engine=engine, seconds=seconds))
        printed = run_code(client, MEASURE.format(rounds=rounds))
        found, used = json.loads(printed.split("RESULT ", 1)[1].splitlines()[0])
        return found, used
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> int:
    engine = sys.argv[1] if len(sys.argv) > 1 else "eager"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    found, used = measure(engine, rounds, 4.0)
    print(f"bert-128 on {used}, {rounds} rounds: median (quartiles)")

    def told(values: np.ndarray[Any, Any], form: str) -> str:
        low, middle, high = (form.format(each) for each in np.quantile(values, [0.25, 0.5, 0.75]))
        return f"{middle} ({low} to {high})"

    def column(arm: bool, name: str) -> np.ndarray[Any, Any]:
        return np.array([each[str(arm)][name] for each in found])

    for arm, label in ((False, "without charts"), (True, "with charts")):
        print(
            f"{label:<15} step {told(column(arm, 'step_ms'), '{:.2f}')} ms, CPU of a step "
            f"{told(column(arm, 'cpu_ms'), '{:.2f}')} ms"
        )
    share = column(True, "share") - column(False, "share")
    print(f"messages a second {told(column(True, 'hz'), '{:.1f}')}")
    print(f"CPU of an update {told(1e3 * share / HZ, '{:.2f}')} ms")
    print(f"share of a core {told(share, '{:.2%}')}")
    of_step = share * column(False, "step_ms") / column(False, "cpu_ms")
    print(f"share of a step's CPU time {told(of_step, '{:.2%}')}")
    slower = column(True, "step_ms") / column(False, "step_ms") - 1
    print(f"step with charts / without - 1: {told(slower, '{:+.2%}')}")
    missed = np.median(share) > LIMIT
    print(f"{'above' if missed else 'within'} {LIMIT:.0%} at {HZ} Hz")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
