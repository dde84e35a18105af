"""Benchmark of the pause of a run when its settings change.

Run ``python -m tests.bench.switching`` on an otherwise idle machine.

Each case runs in its own processes, with nothing exported or compiled on disk: a run of
`ortlab.finetune` that switches back and forth between settings while it trains. The latency is
measured from the end of the step in flight to the start of the first step under the new settings.
Work that an engine does inside that first step (an export, a session, compiled code) is added to
the latency: it is the time of the first steps beyond a median step under the same settings.
`cost_s` is the run's own figure, including the first step. The limits: recompute, and a return to
an earlier engine or precision, take less than a second; learning rate, accumulation and clipping
apply to the next step without a stop; another precision on ORT takes no longer than the run's first
export, which is its first step beyond a median one. `--json FILE` stores all figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ortlab
from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import machine
from ortlab.bench.result import origin, table, warnings
from ortlab.metrics.recorder import INDEX, Event
from ortlab.utils.environment import environment
from tests.bench import memory
from tests.bench.children import found_by, nothing_cached
from tests.support.changed_runs import refusals

BATCH, TOKENS = 4, 64
STEPS = 10
"""Steps under each set of settings; the median step is computed from the last ones."""
FIRST = 2
"""Steps that may still export or compile. The first call of a transformers classifier stores its
problem type in its configuration, so the second one compiles again."""
BAR_S = 1.0
FREE = ("lr", "accumulation", "clip_norm")

CASES: Mapping[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "recompute": ({"engine": "ortmodule"}, ({"recompute": "layers"}, {"recompute": "off"})),
    "free": (
        {"engine": "ortmodule"},
        (
            *(
                {"lr": 1e-4},
                {"lr": 1e-5},
                {"gradient_accumulation_steps": 2},
                {"gradient_accumulation_steps": 1},
            ),
            *({"max_grad_norm": 0.1}, {"max_grad_norm": 1.0}),
        ),
    ),
    "precision": ({"engine": "ortmodule"}, ({"precision": "bf16"}, {"precision": "fp32"})),
    "ortmodule": ({"engine": "eager"}, ({"engine": "ortmodule"}, {"engine": "eager"})),
    "compile": ({"engine": "eager"}, ({"engine": "compile"}, {"engine": "eager"})),
}
"""Initial settings of each run, and the cycle of changes that it repeats."""


MADE_ONCE = ("precision", "engine")
"""Settings whose first change creates objects that a later return reuses."""


@dataclass(frozen=True)
class Change:
    """One change of a run. ``late`` counts steps begun under the old settings after the request."""

    text: str
    latency_s: float
    cost_s: float
    step_s: float
    late: int


class _Trained:
    """A run that makes the changes of a case, `rounds` times."""

    def __init__(self, case: str, given: argparse.Namespace) -> None:
        begin, cycle = CASES[case]
        bert = memory.Case("bert", given.width, given.layers, {"batch": BATCH, "seq": TOKENS})
        data = [memory.batch_of(bert, bert.sizes)] * 1000
        settings = {"device": "cpu", "lr": 1e-5, "lr_scheduler_type": "constant", **begin}
        self._asked: list[int] = []
        self._run = ortlab.finetune(memory.model_of(bert), data, num_train_epochs=1000, **settings)
        self._await(STEPS)
        for changes in cycle * given.rounds:
            self._run.apply(**changes)
            self._asked.append(self._run.step)
            self._await(self._changed().step + STEPS)
        self._run.stop()
        self._run.result()
        self._step_s = self._run.recorder.rows()[:, INDEX["step_ms"]] / 1e3

    def _await(self, step: int) -> None:
        while self._run.step < step:
            if self._run.over():
                self._run.result()
            time.sleep(0.005)

    def _changed(self) -> Event:
        recorder = self._run.recorder
        while len(events := recorder.events("change")) < len(self._asked):
            if refused := refusals(recorder):
                raise RuntimeError(refused[-1].text)
            if self._run.over():
                self._run.result()
            time.sleep(0.005)
        return events[-1]

    def _beyond(self, begin: int, end: int | None) -> tuple[float, float]:
        """Return the extra time of the first steps after step `begin`, and the median step."""
        times = self._step_s[begin:end]
        step_s = float(np.median(times[FIRST:]))
        return float((times[:FIRST] - step_s).sum()), step_s

    def figures(self) -> dict[str, Any]:
        """Return the figures of the first export or step, and of every change."""
        events = self._run.recorder.events("change")
        ends = [*(event.step for event in events[1:]), None]
        changes, met = [], set()
        for event, asked, end in zip(events, self._asked, ends, strict=True):
            latency_s, step_s = self._beyond(event.step, end)
            first = event.text.startswith(MADE_ONCE) and len(met) == 0
            text = f"{event.text}, the first time" if first else event.text
            met.add(text)
            late = max(event.step - asked - 1, 0)  # without the step in flight
            changes.append(Change(text, latency_s, event.values["cost_s"], step_s, late))
        first_s, _ = self._beyond(0, events[0].step)
        return {"first_s": first_s, "changes": [dataclasses.asdict(each) for each in changes]}


def _in_a_process(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return what a process measures with nothing exported, compiled or timed on disk."""
    sizes = ["--layers", given.layers, "--width", given.width, "--rounds", given.rounds]
    with nothing_cached() as variables:
        return found_by("tests.bench.switching", "--child", case, *sizes, variables=variables)


def _bar(text: str, first_s: Sequence[float]) -> float | None:
    """Return the limit in seconds of the change `text`; None for no limit, 0 for no stop at all."""
    if text.startswith(FREE):
        return 0.0
    if text.startswith("precision") and text.endswith("first time"):
        return statistics.median(first_s)
    return None if text.endswith("first time") else BAR_S


def _rows(found: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], bool]:
    """Return the table's rows for the processes of one case, and whether all limits are met."""
    rows, met = [], True
    first_s = [each["first_s"] for each in found]
    changes = [Change(**change) for each in found for change in each["changes"]]
    for text in dict.fromkeys(change.text for change in changes):
        ours = [change for change in changes if change.text == text]
        latency = Spread.of([change.latency_s for change in ours])
        step_s = statistics.median(change.step_s for change in ours)
        bar = _bar(text, first_s)
        if bar == 0:
            # With few steps the median is no more precise than that.
            within = latency.median < step_s and not any(change.late for change in ours)
            said = "the next step"
        else:
            within = bar is None or latency.median < bar
            said = "" if bar is None else f"{bar:.2f} s"
        met &= within
        rows.append(
            [
                text,
                str(len(ours)),
                f"{latency.median:.3f} ({latency.low:.3f} to {latency.high:.3f}) s",
                f"{statistics.median(change.cost_s for change in ours):.3f} s",
                f"{step_s:.3f} s",
                str(max(change.late for change in ours)),
                f"{said}{'' if within else ' MISSED'}",
            ]
        )
    return rows, met


def main() -> int:
    """Print a table for each case; return 1 where a limit is missed."""
    parser = argparse.ArgumentParser("tests.bench.switching", description=__doc__)
    for name, default in (("layers", 12), ("width", 256), ("rounds", 5), ("processes", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--case", choices=CASES, action="append", help="case to run; repeatable (default: all)"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(_Trained(given.child, given).figures()))
        return 0
    here, on, today = environment(), machine("cpu"), datetime.datetime.now(datetime.UTC)
    date = today.date().isoformat()
    print(f"{origin(here, on, date)}\n")
    print("\n".join(warnings(on, quick=False)))
    print(
        f"BERT {given.layers} x {given.width}, {BATCH} x {TOKENS} tokens, {given.rounds} rounds in "
        f"each of {given.processes} processes; medians, with quartiles\n"
    )
    found: dict[str, list[dict[str, Any]]] = {}
    met = True
    for case in given.case or CASES:
        found[case] = [_in_a_process(case, given) for _ in range(given.processes)]
        rows, within = _rows(found[case])
        met &= within
        heads = ["change", "times", "latency", "cost_s", "a step", "steps late", "bar"]
        first_s = statistics.median(each["first_s"] for each in found[case])
        print("\n".join(table(heads, rows)))
        print(f"\nThe first step, beyond a median one: {first_s:.2f} s.\n", flush=True)
    if given.json is not None:
        figures = {"environment": here, "machine": dataclasses.asdict(on), "date": date}
        figures |= {"settings": vars(given), "cases": found}
        Path(given.json).write_text(f"{json.dumps(figures, indent=1)}\n")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
