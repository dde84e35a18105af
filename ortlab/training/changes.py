"""Changes of settings while a run trains: checks, costs, and the switch from old to new."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines import registry
from ortlab.engines.base import Cost, Stepper
from ortlab.metrics.evaluation import goal
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings import CheckpointSettings, FinetuneSettings, is_own
from ortlab.training.control import ChangeOutcome, ChangeRequest, Control
from ortlab.training.data_loading import Batches
from ortlab.training.memory_advice import Peak
from ortlab.training.training_state import TrainingState
from ortlab.utils.errors import forget_locals
from ortlab.utils.process_memory import raised
from ortlab.utils.rng import RandomStates
from ortlab.utils.threads import trim

_PLANS = ("recompute", "memory_level", "memory_plans")
_FIXED_IN_A_RUN = ("seed", "optimizer", "loss", "device")


def fixed(data: Batches, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that a run cannot change to any value.

    Args:
        data: The training data of the run.
        given: Reasons of the user's optimizer and scheduler; None without them.

    Returns:
        Reason why each setting is fixed, by the name of the setting.
    """
    found = {
        name: f"a run keeps the {name} that it started with; use finetune to start another run"
        for name in _FIXED_IN_A_RUN
    }
    found |= given or {}
    return {**found, "batch_size": data.own} if data.own else found


def check_change(
    before: FinetuneSettings, after: FinetuneSettings, fixed: Mapping[str, str]
) -> None:
    """Check that a change leaves the fixed settings of a run alone.

    Args:
        before: Settings in effect.
        after: Requested settings.
        fixed: Result of `fixed` for the data of the run.

    Raises:
        ValueError: If a fixed setting differs.
    """
    schedule = after.optim.lr_scheduler_type
    if is_own(schedule) and schedule != before.optim.lr_scheduler_type:
        raise ValueError(
            f"lr_scheduler_type={schedule!r} is the name of an object, which a run has from its "
            "start; use finetune(..., lr_scheduler=...) to start another run"
        )
    for name, reason in fixed.items():
        there, here = before[name], after[name]
        if there != here:
            raise ValueError(
                f"{name}={here!r} cannot be applied to a run with {name}={there!r}: {reason}"
            )


def check_best(
    checkpoint: CheckpointSettings, *, evaluates: bool, metrics: UserMetrics | None
) -> None:
    """Check that a run which keeps the best checkpoint evaluates, and knows what is better.

    Args:
        checkpoint: Settings of the checkpoints.
        evaluates: True if the run has evaluation data.
        metrics: The user's metrics.

    Raises:
        ValueError: If ``keep_best`` or ``early_stopping_patience`` has nothing to compare, or if
            there are metrics without evaluation data.
    """
    if metrics is not None and not evaluates:
        raise ValueError("metrics are computed in evaluations: pass eval_dataset, too")
    for name in ("keep_best", "early_stopping_patience"):
        if checkpoint[name] and not evaluates:
            raise ValueError(
                f"{name}={checkpoint[name]!r} needs evaluations, but the run has none; pass "
                f"eval_dataset, or leave {name} out"
            )
    goal(checkpoint, metrics)


def cost(before: FinetuneSettings, after: FinetuneSettings) -> Cost:
    """Return the cost of a change while a run trains.

    Args:
        before: Settings in effect.
        after: Requested settings.

    Returns:
        "free", or the kind of work that the engine has to do.
    """
    if rebuilds(before, after):
        return registry.cost(before, after)
    return "free" if before.data.batch_size == after.data.batch_size else registry.size_cost(after)


def rebuilds(before: FinetuneSettings, after: FinetuneSettings) -> bool:
    """Return whether a change needs another stepper.

    Args:
        before: Settings in effect.
        after: Requested settings.

    Returns:
        True if the engine, its options or the distribution across workers differ.
    """
    if (before.model, before.parallel) != (after.model, after.parallel):
        return True
    # DeepSpeed has buffers of another type for 16-bit gradients of several micro-batches.
    several = (
        before.data.gradient_accumulation_steps > 1,
        after.data.gradient_accumulation_steps > 1,
    )
    return after.parallel.param_dtype == "bf16" and len({*several}) == 2


@dataclass(frozen=True)
class Trial:
    """Change of settings whose first step is not done yet, and what it takes to undo it.

    ``taken`` is None if the stepper stays: a step that fails leaves the stepper unchanged.
    """

    before: FinetuneSettings
    wanted: FinetuneSettings
    taken: Checkpoint | None
    random: RandomStates
    began: float


class SettingChanger:
    """Switches a run from its settings to requested ones, and back if they fail.

    Args:
        state: State of the run.
        control: Source of the requested settings.
        prepare: Creates a stepper for other settings; None if the engine cannot be changed.
        peak_bytes: Predicts the peak memory of a step under given settings.
    """

    def __init__(
        self,
        state: TrainingState,
        control: Control,
        prepare: Callable[[FinetuneSettings], Stepper] | None,
        peak_bytes: Peak = lambda _: None,
    ) -> None:
        self.trial: Trial | None = None
        """Change whose first step is not done yet."""
        self._state = state
        self._control = control
        self._prepare = prepare
        self._peak_bytes = peak_bytes
        self._fixed = fixed(state.train)
        self._wanted: dict[str, Any] = {}
        self._requests: list[ChangeRequest] = []  # of `_wanted`, or of the change on trial
        self._decided: list[tuple[ChangeRequest, ChangeOutcome]] = []

    @property
    def pending(self) -> bool:
        """True if the next step is to have other settings."""
        return bool(self._wanted)

    @property
    def can_rebuild(self) -> bool:
        """True if steppers for other settings can be created."""
        return self._prepare is not None

    def requested(self) -> FinetuneSettings:
        """Return the settings for the next step.

        Requested settings that cannot be applied are refused with a warning event.

        Returns:
            The requested settings, or the settings in effect if there was no valid request.
        """
        state = self._state
        for request in self._control.take_requests():
            self._wanted |= request.changes
            self._requests.append(request)
        if not self._wanted:
            return state.settings
        try:
            wanted = state.settings.replace(**self._wanted)
            check_change(state.settings, wanted, self._fixed)
            if self._prepare is None and rebuilds(state.settings, wanted):
                raise ValueError("no stepper can be created for another engine or other options")
        except ValueError as error:
            told = f"the run continues with its current settings: {error}"
            state.tell("warning", told, {"cost_s": 0.0})
            self._wanted, wanted = {}, state.settings
            self._decide(ChangeOutcome("refused", told, state.step))
            self.publish()
        return wanted

    def begin(self, wanted: FinetuneSettings, began: float) -> None:
        """Switch to other settings; `settle` or `revert` must follow.

        Args:
            wanted: Settings for the next step.
            began: Time at which the switch started, on the clock of `time.perf_counter`.
        """
        state = self._state
        self._wanted, before = {}, state.settings
        if wanted == before:
            self._decide(ChangeOutcome("applied", "", state.step))
            return
        if rebuilds(before, wanted):
            taken = state.checkpoint()
            self.trial = Trial(before, wanted, taken, taken.position.random, began)
            self.rebuild(wanted, taken)
            return
        self.trial = Trial(before, wanted, None, RandomStates.now(), began)
        self._adopt(wanted)

    def rebuild(self, settings: FinetuneSettings, taken: Checkpoint) -> None:
        """Replace the stepper by a new one that continues from a checkpoint.

        Args:
            settings: Settings of the new stepper.
            taken: Checkpoint to continue from.
        """
        assert self._prepare is not None
        state = self._state
        # First, so that the new one finds the model as the user gave it: in train mode or not.
        state.stepper.close()
        trim(collect=False)  # so that the charts show the memory of the new one
        state.stepper = self._prepare(settings)
        state.load(taken)
        state.use(settings)
        state.remember(taken)

    def settle(self) -> bool:
        """Accept the change, since its first step is done.

        Returns:
            True if there was a change that cost time.
        """
        if self.trial is None:
            return False
        trial, self.trial = self.trial, None
        free = cost(trial.before, trial.wanted) == "free"
        cost_s = 0.0 if free else time.perf_counter() - trial.began
        changes = _differences(trial.before, trial.wanted)
        self._state.tell("change", changes, {"cost_s": cost_s})
        if more := self._raised(trial):
            self._state.tell("warning", more, {"cost_s": 0.0})
        self._decide(ChangeOutcome("applied", changes, self._state.step, cost_s))
        return not free

    def _raised(self, trial: Trial) -> str:
        """Return by how much a new recompute plan raises the predicted peak; "" if it does not."""
        plans = {
            name: value for name in _PLANS if (value := trial.before[name]) != trial.wanted[name]
        }
        if not plans:
            return ""
        before = self._peak_bytes(trial.wanted.replace(**plans))
        after = self._peak_bytes(trial.wanted)
        more = "" if before is None or after is None else raised(before, after)
        chosen = ", ".join(f"{name}={trial.wanted[name]}" for name in plans)
        return f"{chosen} {more}" if more else ""

    def revert(self, error: Exception) -> None:
        """Return to the settings and the state before the change, since it failed.

        Args:
            error: Exception that the engine raised under the new settings.
        """
        assert self.trial is not None
        trial, self.trial = self.trial, None
        forget_locals(error)  # the interrupted computation uses memory
        if trial.taken is None:
            trial.random.give_back()
            self._adopt(trial.before)
        else:
            self.rebuild(trial.before, trial.taken)
        changes = _differences(trial.before, trial.wanted)
        told = f"{changes}: this failed, and the run continues without it: {error}"
        cost_s = time.perf_counter() - trial.began
        self._state.tell("warning", told, {"cost_s": cost_s})
        self._decide(ChangeOutcome("refused", told, self._state.step, cost_s))
        self.publish()

    def abandon(self) -> None:
        """End the trial of a change whose stepper is lost; the settings in effect stay."""
        if self.trial is None:
            return
        trial, self.trial = self.trial, None
        step, changes = self._state.step, _differences(trial.before, trial.wanted)
        if self._state.settings == trial.wanted:
            self._decide(ChangeOutcome("applied", changes, step))
        else:
            told = f"{changes}: the workers were lost before the change was applied"
            self._decide(ChangeOutcome("refused", told, step))

    def publish(self) -> None:
        """Resolve the requests that were decided, once the run shows the settings in effect."""
        for request, outcome in self._decided:
            request.resolve(outcome)
        self._decided = []

    def close(self) -> None:
        """Resolve all requests, since the loop has ended."""
        self.publish()
        self._control.drop_requests()

    def _decide(self, outcome: ChangeOutcome) -> None:
        self._decided += [(request, outcome) for request in self._requests]
        self._requests = []

    def _adopt(self, settings: FinetuneSettings) -> None:
        self._state.stepper.adopt(settings)
        self._state.use(settings)


def _differences(before: FinetuneSettings, after: FinetuneSettings) -> str:
    was, now = before.as_dict(), after.as_dict()
    return ", ".join(
        f"{name}={now[name]} (was {was[name]})" for name in now if now[name] != was[name]
    )
