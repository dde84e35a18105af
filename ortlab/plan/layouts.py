"""Search over layouts: degrees of parallelism, ZeRO, micro-batch, recompute and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

from ortlab.plan.cost import RECOMPUTE, Layout, RankMemory, StepTime, rank_memory, step_time
from ortlab.plan.hardware import CATALOG, Hardware
from ortlab.plan.transformer import Transformer, divisors, nearest
from ortlab.settings import PlanSettings
from ortlab.utils.process_memory import parse_bytes

_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
_BATCHES: Final = ((1e9, 2**19), (3e9, 2**20), (15e9, 2**21), (float("inf"), 2**22))
"""Largest number of parameters -> tokens of a batch, as table 2.1 of arXiv:2005.14165, rounded."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its predictions.

    Attributes:
        layout: The layout.
        memory: Memory of the rank that holds most.
        time: Time of a step; None if the layout does not fit.
    """

    layout: Layout
    memory: RankMemory
    time: StepTime | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float("inf") if self.time is None else self.time.total


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        fitting: Layouts that fit, fastest first; of those that differ in the schedule only, the
            fastest.
        over: Tensor and pipeline degrees of which no layout fits -> the one with least memory.
    """

    fitting: tuple[Candidate, ...]
    over: dict[tuple[int, int], Candidate]


def chosen_hardware(settings: PlanSettings) -> Hardware:
    """Return the GPU of the catalog with the user's numbers.

    Args:
        settings: The settings.
    """
    found, on = CATALOG[settings.on.hardware], settings.on
    if on.memory is not None:
        found = replace(found, memory=parse_bytes(on.memory))
    if on.tflops is not None:
        sixteen = {name: on.tflops * 1e12 for name in found.flops if name != "fp32"}
        found = replace(found, flops={**found.flops, **sixteen})
    for name in ("link", "network"):
        if on[name] is not None:
            found = replace(found, **{name: on[name] * 1e9})
    return replace(found, node=on.node or found.node, efficiency=on.efficiency or found.efficiency)


def room(settings: PlanSettings, hardware: Hardware) -> float:
    """Return the bytes of a GPU that a rank may take.

    Args:
        settings: The settings.
        hardware: The GPUs.
    """
    return hardware.memory * (1 - settings.layout.margin)


def default_batch(model: Transformer, unit: int) -> int:
    """Return the samples of a batch, a multiple of the odd part of a number.

    Args:
        model: The shape.
        unit: Number of GPUs, times the samples of a micro-batch if they are given.
    """
    tokens = next(tokens for most, tokens in _BATCHES if model.parameters <= most)
    odd = unit // (unit & -unit)
    return max(round(tokens / model.sequence / odd), 1) * odd


def check_degrees(model: Transformer, settings: PlanSettings, hardware: Hardware) -> None:
    """Check the degrees that are given against the model.

    Args:
        model: The shape.
        settings: The settings.
        hardware: The GPUs.

    Raises:
        ValueError: If one cannot be; the message names the nearest that can.
    """
    given = settings.layout
    tensors, stages = tensor_degrees(model), pipeline_degrees(model)
    if given.tensor is not None and given.tensor not in tensors:
        raise ValueError(
            f"tensor={given.tensor}: {_tensor_reason(model, given.tensor)}; the nearest degree is "
            f"tensor={nearest(given.tensor, tensors)}"
        )
    if given.pipeline is not None and given.pipeline not in stages:
        raise ValueError(
            f"pipeline={given.pipeline}: {model.layers} layers cannot be split evenly into as many "
            f"stages; the nearest number is pipeline={nearest(given.pipeline, stages)}"
        )
    if (given.zero or 0) > 1 and (given.pipeline or 1) > 1:
        raise ValueError(
            f"zero={given.zero} with pipeline={given.pipeline}: gradients are summed over "
            "micro-batches, so that a stage keeps them whole; choose zero=1, or pipeline=1"
        )
    if given.precision is not None and given.precision not in hardware.flops:
        raise ValueError(
            f"precision={given.precision!r}: {hardware.name} computes in "
            f"{', '.join(hardware.flops)}; choose one of them"
        )


def check_gpus(model: Transformer, settings: PlanSettings, hardware: Hardware, gpus: int) -> None:
    """Check the number of GPUs against nodes and given degrees, and the batch against both.

    Args:
        model: The shape.
        settings: The settings.
        hardware: The GPUs.
        gpus: Number of GPUs.

    Raises:
        ValueError: If it cannot be; the message names the nearest number that can.
    """
    node, given = hardware.node, settings.layout
    if gpus > node and gpus % node:
        near = max(round(gpus / node), 1) * node
        raise ValueError(
            f"gpus={gpus} does not fill nodes of {node}; the nearest number is gpus={near}"
        )
    shared = (given.tensor or 1) * (given.pipeline or 1)
    if gpus % shared:
        unit = shared * node // gcd(shared, node) if shared > node else shared
        near = max(round(gpus / unit), 1) * unit
        raise ValueError(
            f"gpus={gpus} is not a multiple of tensor * pipeline = {shared}; the nearest number "
            f"is gpus={near}"
        )
    if given.zero and gpus == shared:
        raise ValueError(
            f"zero={given.zero} shards across replicas, and gpus={gpus} with tensor * pipeline = "
            f"{shared} has one; the nearest number is gpus={2 * gpus}"
        )
    batch, micro = given.batch, given.micro_batch or 1
    if batch is None:
        return
    units = [micro * gpus // (t * p) for t, p in _degrees(model, settings, hardware, gpus)]
    if units and not any(batch % unit == 0 for unit in units):
        known = [max(round(batch / unit), 1) * unit for unit in units]
        raise ValueError(
            f"batch={batch} cannot be split evenly across the replicas of any layout of "
            f"{gpus} GPUs; the nearest is batch={nearest(batch, known)}"
        )


def tensor_degrees(model: Transformer) -> list[int]:
    """Return the degrees that divide heads, keys and values, and the MLP.

    Args:
        model: The shape.
    """
    return divisors(gcd(model.heads, model.kv_heads or model.heads, model.mlp_width))


def _tensor_reason(model: Transformer, degree: int) -> str:
    for size, name in (
        (model.heads, "heads"),
        (model.kv_heads, "heads of keys and values"),
        (model.mlp_width, "columns of the MLP"),
    ):
        if size % degree:
            return f"{size} {name} are not a multiple of {degree}"
    raise AssertionError(degree)


def pipeline_degrees(model: Transformer) -> list[int]:
    """Return the numbers of stages that divide the layers, alone or with both embeddings.

    Args:
        model: The shape.
    """
    even = {*divisors(model.layers), *divisors(model.layers + 2)}
    return sorted(each for each in even if each <= model.layers)


def left_out(model: Transformer, hardware: Hardware) -> list[tuple[int, str]]:
    """Return the powers of two that are no tensor degree in a node, with the reason of each.

    Args:
        model: The shape.
        hardware: The GPUs.
    """
    known = tensor_degrees(model)
    powers = [2**n for n in range(1, hardware.node.bit_length()) if 2**n <= hardware.node]
    return [(each, _tensor_reason(model, each)) for each in powers if each not in known]


def _degrees(
    model: Transformer, settings: PlanSettings, hardware: Hardware, gpus: int
) -> Iterator[tuple[int, int]]:
    """Yield tensor and pipeline degrees; matrices are sharded within a node unless asked for."""
    given = settings.layout
    for tensor in [given.tensor] if given.tensor else tensor_degrees(model):
        if not given.tensor and (tensor > hardware.node or hardware.node % tensor):
            continue
        for pipeline in [given.pipeline] if given.pipeline else pipeline_degrees(model):
            if gpus % (tensor * pipeline) == 0:
                yield tensor, pipeline


def _layouts(
    model: Transformer, settings: PlanSettings, hardware: Hardware, gpus: int, batch: int
) -> Iterator[Layout]:
    given, ours = settings.layout, settings.layout.trainer == "ortlab"
    precisions = [given.precision] if given.precision else _precisions(hardware)
    recomputes = [given.recompute] if given.recompute else list(RECOMPUTE)
    if not given.attention_scores and not given.recompute:
        recomputes.remove("selective")  # there are no scores to compute again
    for tensor, pipeline in _degrees(model, settings, hardware, gpus):
        data = gpus // (tensor * pipeline)
        if batch % data:
            continue
        stages = [0] if data == 1 else [0, 1] if pipeline > 1 else [0, 1, 2, 3]
        stages = stages if given.zero is None else [given.zero] if given.zero in stages else []
        for micro in [given.micro_batch] if given.micro_batch else _MICRO_BATCHES:
            count, rest = divmod(batch // data, micro)
            if rest:
                continue
            base = Layout(
                tensor,
                pipeline,
                data,
                micro,
                count,
                sequence_parallel=tensor > 1 and not ours,
                fused_attention=not given.attention_scores,
            )
            parts = [1] if ours else _interleaves(model, base)
            for zero in stages:
                for recompute in recomputes:
                    for precision in precisions:
                        for interleave in parts:
                            yield replace(
                                base,
                                zero=zero,
                                recompute=recompute,
                                precision=precision,
                                interleave=interleave,
                                fp32_gradients=precision == "bf16" and not ours,
                            )


def _precisions(hardware: Hardware) -> list[str]:
    """Return fp32 and the better of the 16-bit formats, which are equally fast."""
    return [next(name for name in ("bf16", "fp16") if name in hardware.flops), "fp32"]


def _interleaves(model: Transformer, layout: Layout) -> list[int]:
    """Return the interleaved schedules; each part needs a whole round of micro-batches."""
    if layout.pipeline == 1 or layout.micro_batches % layout.pipeline:
        return [1]
    return divisors(layout.stage_layers(model))


def search(
    model: Transformer, settings: PlanSettings, hardware: Hardware, gpus: int, batch: int
) -> Found:
    """Return the layouts that fit, fastest first, and why the others do not.

    Args:
        model: The shape.
        settings: The settings.
        hardware: The GPUs.
        gpus: Number of GPUs.
        batch: Samples of a step.
    """
    most = room(settings, hardware)
    fitting: dict[Layout, Candidate] = {}
    least: dict[tuple[int, int], Candidate] = {}
    fits: set[tuple[int, int]] = set()
    for layout in _layouts(model, settings, hardware, gpus, batch):
        degrees = layout.tensor, layout.pipeline
        held = rank_memory(model, layout, optimizer=settings.layout.optimizer)
        if held.total > most:
            known = least.get(degrees)
            if known is None or held.total < known.memory.total:
                least[degrees] = Candidate(layout, held)
            continue
        fits.add(degrees)
        found = Candidate(layout, held, step_time(model, layout, hardware))
        same = replace(layout, interleave=1)
        if same not in fitting or found.seconds < fitting[same].seconds:
            fitting[same] = found
    # Of equally fast ones, the one with the least memory.
    ranked = sorted(fitting.values(), key=lambda one: (round(one.seconds, 9), one.memory.total))
    return Found(tuple(ranked), {k: one for k, one in sorted(least.items()) if k not in fits})
