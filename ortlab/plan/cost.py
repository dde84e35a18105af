"""Memory of a rank and time of a step, for a transformer, a GPU and a layout of ranks.

Sources of the formulas: Rajbhandari et al. 2020 (arXiv:1910.02054) for the state and the traffic of
ZeRO, Narayanan et al. 2021 (arXiv:2104.04473) for the pipeline's bubble and tensor parallelism, and
Korthikanti et al. 2022 (arXiv:2205.05198) for activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ortlab.metrics.zero_bytes import zero_bytes
from ortlab.plan import activations
from ortlab.plan.hardware import CONTEXT, Hardware
from ortlab.plan.transformer import Transformer

RECOMPUTE: Final = ("none", "selective", "full")
"""Choices of recomputation in the backward pass: nothing, attention's scores, or whole layers."""


@dataclass(frozen=True)
class Layout:
    """Distribution of a model and a batch over ranks.

    Attributes:
        tensor: Ranks that each layer's matrices are sharded across.
        pipeline: Stages of the pipeline.
        data: Replicas, each of which trains on its part of the batch.
        micro_batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a replica in each step.
        zero: Stage of ZeRO across the replicas, 0 to 3.
        recompute: One of `RECOMPUTE`.
        precision: "fp32", or the 16-bit format of mixed precision.
        interleave: Parts that the layers of a stage are interleaved in; 1 is the plain schedule.
        sequence_parallel: True if tensor-parallel ranks share the rest of a layer by tokens.
        fused_attention: True if attention stores no scores.
        fp32_gradients: True if 16-bit training accumulates gradients in fp32, as Megatron-LM does.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    micro_batches: int
    zero: int = 0
    recompute: str = "none"
    precision: str = "bf16"
    interleave: int = 1
    sequence_parallel: bool = False
    fused_attention: bool = False
    fp32_gradients: bool = False

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def each(self) -> int:
        """Bytes of an activation and of a weight that is computed with."""
        return 4 if self.precision == "fp32" else 2

    def stage_layers(self, model: Transformer) -> int:
        """Return the layers of the largest stage.

        If the layers cannot be split evenly, embedding and logits count as a layer each.

        Args:
            model: The shape.
        """
        return -(-(model.layers + self._slots(model)) // self.pipeline)

    def end_layers(self, model: Transformer) -> int:
        """Return the layers of the first stage, which are those of the last.

        Args:
            model: The shape.
        """
        return self.stage_layers(model) - self._slots(model) // 2

    def _slots(self, model: Transformer) -> int:
        return 2 if model.layers % self.pipeline else 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank that holds most.

    Attributes:
        parameters: Weights.
        gradients: Gradients.
        optimizer_state: State of the optimizer, with the fp32 copy of 16-bit weights.
        activations: Activations.
        gathered: Weights of the layer that ZeRO's stage 3 gathers.
        context: CUDA's kernels.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    gathered: int
    context: int = CONTEXT

    @property
    def total(self) -> int:
        """All bytes."""
        return self.model + self.activations + self.gathered + self.context

    @property
    def model(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Computation of the slowest stage.
        tensor: Traffic of tensor parallelism.
        pipeline: Traffic between stages.
        bubble: Time that the pipeline fills and drains.
        data: Traffic between replicas that computation does not hide.
    """

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    data: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.tensor + self.pipeline + self.bubble + self.data


def rank_memory(model: Transformer, layout: Layout, *, optimizer: str = "adamw") -> RankMemory:
    """Return the memory of the rank that holds most.

    Args:
        model: The shape.
        layout: The layout.
        optimizer: Name of the optimizer.
    """
    last = layout.pipeline - 1
    stages = {0, min(1, last), last}  # the others hold as much as stage 1, or less
    found = [_stage_memory(model, layout, stage, optimizer) for stage in sorted(stages)]
    return max(found, key=lambda one: one.total)


def _stage_memory(model: Transformer, layout: Layout, stage: int, optimizer: str) -> RankMemory:
    count = -(-stage_parameters(model, layout, stage) // layout.tensor)
    mixed = layout.precision != "fp32"
    state = zero_bytes(
        count,
        count,
        stage=layout.zero,
        ranks=layout.data,
        optimizer=optimizer,
        mixed=mixed,
        gradient=4 if layout.fp32_gradients or not mixed else 2,
    )
    gathered = 0
    if layout.zero == 3:  # the largest, as DeepSpeed's estimator counts
        largest = max(model.layer_parameters, model.embedding)
        gathered = layout.each * -(-largest // layout.tensor)
    held = _stage_activations(model, layout, stage)
    return RankMemory(state.parameters, state.gradients, state.optimizer_state, held, gathered)


def stage_parameters(model: Transformer, layout: Layout, stage: int) -> int:
    """Return the parameters of a stage, on all of its tensor-parallel ranks together.

    Args:
        model: The shape.
        layout: The layout.
        stage: Number of the stage.
    """
    if layout.pipeline == 1:
        return model.parameters
    first, last = stage == 0, stage == layout.pipeline - 1
    layers = layout.end_layers(model) if first or last else layout.stage_layers(model)
    # Tied weights are on both ends.
    ends = model.embedding * (first or last) + model.position_parameters * first
    return layers * model.layer_parameters + ends


def _stage_activations(model: Transformer, layout: Layout, stage: int) -> int:
    """Return the bytes of all micro-batches that are in flight at a stage (1F1B schedule)."""
    each, batch, shard = layout.each, layout.micro_batch, layout.tensor
    first, last = stage == 0, stage == layout.pipeline - 1
    layers = layout.end_layers(model) if first or last else layout.stage_layers(model)
    flying = min(layout.pipeline - stage, layout.micro_batches)
    held = float(layers * flying)
    if layout.interleave > 1:
        held *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.interleave)
    scores = not layout.fused_attention
    whole = _layer_bytes(model, layout, scores=scores)
    shared = shard if layout.sequence_parallel else 1
    if layout.recompute == "full":
        stored = activations.input_bytes(model, batch, each=each) / shared
        total = held * stored + whole
    elif layout.recompute == "selective" and scores:
        less = _layer_bytes(model, layout, scores=False)
        total = held * less + whole - less
    else:
        total = held * whole
    if first:
        total += flying * activations.first_bytes(model, batch) / shared
    if last:
        total += activations.last_bytes(model, batch, each=each) / shard
    return int(total)


def _layer_bytes(model: Transformer, layout: Layout, *, scores: bool) -> int:
    return activations.layer_bytes(
        model,
        layout.micro_batch,
        each=layout.each,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        scores=scores,
    )


def step_time(model: Transformer, layout: Layout, hardware: Hardware) -> StepTime:
    """Return the time of a step.

    Micro-batches go through the slowest stage one after the other. All traffic takes as long as the
    links' peak allows, of rings across all ranks of a group.

    Args:
        model: The shape.
        layout: The layout.
        hardware: The GPUs.

    Raises:
        ValueError: If the GPU has no such precision.
    """
    if layout.precision not in hardware.flops:
        raise ValueError(
            f"precision={layout.precision!r}: {hardware.name} computes in "
            f"{', '.join(hardware.flops)}; choose one of them"
        )
    speed = hardware.flops[layout.precision] * hardware.efficiency
    batch, count = layout.micro_batch, layout.micro_batches
    dense, scores = model.layer_flops(batch), model.score_flops(batch)
    again = {"none": 0, "selective": scores, "full": dense + scores}[layout.recompute]
    if layout.recompute == "selective" and layout.fused_attention:
        again = 0
    layer = 3 * (dense + scores) + again
    last = layout.end_layers(model) * layer + 3 * model.logit_flops(batch)
    slowest = max(layout.stage_layers(model) * layer, last)
    compute = slowest / layout.tensor / speed
    tensor = layout.stage_layers(model) * _tensor_seconds(model, layout, hardware)
    between = _pipeline_seconds(model, layout, hardware)
    data = _data_seconds(model, layout, hardware, compute)
    filling = (layout.pipeline - 1) / layout.interleave
    return StepTime(
        compute=count * compute,
        tensor=count * tensor,
        pipeline=count * between,
        bubble=filling * (compute + tensor + between),
        data=data,
    )


def _tensor_seconds(model: Transformer, layout: Layout, hardware: Hardware) -> float:
    """Return the time of a layer's all-reduces: two forward, two backward, two if recomputed."""
    ranks = layout.tensor
    size = activations.input_bytes(model, layout.micro_batch, each=layout.each)
    passes = 6 if layout.recompute == "full" else 4
    speed = hardware.link if ranks <= hardware.node else hardware.network
    return passes * 2 * (ranks - 1) / ranks * size / speed


def _pipeline_seconds(model: Transformer, layout: Layout, hardware: Hardware) -> float:
    """Return the time in which a stage sends a micro-batch on, and its gradient back."""
    if layout.pipeline == 1:
        return 0.0
    size = activations.input_bytes(model, layout.micro_batch, each=layout.each) / layout.tensor
    speed = hardware.link if layout.gpus <= hardware.node else hardware.network
    return 2 * layout.interleave * size / speed


def _data_seconds(model: Transformer, layout: Layout, hardware: Hardware, compute: float) -> float:
    """Return the traffic between replicas that is not hidden by a micro-batch's computation."""
    ranks = layout.data
    if ranks == 1:
        return 0.0
    # The first stage has the largest embedding, and the last to wait for.
    size = layout.each * stage_parameters(model, layout, 0) / layout.tensor
    within = layout.tensor * ranks <= hardware.node
    once = (ranks - 1) / ranks * size / (hardware.link if within else hardware.network)
    # Gradients are scattered during a backward pass, whose part of the computation is two thirds;
    # weights are gathered while nothing is computed: for each pass at stage 3, else for the step.
    scattered = max(0.0, once - compute * 2 / 3)
    times = layout.micro_batches if layout.zero >= 2 else 1
    return times * scattered + once * (2 * times if layout.zero == 3 else 1)
