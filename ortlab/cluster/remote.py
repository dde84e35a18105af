"""Stepper that runs on workers: the kernel's side of `ortlab.cluster.training`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import fmean
from typing import Any, Final, ParamSpec, TypeVar

import safetensors
import torch
from torch import nn

from ortlab.checkpoint import sharded
from ortlab.checkpoint.sharded import Shards
from ortlab.cluster import packing, training
from ortlab.cluster.call import RankError
from ortlab.cluster.host_files import HostFiles, SentFiles, SharedFiles
from ortlab.cluster.training import RankReport
from ortlab.cluster.workers import Workers
from ortlab.engines.base import (
    Batch,
    EvalResult,
    LossFunction,
    RankStep,
    Report,
    StateBytes,
    StepperLost,
    StepResult,
    tell,
)
from ortlab.engines.nonfinite import Cause
from ortlab.engines.torch.user_optimizer import OptimRequest
from ortlab.history.run_folder import private_home
from ortlab.metrics.timeline import RankTimeline
from ortlab.metrics.user_metrics import joined
from ortlab.settings import FinetuneSettings
from ortlab.utils import scratch

P = ParamSpec("P")
R = TypeVar("R")

_NUMBERS = itertools.count()
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_TIMES = ("forward_ms", "backward_ms", "optimizer_ms", "communication_ms")


def check(model: nn.Module, loss: LossFunction | None, optim: OptimRequest | None = None) -> None:
    """Check that what a run needs can be sent to another process.

    Args:
        model: The model.
        loss: The loss function, or None.
        optim: The user's optimizer and scheduler, or None for those of the settings.

    Raises:
        ValueError: If one of them cannot be pickled; the message says which and why.
    """
    if optim is not None:
        optim.check_elsewhere()
    for name, value in (("the model", model), ("the loss", loss), ("the optimizer", optim)):
        try:
            packing.check(value)
        except Exception as error:
            raise ValueError(
                f"{name} cannot be sent to workers: {error}; use only objects that can be pickled, "
                "or train with workers=1"
            ) from error


class RemoteStepper:
    """`Stepper` that trains copies of a model on all workers, which are reserved for it.

    Every rank gets every batch and trains on its own rows; see
    `ortlab.engines.distributed.steppers.prepare`. The model in this process has the weights of the
    last `state_dict`, and after `close` the final ones.

    If a rank dies, or fails alone or in the middle of a step, the state is lost and StepperLost is
    raised. If all ranks fail before that, the error is a `RankError`, and the stepper can continue.

    Args:
        workers: The workers.
        model: The model.
        loss: The loss function, or None where the model returns its loss.
        settings: The run's settings.
        optim: The user's optimizer and scheduler, from factories; None for those of the settings.
        name: Name of the run, for messages to other users of the workers.

    Raises:
        StepperLost: If a rank fails alone or dies during the preparation.
        RankError: If all ranks fail.
        ValueError: If the model cannot be sent, or other work uses the workers.
        RuntimeError: If the workers were stopped.
    """

    def __init__(
        self,
        workers: Workers,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        optim: OptimRequest | None = None,
        name: str = "a run",
    ) -> None:
        self._workers = workers
        self._owner, self._loss, self._optim = model, loss, optim
        self._neighbors = settings.parallel.tensor_parallel
        self._number = next(_NUMBERS)
        self._lost = self._ahead = self._closed = False
        self._report: Report | None = None
        self._finite = True
        self._asked: Future[list[RankTimeline]] | None = None
        with contextlib.ExitStack() as stack:
            self._group = stack.enter_context(workers.rendezvous(name))
            self._files: HostFiles = (
                SharedFiles()
                if self._group.shared
                else SentFiles(self._ask_each, workers.first_on_host)
            )
            tell(f"preparing on {len(workers)} worker{'s' * (len(workers) > 1)}")
            with self._packed() as (packed, file):
                self._hear(self._ask(training.prepare, self._number, packed, file, settings))
            self._leaving = stack.pop_all()

    @contextlib.contextmanager
    def _packed(self) -> Iterator[tuple[bytes, str]]:
        """Pack model, loss and optimizer for `packing.unpack` on the ranks."""
        file = self._group.folder / "model.safetensors"
        try:
            packed = packing.pack((self._owner, self._loss, self._optim), file)
            with self._files.lent(file) as name:
                yield packed, name
        finally:
            file.unlink(missing_ok=True)

    def _ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `function` on every rank and return the results."""
        return self._heard(lambda: self._workers.run_together(function, *args, **kwargs))

    def _ask_each(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call `function` on every rank with its own arguments and return the results."""
        return self._heard(lambda: self._workers.run_each(function, arguments))

    def _heard(self, call: Callable[[], list[R]]) -> list[R]:
        """Make a call; StepperLost if the ranks do not all end it in the same way."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, RankError) and error.together:
                raise
            self._lost = True
            lost = StepperLost(self._workers.broken or str(error))
            for note in getattr(error, "__notes__", ()):
                lost.add_note(note)
            raise lost from error
        except KeyboardInterrupt:
            self._lost = True
            raise

    def _hear(self, told: Sequence[RankReport]) -> None:
        self._report = told[0].report or self._report
        self._finite = all(each.finite for each in told)

    def step(self, batches_: Sequence[Batch], *, lr: float) -> StepResult:
        """See `Stepper.step`; times are the mean over the ranks."""
        arguments = (self._number, list(batches_), lr)
        asked, self._asked = self._asked, None
        if asked is None:
            found = self._ask(training.step, *arguments)
        else:
            try:
                recorded = self._ask(training.recorded_step, *arguments)
            except BaseException as error:
                asked.set_exception(error)
                raise
            asked.set_result([timeline for _, _, timeline in recorded])
            found = [(result, told) for result, told, _ in recorded]
        self._ahead = True
        results, told = zip(*found, strict=True)
        self._hear(told)
        ranks = tuple(
            RankStep(
                loss=float("nan") if result.own_loss is None else float(result.own_loss),
                samples=result.own_samples,
                step_ms=each.step_ms,
                communication_ms=result.communication_ms,
                memory=each.memory,
                held=each.held,
                base_bytes=each.base_bytes,
            )
            for result, each in found
        )
        times: dict[str, Any] = {
            name: fmean(getattr(result, name) for result in results) for name in _TIMES
        }
        first: StepResult = results[0]
        return dataclasses.replace(first, ranks=ranks, **times)

    def record(self) -> Future[list[RankTimeline]]:
        """Record the next step of all ranks under torch's profiler; any thread may ask.

        Returns:
            Future of the ranks' timelines; it never ends if no step follows.
        """
        asked = self._asked
        if asked is None:
            asked = self._asked = Future()
        return asked

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> EvalResult:
        """See `Stepper.evaluate`; the predictions are those of all ranks, in their order."""
        found = self._ask(training.evaluate, self._number, batch, outputs)
        self._hear([told for _, told in found])
        first: EvalResult = found[0][0]
        if not outputs:
            return first
        # Neighbors that share the layers have the same rows; of pipeline stages the last has some.
        own = [each for each, _ in found[:: self._neighbors]]
        return dataclasses.replace(
            first,
            predictions=_of_all(each.predictions for each in own),
            targets=_of_all(each.targets for each in own),
        )

    def evaluated(self, value: float) -> None:
        """See `Stepper.evaluated`."""
        self._ask(training.evaluated, self._number, value)

    def finite(self) -> bool:
        """See `Stepper.finite`."""
        return self._finite

    def report(self) -> Report:
        """See `Stepper.report`; it is rank 0's report."""
        assert self._report is not None
        return self._report

    def first_bad(self, micro_batches: Sequence[Batch], settings: FinetuneSettings) -> Cause | None:
        """See `ortlab.engines.nonfinite.first_bad`; rank 0, which has the memory, runs it."""
        self.state_dict()
        with self._packed() as (packed, file):
            return self._ask(training.first_bad, packed, file, list(micro_batches), settings)[0]

    def state_dict(self) -> dict[str, Any]:
        """See `Stepper.state_dict`; ``shards`` are the files that the ranks have written."""
        shards = self._where_there_is_room(self._written)
        state = sharded.read(shards.folder, shards.outline)
        self._owner.load_state_dict(state["model"])
        self._ahead = False
        return {**state, "shards": shards}

    def _written(self, within: Path) -> Shards:
        folder = Shards.place(within)
        try:
            with self._files.taken(folder) as name:
                outline, *_ = self._ask(training.write_state, self._number, name)
        except BaseException:
            scratch.remove(folder)
            raise
        return Shards(folder, outline)

    def _where_there_is_room(self, write: Callable[[Path], Shards]) -> Shards:
        """Call `write` with the folder of the group, and if that disk is full, with $ORTLAB_HOME.

        The first is the folder for temporary files where all ranks run on this host.
        """
        try:
            return write(self._group.folder.parent)
        except (OSError, RankError, safetensors.SafetensorError) as error:
            if not any(os.strerror(number) in str(error) for number in _FULL):
                raise
            return write(private_home())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`; ranks read the files of ``shards`` if there are any."""
        whole = {name: value for name, value in state.items() if name != "shards"}
        lies = state.get("shards") or self._where_there_is_room(
            lambda within: sharded.lay(whole, within)
        )
        with self._files.lent(lies.folder) as name:
            self._hear(self._ask(training.read_state, self._number, name, lies.outline))
        self._ahead = True

    def adopt(self, settings: FinetuneSettings) -> None:
        """See `Stepper.adopt`."""
        self._ask(training.adopt, self._number, settings)

    def rest(self) -> None:
        """See `Stepper.rest`."""
        self._ask(training.rest, self._number)

    def reseed(self, seed: int) -> None:
        """See `Stepper.reseed`."""
        self._ask(training.reseed, self._number, seed)

    def peak_bytes(self, step: Callable[[], object]) -> float:
        """Measure the peak memory of a step.

        Args:
            step: Function that takes the step.

        Returns:
            The largest sum of a rank's state and of its growth during the step, in bytes.
        """
        self._ask(training.growth, self._number, began=True)
        step()
        found = self._ask(training.growth, self._number, began=False)
        return max(_total(held) + grown for held, grown in found)

    def state_bytes(self) -> int:
        """Return the bytes of the training's state on the rank that has most of it."""
        found = self._ask(training.growth, self._number, began=False)
        return max(_total(held) for held, _ in found)

    def close(self) -> None:
        """See `Stepper.close`; releases the workers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._lost:
                if self._ahead:
                    self.state_dict()
                self._ask(training.end, self._number)
            elif self._workers.usable():
                with contextlib.suppress(RuntimeError):  # the workers may end meanwhile
                    self._workers.run(training.forget, self._number)
        finally:
            self._leaving.close()


def _total(held: StateBytes) -> int:
    return held.parameters + held.gradients + held.optimizer_state


def _of_all(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return joined(known) if known else None
