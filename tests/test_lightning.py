"""Lightning's fit with ortlab's callback."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import ortlab
from ortlab.metrics.recorder import INDEX
from tests.support.needed_engines import needs
from tests.support.worker_runs import Network, data

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A module as users write it, around a model that may be wrapped."""

    def __init__(self, model: nn.Module, fails_at: int | None = None) -> None:
        super().__init__()
        self.model, self.fails_at = model, fails_at
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise KeyError("positives")
        inputs, targets = batch
        loss = functional.cross_entropy(self.model(inputs), targets)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        scores = self.model(inputs)
        self.log("val_loss", functional.cross_entropy(scores, targets))
        self.log("hits", (scores.argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(module: Module, folder: Path, **chosen: Any) -> Any:
    callback = ortlab.lightning.OrtLabCallback(chosen.pop("name", None))
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        **chosen,
    )
    loader = DataLoader(data(), batch_size=40)
    trainer.fit(module, loader, DataLoader(data(41), batch_size=41))
    return callback


def test_one_process_of_several_records() -> None:
    callback = ortlab.lightning.OrtLabCallback()
    trainer = SimpleNamespace(is_global_zero=False)
    callback.on_train_start(trainer, Module(Network()))
    callback.on_train_batch_start(trainer, None, torch.ones(4), 0)
    callback.on_train_end(trainer, None)
    assert callback.run is None


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_every_step_and_evaluation_is_recorded(tmp_path: Path, engine: str) -> None:
    needs(engine)
    model = Network() if engine == "eager" else ortlab.wrap(Network(), engine=engine)
    module = Module(model)
    run = fit(module, tmp_path, max_epochs=2, name="in-lightning").run
    rows = run.recorder.rows()
    assert rows[:, INDEX["step"]].tolist() == list(range(1, 21))
    assert rows[:, INDEX["loss"]].tolist() == pytest.approx(module.losses, rel=1e-5)
    assert rows[:, INDEX["samples"]].tolist() == [40] * 20
    assert rows[:, INDEX["epoch"]].tolist() == pytest.approx([step / 10 for step in range(1, 21)])
    assert (rows[:, INDEX["backward_ms"]] > 0).all()
    evaluations = run.recorder.events("eval")
    assert [each.step for each in evaluations] == [10, 20]
    assert set(evaluations[0].values) == {"loss", "accuracy", "hits"}
    assert (run.state, run.status().total_steps) == ("finished", 20)
    assert ortlab.open_run("in-lightning").about["state"] == "finished"


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    run = fit(Module(Network()), tmp_path, max_epochs=1, accumulate_grad_batches=5).run
    assert run.recorder.rows()[:, INDEX["samples"]].tolist() == [200, 200]


def test_a_fit_that_raises_is_a_run_that_failed(tmp_path: Path) -> None:
    callbacks = []
    original = ortlab.lightning.OrtLabCallback.on_train_start

    def remembered(self: Any, *arguments: Any) -> None:
        callbacks.append(self)
        original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ortlab.lightning.OrtLabCallback, "on_train_start", remembered)
        with pytest.raises(KeyError, match="positives"):
            fit(Module(Network(), fails_at=3), tmp_path, max_epochs=1)
    (callback,) = callbacks
    assert (callback.run.state, callback.run.step) == ("failed", 3)
    assert callback.run.status().error == "KeyError: 'positives'"


def test_stop_ends_the_fit(tmp_path: Path) -> None:
    class Stopping(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.global_step == 2:
                self.trainer.callbacks[-1].run.stop()
            return super().training_step(batch, index)

    run = fit(Stopping(Network()), tmp_path, max_epochs=5).run
    assert run.state == "stopped"
    assert run.step < 10
