"""Benchmark of the memory that recompute saves and the time it costs.

Run ``python -m tests.bench.recompute [--doubling]``.

Each line comes from its own processes. Memory is measured as in `tests.bench.memory`, without an
arena. Time is measured with one: steps without and with recompute in turn, with a change between
them each time. The limits, for BERT 12 x 256 with 16 x 256 tokens: the memory in use after forward
falls by 70% and the peak by 40%, a step takes at most 35% longer, and a change takes less than a
second. `--doubling` finds the largest batch that fits into a given memory without and with
recompute, and runs both: the batch must double.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import ortlab
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.graph.memory import MemoryPlan
from tests.bench.children import found_by
from tests.bench.memory import Case, Training, batch_of, give_back_at_once, resident

CASES = (
    Case("bert", 256, 12, {"batch": 16, "seq": 256}),
    Case("gpt2", 256, 12, {"batch": 16, "seq": 256}),
    Case("deberta", 256, 6, {"batch": 8, "seq": 128}),
)
ROUNDS, STEPS = 5, 3
PLANS = ("off", "layers")
BUDGET_BYTES = 700 * 2**20


def _change(training: Training, plan: str) -> float:
    """Apply `plan`; return the seconds until the next step could begin."""
    execution = execution_of(training.model)
    started = time.perf_counter()
    execution.configure(execution.settings.replace(recompute=plan))
    for kind in execution._kinds.values():
        for served in kind.served:
            served.recompute(execution._plans)
    return time.perf_counter() - started


def _after_forward(plan: MemoryPlan, sizes: dict[str, int]) -> int:
    at = next(i for i, node in enumerate(plan.stage.nodes) if node.op.endswith("YieldOp"))
    return int(plan.curve(**sizes)[at]) - plan.idle_bytes(**sizes)


def _memory(case: Case) -> dict[str, Any]:
    give_back_at_once()
    training = Training(case, {"arena": False})
    sizes, batch = dict(case.sizes), batch_of(case, case.sizes)
    found: dict[str, Any] = {}
    for plan in PLANS:
        _change(training, plan)
        idle, peak = training.measure(case.sizes)
        gc.collect()
        before = resident("VmRSS")
        outputs = training.model(**batch)
        after = resident("VmRSS")
        outputs["loss"].backward()
        training.model.zero_grad(set_to_none=True)
        del outputs
        predicted = ortlab.memory_plan(training.model)
        found[plan] = {
            "peak": peak - idle,
            "predicted": predicted.step_bytes(**sizes),
            "after": after - before,
            "predicted_after": _after_forward(predicted, sizes),
        }
    return found


def _time(case: Case) -> dict[str, Any]:
    training, batch = Training(case, {}), batch_of(case, case.sizes)
    steps: dict[str, list[float]] = {plan: [] for plan in PLANS}
    changes = []
    for _ in range(ROUNDS):
        for plan in PLANS:
            changes.append(_change(training, plan))
            training.step(batch)
            for _ in range(STEPS):
                started = time.perf_counter()
                training.step(batch)
                steps[plan].append(time.perf_counter() - started)
    return {"steps": steps, "changes": changes[1:]}  # the first one changes nothing


def _doubling(case: Case) -> dict[str, Any]:
    give_back_at_once()
    training = Training(case, {"arena": False})
    others = {name: size for name, size in case.sizes.items() if name != "batch"}
    found: dict[str, Any] = {}
    for plan in PLANS:
        _change(training, plan)
        training.step(batch_of(case, case.sizes))
        predicted = ortlab.memory_plan(training.model)
        most = predicted.max_batch(BUDGET_BYTES, **others)
        sizes = {**others, "batch": most}
        idle, peak = training.measure(sizes)
        batch, times = batch_of(case, sizes), []
        for _ in range(STEPS):
            started = time.perf_counter()
            training.step(batch)
            times.append(time.perf_counter() - started)
        found[plan] = {
            "batch": most,
            "taken": predicted.idle_bytes(**sizes) + peak - idle,
            "samples_per_s": most / statistics.median(times),
        }
    return found


def _in_a_process(what: str, case: Case) -> dict[str, Any]:
    return found_by("tests.bench.recompute", "--child", what, CASES.index(case))


def _fell(found: dict[str, Any], name: str) -> float:
    return 1 - float(found["layers"][name]) / float(found["off"][name])


def savings(case: Case) -> None:
    """Print the memory that recompute saves and the time it costs."""
    found = _in_a_process("memory", case)
    taken = _in_a_process("time", case)
    off, on = (statistics.median(taken["steps"][plan]) for plan in PLANS)
    ratios = sorted(b / a for a, b in zip(*(taken["steps"][plan] for plan in PLANS), strict=True))
    print(f"{case}:")
    for name, told in (("after", "after forward"), ("peak", "peak of a step")):
        of = {"after": "predicted_after", "peak": "predicted"}[name]
        print(
            f"  {told}: {found['off'][name] / 1e6:.0f} -> {found['layers'][name] / 1e6:.0f} MB, "
            f"{_fell(found, name):.0%} less; predicted {found['off'][of] / 1e6:.0f} -> "
            f"{found['layers'][of] / 1e6:.0f} MB, {_fell(found, of):.0%} less"
        )
    print(
        f"  a step: {off * 1e3:.0f} -> {on * 1e3:.0f} ms, {on / off - 1:+.0%} "
        f"({ratios[0] - 1:+.0%} to {ratios[-1] - 1:+.0%}); a change: "
        f"{statistics.median(taken['changes']):.2f} s, at most {max(taken['changes']):.2f} s",
        flush=True,
    )


def doubling(case: Case) -> None:
    """Print the largest batch without and with recompute, and the result of running each."""
    found = _in_a_process("doubling", case)
    off, on = found["off"], found["layers"]
    print(
        f"{case.kind} {case.layers} x {case.width} in {BUDGET_BYTES / 2**20:.0f} MiB: "
        f"batch {off['batch']} -> {on['batch']} ({on['batch'] / off['batch']:.1f} times), "
        f"took {off['taken'] / 2**20:.0f} -> {on['taken'] / 2**20:.0f} MiB, "
        f"{off['samples_per_s']:.1f} -> {on['samples_per_s']:.1f} samples/s",
        flush=True,
    )


def main() -> None:
    """Print one or more lines for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--doubling", action="store_true")
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child is not None:
        what, number = given.child
        measure = {"memory": _memory, "time": _time, "doubling": _doubling}[what]
        print(json.dumps(measure(CASES[int(number)])))
        return
    for case in CASES:
        (doubling if given.doubling else savings)(case)


if __name__ == "__main__":
    main()
