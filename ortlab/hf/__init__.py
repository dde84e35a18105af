"""Hugging Face's Trainer on ortlab's engines, with live charts and the history of runs.

A plain `transformers.Trainer` accepts a model of `ortlab.wrap`; `Trainer` wraps its model itself,
and `OrtLabCallback` shows the run of either. `OrtLabTracker` shows a loop that uses accelerate.
"""

from ortlab.hf.callback import OrtLabCallback
from ortlab.hf.tracker import OrtLabTracker
from ortlab.hf.trainer import Trainer
from ortlab.training.trainer_run import TrainerRun

__all__ = ["OrtLabCallback", "OrtLabTracker", "Trainer", "TrainerRun"]
