"""Benchmark of the cost of viewing a model's graphs.

Run ``python -m tests.bench.graphs``. The limit: capture grows in proportion to the nodes, so the
milliseconds per node stay constant.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import ortlab

LAYERS = (1, 4, 12, 24)
WIDTH, ROWS, TOKENS = 128, 8, 64
ROUNDS, PROFILES, STEPS = 5, 3, 5


def bert(layers: int) -> nn.Module:
    """Return a BERT in engine ortmodule, trained for one step."""
    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        vocab_size=1000,
    )
    model = ortlab.wrap(
        BertForSequenceClassification(config).train(), engine="ortmodule", cache=False
    )
    ids = torch.randint(0, 1000, (ROWS, TOKENS))
    model(input_ids=ids, labels=torch.arange(ROWS) % 2).loss.backward()
    return model


def capture(model: nn.Module) -> None:
    """Read every stage to the last node, and the gradients of its nodes."""
    for stage in ortlab.graphs(model).stages.values():
        len(stage.gradients)


def plan_memory(model: nn.Module) -> None:
    """Plan memory, capture included: lifetimes, and the peak for a batch."""
    ortlab.memory_plan(model).peak_bytes(batch=64)


MEASURES: Mapping[str, Callable[[nn.Module], object]] = {
    "capture": capture,
    "memory plan": plan_memory,
}
"""Measured operations on a model, by name; each gets a column."""


def median_ms(work: Callable[[], object]) -> float:
    """Return the median of several rounds, after one warm-up round."""
    rounds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        rounds.append((time.perf_counter() - started) * 1e3)
    return statistics.median(rounds[1:])


def graphs() -> None:
    """Print a line for each number of layers."""
    heads = "".join(f"{name + ' ms':>16}{'ms a node':>11}" for name in MEASURES)
    print(f"BERT of width {WIDTH}, medians of {ROUNDS}\nlayers  nodes of all stages{heads}")
    for layers in LAYERS:
        model = bert(layers)
        nodes = sum(len(stage.nodes) for stage in ortlab.graphs(model).stages.values())
        line = f"{layers:6}{nodes:21}"
        for measure in MEASURES.values():
            took_ms = median_ms(functools.partial(measure, model))
            line += f"{took_ms:16.1f}{took_ms / nodes:11.4f}"
        print(line, flush=True)


def profiles() -> None:
    """Print the time that watching adds to a step, in the least disturbed of several profiles."""
    print(
        f"\na step in ms, unwatched and watched: the least of {PROFILES} profiles of {STEPS} steps"
    )
    print("layers      ORT   watched               eager   watched")
    for layers in LAYERS:
        model = bert(layers)
        found = [ortlab.profile(model, steps=STEPS) for _ in range(PROFILES)]
        line = f"{layers:6}"
        for times in ([each.ort for each in found], [each.eager for each in found]):
            plain = min(each.plain_us for each in times if each) / 1e3
            watched = min(each.watched_us for each in times if each) / 1e3
            line += f"{plain:9.2f} {watched:9.2f} ({watched / plain - 1:+.1%})  "
        print(line, flush=True)


if __name__ == "__main__":
    graphs()
    profiles()
