"""A small model in training, as the state that the parts of `Trainer` share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ortlab.engines.torch.stepper import Eager
from ortlab.metrics.recorder import Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading
from ortlab.training.control import Control
from ortlab.training.training_state import TrainingState


def examples(count: int = 16) -> TensorDataset:
    """Return samples of 4 numbers; the target is the index of the largest of the first three."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def chosen(**values: Any) -> FinetuneSettings:
    """Return settings for `examples` on the eager engine."""
    return FinetuneSettings.of(**{"engine": "eager", "device": "cpu", "batch_size": 4, **values})


class Parts:
    """State, control and recorder of a run that has not made a step."""

    made: ClassVar[list[Parts]] = []
    """All instances whose recorders must be closed."""

    def __init__(self, **values: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3)
        self.settings = chosen(**values)
        self.control = Control()
        self.recorder = Recorder()
        self.state = TrainingState(
            self.prepare(self.settings),
            data_loading.batches(examples(), self.settings),
            self.settings,
            control=self.control,
            recorder=self.recorder,
        )
        self.made.append(self)

    def prepare(self, settings: FinetuneSettings) -> Any:
        """Return an eager stepper."""
        return Eager().prepare(self.model, functional.cross_entropy, settings)

    def step(self) -> None:
        """Make a step on the first samples."""
        data = self.state.train.epoch(0)
        self.state.stepper.step(data.take(1), lr=0.1)
        self.state.step, self.state.read = self.state.step + 1, data.done

    def told(self, kind: str) -> list[str]:
        """Return the texts of the events of one kind."""
        return [event.text for event in self.recorder.events(kind)]
