"""Settings of plans: the fleet of devices, and how a model is to be trained on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ortlab.settings.choices import GPUS, OPTIMIZERS
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


@dataclass(frozen=True, kw_only=True)
class HardwareSettings(Settings):
    """GPUs and their links."""

    title: ClassVar[str] = "hardware"

    gpus: int | None = setting(
        None,
        minimum=1,
        common=True,
        help="number of GPUs; if not set, the fewest that train the tokens within the days",
    )
    hardware: str = setting(
        "a100-80gb", choices=GPUS, common=True, help="GPU and node of the catalog"
    )
    memory: str | None = setting(
        None, common=True, help="memory of a GPU, such as 80GiB, in place of the catalog's"
    )
    tflops: float | None = setting(
        None,
        above=0,
        unit="TFLOP/s",
        help="peak of dense 16-bit matrix products, in place of the catalog's",
    )
    link: float | None = setting(
        None,
        above=0,
        unit="GB/s",
        help="bandwidth of each GPU within its node in one direction, in place of the catalog's",
    )
    network: float | None = setting(
        None,
        above=0,
        unit="GB/s",
        help="bandwidth of each GPU between nodes in one direction, in place of the catalog's",
    )
    node: int | None = setting(None, minimum=1, help="GPUs of a node, in place of the catalog's")
    efficiency: float | None = setting(
        None,
        above=0,
        maximum=1,
        help="fraction of the peak that computation reaches; if not set, that of a published run "
        "on this generation of GPUs",
    )
    price: float | None = setting(
        None, minimum=0, help="price of a GPU for an hour, to show what training costs"
    )


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(Settings):
    """Sizes of a transformer, which replace those of a config."""

    title: ClassVar[str] = "model"

    layers: int | None = setting(
        None,
        minimum=1,
        help="number of layers; for a number of parameters without sizes, the "
        "shape is like GPT-3's",
    )
    hidden: int | None = setting(None, minimum=1, help="hidden size")
    heads: int | None = setting(None, minimum=1, help="attention heads")
    kv_heads: int | None = setting(None, minimum=1, help="heads of keys and values")
    intermediate: int | None = setting(
        None, minimum=1, help="width of the MLP; if not set, 4 times the hidden size"
    )
    vocabulary: int | None = setting(None, minimum=1, help="vocabulary size")
    sequence: int | None = setting(
        None, minimum=1, unit="tokens", common=True, help="length of a sample"
    )


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(Settings):
    """Parts of the layout that are chosen; the plan searches the others."""

    title: ClassVar[str] = "layout"

    batch: int | None = setting(
        None,
        minimum=1,
        unit="samples",
        common=True,
        help="batch size of a step, of all GPUs; if not set, 0.5 to 4 million tokens, by the "
        "size of the model",
    )
    micro_batch: int | None = setting(
        None, minimum=1, unit="samples", help="micro-batch size of a replica"
    )
    tensor: int | None = setting(
        None, minimum=1, help="GPUs that the matrices of each layer are sharded across"
    )
    pipeline: int | None = setting(None, minimum=1, help="stages of the pipeline")
    zero: int | None = setting(None, minimum=0, maximum=3, help="stage of ZeRO across the replicas")
    recompute: str | None = setting(
        None,
        choices=("none", "selective", "full"),
        help="what the backward pass computes again: nothing, attention's scores, or all layers",
    )
    precision: str | None = setting(
        None, choices=("fp32", "fp16", "bf16"), help="precision; the 16-bit ones are mixed"
    )
    optimizer: str = setting("adamw", choices=OPTIMIZERS, help="optimizer whose state is counted")
    attention_scores: bool = setting(
        False, help="attention stores its scores; fused attention stores none"
    )
    margin: float = setting(
        0.1,
        minimum=0,
        maximum=0.9,
        help="fraction of the memory that is left to the allocator's cache and to buffers",
    )
    trainer: str = setting(
        "megatron",
        choices=("megatron", "ortlab"),
        common=True,
        help="trainer whose layouts are searched: megatron combines all degrees, ortlab leaves "
        "out what finetune cannot train",
    )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """Settings of a training plan: the options of ``ortlab plan`` and ``ortlab.training_plan``."""

    command: ClassVar[str] = "plan"

    tokens: str | None = setting(
        None, common=True, help="tokens to train on, such as 300B, for days and GPU hours"
    )
    days: float | None = setting(
        None, above=0, unit="days", common=True, help="days within which to train the tokens"
    )
    on: HardwareSettings = field(default_factory=HardwareSettings)
    shape: ShapeSettings = field(default_factory=ShapeSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
