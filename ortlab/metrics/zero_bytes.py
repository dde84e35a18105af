"""The bytes of training's state that one rank holds at each stage of ZeRO, by arithmetic.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5) say what each stage partitions, Ren et
al. 2021 (arXiv:2101.06840, section 3) what goes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOMENTS: Final = {"adamw": 8, "sgd": 4, "lamb": 8}
"""Bytes of each trained parameter: two moments in fp32, or SGD's momentum."""


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes of one rank, on its device and, with the optimizer offloaded, on the ``host``."""

    parameters: int
    gradients: int
    optimizer_state: int
    host: int


def zero_bytes(
    parameters: int,
    trained: int,
    *,
    stage: int,
    ranks: int,
    optimizer: str,
    mixed: bool,
    offload: bool = False,
) -> ZeroBytes:
    """Return the bytes that one of `ranks` holds at a `stage` of ZeRO.

    Args:
        parameters: How many elements the model has.
        trained: How many of them are trained.
        stage: 0 to 3.
        ranks: Processes that the state is partitioned among.
        optimizer: A name of `MOMENTS`.
        mixed: Whether weights and gradients take 2 bytes, beside an fp32 copy of the weights.
        offload: Whether the optimizer steps on the host.
    """

    def own(count: int, *, shared: bool) -> int:
        return -(-count // ranks) if shared else count  # the last rank's part is padded

    each = 2 if mixed else 4
    weights = each * own(parameters, shared=stage >= 3)
    gradients = each * own(trained, shared=stage >= 2)
    of_each = optimizer_bytes(optimizer, mixed=mixed, offload=offload)
    state = of_each * own(trained, shared=stage >= 1)
    host = 0
    if offload:
        host, state = state, 0
        if stage >= 2:  # the rank's part of the gradients goes where the optimizer steps
            host, gradients = host + gradients, 0
    return ZeroBytes(weights, gradients, state, host)


def optimizer_bytes(optimizer: str, *, mixed: bool, offload: bool = False) -> int:
    """Return the bytes of optimizer state for each trained parameter: moments, and an fp32 copy.

    In fp32 the weights themselves are updated, but not from the host, which has a copy.
    """
    return (4 if offload or mixed else 0) + MOMENTS[optimizer]
