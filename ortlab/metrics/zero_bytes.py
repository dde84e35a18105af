"""Formula for the bytes of training state per rank at each stage of ZeRO.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5) describe what each stage partitions;
Ren et al. 2021 (arXiv:2101.06840, section 3) describe what is offloaded to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOMENTS: Final = {"adamw": 8, "sgd": 4, "lamb": 8}
"""Bytes of optimizer state per trained parameter: two moments in fp32, or SGD's momentum."""


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes of training state on one rank.

    Attributes:
        parameters: Parameters on the device.
        gradients: Gradients on the device.
        optimizer_state: Optimizer state on the device.
        host: State in host memory, if the optimizer is offloaded.
    """

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
    gradient: int | None = None,
) -> ZeroBytes:
    """Return the bytes of training state on each rank.

    Args:
        parameters: Number of parameters (elements) of the model.
        trained: Number of trained parameters.
        stage: Stage of ZeRO, 0 to 3.
        ranks: Number of ranks that the state is partitioned across.
        optimizer: Name of the optimizer; a key of `MOMENTS`.
        mixed: True if weights and gradients take 2 bytes, with an fp32 copy of the weights.
        offload: True if the optimizer runs on the host.
        gradient: Bytes of a gradient; None is as many as of a weight.
    """

    def own(count: int, *, shared: bool) -> int:
        return -(-count // ranks) if shared else count  # the last rank's part is padded

    each = 2 if mixed else 4
    weights = each * own(parameters, shared=stage >= 3)
    gradients = (gradient or each) * own(trained, shared=stage >= 2)
    of_each = optimizer_bytes(optimizer, mixed=mixed, offload=offload)
    state = of_each * own(trained, shared=stage >= 1)
    host = 0
    if offload:
        host, state = state, 0
        if stage >= 2:  # the rank's shard of the gradients goes where the optimizer runs
            host, gradients = host + gradients, 0
    return ZeroBytes(weights, gradients, state, host)


def optimizer_bytes(optimizer: str, *, mixed: bool, offload: bool = False) -> int:
    """Return the bytes of optimizer state per trained parameter: moments, and an fp32 copy.

    In fp32 the weights are updated directly, without a copy, unless the optimizer runs on the host.

    Args:
        optimizer: Name of the optimizer; a key of `MOMENTS`.
        mixed: True if the weights take 2 bytes.
        offload: True if the optimizer runs on the host.
    """
    return (4 if offload or mixed else 0) + MOMENTS[optimizer]
