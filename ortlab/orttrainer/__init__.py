"""Front end of ORT's first training API, from ORT 1.2 (2020), on engines of ortlab."""

from __future__ import annotations

from ortlab.orttrainer.options import ORTTrainerOptions
from ortlab.orttrainer.trainer import ORTTrainer

__all__ = ["ORTTrainer", "ORTTrainerOptions"]
