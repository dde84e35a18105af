"""DeepSpeed's configuration, made from a run's settings; imports nothing of DeepSpeed."""

from __future__ import annotations

from typing import Any, Final

import torch

from ortlab.settings import FinetuneSettings

BUCKET: Final = 25 * 1024**2 // 4
"""Float32 elements that are reduced or gathered at once: DistributedDataParallel's 25 MiB."""


def configuration(settings: FinetuneSettings, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration dictionary for a run.

    The keys are described at https://www.deepspeed.ai/docs/config-json/.

    Args:
        settings: The run's settings; ``zero_stage`` is 1, 2 or 3.
        device: The device that the weights are on.

    Returns:
        The ``config`` argument of ``deepspeed.initialize``.
    """
    parallel = settings.parallel
    has_copies = parallel.param_dtype == "bf16"
    # With "fp32" at stage 1 DeepSpeed would choose another of its optimizers, whose gradients take
    # 6 bytes each.
    accumulated = "fp32" if not has_copies or accumulates_in_fp32(settings) else "bf16"
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"}}
    return {
        "train_micro_batch_size_per_gpu": 1,  # the ranks set the end of a step themselves
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.optim.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own optimizer runs on the host as well
        "bf16": {"enabled": has_copies, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": accumulated},
        "communication_data_type": "fp32",
        "zero_optimization": {
            **(offload if parallel.offload_optimizer else {}),
            "stage": parallel.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 2 * BUCKET,
            # The default would never partition a smaller model again.
            "stage3_max_reuse_distance": BUCKET,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 10**15,  # one sub-group for each of the optimizer's groups
        },
    }


def accumulates_in_fp32(settings: FinetuneSettings) -> bool:
    """Return whether the bfloat16 gradients of micro-batches are accumulated in float32.

    Args:
        settings: The run's settings.

    Returns:
        True from stage 2 on where a step has several micro-batches: 4 bytes a gradient, not 2.
    """
    return settings.data.gradient_accumulation_steps > 1 and settings.parallel.zero_stage > 1
