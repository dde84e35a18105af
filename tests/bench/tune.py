"""Benchmark of `ortlab.tune` against a full grid of the same choices.

Run ``python -m tests.bench.tune`` on an otherwise idle machine.

The grid runs every engine in every precision at every micro-batch, each on its own copy of the
model. Its time and the search's are wall-clock, measured in one process after the other, with
nothing cached on disk for either. The two winners are then timed again in turn. The limits: the
search's winner is the grid's winner or within 5% of it in those turns, and the search takes less
than a third of the grid's time. `--json FILE` stores all figures; `-` prints them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import Dataset

from tests.bench.children import found_by, nothing_cached
from tests.bench.memory import WORDS, Case, model_of

BAR, SHARE = 0.05, 1 / 3


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens with a class."""

    def __init__(self, number: int, tokens: int) -> None:
        made = torch.Generator().manual_seed(0)
        self._ids = torch.randint(WORDS, (number, tokens), generator=made)
        self._labels = torch.randint(2, (number,), generator=made)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[at], "labels": self._labels[at]}


def _model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return model_of(Case("bert", width, layers, {}))


def _settings(given: argparse.Namespace) -> Any:
    from ortlab.settings import TuneSettings

    return TuneSettings(engines=given.engines, global_batch=given.batch, sizes=given.sizes)


def _candidates(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from ortlab.search.prune import SearchPoint, settings_of
    from ortlab.search.tune import setups_of

    sizes = [given.batch >> place for place in range(given.sizes)]
    candidates = [SearchPoint(s, micro) for s in setups_of(_settings(given)) for micro in sizes]
    return {str(each): settings_of(each, given.batch) for each in candidates}


def _grid(given: argparse.Namespace, field: dict[str, dict[str, Any]]) -> dict[str, Any]:
    import time

    from ortlab.search.race import Race
    from ortlab.settings import RaceSettings

    # With its default limit torch would run the last of so many compiled cells as eager torch.
    torch._dynamo.config.recompile_limit = 64
    model, data = _model(given.width, given.layers), Sentences(8 * given.batch, given.tokens)
    began = time.perf_counter()
    race = Race(
        model,
        data,
        RaceSettings(rounds=given.rounds),
        shared={"batch_size": given.batch, "device": "cpu", "cache": False},
        field=field,
    )
    race.start()
    result = race.result()
    return {"took_s": time.perf_counter() - began, "result": result.to_dict()}


def _tune(given: argparse.Namespace) -> dict[str, Any]:
    import ortlab

    model, data = _model(given.width, given.layers), Sentences(8 * given.batch, given.tokens)
    asked = {"engines": given.engines, "global_batch": given.batch, "sizes": given.sizes}
    result = ortlab.tune(model, data, device="cpu", cache=False, **asked).result()
    return {"took_s": result.took_s, "result": result.to_dict()}


def _apart(part: str, *more: str) -> dict[str, Any]:
    """Return this script's output for one part, run in a process with empty caches."""
    with nothing_cached() as variables:
        words = [*sys.argv[1:], "--part", part, *more]
        return found_by("tests.bench.tune", *words, variables=variables)


def _compare(given: argparse.Namespace) -> dict[str, Any]:
    grid = _apart("grid")
    tune = _apart("tune")
    best = {"grid": grid["result"]["best"], "tune": tune["result"]["best"]}
    again, ratio = None, 1.0
    if best["grid"] != best["tune"]:
        again = _apart("again", "--label", best["grid"], "--label", best["tune"])
        ours = {cell["label"]: cell["step_ms"] for cell in again["result"]["cells"]}
        pairs = zip(ours[best["grid"]], ours[best["tune"]], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
    share = tune["took_s"] / grid["took_s"]
    return {
        "settings": vars(given),
        "best": best,
        "speed_of_tunes_best_beside_the_grids": ratio,
        "grid_s": grid["took_s"],
        "tune_s": tune["took_s"],
        "share_of_the_grids_time": share,
        "within_the_bar": ratio >= 1 - BAR and share < SHARE,
        "busy": grid["result"]["machine"]["load"],
        "grid": grid,
        "tune": tune,
        "again": again,
    }


def main() -> int:
    """Compare, or run one part; the exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser("tests.bench.tune", description=__doc__)
    parser.add_argument("--engines", default="eager,compile,ortmodule")
    for name, default in (("width", 256), ("layers", 4), ("tokens", 64), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sizes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--part", choices=("grid", "tune", "again"), help=argparse.SUPPRESS)
    parser.add_argument("--label", action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        field = _candidates(given)
        if given.part == "again":
            field = {label: field[label] for label in given.label}
        print(json.dumps(_tune(given) if given.part == "tune" else _grid(given, field)))
        return 0
    found = _compare(given)
    figures = json.dumps(found, indent=1)
    if given.json not in (None, "-"):
        Path(given.json).write_text(f"{figures}\n")
    head = {name: found[name] for name in found if name not in ("grid", "tune", "again")}
    print(figures if given.json == "-" else json.dumps(head, indent=1))
    return 0 if found["within_the_bar"] else 1


if __name__ == "__main__":
    sys.exit(main())
