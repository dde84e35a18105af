"""The fleet that a memory plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.choices import OPTIMIZERS
from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class FleetSettings(Settings):
    """What a fleet is planned for; the options of ``%ort zero plan`` and ``ortlab.zero_plan``."""

    gpus: int = setting(8, minimum=1, help="devices that share the model's state")
    memory: str | None = setting(None, help="of each device, as in 40GiB: what has to fit into it")
    precision: str | None = setting(
        None,
        choices=("fp32", "mixed"),
        help="mixed has weights and gradients of 2 bytes and fp32 copies beside the optimizer's "
        "state; else fp32 for a model of the notebook, which trains so here, and mixed for a count",
    )
    optimizer: str = setting("adamw", choices=OPTIMIZERS, help="whose state counts")
    hidden: int | None = setting(
        None,
        minimum=1,
        help="width of a transformer's layers, for its activations; then layers, "
        "sequence and batch too",
    )
    layers: int | None = setting(None, minimum=1, help="how many of them")
    heads: int | None = setting(
        None, minimum=1, help="of attention whose scores are kept; else it is fused and keeps none"
    )
    vocabulary: int | None = setting(None, minimum=1, help="words, for embedding and logits")
    sequence: int | None = setting(None, minimum=1, unit="tokens", help="in a sample")
    batch: int | None = setting(
        None, minimum=1, unit="samples", help="in a micro-batch of one device"
    )
