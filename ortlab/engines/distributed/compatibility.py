"""Which ways for several workers to train go together, and why others do not."""

from __future__ import annotations

from ortlab.settings import FinetuneSettings


def places(settings: FinetuneSettings, size: int) -> int:
    """Among how many `size` ranks share out a batch: those of one model's parts count as one."""
    return size // (settings.tensor_parallel * settings.pipeline_stages)


def refuses(settings: FinetuneSettings, size: int) -> str | None:
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
    from ortlab.engines.distributed import deepspeed  # which is made of `sharded.Ranks`

    reason = deepspeed.missing()
    return reason and f"pipeline_stages goes through DeepSpeed: {reason}"
