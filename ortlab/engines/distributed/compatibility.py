"""Which settings go together, decided from values alone before anything is loaded or started.

The one place that knows: engines and the ways to train in several processes ask it. What depends
on this machine (a device, a compiler) is each engine's own `unavailable` and `refuses`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from typing import Any, Final

from ortlab.engines.base import Capabilities
from ortlab.settings import EngineSettings, FinetuneSettings

DEEPSPEED: Final = "0.19.8"
"""The version whose internals `distributed.deepspeed` knows."""
_AMONG_WORKERS: dict[str, tuple[Any, str]] = {
    "zero_stage": (0, "shares out among workers"),
    "tensor_parallel": (1, "shares out among workers"),
    "pipeline_stages": (1, "shares out among workers"),
    "param_dtype": ("fp32", "is for what workers share out"),
    "offload_optimizer": (False, "is for what workers share out"),
}
"""What one process has of the settings for several, and what those do."""


def engine_conflict(
    engine: str, capabilities: Capabilities, settings: EngineSettings
) -> str | None:
    """Return why an `engine` with these `capabilities` cannot run under `settings`, or None."""
    workers = getattr(settings, "workers", 1)  # a run's: wrapping alone has none
    stage = getattr(settings, "zero_stage", 0)
    if workers > 1 and not capabilities.workers:
        return (
            f"workers={workers}: engine {engine!r} trains in one process; choose workers=1, or "
            "engine='eager'"
        )
    if getattr(settings, "isolated", False) and not capabilities.workers:
        return (
            f"isolated=True: engine {engine!r} trains in the process that has it; choose "
            "isolated=False, or engine='eager'"
        )
    for name, (without, what) in _AMONG_WORKERS.items():
        value = getattr(settings, name, without)
        if value != without and workers == 1:
            several = value if name in ("tensor_parallel", "pipeline_stages") else 2
            return (
                f"{name}={value!r} {what}, and there is one; choose workers={several}, or "
                f"{name}={without!r}"
            )
    if stage not in capabilities.zero_stages and workers > 1:
        known = ", ".join(map(str, capabilities.zero_stages))
        return f"zero_stage={stage}: engine {engine!r} knows {known}; choose one of those"
    if settings.recompute != "off" and not capabilities.recompute:
        return (
            f"recompute={settings.recompute!r} is for engine 'ort'; choose recompute='off' "
            f"with engine {engine!r}"
        )
    return None


def ranks_conflict(settings: FinetuneSettings, size: int) -> str | None:
    """Return why `size` ranks cannot train together under `settings`, or None."""
    if (reason := _model_parallel_conflict(settings, size)) is not None:
        return reason
    if settings.optimizer == "lamb" and settings.reduction == "adasum":
        return (
            "reduction='adasum' with optimizer='lamb': both choose a length for each tensor's "
            "step, and nobody has shown what they do together; choose reduction='mean'"
        )
    if (reason := _not_by_deepspeed(settings)) is not None:
        return reason
    places = data_parallel_size(settings, size)
    if settings.batch_size < places:
        return (
            f"batch_size={settings.batch_size} cannot be shared out to {places} workers; choose "
            f"batch_size={places} or more"
        )
    if settings.reduction == "mean":
        return None
    if (reason := _adasum_conflict(size)) is not None or settings.optimizer == "sgd":
        return reason
    each = f"reduction='adasum' with optimizer={settings.optimizer!r}: each rank steps by its own "
    if settings.zero_stage:
        return f"{each}moments, which ZeRO would share out; choose zero_stage=0 or optimizer='sgd'"
    if settings.clip_norm is not None:
        return f"{each}gradient, and no norm is of all; choose clip_norm=None or optimizer='sgd'"
    if settings.precision == "fp16":
        return f"{each}gradient, and would need a loss scale of its own; choose precision='bf16'"
    return None


def data_parallel_size(settings: FinetuneSettings, size: int) -> int:
    """Return how many parts a batch has among `size` ranks: the ranks of one model count as one."""
    return size // (settings.tensor_parallel * settings.pipeline_stages)


def _model_parallel_conflict(settings: FinetuneSettings, size: int) -> str | None:
    """Why `size` ranks cannot share layers or stages under `settings`; None when they can."""
    layers, stages = settings.tensor_parallel, settings.pipeline_stages
    if layers == stages == 1:
        return None
    if layers > 1 and stages > 1:
        return (
            f"tensor_parallel={layers} with pipeline_stages={stages}: a run has the one or the "
            "other beside data parallel so far; choose 1 for one of them"
        )
    own, none = (
        (f"tensor_parallel={layers}", "tensor_parallel=1")
        if layers > 1
        else (f"pipeline_stages={stages}", "pipeline_stages=1")
    )
    if size % (layers * stages):
        return f"{own} does not divide workers={size}; train with a multiple of {layers * stages}"
    if settings.zero_stage >= 2:
        return (
            f"{own} with zero_stage={settings.zero_stage}: what ZeRO would share out is in parts "
            f"already; choose zero_stage=1 or {none}"
        )
    if settings.param_dtype != "fp32" or settings.offload_optimizer:
        what = "param_dtype='bf16'" if settings.param_dtype != "fp32" else "offload_optimizer=True"
        return (
            f"{own} with {what}: DeepSpeed does that for whole models, and these ranks have parts; "
            f"choose param_dtype='fp32' and offload_optimizer=False, or {none}"
        )
    if settings.reduction != "mean":
        return (
            f"{own} with reduction={settings.reduction!r}: it combines what whole ranks have, and "
            f"these have parts; choose reduction='mean' or {none}"
        )
    if settings.precision == "fp16":
        return (
            f"{own} with precision='fp16': a rank alone would see that its part overflows, and "
            f"their loss scales would differ; choose precision='bf16' or {none}"
        )
    return _sharing_layers(settings) if layers > 1 else _in_stages()


def _sharing_layers(settings: FinetuneSettings) -> str | None:
    own = f"tensor_parallel={settings.tensor_parallel}"
    if settings.engine != "eager":
        return (
            f"{own}: engine {settings.engine!r} would find parts of tensors in the model; choose "
            "engine='eager' or tensor_parallel=1"
        )
    if settings.optimizer not in ("adamw", "sgd"):
        return (
            f"{own} with optimizer={settings.optimizer!r}: it needs norms of whole layers, and "
            "ranks have parts; choose optimizer='adamw' or tensor_parallel=1"
        )
    return None


def _in_stages() -> str | None:
    reason = deepspeed_missing()
    return reason and f"pipeline_stages goes through DeepSpeed: {reason}"


def _adasum_conflict(size: int) -> str | None:
    """Return why Adasum cannot combine the gradients of `size` ranks, or None."""
    if size & (size - 1) == 0:
        return None
    below = 1 << (size.bit_length() - 1)
    return (
        f"reduction='adasum' halves the ranks again and again, and {size} is no power of two; "
        f"train with {below} or {2 * below} workers, or choose reduction='mean'"
    )


def _not_by_deepspeed(settings: FinetuneSettings) -> str | None:
    """Return why DeepSpeed cannot do what it alone does of `settings`, or None."""
    return deepspeed_conflict(settings) if needs_deepspeed(settings) else None


def deepspeed_conflict(settings: FinetuneSettings) -> str | None:
    """Return why DeepSpeed cannot train under `settings`, or None."""
    stage, own = f"zero_stage={settings.zero_stage}", needs_deepspeed(settings)
    if (reason := deepspeed_missing()) is not None:
        return f"{own or stage} goes through DeepSpeed: {reason}"
    if settings.zero_stage == 0:
        return (
            f"{own} with {stage}: DeepSpeed keeps what the optimizer needs in shares; choose "
            "zero_stage=1"
        )
    if settings.reduction != "mean":
        return (
            f"{stage}: DeepSpeed reduces gradients itself, by their mean; choose reduction='mean'"
        )
    if settings.optimizer == "lamb":
        return (
            f"{stage} with optimizer='lamb': its ratios are of whole tensors, which DeepSpeed cuts "
            "up; choose optimizer='adamw'"
        )
    if settings.precision == "fp16":
        return (
            f"{stage} with precision='fp16': DeepSpeed has a loss scale for float16 weights alone, "
            "and these are float32; choose precision='bf16'"
        )
    if settings.param_dtype == "bf16" and settings.precision != "bf16":
        return (
            f"param_dtype='bf16' with precision={settings.precision!r}: weights of 16 bits give "
            "products of 16 bits; choose precision='bf16', or param_dtype='fp32'"
        )
    if settings.param_dtype == "bf16" and settings.engine == "ort":
        return (
            "param_dtype='bf16' with engine='ort': ORT's CPU provider has no MatMul of bfloat16, "
            "and on CUDA it has not been tried; choose engine='eager', or param_dtype='fp32'"
        )
    if settings.zero_stage == 3 and settings.engine != "eager":
        return (
            f"{stage} with engine={settings.engine!r}: it reads all weights of the model at once, "
            "so that every rank would have to hold them; choose zero_stage=2, or engine='eager'"
        )
    return None


def needs_deepspeed(settings: FinetuneSettings) -> str | None:
    """Return the first of `settings` that only DeepSpeed implements, or None."""
    if settings.param_dtype != "fp32":
        return f"param_dtype={settings.param_dtype!r}"
    if settings.offload_optimizer:
        return "offload_optimizer=True"
    return f"zero_stage={settings.zero_stage}" if settings.zero_stage > 1 else None


def deepspeed_missing() -> str | None:
    """Return why DeepSpeed cannot be used here and what to do, or None. Imports nothing."""
    found = None
    if importlib.util.find_spec("deepspeed") is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a folder of that name
            found = importlib.metadata.version("deepspeed")
    if found is None:
        return "DeepSpeed is not installed: pip install 'ortlab[deepspeed]'"
    if found != DEEPSPEED:
        return (
            f"DeepSpeed {found} is installed, and ortlab knows the inner parts of {DEEPSPEED}: "
            "pip install 'ortlab[deepspeed]'"
        )
    return None
