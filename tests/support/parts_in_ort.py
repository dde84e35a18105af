"""Cases of models in parts on engine ``ort``.

``python -m tests.support.parts_in_ort 0 2 FOLDER bert gpt2`` is for those models. Each case
compares fifty steps with eager torch in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.nn import functional

from ortlab.engines.ort import model
from ortlab.engines.self_check import SelfCheckFailed
from tests.support.pipeline_ranks import interleaved, spread
from tests.support.ranks import RANK, Case, main
from tests.support.tensor_ranks import parity, rows, transformer, wide


def disagreeing() -> dict[str, Any]:
    """Let the first check of one of the ranks fail, which have to check again together."""
    compare, calls = model.compare, []

    def compared(*args: Any, **kwargs: Any) -> Any:
        calls.append(RANK)
        if calls == [1]:
            raise SelfCheckFailed("a made-up difference")
        return compare(*args, **kwargs)

    model.compare = compared
    try:
        return parity(wide, functional.cross_entropy, rows, optimizer="sgd", engine="ort")()
    finally:
        model.compare = compare


def cases(models: Sequence[str]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in models:
        found |= {
            f"tensor {name}": transformer(name, "ort"),
            f"stages of {name}": spread(name, "ort"),
            f"fully sharded {name}": transformer(name, "ort", ways={"zero_stage": 3}),
        }
    if "bert" in models:
        return {**found, "disagreeing": disagreeing}
    return {**found, "interleaved": interleaved("ort")}


if __name__ == "__main__":
    main(cases(sys.argv[4:]))
