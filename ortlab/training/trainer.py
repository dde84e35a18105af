"""Fine-tuning as a generator: schedule, evaluation, seeds and changes around a stepper.

Nothing here knows threads or files: ``for result in Course(...).steps()`` trains in the caller's
thread.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ortlab.checkpoint.checkpoint import Checkpoint, Order, Position, Unit
from ortlab.engines import batch as batches
from ortlab.engines import registry
from ortlab.engines.base import Batch, Cost, NotFinite, RankStep, Stepper, StepperLost, StepResult
from ortlab.engines.nonfinite import Cause
from ortlab.engines.torch.stepper import training_device
from ortlab.metrics.recorder import NAN, Event, Recorder, Sample
from ortlab.settings import LOWEST_LOSS_SCALE, EngineSettings, FinetuneSettings
from ortlab.training import memory_advice
from ortlab.training.control import Control
from ortlab.training.data_loading import Batches, Epoch
from ortlab.training.failures import FailurePolicy, PauseReason, typed
from ortlab.utils.errors import forget_locals, message, out_of_memory
from ortlab.utils.process_memory import Memory, Meter
from ortlab.utils.rng import RandomStates, seeded, undisturbed_random
from ortlab.utils.threads import trim


def total_steps(
    data: Batches, settings: FinetuneSettings, begin: Position | None = None
) -> int | None:
    """Optimizer steps of the whole run; None where the data's length and max_steps are unknown.

    A run that is at `begin`, counted as `data` counts, has its steps behind it and the rest of its
    data before it.
    """
    if data.length is None:
        return settings.max_steps
    done, epoch, read = (begin.step, begin.epoch, begin.read) if begin else (0, 0, 0)
    items = settings.accumulation * (1 if data.size is None else settings.batch_size)
    whole = max(settings.epochs - epoch - 1, 0) * math.ceil(data.length / items)
    here = math.ceil((data.length - read) / items) if epoch < settings.epochs else 0
    steps_ = done + here + whole
    return min(steps_, settings.max_steps or steps_)


def learning_rate(step: int, total: int | None, settings: FinetuneSettings) -> float:
    """The learning rate of step number `step`, counted from 0, of `total`.

    It rises in equal parts over ``warmup_steps`` to ``lr``, which the step after them has; then it
    stays, or falls along a line or half a cosine that would be 0 in step number `total`.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    if settings.schedule == "constant" or total is None:
        return settings.lr
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    return settings.lr * (1 + math.cos(math.pi * done)) / 2


_WORKERS_CHECKPOINT = 100
"""Steps between the checkpoints of a run on workers where nothing else is said."""
_FIXED = ("seed", "optimizer")
_FIXED_IN_A_RUN = (*_FIXED, "loss", "device")


def fixed(data: Batches) -> dict[str, str]:
    """The settings that a run on `data` cannot change, whatever the value, each with the reason."""
    found = {
        name: f"a run keeps the {name} that it began with; finetune makes another run"
        for name in _FIXED_IN_A_RUN
    }
    return {**found, "batch_size": data.own} if data.own else found


def check_change(
    before: FinetuneSettings, after: FinetuneSettings, fixed: Mapping[str, str]
) -> None:
    """ValueError where `after` cannot take the place of `before` in a run with these `fixed`."""
    for name, reason in fixed.items():
        there, here = getattr(before, name), getattr(after, name)
        if there != here:
            raise ValueError(
                f"{name}={here!r} cannot be applied to a run that has {name}={there!r}: {reason}"
            )


def place(begin: Checkpoint, data: Batches, settings: FinetuneSettings) -> Position:
    """Where a run on `data` goes on from `begin`, counted as `data` counts.

    ValueError where it cannot.
    """
    for name in _FIXED:
        there, here = begin.settings.get(name), getattr(settings, name)
        if there != here:
            raise ValueError(
                f"{name}={here!r}, and the checkpoint is of a run with {name}={there!r}: its "
                f"place in the data and its optimizer's state hold for that; leave {name} out"
            )
    position = begin.position
    size = begin.settings.get("batch_size")
    if (
        position.unit == "micro-batches"
        and data.size is not None
        and isinstance(size, int)
        and size
    ):
        position = _in_samples(position, data.length, size)
    if (position.unit, position.length) != (data.unit, data.length):
        raise ValueError(
            f"the data has {_count(data.length, data.unit)} an epoch, and the checkpoint's had "
            f"{_count(position.length, position.unit)}; go on with the data that it was trained on"
        )
    order = position.order
    if order is not None and len(order.generators) != len(data.generators):
        raise ValueError(
            f"the loader has {len(data.generators)} generators of its own, and the checkpoint's "
            f"had {len(order.generators)}; make the loader as it was made then"
        )
    return position


def _in_samples(position: Position, length: int | None, size: int) -> Position:
    """A place that was counted in micro-batches of `size`; as it is where their number differs."""
    read = position.read * size
    if length is not None:
        read = min(read, length)  # the last one is smaller
        if math.ceil(length / size) != position.length:
            return position
    elif position.length is not None:
        return position
    return dataclasses.replace(position, read=read, length=length, unit="samples")


def _count(length: int | None, unit: Unit) -> str:
    return f"an unknown number of {unit}" if length is None else f"{length} {unit}"


def check_schedule(total: int | None, settings: FinetuneSettings) -> None:
    """ValueError for a warm-up as long as the run; warns of a schedule without a known length."""
    if total is not None and settings.warmup_steps >= total:
        raise ValueError(
            f"warmup_steps={settings.warmup_steps} must be below the run's {total} steps"
        )
    if total is None and settings.schedule != "constant":
        warnings.warn(
            f"schedule={settings.schedule!r} has no effect on data of unknown length; give "
            "max_steps, or schedule='constant'",
            stacklevel=3,
        )


@dataclass(frozen=True)
class Evaluation:
    """What a model scores on held-out data; ``accuracy`` is NaN where targets are no classes."""

    step: int
    loss: float
    accuracy: float = NAN

    def __str__(self) -> str:
        hits = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.3f}"
        return f"loss {self.loss:.4g}{hits}"


def best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The one with the lowest loss; a loss that is NaN is none."""
    known = [each for each in evaluations if not math.isnan(each.loss)]
    return min(known, key=lambda each: each.loss, default=None)


def better(found: Evaluation, before: Evaluation | None, metric: str) -> bool:
    """Whether `found` is the better one by eval_loss or eval_accuracy; one that is NaN is not."""
    sign, name = (-1, "loss") if metric == "eval_loss" else (1, "accuracy")
    here = sign * getattr(found, name)
    there = NAN if before is None else sign * getattr(before, name)
    return not math.isnan(here) and not here <= there


def evaluate(
    stepper: Stepper,
    data: Batches,
    *,
    step: int,
    size: int | None = None,
    proceed: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """The loss (mean over samples) and accuracy of `data`; None when `proceed` says to stop.

    Samples are batched by `size`, or else by what `data` was made with.

    Random states are what they were before: evaluating more often changes no training.
    """
    loss = torch.zeros(())
    samples = measured = correct = predicted = 0
    with undisturbed_random():
        for batch in data.epoch(0, size=size):
            if not proceed():
                return None
            result = stepper.evaluate(batch)
            samples += result.samples
            correct += result.correct
            predicted += result.predicted
            if result.loss is not None:
                loss = loss.to(result.loss.device) + result.loss.float() * result.samples
                measured += result.samples
    if samples == 0:
        raise ValueError("the evaluation data is empty")
    return Evaluation(
        step,
        loss=loss.item() / measured if measured else NAN,
        accuracy=correct / predicted if predicted else NAN,
    )


def cost(before: FinetuneSettings, after: FinetuneSettings) -> Cost:
    """What it takes a run to go on with `after` in the place of `before`."""
    if _rebuilds(before, after):
        return registry.cost(before, after)
    return "free" if before.batch_size == after.batch_size else registry.size_cost(after)


@dataclass(frozen=True)
class _Trial:
    """New settings until their first step is done, and what the old ones go on from.

    ``taken`` is None where the stepper stays: a step that fails leaves it as it was.
    """

    before: FinetuneSettings
    wanted: FinetuneSettings
    taken: Checkpoint | None
    random: RandomStates
    began: float


def _rebuilds(before: FinetuneSettings, after: FinetuneSettings) -> bool:
    """Whether the change is one of the engine or its options, which takes another stepper."""
    among = (
        *("workers", "isolated", "zero_stage", "reduction", "tensor_parallel", "pipeline_stages"),
        *("param_dtype", "offload_optimizer"),
    )
    names = (*EngineSettings.declarations(), *among)
    if any(getattr(before, name) != getattr(after, name) for name in names):
        return True
    # DeepSpeed has buffers of another type for 16-bit gradients of several micro-batches.
    several = before.accumulation > 1, after.accumulation > 1
    return after.param_dtype == "bf16" and len({*several}) == 2


def _differences(before: FinetuneSettings, after: FinetuneSettings) -> str:
    was, now = before.as_dict(), after.as_dict()
    return ", ".join(
        f"{name}={now[name]} (was {was[name]})" for name in now if now[name] != was[name]
    )


class Trainer:
    """One run of the loop: its steps, and its exact state between two of them.

    With `begin` it goes on where that was taken: the same order of the data, place in it, random
    states and schedule. ValueError where that does not fit the settings or the data.

    With `prepare`, which makes a stepper for other settings, the engine and its options can be
    changed too while it trains (`Control.apply`): all of the state but those goes on. Where the new
    ones fail, in their making or their first step, the old ones go on.

    Where `faults` say that somebody waits for it, data that raises, memory that does not suffice
    and, after a first step, numbers that are not finite have the control hold the loop, which goes
    on when it is let; else they end it.

    `keep` is given a checkpoint every ``checkpoint_every`` steps, after ``checkpoint_minutes``, in
    a pause and where `keep_in_read` asks for one; `keep_best` that of an evaluation which is better
    by ``keep_best`` than all before it, `best` among those. A stepper that is lost has the control
    hold the loop; when it goes on, another stepper does from the last checkpoint.
    """

    def __init__(
        self,
        stepper: Stepper,
        train: Batches,
        settings: FinetuneSettings,
        *,
        control: Control,
        recorder: Recorder,
        evaluation: Batches | None = None,
        meter: Meter | None = None,
        begin: Checkpoint | None = None,
        prepare: Callable[[FinetuneSettings], Stepper] | None = None,
        keep: Callable[[Checkpoint], object] = lambda _: None,
        faults: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        keep_best: Callable[[Checkpoint], object] = lambda _: None,
        best: Evaluation | None = None,
    ) -> None:
        if begin is not None:
            begin = dataclasses.replace(begin, position=place(begin, train, settings))
        self.settings = settings
        """What holds now."""
        self.stepper = stepper
        """What trains now."""
        self._prepare = prepare
        self._wanted: dict[str, Any] = {}
        self._trial: _Trial | None = None
        self._too_large: tuple[int, FinetuneSettings] | None = None
        self._train = train.within(control.reading)
        self._fixed = fixed(train)
        self._control = control
        self._recorder = recorder
        self._evaluation = evaluation.within(control.reading_held_out) if evaluation else None
        self._faults = faults
        self._ended_at: tuple[int, int] | None = None
        """Epoch and place where the data was found to end before the length that it tells."""
        self._meter = meter
        self._begin = begin
        self._keep = keep
        self._keep_best = keep_best
        self._best = best
        self._kept: Checkpoint | None = None
        self._lost = False
        self._lost_at = -1
        self._evaluates_at_most = sys.maxsize
        """The step after which workers were lost last."""
        self._told = 0
        """Steps that the recorder knows: those that are done again are not told again."""
        self._told_not_finite = False
        """Whether what was not finite held the run until it was stopped: it ends as any does."""
        at = begin.position if begin else None
        self._began_at = at.step if at else 0
        self.total = total_steps(train, settings, at)
        """Optimizer steps of the whole run, None where that is unknown."""
        self.step = at.step if at else 0
        """Optimizer steps done."""
        self._kept_step = self.step
        self._kept_s = control.elapsed_s()
        self._epoch = at.epoch if at else 0
        self._read = at.read if at else 0
        self._evaluated = at.evaluated if at else -1
        self._order: Order | None = at.order if at else None
        self._drawn: RandomStates | None = at.random if at else None
        """The random states of the place between two steps, where they are not those of now."""

    def steps(self) -> Iterator[StepResult]:
        """Trains, and yields after every optimizer step; ends early when the control says so.

        Samples and "eval" events go to the recorder. Evaluation comes before the first step, after
        every epoch or ``eval_every`` steps, and at the end unless stopped.

        The seed governs every random number of Python, numpy and torch, which are one for the whole
        process: what else draws from them during the run sees its numbers. When the generator ends
        or is closed they are what they were. Runs that overlap draw from the same states, so their
        seeds do not hold; the last of them to end gives back what was before the first.

        NotFinite when a loss or a gradient is NaN or infinite: at once on a CPU, on another device
        as soon as the recorder has fetched the loss; the stepper has changed no weight since. In
        fp16 such a step is skipped: it counts as a step of the schedule, its data is behind the
        run, and NotFinite comes where the loss scale cannot fall any further.
        """
        with seeded(self.settings.seed):
            try:
                yield from self._steps()
            finally:
                self._drawn = self._drawn or RandomStates.now()

    def checkpoint(self) -> Checkpoint:
        """The state between the last step and the next one, in memory of its own, on the CPU.

        An engine whose own generators cannot be read goes on from a seed that the checkpoint
        records: the run draws other numbers than without it, and the same as one that begins with
        it.
        """
        taken = self._copied()
        if not self._lost:
            self.stepper.reseed(taken.position.engine_seed)
        return taken

    def _copied(self) -> Checkpoint:
        """`checkpoint` that leaves the run the numbers it draws.

        Neither the clock nor a pause changes them; where an engine's own generators cannot be read,
        a run that goes on from it draws others there.
        """
        return self.state().copy()

    def state(self) -> Checkpoint:
        """`checkpoint` without a copy, for when no step follows; the last one of what is lost."""
        if self._lost:
            assert self._kept is not None
            return self._kept
        state = self.stepper.state_dict()
        return Checkpoint(
            state["model"],
            state["optimizer"],
            self._position(),
            self.settings.as_dict(),
            state["loss_scale"],
            shards=state.get("shards"),
        )

    def _position(self) -> Position:
        return Position(
            step=self.step,
            epoch=self._epoch,
            read=self._read,
            length=self._train.length,
            unit=self._train.unit,
            evaluated=self._evaluated,
            random=self._drawn or RandomStates.now(),
            order=self._order,
            engine_seed=_engine_seed(self.settings.seed, self.step),
        )

    def _steps(self) -> Iterator[StepResult]:
        while True:
            try:
                yield from self._steps_of_stepper()
            except StepperLost as error:
                if self._regained(error):
                    continue
            return

    def _regained(self, error: StepperLost) -> bool:
        """Waits until somebody lets the run go on; from the last checkpoint, with a new stepper."""
        if self._kept is None or self._prepare is None:
            raise error
        at = self._kept.position
        # Where it gets no further than the last time, another try would end there too.
        by_itself = self.settings.isolated and self.step > self._lost_at
        self._lost_at = self.step
        self._told = max(self._told, self.step)
        self.step, self._epoch, self._read = at.step, at.epoch, at.read
        self._evaluated, self._order, self._drawn = at.evaluated, at.order, at.random
        self._lost, self._trial = True, None
        self.stepper.close()
        if by_itself:
            self._tell("warning", f"begins again in another process: {error}")
            if self._control.stopping:
                return False
        else:
            hint = "run.resume() or its button goes on from there with fresh workers"
            changes: dict[str, Any] = {}
            if out_of_memory(error):
                self._too_large = self.step, self.settings
                changes = self._smaller(self.settings)
            if changes:
                told = typed(changes)
                hint = f"memory ran out; run.resume({told}) or its button goes on from there"
            where = "at step {step}, that of its last checkpoint"
            self._control.hold(PauseReason(error, where, hint, advice=changes))
            self._tell("warning", f"held: {error}")
            if not self._proceed():
                return False
        try:
            self.stepper = self._prepare(self.settings)
        except StepperLost as again:
            return self._regained(again)
        self._lost, self._begin = False, self._kept
        self._tell("note", f"goes on from the checkpoint of step {self.step}")
        return True

    def _steps_of_stepper(self) -> Iterator[StepResult]:
        data = None
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._load(begin)
            self._hold_on_to(begin)
            if self._order is not None and not self._done():
                data = self._train.again(begin.position)
                begin.position.random.give_back()
            self._drawn = None
        if self.settings.elsewhere and self._kept is None:
            self._hold_on_to(self.checkpoint())
        if self._evaluated < 0 or self._due():
            self._evaluate()
        while self._epoch < self.settings.epochs:
            yield from self._steps_of_epoch(data)
            data = None
            if self._control.stopping or self._done():
                break
            if self.settings.eval_every is None:
                self._evaluate()
            self._epoch, self._read, self._order = self._epoch + 1, 0, None
        if not self._control.stopping:
            self._evaluate()
        if not self.stepper.finite() and not self._told_not_finite:
            self._fail_not_finite()

    def _steps_of_epoch(self, data: Epoch | None) -> Iterator[StepResult]:
        """The steps of an epoch, or of what is left of it in `data`."""
        if data is None:
            self._order = self._train.order()
            data = self._opened(lambda: self._train.epoch(self._epoch))
        while data is not None and not self._done() and self._proceed():
            began = time.perf_counter()
            wanted = self._asked_for()
            changes = bool(self._wanted)
            if self._read == 0:  # a sampler may draw its order: in the middle of that none holds
                self._drawn = RandomStates.now()
            try:
                group = data.take(wanted.accumulation, wanted.batch_size, keep=changes)
                self._drawn = None
            except Exception as error:  # noqa: BLE001 - a Dataset raises what it likes
                if out_of_memory(error):
                    data = self._with_room(error, wanted)
                else:
                    data = self._mended(error, data.done)
                continue
            data_s = time.perf_counter() - began
            if not group:
                if self._ends_early(data.done):
                    data = self._after_an_early_end(data.done)
                    continue
                break
            try:
                if changes:
                    self._change(wanted, began)
                lr = learning_rate(self.step, self.total, self.settings)
                result = self.stepper.step(group, lr=lr)
            # An engine raises all kinds of exceptions. What was at fault besides it, a batch for
            # one, is raised again when the old settings take the step.
            except Exception as error:
                # What is lost tries no step again, and cannot adopt what held before: `_regained`.
                lost = isinstance(error, StepperLost)
                memory = out_of_memory(error) and not lost
                trial = self._trial
                if trial is None and not memory:
                    raise
                if lost and trial is not None and trial.taken is None:
                    raise
                if memory and (trial is None or self._leaves_too_large()):
                    del group
                    self._settle()
                    data = self._with_room(error, self.settings)
                    continue
                self._go_back(error)
                data.put_back()
                continue
            self._settle()
            step_s = time.perf_counter() - began
            self.step += 1
            self._read = data.done
            length = self._train.length
            within = self._read / length if length else 0.0
            made = self.step
            try:
                self._record(result, self._epoch + within, step_s, data_s)
            except NotFinite as error:
                if not self._leaves_out(error, group, made=made):
                    return
                continue
            if not self._done():
                self._keep_in_time()
            yield result
            if not self._done() and self._due():
                self._evaluate()
        if self.step == 0 and not self._control.stopping:
            raise ValueError("the training data is empty: it gave no batch")

    # ---- faults: what the loop waits for until somebody lets it go on --------------------------

    def _held(self, hold: PauseReason) -> bool:
        """Waits as `hold` says; whether the loop goes on. Raises its error where nobody would."""
        error = hold.error
        if not self._faults.waits or self._train.once:
            raise error
        forget_locals(error)  # what it was computing takes memory
        self._control.hold(hold)
        said = " ".join(message(error).split())
        self._tell("warning", f"held at step {self.step}: {type(error).__name__}: {said}")
        return self._proceed()

    def _opened(self, begin: Callable[[], Epoch]) -> Epoch | None:
        """What `begin` opens, or what can be read when the loop goes on; None when it does not."""
        try:
            return begin()
        except Exception as error:  # noqa: BLE001 - a Dataset raises what it likes
            return self._mended(error, self._read)

    def _again(self) -> Epoch | None:
        """The epoch from the end of the last step on: read anew, in the order that it has."""

        def begin() -> Epoch:
            position = self._position()
            found = self._train.again(position)
            position.random.give_back()
            return found

        return self._opened(begin)

    def _mended(self, error: Exception, read: int) -> Epoch | None:
        """The data after it failed, `read` items into the epoch; None when the loop is to end."""
        error.add_note(
            f"the data failed in step {self.step + 1}, after {_count(read, self._train.unit)} of "
            f"epoch {self._epoch + 1}"
        )
        if self.step == self._began_at:
            raise error  # nothing is lost by beginning again
        skips = self._train.size is not None and self._train.length is not None
        hint = "mend the data, and run.resume() or its button reads on there"
        if skips:
            hint += "; run.resume(skip=True) leaves the samples of that step out"
        if not self._held(
            PauseReason(error, "at step {step}", hint, "the data failed", skips=skips)
        ):
            return None
        if skips and self._control.skipping:
            asked = self.settings.batch_size * self.settings.accumulation
            first, self._read = self._read, min(self._read + asked, self._train.length or 0)
            self.total = total_steps(self._train, self.settings, self._position())
            self._tell("note", f"{self._read - first} samples are left out, from {first + 1} on")
        return self._again()

    def _ends_early(self, read: int) -> bool:
        """Whether the data has ended at `read` items, and has told of more."""
        length = self._train.length
        return length is not None and read < length and not self._control.stopping

    def _after_an_early_end(self, read: int) -> Epoch | None:
        """What comes after the data has ended early: where it ends there again, nothing."""
        told = (
            f"epoch {self._epoch + 1} of the data ended after {read} of {self._train.length} "
            f"{self._train.unit}, in step {self.step + 1}"
        )
        if self._ended_at is not None or not self._faults.waits or self._train.once:
            if self._ended_at != (self._epoch, read):
                self._tell("warning", told)
            return None
        self._ended_at = self._epoch, read
        hint = "run.resume() reads on if there is more by then, and else ends the epoch there"
        hold = PauseReason(RuntimeError(told), "at step {step}", hint, "the data ended early")
        return self._again() if self._held(hold) else None

    def _release(self, error: Exception) -> None:
        """Gives back what was being computed when memory did not suffice."""
        forget_locals(error)
        self.stepper.rest()
        trim()
        if training_device(self.settings.device).type == "cuda":
            torch.cuda.empty_cache()

    def _leaves_too_large(self) -> bool:
        """Whether the settings before the ones on trial are known not to fit into memory."""
        trial = self._trial
        if trial is None or trial.taken is not None:
            return False
        return (self.step, trial.before) == self._too_large

    def _with_room(self, error: Exception, settings: FinetuneSettings) -> Epoch | None:
        """The data of the step that memory did not suffice for under `settings`.

        None when the loop is to end. Raises the error of pipeline stages, which it has left in the
        middle of their schedule.
        """
        if self.settings.pipeline_stages > 1:
            raise error
        self._release(error)
        self._too_large = self.step, self.settings
        device = training_device(self.settings.device).type
        held = 0
        if self.settings.workers == 1:  # shares of it lie elsewhere
            state = self.stepper.state_dict()
            held = sum(_bytes(each) for each in (state["model"], state["optimizer"]))
            del state
        changes = self._smaller(settings, held)
        why = memory_advice.hint(changes, settings, device)
        error.add_note(f"memory did not suffice for step {self.step + 1}; {why}")
        hint = "run.resume() tries the step again"
        if changes:
            hint = f"run.resume({typed(changes)}) or its button goes on with that"
        hold = PauseReason(error, "at step {step}", hint, "out of memory", changes)
        return self._again() if self._held(hold) else None

    def _smaller(self, settings: FinetuneSettings, held: int = 0) -> dict[str, Any]:
        """What a step may fit with that does not under `settings`, beside the `held` bytes."""
        device = training_device(self.settings.device).type
        return memory_advice.advice(
            settings,
            own_batches=self._train.size is None,
            room_bytes=memory_advice.available_bytes(device) + held,
            peak_bytes=self._faults.peak_bytes,
        )

    def _evaluated_of(self, data: Batches) -> Evaluation | None:
        """What `evaluate` finds; None where the loop is to end, or to go on without it.

        Where memory does not suffice for as many samples as a step has, fewer at a time have the
        same mean.
        """
        while True:
            size = min(self.settings.batch_size, self._evaluates_at_most)
            try:
                return evaluate(
                    self.stepper, data, step=self.step, size=size, proceed=self._proceed
                )
            except StepperLost:
                raise
            except Exception as error:
                memory = out_of_memory(error)
                when = f"after step {self.step}" if self.step else "before the first step"
                error.add_note(f"the evaluation {when} failed")
                if self.settings.pipeline_stages > 1 or self.step == self._began_at:
                    raise  # nothing is lost by beginning again
                if memory:
                    self._release(error)
                if memory and data.size is not None and size > 1:
                    self._evaluates_at_most = size // 2
                    told = f"memory did not suffice for the evaluation of {size} samples at a time"
                    self._tell("warning", f"{told}: it takes {size // 2} from now on")
                    continue
                what = "out of memory" if memory else "the evaluation failed"
                hint = (
                    "run.resume() or its button evaluates again; run.resume(skip=True) goes on "
                    "without it"
                )
                hold = PauseReason(error, "after step {step}", hint, what, skips=True)
                if not self._held(hold):
                    return None
                if self._control.skipping:
                    self._evaluated = self.step
                    return None

    def _leaves_out(self, error: NotFinite, group: Sequence[Batch], *, made: int) -> bool:
        """Whether the loop goes on past steps, up to `made`, that were not finite.

        They count, as those that a loss scale has skipped; no weight has changed in them.
        """
        try:
            cause = self._faults.examine(self.stepper, group, self.settings)
        except StepperLost:
            raise
        except Exception as again:  # noqa: BLE001 - it may fail as the step did, in any way
            cause = Cause.unknown(again)
        if cause is not None:
            error.add_note(f"in eager torch {cause.told}{self._called(cause.rows, group)}")
        first = self.step + 1
        if self._prepare is None or self.step == self._began_at:
            raise error
        settings = self.settings
        change: dict[str, Any] = {"lr": float(f"{settings.lr / 10:.3g}")}
        if settings.precision == "fp16":
            change = {"precision": "bf16"}
        hint = (
            f"run.resume({typed(change)}) or its button goes on with that, run.resume() with "
            "what it has; the data of the step is left out"
        )
        if cause is not None and cause.in_data:  # no settings would help
            change, hint = {}, "run.resume() or its button leaves the data of the step out"
        where = "with the weights of step {step}"
        if not self._held(PauseReason(error, where, hint, "not finite", change)):
            self._told_not_finite = True
            return False
        taken = self.checkpoint()
        self._recorder.count  # noqa: B018 - what was not finite is known by now
        self._recorder.not_finite_step = None
        self.step = made
        self._rebuild(settings, taken)
        span = f"step {first}" if first == made else f"steps {first} to {made}"
        self._tell("note", f"{span} changed no weight; the run goes on after that")
        return True

    def _called(self, rows: Sequence[int], group: Sequence[Batch]) -> str:
        """What the user's Dataset calls the samples `rows` of a step's micro-batches."""
        if self._train.names is None or not rows:
            return ""
        first = self._read - sum(batches.count(batch)[0] for batch in group)
        return f": {self._train.names(self._epoch, [first + row for row in rows])}"

    def _keeps_every(self) -> int | None:
        """Every how many steps a checkpoint is to be kept."""
        of_workers = _WORKERS_CHECKPOINT if self.settings.elsewhere else None
        return self.settings.checkpoint_every or of_workers

    def _keep_in_time(self) -> None:
        """Keeps a checkpoint where steps or minutes say so."""
        every, minutes = self._keeps_every(), self.settings.checkpoint_minutes
        if every and self.step % every == 0:
            self._keep_last(self.checkpoint())
        elif minutes and self._control.elapsed_s() - self._kept_s >= 60 * minutes:
            self._keep_last(self._copied())

    def _keep_last(self, taken: Checkpoint) -> None:
        self._kept_step, self._kept_s = self.step, self._control.elapsed_s()
        self._hold_on_to(taken)
        self._keep(taken)

    def _hold_on_to(self, taken: Checkpoint) -> None:
        """Has a run on workers go on from `taken` if it loses them."""
        self._kept = taken if self.settings.elsewhere else None

    def _asked_for(self) -> FinetuneSettings:
        """The settings that the next step is to have."""
        self._wanted |= self._control.changes()
        if not self._wanted:
            return self.settings
        try:
            wanted = self.settings.replace(**self._wanted)
            check_change(self.settings, wanted, self._fixed)
            if self._prepare is None and _rebuilds(self.settings, wanted):
                raise ValueError("nothing makes a stepper for another engine or its options")
        except ValueError as error:
            told = f"the run goes on with the settings it has: {error}"
            self._tell("warning", told, {"cost_s": 0.0})
            self._wanted, wanted = {}, self.settings
        return wanted

    def _change(self, wanted: FinetuneSettings, began: float) -> None:
        """Lets `wanted` hold from the next step on; `_settle` or `_go_back` follow it."""
        self._wanted, before = {}, self.settings
        if wanted == before:
            return
        if _rebuilds(before, wanted):
            taken = self.checkpoint()
            self._trial = _Trial(before, wanted, taken, taken.position.random, began)
            self._rebuild(wanted, taken)
            return
        self._trial = _Trial(before, wanted, None, RandomStates.now(), began)
        self._adopt(wanted)

    def _adopt(self, settings: FinetuneSettings) -> None:
        self.stepper.adopt(settings)
        self._use(settings)

    def _rebuild(self, settings: FinetuneSettings, taken: Checkpoint) -> None:
        assert self._prepare is not None
        # First, so that the new one finds the model as the user gave it: in train mode or not.
        self.stepper.close()
        trim(collect=False)  # so that the charts show what the new one takes
        self.stepper = self._prepare(settings)
        self._load(taken)
        self._use(settings)
        self._hold_on_to(taken)

    def _load(self, taken: Checkpoint) -> None:
        self.stepper.load_state_dict(
            {
                "model": taken.model,
                "optimizer": taken.optimizer,
                "loss_scale": taken.loss_scale,
                "shards": taken.shards,
            }
        )
        taken.position.random.give_back()
        self.stepper.reseed(taken.position.engine_seed)

    def _use(self, settings: FinetuneSettings) -> None:
        self.settings = settings
        self.total = total_steps(self._train, settings, self._position())

    def _settle(self) -> None:
        """The first step under new settings is done."""
        if self._trial is None:
            return
        trial, self._trial = self._trial, None
        free = cost(trial.before, trial.wanted) == "free"
        cost_s = 0.0 if free else time.perf_counter() - trial.began
        self._tell("change", _differences(trial.before, trial.wanted), {"cost_s": cost_s})

    def _go_back(self, error: Exception) -> None:
        """New settings have failed: the old ones take the run where it was before them."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        forget_locals(error)  # what it was computing takes memory
        if trial.taken is None:
            trial.random.give_back()
            self._adopt(trial.before)
        else:
            self._rebuild(trial.before, trial.taken)
        changes = _differences(trial.before, trial.wanted)
        told = f"{changes}: the run goes on without, for it failed: {error}"
        self._tell("warning", told, {"cost_s": time.perf_counter() - trial.began})

    def _tell(self, kind: str, text: str, values: dict[str, float] | None = None) -> None:
        event = Event(kind, self.step, self._control.elapsed_s(), text, values or {})
        self._recorder.event(event)

    def _done(self) -> bool:
        return self.total is not None and self.step >= self.total

    def _due(self) -> bool:
        every = self.settings.eval_every
        return every is not None and self.step % every == 0

    def _proceed(self) -> bool:
        # A pause may be the last that this process does: a laptop that closes, a kernel that ends.
        if self._control.pausing:
            self._keep_standing()
        return self._control.proceed(self.checkpoint)

    def keep_in_read(self) -> None:
        """Keeps a checkpoint while `Control.kept_in_read` keeps the loop in a read, which may last.

        Asked by another thread; nothing where other processes train, who answer the loop's alone.
        """
        if not self.settings.elsewhere:
            self._keep_standing()

    def _keep_standing(self) -> None:
        """Keeps a checkpoint of the last step, where there is none and memory has room for it."""
        if self._kept_step == self.step or self._lost:
            return
        try:
            self._keep_last(self._copied())
        except Exception as error:
            if not out_of_memory(error):
                raise
            told = f"no checkpoint of step {self.step}: memory has no room for a copy"
            self._tell("warning", told)

    def _record(self, result: StepResult, epoch: float, step_s: float, data_s: float) -> None:
        on_host = result.loss.device.type == "cpu"

        def number(value: torch.Tensor | None) -> float | torch.Tensor:
            if value is None:
                return NAN
            return float(value) if on_host else value

        if self.step > self._told:
            self._recorder.add(
                Sample(
                    step=self.step,
                    time_s=self._control.elapsed_s(),
                    epoch=epoch,
                    loss=number(result.loss),
                    lr=result.lr,
                    grad_norm=number(result.grad_norm),
                    samples=result.samples,
                    tokens=result.tokens or NAN,
                    samples_per_s=result.samples / step_s,
                    tokens_per_s=result.tokens / step_s or NAN,
                    step_ms=step_s * 1e3,
                    data_ms=data_s * 1e3,
                    forward_ms=result.forward_ms,
                    backward_ms=result.backward_ms,
                    optimizer_ms=result.optimizer_ms,
                    communication_ms=result.communication_ms if result.ranks else NAN,
                    loss_scale=number(result.loss_scale),
                    skipped=number(result.skipped),
                    **self._memory(result).as_dict(),
                )
            )
            for rank, told in enumerate(result.ranks):
                self._record_rank(rank, told, epoch)
        # Asking the stepper waits for a device; there the recorder tells a moment later.
        if (on_host and not self.stepper.finite()) or self._recorder.not_finite_step is not None:
            self._fail_not_finite()

    def _memory(self, result: StepResult) -> Memory:
        """Of this process, or of all ranks together where they train."""
        if result.ranks:
            return Memory.of_all([told.memory for told in result.ranks])
        return self._meter.take() if self._meter is not None else Memory()

    def _record_rank(self, rank: int, told: RankStep, epoch: float) -> None:
        self._recorder.rank(rank).add(
            Sample(
                step=self.step,
                time_s=self._control.elapsed_s(),
                epoch=epoch,
                loss=told.loss,
                samples=told.samples,
                samples_per_s=told.samples / told.step_ms * 1e3,
                step_ms=told.step_ms,
                communication_ms=told.communication_ms,
                parameter_bytes=told.held.parameters,
                gradient_bytes=told.held.gradients,
                optimizer_bytes=told.held.optimizer_state,
                host_bytes=told.held.host,
                base_bytes=told.base_bytes,
                **told.memory.as_dict(),
            )
        )

    def _fail_not_finite(self) -> None:
        self._recorder.count  # noqa: B018 - fetches the losses that are still on the device
        step = self._recorder.not_finite_step or self.step
        self.step = step - 1
        ends = "has" if self._faults.waits and self.step > self._began_at else "ends with"
        if self.settings.precision == "fp16":
            raise NotFinite(
                f"the loss or its gradient overflows float16 at step {step} although the loss "
                f"scale has fallen to {LOWEST_LOSS_SCALE:g}; the run {ends} the last good "
                f"weights. Choose precision='bf16', lower lr={self.settings.lr:g}, or look for "
                "NaN in the data"
            )
        raise NotFinite(
            f"the loss or its gradient is not finite at step {step}; the run {ends} the weights "
            f"of step {step - 1}. Lower lr={self.settings.lr:g}, or look for NaN in the data"
        )

    def _evaluate(self) -> None:
        if self._evaluation is None or self._evaluated == self.step:
            return
        # In the middle of it, as in a pause there, the random states are those of the evaluation.
        self._drawn = RandomStates.now()
        found = self._evaluated_of(self._evaluation)
        self._drawn = None
        if found is None:
            return
        self._evaluated = self.step
        self._recorder.event(
            Event(
                "eval",
                self.step,
                self._control.elapsed_s(),
                str(found),
                {"loss": found.loss, "accuracy": found.accuracy},
            )
        )
        metric = self.settings.keep_best
        if metric and self.step and better(found, self._best, metric):
            self._best = found
            self._keep_best(self._copied())
        if not math.isfinite(found.loss):
            self._recorder.event(
                Event(
                    "warning",
                    self.step,
                    self._control.elapsed_s(),
                    f"the held-out loss is {found.loss} at step {self.step}; look for NaN in the "
                    "evaluation data, or in what the model makes of it in evaluation mode",
                )
            )


def _bytes(state: Any) -> int:
    """Of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, Mapping) else state
    return sum(map(_bytes, parts)) if isinstance(state, Mapping | list | tuple) else 0


def _engine_seed(seed: int, step: int) -> int:
    """What an engine's generators are restarted with at a step: another one for each."""
    return int(np.random.SeedSequence([seed, step, 1]).generate_state(1)[0]) >> 1
