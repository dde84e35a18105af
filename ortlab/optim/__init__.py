"""Optimizers, schedules and the loss scaler of ORT's first training API, for `ortlab.ORTTrainer`.

Use ``from ortlab import optim`` instead of ``from onnxruntime.training import amp, optim``.
"""

from __future__ import annotations

from ortlab.optim import lr_scheduler
from ortlab.optim.config import AdamConfig, LambConfig, SGDConfig
from ortlab.optim.loss_scaler import DynamicLossScaler

__all__ = ["AdamConfig", "DynamicLossScaler", "LambConfig", "SGDConfig", "lr_scheduler"]
