"""A run of the user's own training loop: its steps as torch makes them, and the values it logs."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.batch import count, tensors
from ortlab.history.run_result import RunResult
from ortlab.metrics.recorder import INDEX, NAN, Watched
from ortlab.metrics.user_metrics import MOST
from ortlab.training.checkpoint_writer import CheckpointWriter
from ortlab.training.loop_state import LoopState
from ortlab.training.resume import Earlier
from ortlab.training.tracker import INTERCEPTION, LOGGED, number
from ortlab.training.trainer_run import Step, TrainerRun, settings_of
from ortlab.utils.errors import brief

if TYPE_CHECKING:
    from torch import nn

OF_STEP: Final = (*LOGGED, "epoch")
"""Values of a step that `LoopRun.log` sets; all others are metrics of an evaluation."""
_SAVED_EVERY_S: Final = 600.0
_KEPT: Final = 2  # checkpoints from the course of the loop
_EVALUATION_LOSS = ("eval_loss", "val_loss")


class LoopRun(TrainerRun):
    """The run of a user's own training loop: ``with ortlab.track(model) as run: ...``.

    A step of the run ends when an optimizer of the model makes one: the first of them, if there are
    several. Steps of other models, as in a GAN, belong to it. The loss is the sum of the values on
    which ``backward`` was called since the last step of any optimizer, unless it is logged: with a
    GradScaler, or where micro-batches are not divided by their number, log the loss itself. Samples
    and tokens are those of the calls of the model that a backward pass went through. Forward and
    backward times are those before and in ``backward``. Validation is no part of a step: the step's
    time begins after the last call in evaluation mode, or with gradients that no backward used.

    Args:
        model: The model that the loop trains, wrapped or not.
        name: Name of the run; None for the next run-N.
        show: Shows the run when it begins.
        choice: Reason for the engine if "auto" chose it; "" if it was named.
        where: What trains, for the title.
        state: State of the loop, for checkpoints every 10 minutes and at the end; None for none.
        step: Optimizer steps that the loaded state has done.
        earlier: Run that this one continues, if its metrics are known.
        resumed: Where the loop resumes from, in words; "" for a new run.
    """

    turn: _LoopStep

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str | None = None,
        show: Callable[[Watched], object] = lambda _: None,
        choice: str = "",
        where: str = "a loop",
        state: LoopState | None = None,
        step: int = 0,
        earlier: Earlier | None = None,
        resumed: str = "",
    ) -> None:
        settings = settings_of(model)
        del settings["learning_rate"]  # that of the user's optimizer; see `_measured`
        super().__init__(
            model,
            total_steps=None,
            step=step,
            settings=settings,
            arguments={},
            name=name,
            choice=choice,
            resumed=resumed,
            where=where,
            call=where,
        )
        self._show = show
        self._optimizer: Callable[[], Optimizer | None] | None = None
        self._told_many = False
        self._counts_calls = True
        self._bad: str | None = None
        self._backward = False  # whether the loss of the last step was seen or logged
        self._loop_state = state
        self.turn = _LoopStep(self._free, self)
        self._after_forward = model.register_forward_hook(self._called)
        self._saved = time.monotonic()
        self._writer = CheckpointWriter(
            self._folder,
            first=self.recorder.flush,
            tell=lambda kind, text, step=None: self.tell(kind, text),  # noqa: ARG005
        )
        if earlier is not None:
            self.recorder.restore(earlier.rows, earlier.events, write=True)
            for kind, text in earlier.told:
                self.tell(kind, text)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @property
    def saves_checkpoints(self) -> bool:
        """True if the loop's optimizer is known, and with it the state to save."""
        return self._loop_state is not None

    def begin(self) -> None:
        """Begin to record the steps of the calling thread, until `end`."""
        self._free = time.perf_counter()
        self.turn = _LoopStep(self._free, self)
        INTERCEPTION.enter(self)
        self._show(self)

    @brief
    def checkpoint(self, path: str | Path | None = None) -> Path:
        """Save model, optimizer, scheduler and random states to a file.

        ``ortlab.track(model, optimizer=..., resume_from=path)`` continues from it.

        Args:
            path: The file; None for one in the run's folder.

        Returns:
            The path of the file.

        Raises:
            ValueError: If the loop's optimizer is not known.
            RuntimeError: If the file cannot be written.
        """
        taken = self._taken()
        if path is None:
            path = self._folder.checkpoint_path(f"step-{self._step}")
        return taken.save(path)

    def _taken(self) -> Checkpoint:
        if self._loop_state is None:
            raise ValueError(
                "a checkpoint needs the loop's optimizer: ortlab.track(model, optimizer=optimizer)"
            )
        return self._loop_state.take(self._step, self.began_with)

    def end(self, error: BaseException | None = None, why: str | None = None) -> None:
        """End the run, with a checkpoint if the loop's optimizer is known; twice is fine.

        Args:
            error: What the loop raised; None if it did not raise.
            why: Reason of a failure whose error is not known.
        """
        self._after_forward.remove()
        if not self.over() and self._loop_state is not None:
            self._writer.close()
            try:
                self._taken().save(self._folder.checkpoint_path("final"))
            except Exception as failure:  # noqa: BLE001 - a state_dict of the user's may raise anything
                self.tell("warning", f"no checkpoint of the end of the loop: {failure}")
            self._loop_state = None  # it refers to the model
        super().end(error, why)

    def flush(self) -> None:
        """Record the last step, and tell of the first loss that is not finite."""
        loss = None if self._due is None else self._due["loss"]
        if self._bad is None and isinstance(loss, float) and self._backward and not isfinite(loss):
            self._bad = f"the loss is {loss} at step {self._step}"
            self.tell("not_finite", self._bad)
        super().flush()

    def _result(self) -> RunResult:
        result = super()._result()
        if not self._backward or isfinite(result.final_loss):
            return result
        return dataclasses.replace(result, not_finite=str(result.final_loss))

    def _measured(self) -> dict[str, Any]:
        # A warm-up begins, and a schedule ends, below the learning rate that was chosen.
        rates = self.recorder.rows()[:, INDEX["lr"]]
        return {"learning_rate": float(np.fmax.reduce(rates, initial=NAN))}

    def _lines(self, badges: Sequence[str]) -> tuple[str, ...]:
        return (*filter(None, [self._bad]), *super()._lines(badges))

    def plan(self, total_steps: int | None) -> None:
        """Set the number of steps of the whole loop.

        Args:
            total_steps: Optimizer steps; None if unknown.
        """
        self._total = total_steps

    def count(self, batch: Any) -> None:
        """Count the samples and tokens of a batch, in place of those that the model is called with.

        Args:
            batch: The batch.
        """
        self._counts_calls = False
        self.turn.count(batch)

    @brief
    def log(self, **values: Any) -> None:
        """Set values of the last step, or add metrics of an evaluation.

        ``loss``, ``lr``, ``grad_norm``, ``samples``, ``tokens`` and ``epoch`` belong to the step.
        All others are metrics of an evaluation, such as ``f1``, whose loss is ``eval_loss`` or
        ``val_loss``; they are in the chart of evaluations, the history and comparisons.

        Args:
            **values: Numbers, or tensors and arrays with one element. A loss on a device is fetched
                later, by another thread.

        Raises:
            ValueError: If a value is not a number. Nothing is logged.
        """
        given = {name: _number(name, value) for name, value in values.items()}
        metrics = {name: float(value) for name, value in given.items() if name not in OF_STEP}
        if self._due is not None:
            self._due |= {name: value for name, value in given.items() if name in OF_STEP}
            self._backward |= "loss" in given
        if not metrics:
            return
        loss = next((metrics.pop(name) for name in _EVALUATION_LOSS if name in metrics), NAN)
        if len(metrics) > MOST and not self._told_many:
            self._told_many = True
            self.tell("warning", f"{len(metrics)} metrics were logged at once; {MOST} are kept")
        kept = dict(list(metrics.items())[:MOST])
        self.evaluated({f"eval_{name}": value for name, value in {"loss": loss, **kept}.items()})

    def free(self) -> None:
        """Start the next step's time now, unless the step has begun to train."""
        super().free()
        if not (self.turn.trained or self.turn.samples):
            self.turn = _LoopStep(self._free, self)

    def _meet(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.over():
            return
        found = count(args if tensors(args) else kwargs) if self._counts_calls else (0, 0)
        self.turn.begin_call(_Call(self, found, model))

    def _called(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """Have the backward pass through the output of a call tell that the call has trained."""
        if self.over():
            return
        call = self.turn.calls[-1]
        call.end = time.perf_counter()
        outputs = tensors(output)
        for each in outputs:
            if each.requires_grad:
                each.register_hook(call.trains)  # type: ignore[no-untyped-call]
        if not outputs and call.has_gradients and call.in_training:  # an object of the user
            call.trains()

    def stepped(self, optimizer: Optimizer) -> None:
        """End a step, unless another optimizer than the model's first has made it.

        Args:
            optimizer: The optimizer that has made a step.
        """
        model, first = self.model, self._optimizer and self._optimizer()
        if first is None and model is not None:
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                first, self._optimizer = optimizer, weakref.ref(optimizer)
        if first is not optimizer:
            self.turn.loss = NAN
            return
        self.flush()
        self._backward = self.turn.trained
        self.take_turn(self._step + 1, epoch=0.0)
        if self._loop_state is not None and time.monotonic() - self._saved > _SAVED_EVERY_S:
            self._saved = time.monotonic()
            self._writer.keep(self._taken().copy(), _KEPT)
            self.free()
        self.turn = _LoopStep(self._free, self)


class _Call:
    """A call of the model, which trains if a backward pass goes through its output."""

    def __init__(self, run: LoopRun, counted: tuple[int, int], model: nn.Module) -> None:
        self._run = run
        self._counted = counted
        self.in_training = model.training
        self.has_gradients = torch.is_grad_enabled()
        self.trained = False
        self.start = self.end = time.perf_counter()

    @property
    def validates(self) -> bool:
        """True if the call, unless a backward uses it, is no part of a training step.

        A call in training mode without gradients may be: it makes targets, or a rollout.
        """
        return self.has_gradients or not self.in_training

    def trains(self, _: Any = None) -> None:
        """Count the samples of the call, once; autograd calls this in the backward pass."""
        if not self.trained:
            self.trained = True
            samples, tokens = self._counted
            self._run.turn.samples += samples
            self._run.turn.tokens += tokens


class _LoopStep(Step):
    """A step that ends itself when the optimizer has made it."""

    def __init__(self, began: float, run: LoopRun) -> None:
        super().__init__(began)
        self._run = run
        self._has_data = False
        self.calls: list[_Call] = []
        """Calls of the model that no backward has used so far."""
        self._ready = 0.0  # start of the last backward
        self._after = began  # end of the backward before it

    def count(self, batch: Any) -> None:
        """See `Step.count`; the time before the first batch is that of the data."""
        self._note_data()
        super().count(batch)

    def begin_call(self, call: _Call) -> None:
        """Add a call of the model, which begins now.

        Args:
            call: The call.
        """
        self._note_data()
        self.calls.append(call)

    def _note_data(self) -> None:
        if not self._has_data:
            self._has_data = True
            now = time.perf_counter()
            self.data_s, self.mark = now - self.began, now

    def before_backward(self) -> None:
        """See `Turn.before_backward`."""
        super().before_backward()
        self._ready = self.mark

    def after_backward(self, loss: torch.Tensor) -> None:
        """See `Step.after_backward`; time until the end of a validation is left out."""
        super().after_backward(loss)
        # Recomputation calls the model in the backward itself.
        used = [at for at, each in enumerate(self.calls) if each.trained]
        used = [at for at in used if self.calls[at].start < self._ready]
        if used:
            first = self.calls[used[0]]
            unused = [each.end for each in self.calls[: used[0]] if each.validates]
            if unused and unused[-1] > self._after:
                self._leave_out(until=unused[-1], first=first)
            self.calls = self.calls[used[-1] + 1 :]
        self._after = self.mark

    def _leave_out(self, *, until: float, first: _Call) -> None:
        """Leave out the time between the last backward and the end of a validation."""
        if self._after == self.began:
            self.data_s, self.forward_s = first.start - until, self._ready - first.start
        else:
            self.forward_s -= until - self._after
        self.began += until - self._after

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """See `Turn.after_optimizer`."""
        super().after_optimizer(optimizer)
        if not self.depth:
            self._run.stepped(optimizer)


def _number(name: str, value: Any) -> float | torch.Tensor:
    """Return a value of `LoopRun.log`; a loss on a device stays there.

    Raises:
        ValueError: If it is not a number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return number(value) if name == "loss" else float(value.item())
    if isinstance(value, int | float | np.number):
        return float(value)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    raise ValueError(f"cannot log {name}={value!r:.60}: give a number or a tensor of one element")
