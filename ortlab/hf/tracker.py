"""Tracker of accelerate that shows a training loop as live charts and saves its history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker, on_main_process

from ortlab.session import session
from ortlab.training.loop_run import LoopRun

if TYPE_CHECKING:
    from torch import nn


class OrtLabTracker(GeneralTracker):  # type: ignore[misc]
    """Records a loop that uses accelerate: ``Accelerator(log_with=OrtLabTracker(model))``.

    Every optimizer step from ``init_trackers`` to ``end_training`` is recorded. Numbers that
    ``accelerator.log`` is given are logged as by `LoopRun.log`, text becomes a note of the run.

    Args:
        model: The model that the loop trains, as given to ``accelerator.prepare``.
        name: Name of the run; None for the next run-N.
    """

    name = "ortlab"
    requires_logging_directory = False

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        super().__init__()
        self.run: LoopRun | None = None
        """The active run, or the last one."""
        self._model = model
        self._run_name = name

    @property
    def tracker(self) -> LoopRun | None:
        """The run."""
        return self.run

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Begin a run; ``init_trackers`` calls this."""
        if self.run is not None:
            self.run.supersede()
        self.run = session.loop_run(self._model, name=self._run_name, where="a loop of accelerate")
        self.run.begin()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Note the configuration that ``init_trackers`` was given.

        Args:
            values: The configuration by name.
        """
        if self.run is not None:
            told = ", ".join(f"{name}={value!r:.60}" for name, value in values.items())
            self.run.tell("note", f"configuration: {told}")

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:  # noqa: ARG002
        """Log values of the last step.

        Args:
            values: Values by name.
            step: Number of the step by the loop's own count, which is not used.
        """
        if self.run is None or self.run.over():
            return
        for name, value in values.items():
            if isinstance(value, str):
                self.run.tell("note", f"{name}: {value}")
        self.run.log(**{name: each for name, each in values.items() if not isinstance(each, str)})

    def finish(self) -> None:
        """End the run; ``end_training`` calls this."""
        if self.run is not None:
            self.run.end()
