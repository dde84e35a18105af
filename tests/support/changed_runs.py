"""A run of the loop whose settings a test changes between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Stepper
from ortlab.engines.registry import engine
from ortlab.metrics.recorder import INDEX, Event, Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, trainer
from ortlab.training.control import Control


def refusals(recorder: Recorder) -> list[Event]:
    """Return the warnings of changes that were requested but failed."""
    return [event for event in recorder.events("warning") if "cost_s" in event.values]


class Course:
    """A run of the loop that can be changed: `stop` steps, `act`, the rest; `each` every step."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        begin: Checkpoint | None = None,
        *,
        loss: Any = None,
        act: Callable[[Course], None] = lambda _: None,
        each: Callable[[Any, int], None] = lambda *_: None,
        stop: int = 4,
        **values: Any,
    ) -> None:
        settings = FinetuneSettings.of(
            **{
                "engine": "eager",
                "device": "cpu",
                "learning_rate": 0.01,
                "batch_size": 4,
                "num_train_epochs": 2,
            }
            | {"cache": False, **FinetuneSettings.canonical(values)}
        )
        self.model, self.recorder, self.made = model, Recorder(), 0
        wrapped: dict[str, nn.Module] = {}

        def prepare(settings: FinetuneSettings) -> Stepper:
            self.made += 1
            name = settings.model.engine
            if name not in wrapped:
                wrapped[name] = engine(name).wrap(model, settings.model.replace(precision="fp32"))
            return engine(name).prepare(wrapped[name], loss, settings)

        self.control = Control()
        self.loop = trainer.Trainer(
            prepare(settings),
            data_loading.batches(data, settings),
            settings,
            control=self.control,
            recorder=self.recorder,
            begin=begin,
            prepare=prepare,
        )
        for done, _ in enumerate(self.loop.steps(), 1):
            each(self, done)
            if done == stop:
                act(self)
        self.recorder.close()

    def column(self, name: str = "loss") -> list[float]:
        values: list[float] = self.recorder.rows()[:, INDEX[name]].tolist()
        return values

    def told(self, kind: str) -> list[str]:
        return [event.text for event in self.recorder.events(kind)]
