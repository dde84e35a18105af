"""Settings of the fleet of devices that a memory plan is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ortlab.settings.choices import OPTIMIZERS
from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class FleetSettings(Settings):
    """Settings of a memory plan: the options of ``%ort zero plan`` and ``ortlab.zero_plan``."""

    command: ClassVar[str] = "zero"

    gpus: int = setting(8, minimum=1, help="devices that the model's state is sharded across")
    memory: str | None = setting(
        None, help="memory of each device, such as 40GiB; marks the ZeRO stages that fit"
    )
    precision: str | None = setting(
        None,
        choices=("fp32", "mixed"),
        help="mixed has 2-byte weights and gradients, and fp32 copies beside the optimizer state; "
        "if not set, fp32 for a model of the notebook, which trains so here, and mixed for a "
        "number of parameters",
    )
    optimizer: str = setting("adamw", choices=OPTIMIZERS, help="optimizer whose state is counted")
    hidden: int | None = setting(
        None,
        minimum=1,
        help="hidden size of a transformer, to count its activations; also needs layers, sequence "
        "and batch",
    )
    layers: int | None = setting(None, minimum=1, help="number of layers")
    heads: int | None = setting(
        None,
        minimum=1,
        help="attention heads whose scores are stored; if not set, attention is fused and stores "
        "none",
    )
    vocabulary: int | None = setting(
        None, minimum=1, help="vocabulary size, for embedding and logits"
    )
    sequence: int | None = setting(None, minimum=1, unit="tokens", help="length of a sample")
    batch: int | None = setting(
        None, minimum=1, unit="samples", help="micro-batch size on each device"
    )
