"""Hugging Face's Trainer on ortlab's engines, with live charts and the history of runs.

A plain `transformers.Trainer` accepts a model of `ortlab.wrap`; `Trainer` wraps its model itself,
and `OrtLabCallback` shows the run of either.
"""

from ortlab.hf.callback import OrtLabCallback
from ortlab.hf.trainer import Trainer
from ortlab.training.trainer_run import TrainerRun

__all__ = ["OrtLabCallback", "Trainer", "TrainerRun"]
