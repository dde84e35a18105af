"""Record of a run: its metrics, events, checkpoints and summary in the run's folder."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ortlab.checkpoint.checkpoint import Checkpoint, NotSaved
from ortlab.history import sqlite_index
from ortlab.history.pending_writes import PendingWrites
from ortlab.history.run_folder import RunFolder
from ortlab.history.run_result import RunResult
from ortlab.metrics.evaluation import Evaluation, Goal, evaluations_of, goal
from ortlab.metrics.recorder import NAN, Event, Recorder, State
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.training.checkpoint_writer import CheckpointWriter
from ortlab.training.resume import Earlier
from ortlab.training.run_progress import RunProgress
from ortlab.utils.environment import environment
from ortlab.utils.errors import concise, message, out_of_memory
from ortlab.utils.process_memory import SAMPLER, Meter

if TYPE_CHECKING:
    from torch import nn


class RunRecord:
    """Writes a run to its folder. Creating it writes the settings and the environment.

    Args:
        folder: The run's folder.
        progress: Progress of the run.
        model: Model of the run, of which the class and the number of parameters are recorded.
        names: The user's names of model and data; see `ortlab.training.resume.NAMES`.
        earlier: Run that this one continues, whose metrics and events are copied.
        resumed: Where the run resumes from, in words; "" for a new run.
        metrics: The user's metrics.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: RunProgress,
        *,
        model: nn.Module,
        names: Mapping[str, str] | None = None,
        earlier: Earlier | None = None,
        resumed: str = "",
        metrics: UserMetrics | None = None,
    ) -> None:
        self.metrics = metrics
        """The user's metrics; None without any, and when the run is over."""
        self.folder = folder
        """Folder of the run."""
        self.earlier = earlier
        """Run that this one continues; None for a new one."""
        self.resumed = resumed
        """Description of the checkpoint that the run resumes from; "" for a new run."""
        self.kind = type(model).__name__
        """Class of the model."""
        self.meter: Meter | None = None
        """Memory meter of this process, from `begin` on."""
        self.failure = ""
        """Failure that the run is paused for, or that it was stopped after; "" without one."""
        self._progress = progress
        self._parameters = sum(p.numel() for p in model.parameters())
        self._names = dict(names or {})
        folder.hold()
        self._created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.recorder = Recorder(
            sinks=[folder.metrics()], of_rank=lambda rank: [folder.metrics(rank)]
        )
        """Metrics and events of the run, and of the run that it continues."""
        if earlier is not None:
            self.recorder.restore(earlier.rows, earlier.events, write=True)
        self.pending = PendingWrites(folder, self.event)
        """Parts of the folder that could not be written, which are tried again."""
        self.unsaved: Checkpoint | None = None
        """State at the end of the run as long as it could not be written."""
        self.pending.write_json("settings", progress.settings.as_dict())
        self.pending.write_json("environment", environment())
        self.pending.write("the description", functools.partial(self._write_about, None))
        self.checkpoints = CheckpointWriter(folder, first=self.recorder.flush, tell=self.event)
        """Writer of the run's checkpoints."""

    def begin(self) -> None:
        """List the run in the history, and begin to measure memory."""
        sqlite_index.note(self.folder.path)
        self.meter = SAMPLER.start()

    def event(self, kind: str, text: str, step: int | None = None) -> None:
        """Record an event.

        Args:
            kind: Kind of the event, such as "note" or "warning".
            text: Text of the event.
            step: Step that it belongs to; None for the current one.
        """
        progress = self._progress
        at = progress.step if step is None else step
        self.recorder.event(Event(kind, at, progress.control.elapsed_s(), text))

    def keep_failure(self, told: str) -> None:
        """Write a failure that pauses the run to its folder, in case the process ends in the pause.

        Args:
            told: Description of the failure; "" when the run is resumed.
        """
        self.failure = told
        self.pending.write("the description", functools.partial(self._write_about, None))

    @property
    def told_error(self) -> str | None:
        """Error that ended the run, or failure that it waits for or was stopped after."""
        if self._progress.error is not None:
            return "\n".join(concise(self._progress.error))
        if not self.failure:
            return None
        return f"{'stopped' if self._progress.control.stopping else 'paused'} after {self.failure}"

    def keep(self, taken: Checkpoint) -> None:
        """Write a checkpoint in the background, and delete those beyond ``keep_checkpoints``.

        Args:
            taken: The checkpoint.
        """
        self.checkpoints.keep(taken, self._progress.settings.checkpoint.keep_checkpoints)

    def save_final(self, state: Checkpoint) -> None:
        """Write the state at the end of the run; without room, a copy waits for it.

        Args:
            state: The state.
        """
        try:
            self._save_final(state)
        except NotSaved as error:
            self._keep_unsaved(state, error)

    def _keep_unsaved(self, state: Checkpoint, error: NotSaved) -> None:
        try:
            self.unsaved = state.copy()
        except Exception as failure:
            if not out_of_memory(failure):
                raise
            told = "and memory does not suffice for a copy; the model has its weights"
            self.event("warning", f"no checkpoint of the end of the run: {error}, {told}")
        else:
            self.pending.repeat("the last checkpoint", self._save_unsaved, error)

    def _save_unsaved(self) -> None:
        if self.unsaved is not None:
            self._save_final(self.unsaved)
            self.unsaved = None

    def _save_final(self, state: Checkpoint) -> None:
        state.save(self.folder.checkpoint_path("final"))
        self.checkpoints.trim(self._progress.settings.checkpoint.keep_checkpoints - 1)

    def conclude(self) -> None:
        """Write the result of the run, which completes the folder."""
        progress = self._progress
        self.checkpoints.close()
        if self.meter is not None:
            SAMPLER.end(self.meter)
        if progress.error is not None:
            notes = getattr(progress.error, "__notes__", ())
            told = f"{type(progress.error).__name__}: {message(progress.error)}"
            self.event("error", "; ".join((told, *notes)))
        self.event("state", progress.ended)
        progress.result = self.summary(progress.ended)
        self.pending.write("the metrics", self.recorder.close)
        self.pending.write("the description", functools.partial(self._write_about, progress.result))

    def release(self) -> None:
        """Release the folder and the metrics, and update the run's entry in the history."""
        self.metrics = None
        self.folder.release()
        sqlite_index.note(self.folder.path)

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations so far.

        Returns:
            The evaluations, the first one first.
        """
        return evaluations_of(self.recorder)

    @property
    def loss(self) -> float:
        """Loss of the last step; NaN before the first."""
        last = self.recorder.last
        return float(last.loss) if last else NAN

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next step; NaN without one."""
        last = self.recorder.last
        return float(last.loss_scale) if last else NAN

    def summary(self, state: State) -> RunResult:
        """Return the result up to now.

        Args:
            state: State to report.

        Returns:
            The result.
        """
        recorder, evaluations = self.recorder, self.evaluations()
        bad = recorder.last is not None and not math.isfinite(self.loss)
        report = self._progress.report
        return RunResult(
            state=state,
            steps=self._progress.step,
            wall_s=self._progress.control.elapsed_s(),
            final_loss=self.loss,
            before=evaluations[0] if evaluations else None,
            after=evaluations[-1] if evaluations else None,
            best=self._goal().best(evaluations[1:] or evaluations),
            samples_per_s=recorder.rate("samples"),
            tokens_per_s=recorder.rate("tokens") or NAN,
            peak_bytes=self._peak_bytes(),
            export_s=report.export_s if report else 0.0,
            check_s=report.check_s if report else 0.0,
            skipped_steps=int(recorder.total("skipped")),
            loss_scale=self.loss_scale,
            not_finite=str(self.loss) if bad else "",
        )

    def _goal(self) -> Goal:
        return goal(self._progress.settings.checkpoint, self.metrics)

    def _peak_bytes(self) -> float:
        """Return the peak of this process, or of the rank that used most."""
        if self.recorder.ranks:
            return self.recorder.peak_bytes()
        return self.meter.highest_peak_bytes() if self.meter else NAN

    def _write_about(self, result: RunResult | None) -> None:
        progress = self._progress
        ended: dict[str, Any] = {"error": self.told_error}
        if result is not None:
            ended |= {
                "steps": result.steps,
                "engine_used": progress.engine_used,
                "precision": progress.settings.model.precision,
                "learning_rate": progress.settings.optim.learning_rate,
                "workers": progress.settings.parallel.workers,
                "fallback_reason": progress.fallback_reason,
                "result": result.as_dict(),
            }
        self.folder.write_about(
            model=self.kind,
            parameters=self._parameters,
            created=self._created,
            state="running" if result is None else result.state,
            names=self._names,
            continues=self.earlier.name if self.earlier else None,
            resumed=self.resumed,
            engine_asked=progress.engine_asked,
            ended=ended,
        )
