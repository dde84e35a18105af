"""Callback of Lightning that shows a ``fit`` as live charts and saves its history."""

from __future__ import annotations

import math
from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    if error.name != "lightning":  # one of its own packages is missing
        raise
    raise ModuleNotFoundError(
        "ortlab.lightning needs Lightning: pip install lightning", name="lightning"
    ) from None

from ortlab.session import session
from ortlab.training.loop_run import LoopRun

__all__ = ["LoopRun", "OrtLabCallback"]


class OrtLabCallback(Callback):
    """Shows each ``fit`` of Lightning live and saves it: ``callbacks=[OrtLabCallback()]``.

    It records loss, learning rate, throughput, times and memory of every optimizer step, and what
    validation logs as metrics of an evaluation. Stop ends the ``fit`` after the step in flight.
    With several processes only the first one reports. A model that is wrapped within the
    LightningModule runs in its engine.

    Args:
        name: Name of the run; None for the next run-N.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[ortlab.lightning.OrtLabCallback()])
        >>> trainer.fit(module, loader)
    """

    def __init__(self, name: str | None = None) -> None:
        self.run: LoopRun | None = None
        """The active run, or the last one."""
        self._name = name
        self._before: dict[str, float] = {}
        self._metrics: set[str] = set()  # names that validation logs

    # Lightning passes its Trainer, the LightningModule, and what the event is about.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run."""
        if not trainer.is_global_zero:
            return
        if self.run is not None:
            self.run.supersede()
        self.run = session.loop_run(pl_module, name=self._name, where="Lightning's fit")
        total = trainer.estimated_stepping_batches
        self.run.plan(int(total) if math.isfinite(total) else None)
        self.run.begin()

    def on_train_batch_start(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Count a batch."""
        if self.run is not None:
            self.run.count(batch)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Set the epoch of the last step, and stop where that was asked for."""
        if self.run is None:
            return
        batches = trainer.num_training_batches
        done = trainer.fit_loop.batch_idx + 1
        self.run.log(epoch=trainer.current_epoch + (done / batches if batches else 0.0))
        if self.run.stopping:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Remember what was logged before."""
        self._before = _values(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Record what validation has logged; Lightning's sanity check precedes the run."""
        if self.run is None or self.run.over():
            return
        now = _values(trainer)
        self._metrics |= {name for name, value in now.items() if self._before.get(name) != value}
        self.run.log(**{name: now[name] for name in self._metrics if name in now})
        self.run.free()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the run; ``fit`` is about to return."""
        self._end(None)

    def on_exception(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        exception: BaseException,
    ) -> None:
        """End the run of a ``fit`` that raised."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        if self.run is not None:
            self.run.end(error)


def _values(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
