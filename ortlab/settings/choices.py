"""Names of the values that settings choose from."""

from __future__ import annotations

ENGINES = ("eager", "compile", "ort", "ortmodule", "ort_fused")
"""Engines that execute a model."""


AUTO = "auto"
"""Choice of the best engine that runs here, which `ortlab.engines.registry` resolves."""


SAME_ENGINE = {"offload": "ort_fused"}
"""Accepted name of an engine -> the engine that it means: former names."""


FORMER_ENGINE = {**SAME_ENGINE, "ort": "ortmodule"}
"""Name of an engine in files with the former names of settings -> the engine that it means."""


IN_ORT = ("ort", "ortmodule", "ort_fused")
"""Engines that run a model in ORT."""


REFERENCE = ("eager", "fp32")
"""Engine and precision that all others are compared with."""


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


OF_ANY_ENGINE = ("engine", "precision", "recompute")
"""Settings of `EngineSettings` that also apply to engines without an ORT graph."""


LOWEST_LOSS_SCALE = 1.0
"""Loss scale at which a run fails if gradients overflow float16; DeepSpeed's min_loss_scale."""


KERNELS = ("measured", "torch", "ort")


ATTENTION = ("auto", "fused", "onnx")


LOG_LEVELS = ("verbose", "devinfo", "info", "warning", "error", "fatal")


OPSETS = (14, 17)
"""Oldest and newest ONNX opset that ORTModule's export rules are tested with."""


EXPORT_OPSETS = (14, 20)
"""Oldest opset that supports attention, and newest opset that torch's exporter writes."""


OPTIMIZERS = ("adamw", "sgd", "lamb")


GPUS = (
    "v100-32gb",
    "v100-32gb-dgx2",
    "a100-40gb",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
)
"""GPUs of `ortlab.plan.hardware`'s catalog."""


OWN = "own "
"""Prefix of the name by which settings record an object of the user's in place of a choice."""


def is_own(name: str) -> bool:
    """Return whether a setting records an object of the user's, not a choice.

    Args:
        name: The setting.
    """
    return name.startswith(OWN)


LOSSES = ("cross_entropy", "mse", "l1", "bce_with_logits")
