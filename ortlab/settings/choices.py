"""The values that settings choose from, by their names."""

from __future__ import annotations

ENGINES = ("eager", "compile", "ort", "offload")


IN_ORT = ("ort", "offload")
"""The engines whose graph runs in ORT."""


REFERENCE = ("eager", "fp32")
"""The engine and precision that others are compared with."""


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


OF_ANY_ENGINE = ("engine", "precision", "recompute")
"""The settings of `EngineSettings` that are not for ORT's graph alone."""


LOWEST_LOSS_SCALE = 1.0
"""Where gradients overflow float16 at this loss scale, a run ends: DeepSpeed's min_loss_scale."""


KERNELS = ("measured", "torch", "ort")


ATTENTION = ("auto", "fused", "onnx")


LOG_LEVELS = ("verbose", "devinfo", "info", "warning", "error", "fatal")


OPSETS = (14, 17)
"""The oldest and the newest ONNX opset that ORTModule's export rules are checked at."""


EXPORT_OPSETS = (14, 20)
"""The oldest opset that has attention, and the newest that torch's exporter writes."""


OPTIMIZERS = ("adamw", "sgd", "lamb")


LOSSES = ("cross_entropy", "mse", "l1", "bce_with_logits")
