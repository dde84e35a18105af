"""Keras's ``fit`` with ortlab's callback: charts, history, stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import ortlab
import ortlab.keras
from ortlab.metrics.recorder import INDEX
from ortlab.session import session
from tests.support.needed_engines import needs


def model(engine: str) -> Any:
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(4)]
    )
    made = ortlab.wrap(made, engine=engine)
    made.compile(
        optimizer=keras.optimizers.AdamW(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return made


def data(count: int = 80) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0)
    inputs = drawn.standard_normal((count, 6)).astype("float32")
    return inputs, inputs[:, :4].argmax(1)


def fit(made: Any, callback: Any, **options: Any) -> dict[str, list[float]]:
    chosen = {"batch_size": 16, "epochs": 2, "verbose": 0, **options}
    found: dict[str, list[float]] = made.fit(*data(), callbacks=[callback], **chosen).history
    return found


def column(run: Any, name: str) -> list[float]:
    found: list[float] = run.recorder.rows()[:, INDEX[name]].tolist()
    return found


@pytest.mark.parametrize("engine", ["eager", "ort"])
def test_each_step_and_evaluation_of_fit_is_recorded(home: Path, engine: str) -> None:
    needs(engine)
    callback = ortlab.keras.OrtLabCallback()
    made = model(engine)
    history = fit(made, callback, validation_split=0.2)
    run = callback.run
    assert run is not None
    assert run.title == f"run-1: Sequential in Keras's fit on {engine}"
    assert repr(run) == "<TrainerRun run-1: finished, step 8/8>"
    steps = np.array(column(run, "loss")).reshape(2, 4)  # Keras shows the means of epochs
    assert steps.mean(1) == pytest.approx(history["loss"], rel=1e-4)
    assert steps[0, 0] != pytest.approx(history["loss"][0], rel=1e-3)
    assert column(run, "samples") == [16] * 8
    assert column(run, "lr") == pytest.approx([1e-2] * 8)
    assert column(run, "epoch") == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    evaluations = run.recorder.events("eval")
    for name in ("loss", "accuracy"):
        told = [event.values[name] for event in evaluations]
        assert told == pytest.approx(history[f"val_{name}"])
    assert run in list(session.trainers)
    (entry,) = ortlab.list_runs()
    assert (entry.name, entry.engine_used, entry.state) == ("run-1", engine, "finished")
    stored = json.loads((run.folder / "settings.json").read_text())
    assert (stored["num_train_epochs"], stored["learning_rate"], stored["optimizer"]) == (
        2,
        pytest.approx(1e-2),
        "adamw",
    )
    assert "batch_size" not in stored, "Keras does not tell it"
    assert "run-1" in repr(ortlab.open_run("run-1"))
    fit(made, ortlab.keras.OrtLabCallback())
    assert "run-2" in repr(ortlab.compare_runs("run-1", "run-2"))


def test_a_button_stops_fit_and_a_scheduled_rate_is_shown(home: Path) -> None:
    callback = ortlab.keras.OrtLabCallback("stopped")
    made = model("eager")

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                assert callback.run is not None
                callback.run.stop()

    made.optimizer.learning_rate = 0.5
    made.fit(*data(), batch_size=16, epochs=9, verbose=0, callbacks=[callback, Stop()])
    assert callback.run is not None
    assert (callback.run.status().state, callback.run.status().step) == ("stopped", 3)
    assert column(callback.run, "lr") == [0.5] * 3


def test_a_fit_that_raised_has_failed_when_the_next_begins(home: Path) -> None:
    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("the disk is full")

    callback = ortlab.keras.OrtLabCallback()
    made = model("eager")
    with pytest.raises(RuntimeError, match="the disk is full"):
        made.fit(*data(), verbose=0, callbacks=[callback, Fail()])
    failed = callback.run
    assert failed is not None
    fit(made, callback)
    assert failed.status().state == "failed"
    assert "it raised or was interrupted" in str(failed.status().error)
    assert callback.run is not None
    assert callback.run.status().state == "finished"
