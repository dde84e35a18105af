"""Optimizers and schedules of ORT's first training API, for `ortlab.ORTTrainer`.

Use ``from ortlab import optim`` instead of ``from onnxruntime.training import optim``.
"""

from __future__ import annotations

from ortlab.optim import lr_scheduler
from ortlab.optim.config import AdamConfig, LambConfig, SGDConfig

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "lr_scheduler"]
