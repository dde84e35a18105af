"""Progress of a run: what its worker updates, and its user, its record and its view read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ortlab.engines.base import Report
from ortlab.history.run_result import RunResult
from ortlab.metrics.recorder import State
from ortlab.settings import AUTO, FinetuneSettings
from ortlab.training.control import Control
from ortlab.training.trainer import Trainer

SLOW_READ_S: Final = 2.0
"""Seconds after which a run reports that it waits for data."""
_OVER: Final[tuple[State, ...]] = ("stopped", "finished", "failed")


@dataclass
class RunProgress:
    """Progress of a run, from its creation to its end."""

    control: Control
    """Control that pauses, stops and changes the run."""
    settings: FinetuneSettings
    """Settings in effect."""
    total: int | None
    """Optimizer steps of the whole run; None if unknown."""
    auto: str = ""
    """Engine that "auto" chose; "" if the user named one."""
    choice: str = ""
    """Reason for that choice."""
    last_step: int = 0
    """Optimizer steps done while there is no trainer: before training and after it."""
    earlier_settings: list[FinetuneSettings] = field(default_factory=list)
    """Settings before each change, the last one last; an undo removes its entry."""
    stage: State = "starting"
    """State, apart from pauses and stops that the control knows of."""
    doing: str = "preparing"
    """Activity before the first step."""
    foretold: str | None = None
    """Warning, before the first step, that it will not fit into memory."""
    report: Report | None = None
    """Report of the engine, with the times of earlier engines of the run."""
    trainer: Trainer | None = None
    """Trainer of the run, while it trains."""
    error: BaseException | None = None
    """Exception that ended the run."""
    result: RunResult | None = None
    """Result of the run, once it is over."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.last_step if self.trainer is None else self.trainer.step

    @property
    def state(self) -> State:
        """State of the run, as its user sees it."""
        if self.stage in _OVER:
            return self.stage
        if self.control.stopping:
            return "stopping"
        held = self.control.held
        still = self.control.waiting or (held is not None and not held.passes)
        return "paused" if still else self.stage

    @property
    def ended(self) -> State:
        """State of the run at its end."""
        if self.error is not None:
            return "failed"
        return "stopped" if self.control.stopping else "finished"

    @property
    def engine_asked(self) -> str:
        """Name of the engine that the user asked for, "auto" while the one it chose is in use."""
        engine = self.settings.model.engine
        return AUTO if engine == self.auto else engine

    @property
    def engine_used(self) -> str:
        """Name of the engine that executes the model."""
        return self.report.engine_used if self.report else self.settings.model.engine

    @property
    def fallback_reason(self) -> str | None:
        """Reason of a fallback to another engine; None without one."""
        return self.report.fallback_reason if self.report else None

    @property
    def reading(self) -> str:
        """Data or callback that the loop waits for, in words."""
        if self.control.calling is not None:
            return f"the callback {self.control.calling}"
        if self.control.reads_held_out:
            return f"the evaluation data after step {self.step}"
        return f"the data of step {self.step + 1}"

    def use(self, settings: FinetuneSettings) -> None:
        """Record the settings in effect; a return to the previous ones undoes a change.

        Args:
            settings: Settings of the trainer.
        """
        if settings == self.settings:
            return
        if self.earlier_settings and settings == self.earlier_settings[-1]:
            self.earlier_settings.pop()
        else:
            self.earlier_settings.append(self.settings)
        self.settings = settings

    def release(self) -> None:
        """Drop the trainer, and with it the model and the data."""
        self.last_step, self.trainer = self.step, None
