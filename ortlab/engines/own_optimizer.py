"""Optimizer and learning rate scheduler of a run, of which at least one is the user's own."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortlab.settings import OWN


class OwnOptim:
    """Optimizer and scheduler of a run, of which at least one is the user's own.

    Args:
        optimizer: The optimizer.
        scheduler: The user's scheduler; None if the settings say the learning rate.
        named: True if the settings name the optimizer.
        warnings: Warnings about them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        named: bool,
        warnings: Sequence[str] = (),
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.named = named
        """True if the settings name the optimizer."""
        self.warnings = list(warnings)
        """Warnings for the user."""
        self.by_metric = scheduler is not None and bool(required(scheduler))
        """True if the scheduler is stepped with the metric of an evaluation."""
        # GradScaler reads the attribute, too: such an optimizer skips its step where `found_inf`
        # is set, without a synchronization.
        self.reads_flag = named or bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        """True if the optimizer itself skips its step on a device if ``found_inf`` is set."""
        first = "lr" if scheduler is None else "initial_lr"
        self._rates = [float(g.get(first, g["lr"])) for g in optimizer.param_groups]
        self._error: Exception | None = None

    @property
    def names(self) -> dict[str, str]:
        """Names by which the settings record the user's own, by setting."""
        own = {"optimizer": None if self.named else self.optimizer}
        values = {**own, "lr_scheduler_type": self.scheduler}
        return {n: f"{OWN}{type(v).__name__}" for n, v in values.items() if v is not None}

    @property
    def fixed(self) -> dict[str, str]:
        """Reasons why settings cannot change in mid-run, by setting."""
        reason = (
            f"{type(self.scheduler).__name__} is stepped with the metric that the run began with"
        )
        return dict.fromkeys(("keep_best", "keep_best_mode"), reason) if self.by_metric else {}

    @property
    def learning_rate(self) -> float | None:
        """Initial learning rate of the first group that has one above 0; None without one."""
        return next((rate for rate in self._rates if rate > 0), None)

    @property
    def weight_decay(self) -> float | None:
        """Weight decay of the first group; None if it has none."""
        found = self.optimizer.param_groups[0].get("weight_decay")
        return found if isinstance(found, int | float) and found >= 0 else None

    def attach(self, owner: nn.Module) -> None:
        """Prepare the optimizer for a model that is on its device by now.

        Args:
            owner: The user's model.

        Raises:
            RuntimeError: If the model's parameters were replaced, as torch does on request when a
                model moves (``torch.__future__.set_overwrite_module_params_on_conversion``).
        """
        own = {id(p) for p in owner.parameters()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not all(id(p) in own for p in parameters):
            raise RuntimeError(
                "moving the model to its device replaced its parameters, so that the optimizer has "
                "the old ones; move the model first (model.to(...)), then create the optimizer"
            )
        # torch moves an optimizer's state to its parameters only here.
        away = any(
            value.dim() and value.device != parameter.device
            for parameter in parameters
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        )
        if away:
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def begin(self, lr: float) -> float:
        """Set the learning rates of the next step.

        Args:
            lr: Learning rate of the first group by the schedule of the settings. Those of the
                other groups keep their proportion to it. A scheduler of the user's has set others.

        Returns:
            The learning rate of the first group.

        Raises:
            Exception: The error that the scheduler raised after the last step.
        """
        if self._error is not None:
            raise self._error
        first = self.learning_rate
        if self.scheduler is None and first is not None:
            self._set([lr if rate == first else rate * (lr / first) for rate in self._rates])
        return float(self.optimizer.param_groups[0]["lr"])

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a compiled or captured step reads the tensor
            else:
                group["lr"] = rate

    def stepped(self, skipped: torch.Tensor | None) -> None:
        """Step a scheduler that is stepped after each optimizer step.

        Args:
            skipped: Whether loss scaling has skipped the step; None without loss scaling.
        """
        if self.scheduler is None or self.by_metric or (skipped is not None and bool(skipped)):
            return
        self._advance()

    def evaluated(self, value: float) -> None:
        """Step a scheduler that is stepped after each evaluation.

        Args:
            value: The metric.
        """
        if self.by_metric:
            self._advance(value)

    def _advance(self, *values: float) -> None:
        try:
            self.scheduler.step(*values)
        # The optimizer has made its step, which counts: the next one raises, before it changes
        # anything.
        except Exception as error:  # noqa: BLE001
            error.add_note(f"raised by the lr_scheduler {type(self.scheduler).__name__}")
            self._error = error

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scheduler; None without one."""
        return None if self.scheduler is None else dict(self.scheduler.state_dict())

    def check(self, state: Mapping[str, Any] | None) -> None:
        """Check that the scheduler can load a state from a checkpoint.

        Args:
            state: Result of `state`.

        Raises:
            ValueError: If it has other entries.
        """
        others = {*(state or ())} ^ {*(self.state() or ())}
        if others:
            raise ValueError(
                f"only one of the checkpoint's lr_scheduler and this one has "
                f"{', '.join(sorted(map(str, others)))}; give the scheduler that the run had"
            )

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of the scheduler, after that of the optimizer.

        Args:
            state: Result of `state`; its values are copied.
        """
        self._error = None
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict(_typed_as(copy.deepcopy(state), self.state()))

    def release(self) -> None:
        """Leave the optimizer to the user, with its own learning rates unless a scheduler set them.

        A later run with the same object would otherwise start at the end of this run's schedule.
        """
        if self.scheduler is None:
            self._set(self._rates)
        for name in ("found_inf", "grad_scale"):  # the optimizer would skip steps of the user's
            with contextlib.suppress(AttributeError):
                delattr(self.optimizer, name)


def required(stepped: Any) -> list[str]:
    """Return the names of the arguments that ``stepped.step`` needs.

    Args:
        stepped: An optimizer or a scheduler.
    """
    # A scheduler replaces its optimizer's own method by one without a signature.
    step = getattr(type(stepped), "step", None)
    parameters = list(inspect.signature(step or stepped.step).parameters.values())
    plain = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in plain]
    return needed if step is None else needed[1:]


def _typed_as(kept: Any, own: Any) -> Any:
    """Return `kept` with the types of dictionaries in `own`: MultiStepLR has a Counter."""
    if isinstance(kept, Mapping) and isinstance(own, Mapping):
        items = {name: _typed_as(value, own.get(name)) for name, value in kept.items()}
        return type(own)(items)  # type: ignore[call-arg]
    if isinstance(kept, list) and isinstance(own, list):
        return [_typed_as(*pair) for pair in zip(kept, own, strict=False)] + kept[len(own) :]
    return kept
