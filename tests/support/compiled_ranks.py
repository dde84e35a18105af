"""Cases with DeepSpeed and a compiled model, run as those of `tests.support.deepspeed_ranks`."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn import functional

from tests.support import ranks
from tests.support.mixed_ranks import HALVES
from tests.support.ranks import LR, data, network, together


def compiled(**among: Any) -> dict[str, Any]:
    """Return the losses of 50 steps at stage 2; batches have one size, as each size compiles."""
    (batch,) = data(8)
    found: dict[str, Any] = {}
    for name in ("compile", "eager"):
        many = together(network(), functional.cross_entropy, engine=name, zero_stage=2, **among)
        found[name] = [float(many.step([batch], lr=LR).loss) for _ in range(50)]
        found["engine"] = [*found.get("engine", []), many.report().engine_used]
        many.close()
    return found


CASES: dict[str, ranks.Case] = {
    "compiled": compiled,
    "compiled mixed": functools.partial(compiled, **HALVES),
}


if __name__ == "__main__":
    ranks.main(CASES)
