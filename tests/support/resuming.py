"""Runs that stop at a step and are resumed in another process.

`tests/training/test_resume.py` compares them.

``python -m tests.support.resuming FOLDER CASE ...`` resumes from FOLDER/CASE.ckpt and writes the
results to FOLDER/CASE.safetensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.registry import engine
from ortlab.metrics.recorder import INDEX, Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, trainer
from ortlab.training.control import Control
from tests.support import tiny
from tests.support.waiting import Turns

STOP = 4
"""The step after which the state is saved, in the middle of the second epoch."""


class Tokens(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 50, (6,), generator=generator)
        return {"input_ids": ids, "labels": index % 2}


def examples(count: int = 20) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network(dropout: float = 0.5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
        )


class Gated(nn.Module):
    """A model whose training steps wait for their turn."""

    def __init__(self, turns: int = 1000) -> None:
        super().__init__()
        self.inner = network()
        self.turns = Turns(turns)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.turns.take()
        scores: torch.Tensor = self.inner(inputs)
        return scores


def bert(dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.bert(dropout)


def loud(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients overflow float16 at the first loss scales."""
    return 1000 * functional.cross_entropy(scores, target)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    settings: dict[str, Any]
    loss: Any = None


_BERT = {"kernels": "ort", "cache": False}
CASES = {
    "eager": Case(lambda: bert(0.1), Tokens, {"engine": "eager", "precision": "bf16"}),
    "eager in fp16": Case(network, examples, {"engine": "eager", "precision": "fp16"}, loud),
    "compile": Case(network, examples, {"engine": "compile"}, functional.cross_entropy),
    "engine ort": Case(lambda: bert(0.1), Tokens, {"engine": "ort"}),
    "engine ort with a budget": Case(
        lambda: bert(0.1), Tokens, {"engine": "ort", "activation_budget": 0.5}
    ),
    "ortmodule": Case(lambda: bert(0.0), Tokens, {"engine": "ortmodule", **_BERT}),
    "ort with dropout": Case(lambda: bert(0.1), Tokens, {"engine": "ortmodule", **_BERT}),
    "ort on torch's kernels": Case(
        lambda: bert(0.1), Tokens, {"engine": "ortmodule", **_BERT, "kernels": "torch"}
    ),
}


class Course:
    """A run of `case`, from its start or from the checkpoint `begin`."""

    def __init__(self, case: Case, begin: Checkpoint | None = None) -> None:
        settings = FinetuneSettings.of(
            **{
                "device": "cpu",
                "lr": 0.01,
                "batch_size": 4,
                "gradient_accumulation_steps": 2,
                "num_train_epochs": 3,
            }
            | {"lr_scheduler_type": "cosine", "seed": 3, **case.settings}
        )
        self.model = case.model()
        stepper = engine(settings.model.engine).prepare(self.model, case.loss, settings)
        self.recorder = Recorder()
        self.loop = trainer.Trainer(
            stepper,
            data_loading.batches(case.data(), settings),
            settings,
            control=Control(),
            recorder=self.recorder,
            begin=begin,
        )

    def finish(self, *, keep: Path | None = None) -> dict[str, torch.Tensor]:
        """Train to the end; return the weights and the losses after `STOP` or after `begin`."""
        for done, _ in enumerate(self.loop.steps(), 1):
            if keep is not None and done == STOP:
                self.loop.checkpoint().save(keep)
        self.recorder.close()
        losses = torch.tensor(self.recorder.rows()[:, INDEX["loss"]])
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {**state, "losses": losses if keep is None else losses[STOP:]}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        torch.rand(7)  # this process has drawn other numbers
        course = Course(CASES[name], Checkpoint.load(folder / f"{name}.ckpt"))
        safetensors.torch.save_file(course.finish(), folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
