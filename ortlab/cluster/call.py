"""A call that runs on all ranks: their output, their results and their failures."""

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
"""Seconds that the output of a rank may arrive after its result."""


class RankError(Concise, RuntimeError):
    """Raised when a call failed on a rank.

    Its attribute ``together`` is True if every rank failed by itself and none of them in the middle
    of a step, so that the ranks can continue.

    Args:
        message: The error message, which names the rank.
        rank: The rank.
        remote_traceback: The rank's whole traceback as text.
    """

    def __init__(self, message: str, rank: int, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.together = False


class RankDied(RankError):
    """Raised when the process of a rank ended."""


class WorkerCall:
    """State of a call that runs on all ranks.

    ``pending`` are the ranks that still run it, ``failures`` the failures of other ranks, and
    ``lost`` the ranks whose engine is gone.

    Args:
        results: ipyparallel's asynchronous results, one for each rank.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results
        self._shown = [{"stdout": 0, "stderr": 0} for _ in results]
        self._packed: dict[int, bytes] = {}
        self.pending = list(range(len(results)))
        self.failures: dict[int, Failure] = {}
        self.lost: list[int] = []

    def poll(self) -> None:
        """Wait a moment, print new output and record the ranks that are done."""
        self._results[self.pending[0]].wait(_POLL_S)
        for rank in list(self.pending):
            done = self._results[rank].ready()
            if done:
                self.pending.remove(rank)
                self._take(rank)
            self._relay(rank, whole=done)

    def values(self) -> list[Any]:
        """Return the results, by rank."""
        return [pickle.loads(self._packed[rank]) for rank in range(len(self._results))]

    def error(self) -> RankError | None:
        """Return the first failure, with the others in its notes, or None if no rank failed."""

        def order(item: tuple[int, Failure]) -> tuple[bool, bool, float]:
            """Sort failures by time, after them those that another rank's failure caused."""
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
        else:  # an interrupt outside the call, or a payload that the rank could not unpickle
            text = f"{getattr(error, 'ename', type(error).__name__)}: {error}"
            interrupted = getattr(error, "ename", "") == "KeyboardInterrupt"
            trace = "\n".join(getattr(error, "traceback", None) or ())
            self.failures[rank] = Failure(text, (), trace, float("inf"), interrupted)
        result.wait_for_output(_LAST_WORDS_S)

    def _relay(self, rank: int, *, whole: bool) -> None:
        """Print the new lines of a rank; an unfinished last line only with `whole`."""
        for name, shown in self._shown[rank].items():
            *lines, rest = getattr(self._results[rank], name).split("\n")
            if whole and rest:
                lines.append(rest)
            for line in lines[shown:]:
                # Skips text that a progress bar has overwritten.
                print(f"[{rank}] {line.rpartition(chr(13))[2]}", file=getattr(sys, name))
            self._shown[rank][name] = len(lines)
