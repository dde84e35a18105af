"""Profiles of a training step in each engine, by kind of operator, for ``bench engines --profile``.

Operators in torch are timed by `torch.profiler`, and those in ORT by ORT's own profile, both with
forward and backward only. A few further steps of the whole tell how long each part takes without
instrumentation. What those take beyond the operators is time between operators, of which the time
of Python and torch around ORT's sessions is a part of its own.
"""

from __future__ import annotations

import copy
import re
import statistics
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from ortlab.bench.interleaved import no_gc
from ortlab.bench.result import StepProfile
from ortlab.engines.base import Batch, Stepper
from ortlab.engines.batch import arguments, to_device
from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import autocast_for
from ortlab.graph import profiler
from ortlab.graph.profile_torch import sums
from ortlab.graph.timed_step import WARMUP, Clock, Step
from ortlab.settings import IN_ORT, FinetuneSettings

STEPS: Final = 5
COMPILED: Final = "fused by Inductor"
OTHERS: Final = "other operators"
KINDS: Final[Mapping[str, str]] = {
    "matrix products": r"b?(add)?b?mm|(add)?mv|dot|\w*(gemm|matmul|linear)\w*",
    "convolutions": r"\w*conv\w*",
    "recurrent layers": r"\w*(lstm|gru|rnn)\w*",
    "loss": r"\w*log_?softmax|softmaxcrossentropy\w*|\w*(nll_loss|cross_entropy)\w*",
    "attention": r"\w*attention\w*|softmax",
    "random draws": r"bernoulli|random|rand\w*|uniform|normal|native_dropout|dropout|exponential",
    "normalization": r"\w*norm\w*",
    "activations": r"\w*(gelu|relu|silu|swish|erf|tanh|sigmoid)|threshold",
    "embeddings and selection": r"embedding\w*|gather\w*|scatter\w*|index\w*|where|masked_fill|"
    r"one_?hot\w*|slice|select\w*|concat\w*|cat|split|pad|constant_pad_nd|\w*pool\w*",
    "reductions": r"(reduce)?(sum|mean|max|min|prod|amax|amin|argmax)\w*|reduce\w+|cumsum",
    "elementwise": r"add|sub|mul|div|rsub|neg|exp|log|sqrt|rsqrt|pow|square|reciprocal|abs|clip|"
    r"clamp\w*|eq|equal|ne|lt|less\w*|le|gt|greater\w*|ge|and|or|not|xor|(bitwise|logical)_\w+|"
    r"cast|dequantizelinear|erf|lerp|addcmul|addcdiv|cos|sin|bias\w*|isnan|isinf",
    "copies and layout": r"_?to(_copy)?|copy|clone|contiguous|fill|zeros?|ones|full|empty\w*|"
    r"(new_)?(zeros|ones|full|empty)\w*|_?unsafe_view|view|_?reshape\w*|transpose|permute|expand\w*|"
    r"t|as_strided|unsqueeze|squeeze|flatten|identity|shape|tile|detach\w*|resolve\w*|\w*alias\w*",
}
"""Patterns of operators' names, without prefix, direction and trailing underscore, by kind.

The first kind that matches counts.
"""

_KINDS: Final = [(kind, re.compile(pattern)) for kind, pattern in KINDS.items()]
_PREFIX: Final = re.compile(r".*(\.|::)_*")
_SUFFIX: Final = re.compile(r"(_backward(_data)?|grad(_dx|_\d+)?|_)$")


def kind_of(name: str) -> str:
    """Return the kind of an operator.

    Args:
        name: Name of an ATen operator or of a node in ORT.
    """
    if name == COMPILED:
        return COMPILED
    plain = _PREFIX.sub("", name).lower()
    while (shorter := _SUFFIX.sub("", plain)) != plain:
        plain = shorter
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(plain)), OTHERS)


def _operator(event: str) -> str | None:
    """Return the operator of an event of torch's profiler; None for one that computes nothing."""
    if "Call CompiledFxGraph" in event:
        return COMPILED
    return event if "::" in event and "autograd::" not in event else None


def profile(
    name: str,
    stepper: Stepper,
    model: nn.Module,
    batch: Batch,
    settings: FinetuneSettings,
    device: torch.device,
) -> StepProfile:
    """Profile the steps of an engine.

    Args:
        name: Name of the model.
        stepper: Stepper that trains the model in the engine.
        model: The model itself, which is copied.
        batch: Batch of each step.
        settings: Settings of the stepper.
        device: Device that it trains on.

    Raises:
        ValueError: If torch runs the model although the engine is one of ORT's.
    """
    with no_gc():
        results = [stepper.step([batch], lr=0.0) for _ in range(STEPS)]
    own = copy.deepcopy(model).to(device)
    around_us = 0.0
    if settings.model.engine in IN_ORT:
        us, around_us = _in_ort(own, batch, settings, device)
    else:
        us = _in_torch(own, to_device(batch, device), settings, device)
    return StepProfile(
        name,
        settings.model.engine,
        settings.model.precision,
        forward_ms=statistics.median(each.forward_ms for each in results),
        backward_ms=statistics.median(each.backward_ms for each in results),
        optimizer_ms=statistics.median(each.optimizer_ms for each in results),
        kind_ms=sums((kind_of(op), took / 1e3) for op, took in us.items()),
        operator_ms={op: us[op] / 1e3 for op in sorted(us, key=lambda op: -us[op])},
        around_ms=around_us / 1e3,
    )


def _in_ort(
    model: nn.Module, batch: Batch, settings: FinetuneSettings, device: torch.device
) -> tuple[dict[str, float], float]:
    """Return the microseconds of each operator, in ORT and in torch, and those around sessions."""
    own, precision = settings.model, settings.model.precision
    if own.engine == "ort":  # autocast sets its precision, the graph's kernels that of ORTModule
        own = own.replace(precision="fp32")
    else:
        precision = "fp32" if device.type == "cpu" else precision
    wrapped = engine(own.engine).wrap(model, own)
    with autocast_for(precision, device):
        found = profiler.profile(wrapped, batch, STEPS)
    if found.ort is None:
        raise ValueError(found.notes[-1])
    around_us = sum(time.around_us for time in found.ort.phases.values())
    return sums((node.op, node.us) for node in found.nodes), around_us


def _in_torch(
    model: nn.Module, batch: Batch, settings: FinetuneSettings, device: torch.device
) -> dict[str, float]:
    """Return the microseconds of each operator in torch, without those that it calls itself."""
    wrapped = engine(settings.model.engine).wrap(model, settings.model.replace(precision="fp32"))
    step, clock = Step(wrapped, *arguments(model, batch)), Clock(device)

    def run() -> None:
        # Autocast keeps copies of weights until its end.
        with autocast_for(settings.model.precision, device):
            step.run(wrapped, clock)

    for _ in range(WARMUP):
        run()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(STEPS):
            run()
    return sums(
        (name, (event.self_device_time_total or event.self_cpu_time_total) / STEPS)
        for event in recorded.key_averages()
        if (name := _operator(event.key)) is not None
    )
