"""Benchmark of the time that the export cache saves in the first step.

Run ``python -m tests.bench.cache [--rounds 3]``. Each figure comes from its own process. The first
step is timed from its call to the end of the optimizer's step, with the model wrapped and nothing
exported; one median step is subtracted. The limit: with the graph in the cache it takes a third of
the time without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from typing import Any

from ortlab.engines.ortmodule import graph_cache
from tests.bench.children import found_by, nothing_cached

MODELS = ((12, 256), (4, 768))
DROPOUTS = (0.1, 0.0)
BATCH, TOKENS, STEPS = 8, 64, 10
BAR = 1 / 3


def _child(layers: int, width: int, dropout: float) -> dict[str, Any]:
    """Time the first step and ten more; return also a digest of the first loss and gradients."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    import ortlab
    from ortlab.engines.ortmodule.engine import execution_of

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    original = BertForSequenceClassification(config).train()
    ids = torch.randint(0, config.vocab_size, (BATCH, TOKENS))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(BATCH) % 2,
    }
    started = time.perf_counter()
    model = ortlab.wrap(original)
    wrap_s = time.perf_counter() - started
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-4)
    digest = hashlib.sha256()
    times = []
    for step in range(1 + STEPS):
        started = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        if step == 0:
            forward_s = time.perf_counter() - started
            for tensor in (loss, *(p.grad for p in original.parameters() if p.grad is not None)):
                digest.update(tensor.detach().numpy().tobytes())
            started = time.perf_counter() - forward_s
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    report = execution_of(model).report()
    return {
        "wrap_s": wrap_s,
        "first_s": times[0] - statistics.median(times[1:]),
        "step_s": statistics.median(times[1:]),
        "export_s": report.export_s,
        "check_s": report.check_s,
        "notes": report.notes,
        "digest": digest.hexdigest(),
    }


def main() -> int:
    """Print a line for each model and the figures of every process; return 1 above the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        layers, width, dropout = options.child
        print(json.dumps(_child(int(layers), int(width), float(dropout))))
        return 0
    missed = False
    with nothing_cached() as variables:
        os.environ |= variables  # for `cache`, too
        for layers, width in MODELS:
            for dropout in DROPOUTS:
                missed |= _measure(layers, width, dropout, options.rounds)
    return int(missed)


def _measure(layers: int, width: int, dropout: float, rounds: int) -> bool:
    """Measure, and return whether the limit is missed."""
    child = ("tests.bench.cache", "--child", layers, width, dropout)
    without, with_cache = [], []
    for _ in range(rounds):
        graph_cache.clear()
        without.append(found_by(*child))
        with_cache.append(found_by(*child))
        for name, found in (("uncached", without[-1]), ("cached", with_cache[-1])):
            figures = {key: round(value, 3) for key, value in found.items() if key.endswith("_s")}
            print(f"  {name:8} {figures}", flush=True)
        hit = any("from the cache" in note for note in with_cache[-1]["notes"])
        assert hit, with_cache[-1]["notes"]
    a, b, export, restored, check = (
        statistics.median(one[figure] for one in ones)
        for figure, ones in (
            ("first_s", without),
            ("first_s", with_cache),
            ("export_s", without),
            ("export_s", with_cache),
            ("check_s", [*without, *with_cache]),
        )
    )
    size = graph_cache.usage()
    verdict = "met" if b <= BAR * a else "MISSED"
    line = f"BERT {layers} x {width}, dropout {dropout}: {a:.2f} s uncached, {b:.2f} s cached"
    print(f"{line}, ratio {b / a:.2f}: bar {BAR:.2f} {verdict}; {size}")
    print(f"  of that export {export:.2f} s, from the cache {restored:.2f} s, check {check:.2f} s")
    if dropout == 0.0:
        same = len({one["digest"] for one in (*without, *with_cache)}) == 1
        print(f"  loss and gradients of the first step: {'bit-identical' if same else 'DIFFERENT'}")
    return b > BAR * a


if __name__ == "__main__":
    sys.exit(main())
