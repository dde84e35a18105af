"""A run of another library's trainer as seen from outside: its metrics, state and folder."""

from __future__ import annotations

import datetime
import functools
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlab.engines.base import Report, wrapped_model
from ortlab.engines.batch import count, tensors
from ortlab.history import sqlite_index
from ortlab.history.pending_writes import PendingWrites
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import RunFolder, told_taken
from ortlab.history.run_result import RunResult
from ortlab.metrics.evaluation import Goal, evaluations_of, told_last
from ortlab.metrics.recorder import INDEX, NAN, Event, Recorder, Sample, State, Status
from ortlab.metrics.told_events import told_warnings
from ortlab.settings import AUTO, FinetuneSettings
from ortlab.training.tracker import INTERCEPTION, Turn
from ortlab.utils import at_exit
from ortlab.utils.environment import environment
from ortlab.utils.process_memory import SAMPLER, Meter

if TYPE_CHECKING:
    from torch import nn

_WAIT_S = 0.1


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Return the settings of a model's engine, and the defaults of all others.

    Args:
        model: A model, wrapped or not.
    """
    declared = FinetuneSettings.declarations()
    found = {name: each.default for name, each in declared.items()} | {"engine": "eager"}
    if (wrapped := wrapped_model(model)) is not None:
        own = wrapped.settings.as_dict()
        found |= {name: value for name, value in own.items() if name in declared}
    return found


class Step(Turn):
    """An optimizer step of one or more batches.

    The loss is the sum of the values that ``backward`` was called on, because the Trainer divides
    before that. It is left out if a loss scale multiplied it.

    Args:
        began: Start of the step, in seconds of `time.perf_counter`.
        scaled: Whether a loss scale multiplies the loss.
    """

    def __init__(self, began: float, *, scaled: bool = False) -> None:
        super().__init__(began)
        self.samples = self.tokens = 0
        self._scaled = scaled

    def after_backward(self, loss: torch.Tensor) -> None:
        """See `Turn.after_backward`; the forward of the next batch may follow."""
        before = self.loss
        super().after_backward(loss)
        if self._scaled:
            self.loss = NAN
        elif not (isinstance(before, float) and math.isnan(before)):
            self.loss = before + self.loss

    def count(self, batch: Any) -> None:
        """Count the samples and tokens of a batch that goes into the model.

        Args:
            batch: Arguments of the model.
        """
        samples, tokens = count(batch)
        self.samples += samples
        self.tokens += tokens


class TrainerRun(StoredRun):
    """The run of one call of ``train``, recorded by a callback, or of a loop (`LoopRun`).

    It is a `metrics.recorder.Watched` and is saved like any run (see `history.run_folder`), with
    the Trainer's own arguments in ``trainer.json`` and without checkpoints, which the Trainer saves
    elsewhere. Pause and stop work only if ``train`` was called in a thread of its own: a kernel
    that is busy with it receives no message of a button.

    Args:
        model: The model that the Trainer trains.
        total_steps: Number of optimizer steps of the whole training; None if it is not known.
        step: Optimizer steps that were done before, if it resumes from a checkpoint.
        settings: Settings that correspond to the Trainer's arguments.
        arguments: The Trainer's arguments.
        name: Name of the run; None for the next run-N.
        root: Folder of the runs; None for the default.
        choice: Reason for the engine if "auto" was asked for; "" if it was named.
        resumed: Where the run resumes from, in words; "" for a new run.
        where: What trains, for the title.
        call: The method that trains, for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        total_steps: int | None,
        step: int,
        settings: Mapping[str, Any],
        arguments: Mapping[str, Any],
        name: str | None = None,
        root: Path | None = None,
        choice: str = "",
        resumed: str = "",
        where: str = "a Trainer",
        call: str = "train",
    ) -> None:
        self.interactive = threading.current_thread() is not threading.main_thread()
        """True if pause and stop have an effect."""
        self.error: BaseException | None = None
        """Error that ``train`` raised, if it is known."""
        self.resumed = resumed or (f"resumed from a checkpoint at step {step:,}" if step else "")
        """Description of the checkpoint that the run resumes from; "" for a new run."""
        self._kind, self._where, self._call = model.__class__.__name__, where, call
        self._model = weakref.ref(model)
        self._engine = wrapped_model(model)
        self._choice = choice
        self._engine_name = str(settings["engine"])
        self._before = self._report = self._now()
        self._parameters = sum(p.numel() for p in model.parameters())
        self._total, self._step = total_steps, step
        self._state: State = "running"
        self._ended = 0.0
        self._stopping = False
        self._failed: str | None = None
        self._going = threading.Event()
        self._warm = False  # True after the first step
        self._going.set()
        self._over = threading.Event()
        self._due: dict[str, Any] | None = None
        super().__init__(RunFolder.create(name, root=root))
        self._starts = [*filter(None, [told_taken(self.name, name), self.resumed, choice])]
        self._folder.hold()
        self._precision = str(settings["precision"])
        self._created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.recorder = Recorder(sinks=[self._folder.metrics()])
        """Metrics of the run."""
        self._pending = PendingWrites(self._folder, self.tell)
        self._meter: Meter = SAMPLER.start()
        self._began = self._free = time.perf_counter()
        self.turn = Step(self._began)
        self._pending.write_json("settings", settings)
        self._pending.write_json("trainer", arguments)
        self._pending.write_json("environment", environment())
        self._pending.write("the description", functools.partial(self._write_about, None))
        sqlite_index.note(self.folder)
        self._hook = model.register_forward_pre_hook(self._meet, with_kwargs=True)
        self.tell("state", "running")
        for line in self._starts:
            self.tell("note", line)
        at_exit.register(self._end_with_python)

    @property
    def title(self) -> str:
        """Title of the charts."""
        return f"{self.name}: {self._kind} in {self._where} on {self.engine_used}"

    @property
    def model(self) -> nn.Module | None:
        """Model in training; None once nothing else refers to it."""
        return self._model()

    @property
    def state(self) -> str:  # not State: jedi completes no attribute where a property is a Literal
        """State of the run."""
        return self._current()

    def _current(self) -> State:
        if self.over():
            return self._state
        if self._stopping:
            return "stopping"
        return self._state if self._going.is_set() else "paused"

    @property
    def engine_asked(self) -> str:
        """Engine that the user asked for, such as "auto"."""
        return AUTO if self._choice else self._engine_name

    @property
    def engine_used(self) -> str:
        """Engine that executes the model; after a fallback not the one that was asked for."""
        return self._report.engine_used

    def __repr__(self) -> str:
        total = "" if self._total is None else f"/{self._total}"
        return f"<{type(self).__name__} {self.name}: {self.state}, step {self._step}{total}>"

    # ---- calls of the callback -------------------------------------------------------------------

    def begin_step(self, *, scaled: bool) -> None:
        """Begin an optimizer step.

        Args:
            scaled: Whether a loss scale multiplies the loss.
        """
        self.flush()
        self.turn = Step(self._free, scaled=scaled)
        INTERCEPTION.leave(self)  # still entered if the last step raised and train was called again
        INTERCEPTION.enter(self)

    def end_step(self, step: int, epoch: float) -> None:
        """End an optimizer step; block while the run is paused.

        Args:
            step: Number of optimizer steps so far.
            epoch: Epoch, with its fraction.
        """
        INTERCEPTION.leave(self)
        self.take_turn(step, epoch)

    def take_turn(self, step: int, epoch: float) -> None:
        """Take the times and values of the turn for the step's record; block in a pause.

        Args:
            step: Number of optimizer steps so far.
            epoch: Epoch, with its fraction.
        """
        turn, now = self.turn, time.perf_counter()
        step_s = now - turn.began
        rate_s = step_s if self._warm else NAN  # the first step may export, and warms up
        self._step, self._free, self._warm = step, now, True
        self._due = {
            "step": step,
            "time_s": now - self._began,
            "epoch": epoch,
            "loss": turn.loss,
            "lr": turn.lr,
            "grad_norm": NAN,
            "samples": turn.samples or NAN,
            "tokens": turn.tokens or NAN,
            "samples_per_s": turn.samples / rate_s or NAN,
            "tokens_per_s": turn.tokens / rate_s or NAN,
            "step_ms": step_s * 1e3,
            "data_ms": turn.data_s * 1e3,
            "forward_ms": turn.forward_s * 1e3,
            "backward_ms": turn.backward_s * 1e3,
            "optimizer_ms": turn.optimizer_s * 1e3,
            **self._meter.take().as_dict(),
        }
        self._hear()
        if not self._going.is_set():
            self.tell("pause", "paused")
            while not self._going.wait(_WAIT_S):
                self._free = time.perf_counter()
            told = "stopped" if self._stopping else "resumed"
            self.tell("pause", f"{told} after {self._free - now:,.0f} s")

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Add the values that the Trainer logs for the last step.

        Args:
            logs: Values by the Trainer's names.
        """
        if self._due is None:
            return
        if isinstance(norm := logs.get("grad_norm"), int | float):
            self._due["grad_norm"] = float(norm)
        loss = self._due["loss"]
        if isinstance(loss, float) and math.isnan(loss) and "loss" in logs:
            self._due["loss"] = float(logs["loss"])

    def flush(self) -> None:
        """Record the last step; the Trainer has logged its values by now, if it logs any."""
        if self._due is not None:
            self.recorder.add(Sample(**self._due))
            self._due = None

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Record an evaluation.

        Args:
            metrics: Values by the Trainer's names: ``eval_loss``, ``eval_accuracy`` and others.
        """
        if self.over():
            return
        self.flush()
        values = {
            name.removeprefix("eval_"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name.startswith("eval_")
        }
        self.tell("eval", "", {"loss": NAN, "accuracy": NAN, **values})
        self.free()

    def free(self) -> None:
        """Start the next step's time now, leaving out the Trainer's work since the last step."""
        self._free = time.perf_counter()

    def tell(self, kind: str, text: str, values: Mapping[str, float] | None = None) -> None:
        """Record an event, see `metrics.recorder.Event`.

        Args:
            kind: Kind of the event.
            text: Text of the event.
            values: Numbers of the event.
        """
        self.recorder.event(Event(kind, self._step, self._elapsed_s(), text, dict(values or {})))

    def end(self, error: BaseException | None = None, why: str | None = None) -> None:
        """End the run; calling it twice is fine.

        Args:
            error: What ``train`` raised; None if it did not raise.
            why: Reason of a failure whose error is not known.
        """
        if self.over():
            return
        at_exit.unregister(self._end_with_python)
        INTERCEPTION.leave(self)
        self._hook.remove()
        self.flush()
        self._hear()
        self._ended = time.perf_counter()
        self.error = error
        if isinstance(error, KeyboardInterrupt):
            self._stopping = True
        elif error is not None:
            self._failed = f"{type(error).__name__}: {error}"
        else:
            self._failed = why
        self._state = "failed" if self._failed else "stopped" if self._stopping else "finished"
        if self._failed:
            self.tell("error", self._failed)
        self.tell("state", self._state)
        SAMPLER.end(self._meter)
        self._pending.write("the metrics", self.recorder.close)
        result = self._result()
        self._pending.write("the description", functools.partial(self._write_about, result))
        self._folder.release()
        sqlite_index.note(self.folder)
        self._engine = None  # it refers to the model
        self._over.set()

    def supersede(self) -> None:
        """End the run because another begins: a call that raised tells its callbacks nothing."""
        self.end(why=f"{self._call} ended without on_train_end: it raised or was interrupted")

    def _end_with_python(self) -> None:
        self.end(why=f"Python exited before {self._call} ended")

    # ---- calls of views --------------------------------------------------------------------------

    def status(self) -> Status:
        """See `metrics.recorder.Watched.status`."""
        report = self._report
        badges = []
        if report.fallback_reason:
            badges.append(f"fallback to {report.engine_used}: {report.fallback_reason}")
        troubles = [self._pending.trouble]
        if not self.over():  # what is left of them then, `_pending` has
            troubles = [self.recorder.trouble, *troubles]
        badges += filter(None, troubles)
        return Status(
            state=self._current(),
            step=self._step,
            total_steps=self._total,
            elapsed_s=self._elapsed_s(),
            left_s=self._left_s(),
            badges=tuple(badges),
            lines=self._lines(badges),
            error=self._failed,
        )

    def pause(self) -> None:
        """Pause after the step in flight, without waiting; no effect unless `interactive`."""
        if self.interactive:
            self._going.clear()

    def resume(self) -> None:
        """Resume after a pause."""
        self._going.set()

    def stop(self) -> None:
        """Make ``train`` return after the step in flight, also from a pause, without waiting."""
        self._stopping = True
        self._going.set()

    @property
    def stopping(self) -> bool:
        """True if `stop` was called."""
        return self._stopping

    def over(self) -> bool:
        """Return whether the run has ended."""
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait for the end of the run.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Returns:
            Whether the run has ended.
        """
        return self._over.wait(timeout)

    # ---- recording -------------------------------------------------------------------------------

    def _meet(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a training batch before forward, in the training thread."""
        if model.training and torch.is_grad_enabled() and not self.over():
            self.turn.count(args if tensors(args) else kwargs)

    def _now(self) -> Report:
        return Report(self._engine_name) if self._engine is None else self._engine.report()

    def _hear(self) -> None:
        """Record what the engine reports for the first time."""
        known, self._report = self._report, self._now()
        for note in self._report.notes[len(known.notes) :]:
            self.tell("note", note)
        reason = self._report.fallback_reason
        if reason and reason != known.fallback_reason:
            self.tell("warning", f"fallback to {self._report.engine_used}: {reason}")

    def _elapsed_s(self) -> float:
        return (self._ended or time.perf_counter()) - self._began

    def _left_s(self) -> float | None:
        if self.over() or not self.recorder.count or self._total is None:
            return None
        recent, _ = self.recorder.since(max(self.recorder.count - 64, 0))
        return (self._total - self._step) * float(recent[:, INDEX["step_ms"]].mean()) / 1e3

    def _spent(self) -> tuple[float, float]:
        """Return the seconds of this run spent on exports and on self-checks."""
        before, now = self._before, self._report
        return now.export_s - before.export_s, now.check_s - before.check_s

    def _lines(self, badges: Sequence[str]) -> tuple[str, ...]:
        lines = [*self._starts]
        lines += map(told_last, evaluations_of(self.recorder)[-1:])
        export_s, check_s = self._spent()
        if export_s:
            lines.append(f"export to ORT {export_s:.2g} s")
        if check_s:
            lines.append(f"self-check against eager {check_s:.2g} s")
        warnings = self.recorder.events("warning")
        return (*lines, *told_warnings(warnings, badges), *self._report.remarks)

    def _result(self) -> RunResult:
        recorder, evaluations = self.recorder, evaluations_of(self.recorder)
        last = recorder.last
        export_s, check_s = self._spent()
        return RunResult(
            state=self._state,
            steps=self._step,
            wall_s=self._elapsed_s(),
            final_loss=float(last.loss) if last else NAN,
            before=evaluations[0] if evaluations else None,
            after=evaluations[-1] if evaluations else None,
            best=Goal().best(evaluations),
            samples_per_s=recorder.rate("samples"),
            tokens_per_s=recorder.rate("tokens") or NAN,
            peak_bytes=self._meter.highest_peak_bytes(),
            export_s=export_s,
            check_s=check_s,
        )

    def _measured(self) -> dict[str, Any]:
        """Return settings that are known at the end only, for run.json."""
        return {}

    def _write_about(self, result: RunResult | None) -> None:
        ended = None
        if result is not None:
            ended = {
                "steps": result.steps,
                "engine_used": self.engine_used,
                "precision": self._precision,
                "fallback_reason": self._report.fallback_reason,
                "error": self._failed,
                "result": result.as_dict(),
                **self._measured(),
            }
        self._folder.write_about(
            model=self._kind,
            parameters=self._parameters,
            created=self._created,
            state="running" if result is None else result.state,
            resumed=self.resumed,
            engine_asked=self.engine_asked,
            ended=ended,
        )
