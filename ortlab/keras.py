"""Callback of Keras that shows a ``fit`` as live charts and saves its history.

The models are those of Keras's torch backend, which are torch modules. It is chosen on import,
unless Keras is loaded or ``KERAS_BACKEND`` is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":  # a backend is missing
        raise
    raise ModuleNotFoundError("ortlab.keras needs Keras: pip install keras", name="keras") from None

from ortlab.session import session
from ortlab.training.trainer_run import TrainerRun, settings_of

__all__ = ["OrtLabCallback", "TrainerRun"]

_OPTIMIZERS = {"AdamW": "adamw", "SGD": "sgd", "Lamb": "lamb"}


class OrtLabCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows each ``fit`` of a Keras model live and saves it: ``callbacks=[OrtLabCallback()]``.

    It records loss, learning rate, throughput, times and memory of every step, and evaluations on
    validation data. The model may be wrapped or not.

    A ``fit`` that raises does not tell its callbacks. The run then counts as failed when the next
    one begins or Python exits.

    Args:
        name: Name of the run; None for the next run-N.

    Example:
        >>> model = ortlab.wrap(model, engine="ort")
        >>> model.compile(optimizer, loss)
        >>> model.fit(x, y, epochs=3, callbacks=[ortlab.keras.OrtLabCallback()])
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.run: TrainerRun | None = None
        """The active run, or the last one."""
        self._name = name
        self._step = self._epoch = 0

    def __repr__(self) -> str:
        return f"OrtLabCallback(run={self.run!r})"

    # Keras passes indices and the values that it logs.

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Begin a run.

        Raises:
            ValueError: If the model is not one of Keras's torch backend.
        """
        if keras.backend.backend() != "torch":
            raise ValueError(
                f"OrtLabCallback needs Keras's torch backend, and this is {keras.backend.backend()}"
                '; set os.environ["KERAS_BACKEND"] = "torch" before keras is imported'
            )
        if self.run is not None:
            self.run.supersede()
        entry = session.wrapped.entry(self.model)
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._step = 0
        self.run = TrainerRun(
            self.model,
            total_steps=steps * epochs if steps and epochs else None,
            step=0,
            settings=self._settings(),
            arguments={name: value for name, value in self.params.items() if name != "verbose"},
            name=self._name,
            choice="" if entry is None else entry.choice,
            where="Keras's fit",
            call="fit",
        )
        session.trainers.append(self.run)
        session.show(self.run)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin an epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin a step."""
        if self.run is not None:
            scaled = isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer)
            self.run.begin_step(scaled=scaled)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """End a step."""
        if self.run is None:
            return
        self._step += 1
        self.run.turn.lr = float(self.model.optimizer.learning_rate)
        steps = self.params.get("steps")
        self.run.end_step(self._step, self._epoch + ((batch + 1) / steps if steps else 0.0))
        if self.run.stopping:
            self.model.stop_training = True

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Record an evaluation on the validation data of ``fit``."""
        if self.run is not None:
            self.run.evaluated({f"eval_{name}": value for name, value in (logs or {}).items()})

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """End the run; ``fit`` is about to return."""
        if self.run is not None:
            self.run.end()

    def _settings(self) -> dict[str, Any]:
        """Return the settings that correspond to those of ``fit``, as far as there are any."""
        known = settings_of(self.model)
        del known["batch_size"]  # Keras does not tell it
        chosen = {
            "num_train_epochs": self.params.get("epochs"),
            "learning_rate": float(self.model.optimizer.learning_rate),
            "optimizer": _OPTIMIZERS.get(type(self.model.optimizer).__name__),
        }
        return known | {name: value for name, value in chosen.items() if value is not None}
