"""Keras models on Keras's torch backend, which are torch modules, in every way of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch import Tensor
from torch.nn import functional

import ortlab
from ortlab.engines.base import wrapped_model
from tests.support.worker_runs import losses

CLASSES = 5


def _sequential() -> tuple[Any, Tensor]:
    made = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.Activation("gelu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.LayerNormalization(),
            layers.Dense(CLASSES),
        ]
    )
    return made, torch.randn(16, 12, 12, 3)


def _functional() -> tuple[Any, Tensor]:
    ids = keras.Input((10,), dtype="int32")
    embedded = layers.Embedding(50, 16)(ids)
    attended = layers.MultiHeadAttention(2, 8)(embedded, embedded)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(embedded + attended))
    return keras.Model(ids, layers.Dense(CLASSES)(pooled)), torch.randint(0, 50, (16, 10))


class Own(keras.Model):  # type: ignore[misc]
    """A model as a class, with layers that are built in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.last = layers.Dense(CLASSES)

    def call(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.hidden(x))
        return made


def _subclass() -> tuple[Any, Tensor]:
    model, x = Own(), torch.randn(16, 6)
    model(x)
    return model, x


MODELS = {"sequential": _sequential, "functional": _functional, "subclass": _subclass}


def steps(model: Any, x: Tensor, y: Tensor, weights: list[Tensor]) -> list[float]:
    """Train from given weights and return the losses of each step."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    keras.utils.set_random_seed(4)
    found = []
    for _ in range(4):
        loss = functional.cross_entropy(model(x, training=True), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_own_loops_train_as_in_eager_torch(make: Callable[[], tuple[Any, Tensor]]) -> None:
    torch._dynamo.reset()
    keras.utils.set_random_seed(1)
    model, x = make()
    y = torch.randint(0, CLASSES, (len(x),))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = steps(model, x, y, weights)
    wrapped = ortlab.wrap(model, engine="ort")
    assert steps(wrapped, x, y, weights) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == len(expected)
    record: Any = wrapped_model(wrapped)
    report = record.report()
    assert report.fallback_reason is None
    assert any(remark.startswith("ORT ") for remark in report.remarks)


def _perceptron() -> Any:
    torch._dynamo.reset()
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(2),
        ]
    )


@pytest.mark.parametrize("jit_compile", ["auto", pytest.param(True, marks=pytest.mark.nightly)])
def test_fit_evaluate_and_predict(jit_compile: bool | str) -> None:
    x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    y = (x.sum(1) > 0).astype("int64")
    found = {}
    for engine in ("eager", "ort"):
        model = _perceptron()
        if engine == "ort":
            model = ortlab.wrap(model, engine="ort")
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile if engine == "ort" else False,
        )
        keras.utils.set_random_seed(2)
        history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0).history
        found[engine] = [
            *history["loss"], *model.evaluate(x, y, verbose=0), *model.predict(x, verbose=0)[0]
        ]  # fmt: skip
    assert found["ort"] == pytest.approx(found["eager"], rel=1e-4)
    record: Any = wrapped_model(model)
    assert record.report().fallback_reason is None
    assert record.report().export_s > 0


def test_a_run_trains_as_in_eager_torch() -> None:
    data = [(torch.randn(16, 8), torch.randint(0, 2, (16,))) for _ in range(6)]
    found = {}
    for engine in ("eager", "ort"):
        run = ortlab.finetune(
            _perceptron(), data, loss="cross_entropy", engine=engine, device="cpu", max_steps=6
        )
        run.result(timeout=300)
        found[engine] = list(losses(run))
    assert any(line.startswith("ORT ") for line in run.status().lines)
    assert len(found["ort"]) == 6
    assert found["ort"] == pytest.approx(found["eager"], rel=1e-4)


def test_a_model_on_another_backend_is_refused_with_advice() -> None:
    elsewhere = type("Sequential", (), {"__module__": "keras.src.models.sequential"})
    with pytest.raises(ValueError, match=r'set os\.environ\["KERAS_BACKEND"\] = "torch"'):
        ortlab.wrap(elsewhere())  # type: ignore[arg-type]
