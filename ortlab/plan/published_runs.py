"""Published training runs with their sources, and the plan's error for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ortlab.plan.cost import Layout, rank_memory, step_time
from ortlab.plan.hardware import CATALOG, EFFICIENCY, Hardware
from ortlab.plan.transformer import Transformer
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table


@dataclass(frozen=True)
class PublishedRun:
    """A run that was published.

    Attributes:
        name: Name of the run.
        source: Address of its figures.
        model: Shape of the model.
        layout: Layout of its ranks.
        hardware: Its GPUs.
        seconds: Published time of a step; computed from `tflops` if only that was published.
        tflops: Published operations per second and GPU, in 10^12; None if the time was published.
        memory: Published memory of a rank, in bytes; None if there is none.
        note: Assumptions; "" for none.
    """

    name: str
    source: str
    model: Transformer
    layout: Layout
    hardware: Hardware
    seconds: float
    tflops: float | None = None
    memory: float | None = None
    note: str = ""

    @property
    def predicted(self) -> float:
        """Planned seconds of a step."""
        return step_time(self.model, self.layout, self.hardware).total

    @property
    def error(self) -> float:
        """Relative error of the planned time."""
        return self.predicted / self.seconds - 1

    @property
    def predicted_memory(self) -> int:
        """Planned bytes of a rank."""
        return rank_memory(self.model, self.layout).total


_NARAYANAN: Final = "https://arxiv.org/abs/2104.04473"
_KORTHIKANTI: Final = "https://arxiv.org/abs/2205.05198"
_MT_NLG: Final = "https://arxiv.org/abs/2201.11990"
_ZERO: Final = "https://arxiv.org/abs/1910.02054"
_LLAMA: Final = "https://arxiv.org/abs/2407.21783"
_SHOEYBI: Final = "https://arxiv.org/abs/1909.08053"
_BIGSCIENCE: Final = "https://github.com/bigscience-workshop/bigscience/blob/master"
_TURING: Final = (
    "https://www.microsoft.com/en-us/research/blog/"
    "turing-nlg-a-17-billion-parameter-language-model-by-microsoft/"
)
_175B: Final = Transformer(96, 12288, 96, 2048)
_530B: Final = Transformer(105, 20480, 128, 2048)
_A100: Final = CATALOG["a100-80gb"]


def _by_tflops(
    name: str,
    source: str,
    model: Transformer,
    layout: Layout,
    hardware: Hardware,
    tflops: float,
    note: str = "",
) -> PublishedRun:
    """Return a run whose time follows from the operations per second that were published.

    Layers that are computed again count, as in appendix A of Narayanan et al. and in DeepSpeed.
    """
    flops = model.step_flops(layout.batch, again=layout.recompute == "full")
    seconds = flops / (layout.gpus * tflops * 1e12)
    return PublishedRun(name, source, model, layout, hardware, seconds, tflops, note=note)


def _v100() -> Iterator[PublishedRun]:
    recomputed = Layout(8, 1, 64, 8, 1, recompute="full", precision="fp16")
    dgx2 = CATALOG["v100-32gb-dgx2"]
    yield _by_tflops(
        "Turing-NLG 17B",
        f"{_ZERO}, section 10.6; {_TURING}",
        Transformer(78, 4256, 28, 1024),
        replace(recomputed, tensor=4, zero=2),
        dgx2,
        41.4,
        "a batch of 512 on 256 GPUs, as the second source says",
    )
    yield _by_tflops(
        "ZeRO 100B",
        f"{_ZERO}, figure 2 and table 5",
        Transformer(125, 8192, 64, 1024),
        replace(recomputed, tensor=16, data=25, micro_batch=32, zero=2, sequence_parallel=True),
        dgx2,
        38,
        "partitioned activation checkpoints count as sequence parallelism",
    )
    yield _by_tflops(
        "Megatron-LM 8.3B",
        f"{_SHOEYBI}, section 5.1",
        Transformer(72, 3072, 32, 1024),
        recomputed,
        dgx2,
        15_100 / 512,
    )
    yield PublishedRun(
        "BigScience 104B",
        f"{_BIGSCIENCE}/experiments/tr8-104B.md",
        Transformer(64, 11600, 80, 2048),
        replace(recomputed, tensor=4, pipeline=32, data=1, micro_batch=1, micro_batches=2048),
        replace(CATALOG["v100-32gb"], node=4),
        696,
        memory=30e9,
        note="the shape is in chronicles-prequel.md of tr11-176B-ml",
    )


def _a100() -> Iterator[PublishedRun]:
    yield PublishedRun(
        "BLOOM 176B",
        f"{_BIGSCIENCE}/train/tr11-176B-ml/README.md and chronicles-prequel.md",
        Transformer(70, 14336, 112, 2048, 250880, positions=False),
        Layout(4, 12, 8, 2, 128, zero=1, recompute="full", fp32_gradients=True),
        replace(_A100, network=6.25e9),  # 4 links of 100 Gb/s for 8 GPUs
        104.5,
        memory=59e9,
    )
    for gpus, tflops in ((384, 153), (768, 149), (1536, 141)):
        yield _of_table_2(f"Megatron-LM 175B, {gpus} GPUs", _175B, gpus, 1536, tflops, (8, 12))
    for gpus, tflops in ((560, 171), (1120, 167), (2240, 159)):
        yield _of_table_2(f"Megatron-LM 530B, {gpus} GPUs", _530B, gpus, 2240, tflops, (8, 35))
    for gpus, micro, tflops in ((384, 4, 144), (768, 2, 88), (1536, 1, 44)):
        yield _of_table_2(f"ZeRO-3 175B, {gpus} GPUs", _175B, gpus, 1536, tflops, (1, 1), micro)
    for gpus, micro, tflops in ((640, 4, 138), (1120, 2, 98), (2240, 1, 48)):
        batch = gpus * micro
        yield _of_table_2(f"ZeRO-3 530B, {gpus} GPUs", _530B, gpus, batch, tflops, (1, 1), micro)
    plain = Layout(8, 1, 1, 4, 1, precision="fp16")
    yield from _of_table_5("Megatron-LM 22B", Transformer(48, 6144, 64, 2048), plain, 1.42, 1.10)
    deep = replace(plain, micro_batch=1, interleave=3)
    eight = replace(deep, pipeline=8, micro_batches=64)
    yield from _of_table_5("Megatron-LM 175B, 64 GPUs", _175B, eight, 18.13, 13.75)
    many = replace(deep, pipeline=35, micro_batches=280)
    yield from _of_table_5("Megatron-LM 530B, 280 GPUs", _530B, many, 49.05, 37.83)
    most = replace(deep, pipeline=64, micro_batches=512, interleave=1)
    trillion = Transformer(128, 25600, 160, 2048)
    yield from _of_table_5("Megatron-LM 1T, 512 GPUs", trillion, most, 94.42, 71.49)
    for nodes, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        data = nodes * 8 // 280
        yield PublishedRun(
            f"MT-NLG 530B, {nodes * 8} GPUs",
            f"{_MT_NLG}, section 2.4",
            _530B,
            Layout(8, 35, data, 1, 1920 // data, zero=1, recompute="full"),
            _A100,
            seconds,
        )


def _h100() -> Iterator[PublishedRun]:
    llama = Transformer(
        126,
        16384,
        128,
        8192,
        128256,
        kv_heads=8,
        intermediate=53248,
        gated=True,
        tied=False,
        positions=False,
    )
    for gpus, tflops in ((8192, 430), (16384, 400)):
        data = gpus // 128
        yield _by_tflops(
            f"Llama 3 405B, {gpus} GPUs",
            f"{_LLAMA}, table 4",
            llama,
            Layout(
                8,
                16,
                data,
                1,
                2048 // data,
                zero=1,
                interleave=8,
                sequence_parallel=True,
                fused_attention=True,
            ),
            CATALOG["h100-80gb"],
            tflops,
            "one layer in each interleaved part, and all attention scores counted: assumed",
        )


def _of_table_2(
    name: str,
    model: Transformer,
    gpus: int,
    batch: int,
    tflops: float,
    degrees: tuple[int, int],
    micro_batch: int = 1,
) -> PublishedRun:
    """Return a run of Narayanan et al., table 2; all recompute layers."""
    tensor, pipeline = degrees
    data = gpus // (tensor * pipeline)
    layout = Layout(
        tensor,
        pipeline,
        data,
        micro_batch,
        batch // (data * micro_batch),
        zero=0 if tensor > 1 else 3,
        recompute="full",
        precision="fp16",
    )
    return _by_tflops(name, f"{_NARAYANAN}, table 2", model, layout, _A100, tflops)


def _of_table_5(
    name: str, model: Transformer, layout: Layout, full: float, selective: float
) -> Iterator[PublishedRun]:
    """Yield the two runs of a model in table 5 of Korthikanti et al."""
    source = f"{_KORTHIKANTI}, table 5"
    whole = replace(layout, recompute="full")
    yield PublishedRun(f"{name}, full recompute", source, model, whole, _A100, full)
    less = replace(layout, recompute="selective", sequence_parallel=True)
    yield PublishedRun(f"{name}, selective", source, model, less, _A100, selective)


RUNS: Final = (*_v100(), *_a100(), *_h100())
FITTED: Final = {
    "V100": "Turing-NLG 17B",
    "A100": "BLOOM 176B",
    "H100": "Llama 3 405B, 8192 GPUs",
}
"""Generation -> the run that its constant in `ortlab.plan.hardware.EFFICIENCY` is fitted on."""
WITHIN: Final = 0.25
"""Largest error that counts as predicted."""


def published_table() -> Table[PublishedRun]:
    """Return the published runs with the planned time of each, and the error."""
    tested = [run for run in RUNS if run.name not in FITTED.values()]
    missed = [run.name for run in tested if abs(run.error) > WITHIN]
    columns = [
        Column[PublishedRun]("run", lambda run: run.name),
        Column[PublishedRun]("GPUs", lambda run: f"{run.layout.gpus} {run.hardware.generation}"),
        Column[PublishedRun]("published", lambda run: f"{run.seconds:.2f} s", number=True),
        Column[PublishedRun]("planned", lambda run: f"{run.predicted:.2f} s", number=True),
        Column[PublishedRun]("error", lambda run: f"{run.error:+.1%}", number=True),
        Column[PublishedRun]("", _remark),
        Column[PublishedRun]("memory, published", _published_memory, number=True),
        Column[PublishedRun]("planned", _planned_memory, number=True),
        Column[PublishedRun]("source", lambda run: run.source),
    ]
    fits = ", ".join(f"{EFFICIENCY[each]:.1%} of {each}'s peak" for each in EFFICIENCY)
    notes = [
        f"one constant for each generation, fitted on one run: {fits}",
        f"{len(tested) - len(missed)} of {len(tested)} other runs are within {WITHIN:.0%}; missed: "
        f"{'; '.join(missed) or 'none'}",
        "published memory is what nvidia-smi showed, with the allocator's cache",
    ]
    notes += [f"{run.name}: {run.note}" for run in RUNS if run.note]
    return Table(RUNS, columns, notes=notes)


def _remark(run: PublishedRun) -> str:
    if run.name in FITTED.values():
        return "fitted"
    return "missed" if abs(run.error) > WITHIN else ""


def _published_memory(run: PublishedRun) -> str:
    return "" if run.memory is None else memory(run.memory)


def _planned_memory(run: PublishedRun) -> str:
    return "" if run.memory is None else memory(run.predicted_memory)
