"""Batches of the user's own: ``collate_fn`` of a run, and the arguments of a DataLoader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ortlab
from ortlab.metrics.recorder import INDEX
from ortlab.training import data_loading
from ortlab.training.run import Run
from tests.support.waiting import HANGS_S

CHOSEN: dict[str, Any] = {"loss": "cross_entropy", "engine": "eager", "device": "cpu"}


class Texts(Dataset[Any]):
    """Samples of 1 to 7 tokens."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (1 + index % 7,), generator=drawn)
        return tokens, int(tokens[0]) % 3


def padded(samples: list[Any]) -> Any:
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True), torch.tensor(labels)


class Bag(nn.Module):
    """The mean of the tokens' embeddings, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 8, padding_idx=0)
            self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).sum(1))


def train(model: nn.Module, data: Any, **more: Any) -> Run:
    run = ortlab.finetune(model, data, **{**CHOSEN, "batch_size": 8, "lr": 0.05, **more})
    run.result(HANGS_S)
    return run


def losses(run: Run) -> list[float]:
    return run.recorder.rows()[:, INDEX["loss"]].tolist()


def test_a_dataset_is_batched_by_your_function() -> None:
    run = train(Bag(), Texts(), collate_fn=padded, eval_dataset=Texts(), num_train_epochs=2)
    order = data_loading._shuffled
    batches = [
        padded([Texts()[index] for index in order(40, 0, epoch)[place : place + 8]])
        for epoch in range(2)
        for place in range(0, 40, 8)
    ]
    whole = train(Bag(), batches, batch_size=16)
    assert losses(run) == pytest.approx(losses(whole))
    assert run.result().after.accuracy > run.result().before.accuracy
    with pytest.raises(ValueError, match=r"different shapes in one batch .* pass a collate_fn"):
        train(Bag(), Texts())


def test_a_resumed_run_finds_it_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    whole = losses(train(Bag(), Texts(), collate_fn=padded, num_train_epochs=4))
    model, calls = Bag(), []

    def collate(samples: list[Any]) -> Any:
        calls.append(len(samples))
        if len(calls) == 9:
            ortlab.last_run.stop()
        return padded(samples)

    for name, value in {"model": model, "texts": Texts(), "collate": collate}.items():
        monkeypatch.setattr(__main__, name, value, raising=False)
    chosen: dict[str, Any] = {**CHOSEN, "batch_size": 8, "lr": 0.05, "num_train_epochs": 4}
    run = ortlab.finetune(model, __main__.texts, collate_fn=collate, **chosen)
    run.result(HANGS_S)
    assert run.state == "stopped"
    again = ortlab.resume(run.name)
    again.result(HANGS_S)
    assert losses(again) == pytest.approx(whole)
    monkeypatch.delattr(__main__, "collate")


def test_what_has_no_effect_is_refused() -> None:
    data = TensorDataset(torch.ones(8, 2, dtype=torch.long), torch.zeros(8, dtype=torch.long))
    loader = DataLoader(data, batch_size=4)
    with pytest.raises(ValueError, match="collate_fn has no effect: the DataLoader makes its own"):
        train(Bag(), loader, collate_fn=padded)
    with pytest.raises(ValueError, match="collate_fn=3 is not a function of a list of samples"):
        train(Bag(), data, collate_fn=3)
    with pytest.raises(ValueError, match="sampler is an argument of a DataLoader; pass one"):
        train(Bag(), data, sampler=iter([3]))
