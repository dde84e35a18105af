"""Hugging Face: transformers' Trainer in ONNX Runtime, its run as live charts and in the history.

A plain `transformers.Trainer` takes a model of `ortlab.wrap` as it is; `Trainer` wraps it, and
`OrtLabCallback` shows the run of either.
"""

from ortlab.hf.callback import OrtLabCallback
from ortlab.hf.following import TrainerRun
from ortlab.hf.trainer import Trainer

__all__ = ["OrtLabCallback", "Trainer", "TrainerRun"]
