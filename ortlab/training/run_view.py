"""Text of a run as its views show it: title, status, badges and lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ortlab.history.run_result import told_skipped
from ortlab.metrics.evaluation import told_last
from ortlab.metrics.recorder import Status
from ortlab.metrics.told_events import told_failed, told_warnings
from ortlab.settings import AUTO
from ortlab.training.control import PauseReason
from ortlab.training.failures import PAUSED, typed
from ortlab.training.run_progress import SLOW_READ_S, RunProgress
from ortlab.training.run_record import RunRecord
from ortlab.utils.errors import concise, shorten
from ortlab.utils.process_memory import memory

_WORDS_S: Final = 0.5
"""Time for which badges and lines may be old, as long as no event tells of a change."""


class RunView:
    """Describes a run in words and numbers; it changes nothing and waits for nothing.

    Args:
        progress: Progress of the run.
        record: Record of the run.
        warnings: Warnings about the start of the run, shown as long as it exists.
        notes: Lines on the start of the run, shown as long as it exists.
        kept: Returns the sizes in bytes of cached engines of earlier settings, by their names.
    """

    def __init__(
        self,
        progress: RunProgress,
        record: RunRecord,
        *,
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
        kept: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._progress = progress
        self._record = record
        self._warnings = tuple(warnings)
        self._notes = tuple(notes)
        self._kept = kept
        self._words: _Words | None = None

    def __repr__(self) -> str:
        progress = self._progress
        total = "" if progress.total is None else f"/{progress.total}"
        return (
            f"<Run {self._name}: {progress.state}, step {progress.step}{total}, "
            f"{progress.engine_used}>"
        )

    @property
    def title(self) -> str:
        """Title of the run's charts."""
        return f"{self._name}: {self._record.kind} on {self._progress.engine_used}"

    def status(self, *, over: bool) -> Status:
        """Return the current status.

        Args:
            over: True if the run has ended and its folder is complete.

        Returns:
            The status, with texts for the user.
        """
        progress, control = self._progress, self._progress.control
        held = control.held
        badges, lines = self._recent_words(over=over)
        return Status(
            state=progress.state,
            step=progress.step,
            total_steps=progress.total,
            elapsed_s=progress.result.wall_s if progress.result else control.elapsed_s(),
            left_s=self._left_s(over=over),
            badges=badges,
            lines=lines,
            error=self._told_error(),
            advice="" if held is None else typed(held.advice),
        )

    def pause_error(self, held: PauseReason) -> Exception:
        """Return the error that pauses the run, with a note about what to do.

        Args:
            held: Reason of the pause.

        Returns:
            The error of `held`, with a shortened traceback.
        """
        where = held.where.format(step=self._progress.step)
        told = f"{self._name} is paused {where}: {held.hint}; run.stop() ends the run"
        shorten(held.error)
        if told not in getattr(held.error, "__notes__", ()):
            held.error.add_note(told)
        return held.error

    @property
    def _name(self) -> str:
        return self._record.folder.name

    def _told_error(self) -> str | None:
        progress, held = self._progress, self._progress.control.held
        if held is not None:
            return "\n".join(concise(self.pause_error(held))) if held.what else None
        ends = progress.error is not None or progress.control.stopping
        return self._record.told_error if ends else None  # not that of a pause that is beginning

    def _left_s(self, *, over: bool) -> float | None:
        progress, recorder = self._progress, self._record.recorder
        if progress.total is None or over or recorder.count == 0:
            return None  # a resumed run is at a step before it has made one
        return (progress.total - progress.step) * recorder.mean("step_ms", 64) / 1e3

    def _recent_words(self, *, over: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return badges and lines; most of a view's updates have new numbers alone."""
        progress = self._progress
        first = progress.step == 0  # its lines tell what the run is doing
        key = progress.state, over, first, progress.control.held, self._record.recorder.event_count
        words, now = self._words, time.perf_counter()
        if first or words is None or words.key != key or now > words.until:
            until = now + _WORDS_S
            badges = self._badges(over=over)
            words = _Words(key, until, badges, self._lines(badges, over=over))
            self._words = words
        return words.badges, words.lines

    def _badges(self, *, over: bool) -> tuple[str, ...]:
        progress, record = self._progress, self._record
        badges = []
        if progress.fallback_reason is not None:
            badges.append(f"fallback to {progress.engine_used}: {progress.fallback_reason}")
        if (held := progress.control.held) is not None:
            told = held.what or f"{held.error}; resume continues from step {progress.step}"
            badges.append(f"held: {told}")
        if progress.foretold is not None and progress.step == 0 and not over:
            badges.append(progress.foretold)
        troubles = [record.pending.trouble]
        if not over:  # what is left of them then, `pending` has
            troubles = [record.checkpoints.trouble, record.recorder.trouble, *troubles]
        badges += filter(None, (*self._warnings, *troubles))
        badges += told_failed(record.recorder.events("metric_failed"))
        return tuple(badges)

    def _lines(self, badges: Sequence[str], *, over: bool) -> tuple[str, ...]:
        progress, record = self._progress, self._record
        lines = [*filter(None, [record.resumed]), *self._notes]
        if progress.engine_asked == AUTO:
            lines.append(progress.choice)
        if progress.step == 0 and not over:
            lines.append(progress.doing)
        since = progress.control.reading_since
        waited_s = 0.0 if since is None else time.perf_counter() - since
        if waited_s > SLOW_READ_S and not over:
            lines.append(f"waiting for {progress.reading} for {waited_s:.0f} s; Stop ends the run")
        evaluations = record.evaluations()
        if evaluations:
            before, after = evaluations[0], evaluations[-1]
            when = f"first, step {before.step:,}" if before.step else "before training"
            first = f" ({when}: {before})" if evaluations[1:] else ""
            lines.append(f"{told_last(after)}{first}")
        lines += [event.text for event in record.recorder.events("early_stop")]
        lines += [event.text for event in record.recorder.events("skipped_data")[-1:]]
        if skipped := int(record.recorder.total("skipped")):
            lines.append(told_skipped(skipped, record.loss_scale))
        report = progress.report
        if report is not None:
            if report.export_s:
                lines.append(f"export to ORT {report.export_s:.2g} s")
            if report.check_s:
                lines.append(f"self-check against eager {report.check_s:.2g} s")
            lines += report.remarks
        shown = [*badges, *lines]
        if progress.foretold is not None and progress.step > 0:
            shown.append(progress.foretold)  # the step fits after all
        if progress.control.held is not None:
            shown.append(PAUSED)  # the view's error
        lines += told_warnings(record.recorder.events("warning"), shown)
        if not over and (kept := self._kept()):
            told = ", ".join(f"{settings} ({memory(size)})" for settings, size in kept.items())
            lines.append(f"cached for earlier settings: {told}")
        return tuple(lines)


class _Words(NamedTuple):
    """Badges and lines of a run until a time, as long as what they depend on stays the same."""

    key: tuple[object, ...]
    until: float
    badges: tuple[str, ...]
    lines: tuple[str, ...]
