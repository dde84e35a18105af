"""Tracker of a user's own training loop: its loss, rates, times and memory."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ortlab.engines.batch import count
from ortlab.metrics.recorder import INDEX, NAN, Event, Recorder, Sample, State, Status
from ortlab.settings import unknown_name
from ortlab.training.data_loading import length_of
from ortlab.utils.process_memory import SAMPLER, Meter

B = TypeVar("B")

LOGGED = ("loss", "lr", "grad_norm", "samples", "tokens")
"""Values of a step that a loop can log."""


class Tracker(Generic[B]):
    """Loop over the batches of a loader that records every turn as a step.

    The loss is the value given to `log`, or else the scalar on which ``backward`` was last called
    in this thread; if that was scaled (by a GradScaler, or divided for accumulation), log the loss
    itself. The forward time is the time before ``backward``, the optimizer time that of
    ``optimizer.step``. The learning rate is that of the optimizer's first parameter group.

    By default the loop is one pass over the loader. For several passes, one after the other, use
    the tracker as a context::

        with ortlab.track(loader) as t:
            for epoch in range(3):
                for data, target in t: ...

    During a pass, ``torch.Tensor.backward`` and torch's optimizer hooks are intercepted. They are
    restored however it ends: at the end, by ``break``, by an exception, by an interrupt.

    Args:
        loader: The loader, or a list of batches.
        name: Title of the charts; None for one made from the loader's class.
        show: Shows the tracker when the first pass begins.

    Raises:
        ValueError: If `loader` is not iterable.
    """

    interactive = False

    def __init__(
        self,
        loader: Iterable[B],
        *,
        name: str | None = None,
        show: Callable[[Tracker[Any]], None] | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise ValueError(
                f"cannot loop over a {type(loader).__name__}; pass a loader or a list of batches"
            )
        self._loader: Iterable[B] | None = loader
        self._length = length_of(loader)
        self.title = name or f"loop over {type(loader).__name__}"
        """Title of the charts."""
        self.recorder = Recorder()
        """Metrics and events of the loop."""
        self._show = show
        self._state: State = "starting"
        self._error: str | None = None
        self._began = 0.0
        self._ended = 0.0
        self._step = 0
        self._passes = 0
        self._in_context = False
        self._passing = False
        self._stopping = False
        self._meter: Meter | None = None
        self.turn = Turn()
        self._over = threading.Event()

    def __repr__(self) -> str:
        total = "" if self._length is None else f"/{self._length * max(self._passes, 1)}"
        return f"<Tracker {self.title}: {self._state}, step {self._step}{total}>"

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader has no length")
        return self._length

    def __enter__(self) -> Self:
        self._in_context = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in_context = False
        if error is None:
            self._end("finished")
        elif isinstance(error, Exception):
            self._end("failed", f"{type(error).__name__}: {error}")
        else:
            self._end("stopped")

    def __iter__(self) -> Iterator[B]:
        if self.over():
            raise RuntimeError(
                f"{self.title} is over; for several passes use: with ortlab.track(loader) as t: ..."
            )
        return self._pass()

    def log(self, **values: float | torch.Tensor) -> None:
        """Set values of the current step.

        Args:
            **values: Any of loss, lr, grad_norm, samples and tokens. A tensor on a device is
                fetched later, by another thread.

        Raises:
            ValueError: If a name is unknown.
        """
        for name, value in values.items():
            if name not in LOGGED:
                raise ValueError(f"cannot log {name!r}: {unknown_name(name, LOGGED)}")
            self.turn.logged[name] = number(value)

    def status(self) -> Status:
        """Return the current status. See `ortlab.metrics.recorder.Watched.status`."""
        now = self._ended or time.perf_counter()
        total = self._length if self._length is None else self._length * max(self._passes, 1)
        left_s = None
        if total is not None and self._step and not self.over():
            recent, _ = self.recorder.since(max(self.recorder.count - 64, 0))
            left_s = (total - self._step) * float(recent[:, INDEX["step_ms"]].mean()) / 1e3
        return Status(
            state=self._state,
            step=self._step,
            total_steps=total,
            elapsed_s=now - self._began if self._began else 0.0,
            left_s=left_s,
            error=self._error,
        )

    def pause(self) -> None:
        """Do nothing: the loop is the user's, and a busy kernel cannot react to a button."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def stop(self) -> None:
        """End the loop after the current turn, as if the loader were exhausted."""
        self._stopping = True

    def over(self) -> bool:
        """Return whether the loop has ended."""
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended.

        Args:
            timeout: Seconds to wait at most; None to wait without a limit.

        Returns:
            True if the loop has ended.
        """
        return self._over.wait(timeout)

    def _pass(self) -> Iterator[B]:
        assert self._loader is not None
        if self._passing:
            raise RuntimeError(
                f"{self.title} is in a loop already, and a tracker records one pass at a time; for "
                "two at once, as in zip, track each loader with ortlab.track"
            )
        self._passing = True
        ended: State = "stopped"
        error = None
        try:
            self._begin()
            INTERCEPTION.enter(self)
            yield from self._turns(iter(self._loader))
            ended = "stopped" if self._stopping else "finished"
        # Only the loader and the viewer can raise here: the loop's body runs in the caller.
        except Exception as raised:
            ended, error = "failed", f"{type(raised).__name__}: {raised}"
            raise
        finally:
            INTERCEPTION.leave(self)
            self._passing = False
            # After break or an exception the last turn counts if it trained.
            if self.turn.going and self.turn.trained:
                self._record()
            if not self._in_context:
                self._end(ended, error)

    def _begin(self) -> None:
        self._passes += 1
        if self._began:
            return
        self._began = time.perf_counter()
        self._meter = SAMPLER.start()
        self._state = "running"
        if self._show is not None:
            self._show(self)

    def _turns(self, batches: Iterator[B]) -> Iterator[B]:
        while not self._stopping:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.turn = Turn(began, batch)
            yield batch
            self._record()

    def _record(self) -> None:
        assert self._meter is not None
        turn, now = self.turn, time.perf_counter()
        turn.going = False
        self._step += 1
        step_s = now - turn.began
        rate_s = step_s if self._step > 1 else NAN  # the first step may compile, and warms up
        values: dict[str, Any] = {"loss": turn.loss, "lr": turn.lr, "samples": turn.samples}
        values["tokens"] = turn.tokens or NAN
        values |= turn.logged
        epoch = self._step / self._length if self._length else self._passes - 1
        self.recorder.add(
            Sample(
                step=self._step,
                time_s=now - self._began,
                epoch=epoch,
                samples_per_s=values["samples"] / rate_s,
                tokens_per_s=values["tokens"] / rate_s,
                step_ms=step_s * 1e3,
                data_ms=turn.data_s * 1e3,
                forward_ms=turn.forward_s * 1e3 if turn.trained else NAN,
                backward_ms=turn.backward_s * 1e3 if turn.trained else NAN,
                optimizer_ms=turn.optimizer_s * 1e3 if turn.trained else NAN,
                **self._meter.take().as_dict(),
                **values,
            )
        )

    def _end(self, state: State, error: str | None = None) -> None:
        if self.over():
            return
        self._ended = time.perf_counter()
        self._state, self._error = state, error
        if self._meter is not None:
            SAMPLER.end(self._meter)
            self.recorder.event(Event("state", self._step, self._ended - self._began, state))
        self.recorder.close()
        self._loader = None
        self._over.set()


class Watching(Protocol):
    """Receiver of torch's backward and optimizer steps."""

    @property
    def turn(self) -> Turn:
        """Current turn of the loop."""
        ...


class Turn:
    """One turn of a loop: its start, its times, and the values that were seen.

    Args:
        began: Start on the clock of `time.perf_counter`; 0 for a turn that has not begun.
        batch: The turn's batch, from which samples and tokens are counted.
    """

    def __init__(self, began: float = 0.0, batch: Any = None) -> None:
        self.began = began
        self.mark = time.perf_counter()
        self.data_s = self.mark - began
        self.forward_s = self.backward_s = self.optimizer_s = 0.0
        self.depth = 0
        self.samples, self.tokens = count(batch)
        self.loss: float | torch.Tensor = NAN
        self.lr: float | torch.Tensor = NAN
        self.logged: dict[str, float | torch.Tensor] = {}
        self.going = began > 0
        self.trained = False

    def before_backward(self) -> None:
        """Record the end of the forward pass."""
        now = time.perf_counter()
        self.forward_s += now - self.mark
        self.mark = now

    def after_backward(self, loss: torch.Tensor) -> None:
        """Record the end of a backward pass.

        Args:
            loss: Tensor on which ``backward`` was called.
        """
        now = time.perf_counter()
        self.backward_s += now - self.mark
        self.mark = now
        self.trained = True
        if loss.numel() == 1:
            self.loss = number(loss)

    def before_optimizer(self) -> None:
        """Record the start of an optimizer step."""
        # A subclass whose step calls its base class's step triggers the hook twice, nested.
        self.depth += 1
        if self.depth == 1:
            self.mark = time.perf_counter()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Record the end of an optimizer step.

        Args:
            optimizer: The optimizer.
        """
        self.depth -= 1
        if self.depth:
            return
        now = time.perf_counter()
        self.optimizer_s += now - self.mark
        self.mark = now
        self.lr = number(optimizer.param_groups[0]["lr"])


class Interception:
    """Hooks on torch's backward and optimizer steps, for the last tracker of each thread."""

    def __init__(self) -> None:
        # Reentrant, since gc may finalize a dropped loop while this thread owns the lock. The list
        # is changed in single operations for the same reason, and because `_turn` takes no lock.
        self._lock = threading.RLock()
        self._entered: list[tuple[int, Watching]] = []
        self._give_back: Callable[[], None] | None = None

    def enter(self, tracker: Watching) -> None:
        """Begin to report the calling thread's steps to a tracker.

        Args:
            tracker: The tracker.
        """
        with self._lock:
            self._entered.append((threading.get_ident(), tracker))
            if self._give_back is None:
                self._give_back = self._take()

    def leave(self, tracker: Watching) -> None:
        """Stop reporting to a tracker. One that has not entered is ignored.

        Another thread may call this: a loop that was dropped halfway ends with its last reference.

        Args:
            tracker: The tracker.
        """
        with self._lock:
            for entry in [entry for entry in self._entered if entry[1] is tracker]:
                self._entered.remove(entry)
            if not self._entered and self._give_back is not None:
                give_back, self._give_back = self._give_back, None
                give_back()

    def _turn(self) -> Turn | None:
        here = threading.get_ident()
        for thread, tracker in reversed(self._entered):
            if thread == here:
                return tracker.turn
        return None

    def _take(self) -> Callable[[], None]:
        original: Callable[..., None] = torch.Tensor.backward

        @functools.wraps(original)
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            turn = self._turn()
            if turn is not None:
                turn.before_backward()
            original(loss, *args, **kwargs)
            if turn is not None:
                turn.after_backward(loss)

        def before(*_: Any) -> None:
            turn = self._turn()
            if turn is not None:
                turn.before_optimizer()

        def after(optimizer: Optimizer, *_: Any) -> None:
            turn = self._turn()
            if turn is not None:
                turn.after_optimizer(optimizer)

        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

        def give_back() -> None:
            for hook in hooks:
                hook.remove()
            # If somebody replaced it after us, theirs calls ours, which then does nothing.
            if torch.Tensor.backward is backward:
                torch.Tensor.backward = original  # type: ignore[method-assign]

        return give_back


INTERCEPTION = Interception()
"""Interception of this process."""


def number(value: float | torch.Tensor) -> float | torch.Tensor:
    """Return a float if that needs no wait, and otherwise a copy that later steps do not change.

    Args:
        value: A number, or a tensor of one element.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.detach()
    return value.item() if value.device.type == "cpu" else value.clone()
