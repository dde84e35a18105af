"""State of a run between two optimizer steps: everything that a checkpoint captures."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint, Order, Position, Unit
from ortlab.checkpoint.checks import check_model, check_optimizer, check_own_optimizer
from ortlab.engines.base import Stepper
from ortlab.engines.loss_scale import check_loss_scale
from ortlab.engines.own_optimizer import OwnOptim
from ortlab.engines.torch.stepper import trained_groups
from ortlab.metrics.recorder import Event, Recorder
from ortlab.settings import FinetuneSettings, is_own
from ortlab.training.control import Control
from ortlab.training.data_loading import Batches
from ortlab.training.schedule import total_steps
from ortlab.utils.rng import RandomStates, is_torch_state

_FIXED = ("seed", "optimizer")


class TrainingState:
    """Stepper, settings and position of a run, shared by the parts of `Trainer`.

    Args:
        stepper: Stepper that trains first.
        train: The training data.
        settings: Settings that the run starts with.
        control: Clock of the run.
        recorder: Recorder that receives the events of the run.
        begin: Position that the run starts from, in the units of `train`; None for the beginning.
    """

    def __init__(
        self,
        stepper: Stepper,
        train: Batches,
        settings: FinetuneSettings,
        *,
        control: Control,
        recorder: Recorder,
        begin: Position | None = None,
    ) -> None:
        self.stepper = stepper
        """Stepper that trains now."""
        self.settings = settings
        """Settings in effect."""
        self.train = train
        """The training data."""
        self.recorder = recorder
        """Recorder of the run."""
        self.total = total_steps(train, settings, begin)
        """Optimizer steps of the whole run; None if unknown."""
        self.step = begin.step if begin else 0
        """Optimizer steps done."""
        self.began_at = self.step
        """Step that the run started from."""
        self.epoch = begin.epoch if begin else 0
        """Number of the epoch, counted from 0."""
        self.read = begin.read if begin else 0
        """Items of the epoch that the steps done have used."""
        self.evaluated = begin.evaluated if begin else -1
        """Step of the last evaluation; -1 before the first."""
        self.order: Order | None = begin.order if begin else None
        """Source of the order of the current epoch; None between two epochs."""
        self.drawn: RandomStates | None = begin.random if begin else None
        """Random states of the position between two steps, if they are not the current ones."""
        self.stopped_early = False
        """True if the evaluations have not improved for ``early_stopping_patience``."""
        self.lost = False
        """True from the loss of the stepper's workers until another stepper replaces it."""
        self.recovery: Checkpoint | None = None
        """Checkpoint that a run on workers continues from if it loses them."""
        self._control = control

    @property
    def done(self) -> bool:
        """True if all steps of the run are done, or those until an early stop."""
        return self.stopped_early or (self.total is not None and self.step >= self.total)

    def position(self) -> Position:
        """Return the position between the last step and the next one.

        Returns:
            The position, with the random states that the next step starts from.
        """
        return Position(
            step=self.step,
            epoch=self.epoch,
            read=self.read,
            length=self.train.length,
            unit=self.train.unit,
            evaluated=self.evaluated,
            random=self.drawn or RandomStates.now(),
            order=self.order,
            engine_seed=_engine_seed(self.settings.data.seed, self.step),
        )

    def snapshot(self) -> Checkpoint:
        """Return a checkpoint that shares memory with the model, for when no step follows.

        Returns:
            The state between two steps. After a loss of workers, the last recovery checkpoint.
        """
        if self.lost:
            assert self.recovery is not None
            return self.recovery
        state = self.stepper.state_dict()
        return Checkpoint(
            state["model"],
            state["optimizer"],
            self.position(),
            self.settings.as_dict(),
            state["loss_scale"],
            shards=state.get("shards"),
            scheduler=state.get("scheduler"),
        )

    def copy(self) -> Checkpoint:
        """Return a checkpoint in memory of its own without changing the run's random numbers.

        Where an engine's own generators cannot be read, a run that resumes from this checkpoint
        draws other random numbers there than this run does.

        Returns:
            The state between two steps, on the CPU.
        """
        return self.snapshot().copy()

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint that a resumed run continues exactly as this run does.

        An engine whose own generators cannot be read is reseeded with a seed that the checkpoint
        records. This run then draws other random numbers than it would without the checkpoint, and
        the same ones as a run that resumes from it.

        Returns:
            The state between two steps, in memory of its own, on the CPU.
        """
        taken = self.copy()
        if not self.lost:
            self.stepper.reseed(taken.position.engine_seed)
        return taken

    def load(self, taken: Checkpoint) -> None:
        """Restore the stepper and the random states from a checkpoint.

        Args:
            taken: The checkpoint.
        """
        self.stepper.load_state_dict(
            {
                "model": taken.model,
                "optimizer": taken.optimizer,
                "loss_scale": taken.loss_scale,
                "scheduler": taken.scheduler,
                "shards": taken.shards,
            }
        )
        taken.position.random.give_back()
        self.stepper.reseed(taken.position.engine_seed)

    def remember(self, taken: Checkpoint) -> None:
        """Keep a checkpoint in memory for a run on workers to recover from.

        Args:
            taken: The checkpoint. It is dropped if the run trains in this process.
        """
        self.recovery = taken if self.settings.parallel.elsewhere else None

    def rewind(self, position: Position) -> None:
        """Set the counters and the order back to a position, without touching the stepper.

        Args:
            position: Position of an earlier checkpoint of this run.
        """
        self.step, self.epoch, self.read = position.step, position.epoch, position.read
        self.evaluated, self.order = position.evaluated, position.order
        self.drawn = position.random

    def use(self, settings: FinetuneSettings) -> None:
        """Put settings into effect and recompute the length of the run.

        Args:
            settings: The settings for the next step.
        """
        self.settings = settings
        self.recount()

    def recount(self) -> None:
        """Recompute the length of the run from the current position."""
        self.total = total_steps(self.train, self.settings, self.position())

    def tell(self, kind: str, text: str, values: dict[str, float] | None = None) -> None:
        """Record an event at the current step.

        Args:
            kind: Kind of the event, such as "note" or "warning".
            text: Text of the event.
            values: Numbers of the event, by name.
        """
        event = Event(kind, self.step, self._control.elapsed_s(), text, values or {})
        self.recorder.event(event)


def check_state(
    begin: Checkpoint, model: nn.Module, settings: FinetuneSettings, given: OwnOptim | None = None
) -> None:
    """Check that a model, its optimizer, its scheduler and its loss scale can load a checkpoint.

    A stepper checks that too, but once it exists, the model may be on another device and workers
    may have started.

    Args:
        begin: The checkpoint.
        model: The user's model.
        settings: Settings of the new run.
        given: The user's optimizer or scheduler; None for those of the settings.

    Raises:
        ValueError: If they cannot.
    """
    there, here = begin.settings.get("lr_scheduler_type", ""), settings.optim.lr_scheduler_type
    if there != here and (is_own(there) or is_own(here)):
        raise ValueError(
            f"lr_scheduler_type={here!r} does not match the checkpoint, which has {there!r}: its "
            "optimizer's groups depend on it; give the scheduler that the run had, or start a new "
            "run without resume_from"
        )
    check_model(begin.model, model.state_dict())
    if given is None or given.named:
        groups = trained_groups(model)
        own = {"param_groups": [{"params": group} for group in groups]}
        parameters = [each for group in groups for each in group]
        check_optimizer(begin.optimizer, own, parameters, settings.optim.optimizer)
    else:
        check_own_optimizer(begin.optimizer, given.optimizer.state_dict())
    if given is not None:
        given.check(begin.scheduler)
    check_loss_scale(begin.loss_scale)


def place(begin: Checkpoint, data: Batches, settings: FinetuneSettings) -> Position:
    """Return the position in `data` at which a run continues from a checkpoint.

    Args:
        begin: The checkpoint.
        data: Data of the new run.
        settings: Settings of the new run.

    Returns:
        The checkpoint's position, counted in the units of `data`.

    Raises:
        ValueError: If the settings or the data do not match the checkpoint.
    """
    for name in _FIXED:
        there, here = begin.settings.get(name), settings[name]
        if there != here:
            raise ValueError(
                f"{name}={here!r} does not match the checkpoint, which has {name}={there!r}: its "
                f"place in the data and its optimizer's state depend on it; leave {name} out"
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
            f"the data has {count_of(data.length, data.unit)} per epoch, but the checkpoint's had "
            f"{count_of(position.length, position.unit)}; pass the data that the checkpoint was "
            "trained on"
        )
    order = position.order
    if order is not None and len(order.generators) != len(data.generators):
        raise ValueError(
            f"the loader has {len(data.generators)} generators of its own, but the checkpoint's "
            f"had {len(order.generators)}; create the loader as it was created then"
        )
    if fault := _fault(begin, data):
        raise ValueError(
            f"the checkpoint's position is not one of a run: {fault}; use another checkpoint, such "
            "as those in the run's folder"
        )
    return position


def _fault(begin: Checkpoint, data: Batches) -> str:
    """Return what a position has that no run on `data` has; "" for nothing."""
    place, order = begin.position, begin.position.order
    length = place.length if place.length is not None and data.exact else math.inf
    most = place.read + (place.epoch * length if place.epoch else 0)
    if place.read > length:
        return f"{place.read} of {count_of(place.length, place.unit)} are read"
    if place.step > most:
        return f"{place.step} steps have read {most} {place.unit}"
    # The number of epochs may have been lowered in the run, but each epoch has a step.
    if place.epoch > max(place.step, begin.settings.get("num_train_epochs", 0)):
        return f"epoch {place.epoch} after {place.step} steps"
    if place.read and order is None:
        return f"the order of the {count_of(place.read, place.unit)} that were read is missing"
    if order is not None and not all(
        is_torch_state(state, generator.device)
        for state, generator in zip(order.generators, data.generators, strict=True)
    ):
        return "the random state of a generator of the loader is not valid"
    return ""


def count_of(length: int | None, unit: Unit) -> str:
    """Return a number of items in words.

    Args:
        length: Number of items; None if unknown.
        unit: Unit of the items.

    Returns:
        Text such as "48 samples".
    """
    return f"an unknown number of {unit}" if length is None else f"{length} {unit}"


def _in_samples(position: Position, length: int | None, size: int) -> Position:
    """Convert a position in micro-batches of `size` to samples, if their numbers match."""
    read = position.read * size
    if length is not None:
        read = min(read, length)  # the last micro-batch is smaller
        if math.ceil(length / size) != position.length:
            return position
    elif position.length is not None:
        return position
    return dataclasses.replace(position, read=read, length=length, unit="samples")


def _engine_seed(seed: int, step: int) -> int:
    """Return the seed that an engine's generators are restarted with at a step."""
    return int(np.random.SeedSequence([seed, step, 1]).generate_state(1)[0]) >> 1
