"""Benchmark of the overhead of ortlab's workers against plain torchrun.

Run ``python -m tests.bench.workers`` on an otherwise idle machine.

The same BERT trains on the same batches in the same two gloo processes of one thread each: once as
a run of `ortlab.finetune` on local workers, once as a plain script with DistributedDataParallel
under torchrun. Separate processes take turns; each reports the median of its steps without the
first few. The limit is 2% of samples per second.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ortlab
from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import machine
from ortlab.bench.result import origin, table, warnings
from ortlab.engines.single_process import OneProcess
from ortlab.engines.torch.stepper import optimizer_for
from ortlab.metrics.recorder import INDEX
from ortlab.settings import FinetuneSettings
from ortlab.utils.environment import environment
from tests.bench import memory
from tests.bench.children import found_by

WARMUP = 3
BAR = 0.02
WORKERS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both sides' samples per second and the overhead."""
    given = _parser().parse_args(arguments)
    if given.child == "ortlab":
        print(json.dumps(_by_ortlab(given)))
        return 0
    if given.child == "plain":
        _by_hand(given)
        return 0
    before = machine("cpu")
    words = [f"--{name}={getattr(given, name)}" for name in ("layers", "width", "batch", "seq")]
    words.append(f"--steps={given.steps}")
    rates: dict[str, list[float]] = {"ortlab": [], "torchrun": []}
    starts: list[float] = []
    for _ in range(given.rounds):
        ours = found_by("tests.bench.workers", "--child=ortlab", *words)
        rates["ortlab"].append(given.batch / statistics.median(ours["steps_s"]))
        starts.append(ours["first_s"])
        theirs = _under_torchrun(words)
        rates["torchrun"].append(given.batch / statistics.median(theirs["steps_s"]))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    costs = [1 - a / b for a, b in zip(rates["ortlab"], rates["torchrun"], strict=True)]
    print(f"BERT {given.layers} x {given.width}, {given.batch} x {given.seq} tokens, 2 processes")
    print(*table(["", "samples/s"], [[n, _spread(each)] for n, each in rates.items()]), sep="\n")
    cost = Spread.of(costs)
    print(
        f"the layer costs {cost.median:.1%} ({cost.low:.1%} to {cost.high:.1%}) of samples/s; the "
        f"bar is {BAR:.0%}; from the start of workers to the end of the first step "
        f"{statistics.median(starts):.1f} s"
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(*warnings(before, quick=False), origin(environment(), before, today), sep="\n")
    return 0


def _spread(values: Sequence[float]) -> str:
    found = Spread.of(values)
    return f"{found.median:.4g} ({found.low:.4g} to {found.high:.4g})"


def _under_torchrun(words: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={WORKERS}", "-m", "tests.bench.workers", "--child=plain", *words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _case(given: argparse.Namespace) -> tuple[torch.nn.Module, Any]:
    bert = memory.Case("bert", given.width, given.layers, {"batch": given.batch, "seq": given.seq})
    return memory.model_of(bert), memory.batch_of(bert, bert.sizes)


def _by_ortlab(given: argparse.Namespace) -> dict[str, Any]:
    model, batch = _case(given)
    steps = WARMUP + given.steps
    run = ortlab.finetune(
        model,
        [batch] * steps,
        engine="eager",
        device="cpu",
        workers=WORKERS,
        lr_scheduler_type="constant",
    )
    run.result()
    rows = run.recorder.rows()
    return {
        "steps_s": list(rows[WARMUP:, INDEX["step_ms"]] / 1e3),
        "first_s": float(rows[0, INDEX["time_s"]]),
    }


def _by_hand(given: argparse.Namespace) -> None:
    """Train as a user's own script for torchrun would."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, batch = _case(given)
    rows = given.batch // world
    own = {name: each[rank * rows : (rank + 1) * rows] for name, each in batch.items()}
    parallel = DistributedDataParallel(model.train())
    alone = OneProcess(model, None, model, torch.device("cpu"))
    optimizer = optimizer_for(model, FinetuneSettings.of(engine="eager", device="cpu"), alone)
    steps_s = []
    for _ in range(WARMUP + given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = parallel(**own).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told = loss.detach() / world
        dist.all_reduce(told)  # the loss of the whole batch, as in the charts
        told.item()
        steps_s.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"steps_s": steps_s[WARMUP:]}))
    del parallel, loss  # they hold the process group, whose threads abort at interpreter exit
    gc.collect()
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=("ortlab", "plain"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
