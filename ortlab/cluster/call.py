"""A call that runs on all ranks: what they print meanwhile, and what came of it."""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from ortlab.cluster.rank import Failure
from ortlab.utils.errors import Concise

_POLL_S: Final = 0.05
_LAST_WORDS_S: Final = 2.0
"""That what a rank printed may take longer than its result."""


class RankError(Concise, RuntimeError):
    """A call that failed on a rank; `remote_traceback` is the whole of it as text.

    ``together`` says that every rank failed by itself, none has gone on alone, and none is in the
    middle of a step.
    """

    def __init__(self, message: str, rank: int, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.together = False


class RankDied(RankError):
    """A rank whose process ended."""


class WorkerCall:
    """What ipyparallel's `results`, one a rank, have given by now.

    ``pending`` are the ranks that are still at it, ``failures`` how others failed, ``lost`` those
    whose engine is gone.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results
        self._shown = [{"stdout": 0, "stderr": 0} for _ in results]
        self._packed: dict[int, bytes] = {}
        self.pending = list(range(len(results)))
        self.failures: dict[int, Failure] = {}
        self.lost: list[int] = []

    def poll(self) -> None:
        """Prints what is new, and notes who is done; waits a moment for it."""
        self._results[self.pending[0]].wait(_POLL_S)
        for rank in list(self.pending):
            done = self._results[rank].ready()
            if done:
                self.pending.remove(rank)
                self._take(rank)
            self._relay(rank, whole=done)

    def values(self) -> list[Any]:
        """The results by rank."""
        return [pickle.loads(self._packed[rank]) for rank in range(len(self._results))]

    def error(self) -> RankError | None:
        """The failure that came first, with the others in its notes; None without any."""

        def order(item: tuple[int, Failure]) -> tuple[bool, bool, float]:
            """Who was interrupted, or lost its peer, came after the one that is to blame."""
            return item[1].interrupted, item[1].follows, item[1].at_s

        failed = sorted(self.failures.items(), key=order)
        if not failed:
            return None
        (rank, first), *others = failed
        world = len(self._results)
        error = RankError(f"rank {rank} of {world}: {first.error}", rank, first.traceback)
        for line in first.lines:
            error.add_note(line)
        for other, failure in others:
            if not failure.interrupted:
                error.add_note(f"after that rank {other}: {textwrap.shorten(failure.error, 100)}")
        return error

    def _take(self, rank: int) -> None:
        result = self._results[rank]
        error = result.exception()
        if error is None:
            outcome = result.get()
            if isinstance(outcome, Failure):
                self.failures[rank] = outcome
            else:
                self._packed[rank] = outcome
        elif getattr(error, "ename", "") == "EngineError":
            self.lost.append(rank)
            return
        else:  # an interrupt beside the call, or what sent it could not be read there
            text = f"{getattr(error, 'ename', type(error).__name__)}: {error}"
            interrupted = getattr(error, "ename", "") == "KeyboardInterrupt"
            trace = "\n".join(getattr(error, "traceback", None) or ())
            self.failures[rank] = Failure(text, (), trace, float("inf"), interrupted)
        result.wait_for_output(_LAST_WORDS_S)

    def _relay(self, rank: int, *, whole: bool) -> None:
        """Prints the lines that are new of a rank; those without an end only with `whole`."""
        for name, shown in self._shown[rank].items():
            *lines, rest = getattr(self._results[rank], name).split("\n")
            if whole and rest:
                lines.append(rest)
            for line in lines[shown:]:
                # Without what a progress bar wrote over.
                print(f"[{rank}] {line.rpartition(chr(13))[2]}", file=getattr(sys, name))
            self._shown[rank][name] = len(lines)
