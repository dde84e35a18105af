"""Which ways for several workers to train go together, and why others do not."""

from __future__ import annotations

from ortlab.settings import FinetuneSettings


def refuses(settings: FinetuneSettings, size: int) -> str | None:
    """Why `size` ranks cannot share layers or stages under `settings`; None when they can."""
    if settings.tensor_parallel == 1:
        return None
    own = f"tensor_parallel={settings.tensor_parallel}"
    if size % settings.tensor_parallel:
        return f"{own} does not divide {size} workers; train with a multiple of it"
    if settings.engine != "eager":
        return (
            f"{own}: engine {settings.engine!r} would see shards where the model has tensors; "
            "choose engine='eager' or tensor_parallel=1"
        )
    if settings.zero_stage >= 2:
        return (
            f"{own} with zero_stage={settings.zero_stage}: DeepSpeed would flatten and share out "
            "what is shared already; choose zero_stage=1 or tensor_parallel=1"
        )
    if settings.reduction == "adasum":
        return (
            f"{own} with reduction='adasum': its coefficients are of whole tensors, and ranks have "
            "shards; choose reduction='mean' or tensor_parallel=1"
        )
    if settings.optimizer not in ("adamw", "sgd"):
        return (
            f"{own} with optimizer={settings.optimizer!r}: it needs norms of whole layers, and "
            "ranks have shards; choose optimizer='adamw' or tensor_parallel=1"
        )
    if settings.precision == "fp16":
        return (
            f"{own} with precision='fp16': a shard's overflow is seen by its rank alone, and the "
            "loss scales would part; choose precision='bf16' or tensor_parallel=1"
        )
    return None
