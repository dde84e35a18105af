"""Fine-tuning as a generator: batches, schedule, evaluation and seeds around a stepper.

Nothing here knows threads or files: ``for result in steps(...)`` trains in the caller's thread.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ortlab.engines.base import Batch, NotFinite, Stepper, StepResult
from ortlab.memory import Memory, Meter
from ortlab.randomness import seeded, undisturbed_random
from ortlab.settings import FinetuneSettings
from ortlab.telemetry import NAN, Event, Recorder, Sample


class Control:
    """Pause and stop, asked for by anyone, read by the loop between steps."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        """When the run began, on `time.perf_counter`'s clock."""
        self.waiting = False
        """Whether the loop stands still now; a pause is asked for before that."""
        self._go = threading.Event()
        self._go.set()
        self._stop = threading.Event()

    def elapsed_s(self) -> float:
        """Seconds since the run began, pauses included."""
        return time.perf_counter() - self.began

    def pause(self) -> None:
        """Asks the loop to wait before its next step; nothing once a stop was asked for."""
        self._go.clear()
        # Looked at afterwards: a stop that comes between the two must not be waited out either.
        if self._stop.is_set():
            self._go.set()

    def resume(self) -> None:
        """Lets a paused loop go on."""
        self._go.set()

    def stop(self) -> None:
        """Asks the loop to end after the step in flight, from a pause too."""
        self._stop.set()
        self._go.set()

    @property
    def pausing(self) -> bool:
        """Whether a pause was asked for."""
        return not self._go.is_set()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    def proceed(self) -> bool:
        """Blocks while paused; False when the loop is to end."""
        if not self._go.is_set() and not self._stop.is_set():
            self.waiting = True
            self._go.wait()
            self.waiting = False
        return not self._stop.is_set()


@dataclass(frozen=True)
class Batches:
    """Data as micro-batches: ``epoch(n)`` iterates over epoch `n`, counted from 0.

    ``length`` is the number of micro-batches in an epoch, None where only reading tells.
    """

    epoch: Callable[[int], Iterator[Batch]]
    length: int | None


def batches(data: Any, settings: FinetuneSettings, *, evaluation: bool = False) -> Batches:
    """`data` as micro-batches, for training or for `evaluation`.

    A DataLoader or another iterable of batches is used as it is. A torch or ``datasets`` Dataset is
    made of samples: they are batched by ``batch_size`` (see `collate`), and in training those that
    can be indexed come in an order of their own each epoch, drawn from the seed.

    ValueError for what is empty, is no iterable, or can be read once but is needed for several
    epochs; a ``batch_size`` that has no effect warns.
    """
    made_of_samples = _of_samples(data)
    single = isinstance(data, torch.Tensor | Mapping | str | bytes)
    if not made_of_samples and (single or not hasattr(data, "__iter__")):
        raise ValueError(
            f"the data is one {type(data).__name__}; give a Dataset, a DataLoader or a list of "
            "batches, as in DataLoader(TensorDataset(inputs, targets), batch_size=16)"
        )
    length = length_of(data)
    once = settings.epochs == 1 and not evaluation
    if length == 0:
        raise ValueError(f"the data is empty: the {type(data).__name__} has no element")
    if made_of_samples:
        return _batched(data, length, settings, shuffle=not evaluation)
    if isinstance(data, Iterator) and not once:
        raise ValueError(
            f"a {type(data).__name__} can be read only once, and this data is read several times; "
            "give a list or a DataLoader (to train on it once: epochs=1)"
        )
    _warn_of_batch_size(data, settings)
    return Batches(lambda _: iter(data), length)


def _of_samples(data: Any) -> bool:
    """Whether `data` yields samples, not batches."""
    # Only who imported it can have made one, and importing it takes a second.
    hub = sys.modules.get("datasets")
    hub_types = (hub.Dataset, hub.IterableDataset) if hub is not None else ()
    return isinstance(data, (Dataset, *hub_types))


def length_of(data: Any) -> int | None:
    """``len(data)``; None where it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _batched(
    data: Any, length: int | None, settings: FinetuneSettings, *, shuffle: bool
) -> Batches:
    size = settings.batch_size
    if length is None or isinstance(data, IterableDataset):
        return Batches(lambda _: map(collate, _grouped(iter(data), size)), None)

    def epoch(number: int) -> Iterator[Batch]:
        order = torch.Generator()
        order.manual_seed(int(np.random.SeedSequence([settings.seed, number]).generate_state(1)[0]))
        loader: DataLoader[Any] = DataLoader(
            data, batch_size=size, shuffle=shuffle, generator=order, collate_fn=collate
        )
        return iter(loader)

    return Batches(epoch, math.ceil(length / size))


def _warn_of_batch_size(data: Any, settings: FinetuneSettings) -> None:
    default = FinetuneSettings.declarations()["batch_size"].default
    if settings.batch_size not in (default, getattr(data, "batch_size", None)):
        warnings.warn(
            f"batch_size={settings.batch_size} has no effect: the {type(data).__name__} makes its "
            "own batches; give the Dataset itself, or set the loader's batch_size",
            stacklevel=4,
        )


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(itertools.islice(items, size)):
        yield group


def collate(samples: Sequence[Any]) -> Batch:
    """One batch of `samples`: mappings, tuples, or values that torch can make a tensor of.

    Text in a mapping is left out, since no model takes it. ValueError for samples of different
    shapes: padding them is the tokenizer's affair.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {
            name: _stack(str(name), [sample[name] for sample in samples])
            for name, value in first.items()
            if not isinstance(value, str)
        }
    if isinstance(first, tuple | list):
        return [
            _stack(f"item {place}", values)
            for place, values in enumerate(zip(*samples, strict=True))
        ]
    return _stack("the data", samples)


def _stack(name: str, values: Sequence[Any]) -> Batch:
    if isinstance(values[0], Mapping):
        return collate(values)
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of a sample is {type(values[0]).__name__}, which is no tensor: {error}; "
            "give a DataLoader with a collate_fn"
        ) from error
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        some = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise ValueError(
            f"{name} has different shapes in one batch ({some}); pad the samples, as with "
            "tokenizer(..., padding='max_length'), or give a DataLoader with a collate_fn"
        )
    return torch.stack(tensors)


def total_steps(length: int | None, settings: FinetuneSettings) -> int | None:
    """Optimizer steps of the whole run; None where the data's length and max_steps are unknown."""
    if length is None:
        return settings.max_steps
    steps_ = settings.epochs * math.ceil(length / settings.accumulation)
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


def evaluate(
    stepper: Stepper, data: Batches, *, step: int, control: Control | None = None
) -> Evaluation | None:
    """The loss (mean over samples) and accuracy of `data`; None when a stop was asked for.

    Random states are what they were before: evaluating more often changes no training.
    """
    loss = torch.zeros(())
    samples = measured = correct = predicted = 0
    with undisturbed_random():
        for batch in data.epoch(0):
            if control is not None and not control.proceed():
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


def steps(
    stepper: Stepper,
    train: Batches,
    settings: FinetuneSettings,
    *,
    control: Control,
    recorder: Recorder,
    evaluation: Batches | None = None,
    meter: Meter | None = None,
) -> Iterator[StepResult]:
    """Trains, and yields after every optimizer step; ends early when `control` says so.

    Samples and "eval" events go to `recorder`. Evaluation comes before the first step, after every
    epoch or ``eval_every`` steps, and at the end unless stopped.

    The seed governs every random number of Python, numpy and torch, which are one for the whole
    process: what else draws from them during the run sees its numbers. When the generator ends or
    is closed they are what they were. Runs that overlap draw from the same states, so their seeds
    do not hold; the last of them to end gives back what was before the first.

    NotFinite when a loss or a gradient is NaN or infinite: at once on a CPU, on another device as
    soon as the recorder has fetched the loss; the stepper has changed no weight since.
    """
    with seeded(settings.seed):
        yield from _Course(stepper, train, settings, control, recorder, evaluation, meter).steps()


@dataclass
class _Course:
    """The state of one run of `steps`."""

    stepper: Stepper
    train: Batches
    settings: FinetuneSettings
    control: Control
    recorder: Recorder
    evaluation: Batches | None
    meter: Meter | None
    step: int = 0
    evaluated: int = -1

    def steps(self) -> Iterator[StepResult]:
        total = total_steps(self.train.length, self.settings)
        self._evaluate()
        for epoch in range(self.settings.epochs):
            yield from self._epoch(epoch, total)
            if self.control.stopping or self.step == total:
                break
            if self.settings.eval_every is None:
                self._evaluate()
        if not self.control.stopping:
            self._evaluate()
        if not self.stepper.finite():
            self._fail_not_finite()

    def _epoch(self, epoch: int, total: int | None) -> Iterator[StepResult]:
        size = self.settings.accumulation
        per_epoch = self.train.length and math.ceil(self.train.length / size)
        every = self.settings.eval_every
        started = self.step
        data = self.train.epoch(epoch)
        while self.control.proceed():
            began = time.perf_counter()
            group = list(itertools.islice(data, size))
            data_s = time.perf_counter() - began
            if not group:
                break
            result = self.stepper.step(group, lr=learning_rate(self.step, total, self.settings))
            step_s = time.perf_counter() - began
            self.step += 1
            within = (self.step - started) / per_epoch if per_epoch else 0.0
            self._record(result, epoch + within, step_s, data_s)
            yield result
            if self.step == total:
                break
            if every is not None and self.step % every == 0:
                self._evaluate()
        if self.step == 0 and not self.control.stopping:
            raise ValueError("the training data is empty: it gave no batch")

    def _record(self, result: StepResult, epoch: float, step_s: float, data_s: float) -> None:
        on_host = result.loss.device.type == "cpu"
        loss: float | torch.Tensor = result.loss.item() if on_host else result.loss
        grad_norm: float | torch.Tensor | None = result.grad_norm
        if isinstance(grad_norm, torch.Tensor) and on_host:
            grad_norm = grad_norm.item()
        memory = self.meter.take() if self.meter is not None else Memory()
        self.recorder.add(
            Sample(
                step=self.step,
                time_s=self.control.elapsed_s(),
                epoch=epoch,
                loss=loss,
                lr=result.lr,
                grad_norm=NAN if grad_norm is None else grad_norm,
                samples=result.samples,
                tokens=result.tokens or NAN,
                samples_per_s=result.samples / step_s,
                tokens_per_s=result.tokens / step_s or NAN,
                step_ms=step_s * 1e3,
                data_ms=data_s * 1e3,
                forward_ms=result.forward_ms,
                backward_ms=result.backward_ms,
                optimizer_ms=result.optimizer_ms,
                **memory.as_dict(),
            )
        )
        # Asking the stepper waits for a device; there the recorder tells a moment later.
        if (on_host and not self.stepper.finite()) or self.recorder.not_finite_step is not None:
            self._fail_not_finite()

    def _fail_not_finite(self) -> None:
        self.recorder.count  # noqa: B018 - fetches the losses that are still on the device
        step = self.recorder.not_finite_step or self.step
        raise NotFinite(
            f"the loss or its gradient is not finite at step {step}; the run ends with the weights "
            f"of step {step - 1}. Lower lr={self.settings.lr:g}, or look for NaN in the data"
        )

    def _evaluate(self) -> None:
        if self.evaluation is None or self.evaluated == self.step:
            return
        found = evaluate(self.stepper, self.evaluation, step=self.step, control=self.control)
        if found is None:
            return
        self.evaluated = self.step
        self.recorder.event(
            Event(
                "eval",
                self.step,
                self.control.elapsed_s(),
                str(found),
                {"loss": found.loss, "accuracy": found.accuracy},
            )
        )
        if not math.isfinite(found.loss):
            self.recorder.event(
                Event(
                    "warning",
                    self.step,
                    self.control.elapsed_s(),
                    f"the held-out loss is {found.loss} at step {self.step}; look for NaN in the "
                    "evaluation data, or in what the model makes of it in evaluation mode",
                )
            )
