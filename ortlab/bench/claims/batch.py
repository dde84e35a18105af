"""Claim that ORT's memory planning fits larger batches: the largest one of each engine here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ortlab.bench.claims.search import PREDICTION, SET_UPS, Largest, Search, SearchSettings
from ortlab.bench.result import table
from ortlab.utils.process_memory import memory, parse_bytes

METHOD = (
    "Each trial is a fresh process that makes three steps under RLIMIT_DATA, with glibc set to "
    "return freed memory at once. A batch does not fit if the process runs out of memory; the "
    "largest is found within 1%. The limit and the peak count beyond what the process has when the "
    "libraries are loaded and it has no model, with 1 MiB for each thread's stack. Predicted peak: "
    "memory that a process with a small batch holds between steps (measured), plus the step's "
    "tensors by ortlab's memory plan. "
    f"{PREDICTION}"
)


class LargestBatches:
    """Measurement of the claim.

    Args:
        settings: Settings of the search.

    Raises:
        ValueError: If the memory is not a size, or the system is not Linux.
    """

    def __init__(self, settings: SearchSettings) -> None:
        if sys.platform != "linux":
            raise ValueError("this claim needs Linux, where a process can have a memory limit")
        self._settings = settings
        self.limit_bytes = parse_bytes("64MiB" if settings.quick else settings.memory)
        self.found: list[Largest] = []

    def run(self) -> None:
        """See `Measurement.run`."""
        engines = self._settings.engines.split(",")
        for model in self._settings.models.split(","):
            hint = None
            for engine in (each for each in SET_UPS if each in engines):
                for set_up in SET_UPS[engine][: 1 if self._settings.quick else None]:
                    largest = Search(
                        model, set_up, self.limit_bytes, self._settings, close=_CLOSE
                    ).run(hint)
                    self.found.append(largest)
                    hint = largest.rows or hint

    def as_dict(self) -> dict[str, Any]:
        """See `Measurement.as_dict`."""
        found = [
            dataclasses.asdict(each)
            | {"rows_error": each.rows_error, "bytes_error": each.bytes_error}
            for each in self.found
        ]
        return {"limit_bytes": self.limit_bytes, "method": METHOD, "largest": found}

    def tables(self) -> list[str]:
        """See `Measurement.tables`."""
        lines = [f"Largest batch in {memory(self.limit_bytes)} beyond the libraries.", ""]
        if self._settings.quick:
            lines = [*lines, "Twice that batch, or less, does not fit: the search ends early.", ""]
        heads = ["model", "set-up", "largest batch", "of eager's", "peak", "peak with libraries"]
        heads += ["predicted batch", "error", "predicted peak", "error"]
        rows = [self._row(each) for each in self.found]
        lines += [*table(heads, rows), "", *self._verdict(), METHOD]
        return [*lines, *(f"- {line}" for line in map(ended, self.found) if line)]

    def _row(self, each: Largest) -> list[str]:
        if each.rows is None:
            return [each.model, each.set_up, "error, see below", *[""] * 7]
        eager = next(
            (e.rows for e in self.found if (e.model, e.set_up) == (each.model, "eager")), 0
        )
        ratio = f"{each.rows / eager:.2f}" if eager and not self._settings.quick else ""
        own = ["", ""]
        if each.library_bytes is not None and each.peak_bytes is not None:
            own = [memory(each.peak_bytes), memory(each.library_bytes + each.peak_bytes)]
        return [
            each.model,
            each.set_up,
            str(each.rows),
            ratio,
            *own,
            *beside(each.predicted_rows, each.rows_error, str, each.unplanned),
            *beside(each.predicted_bytes, each.bytes_error, memory, ""),
        ]

    def _verdict(self) -> list[str]:
        """Return how well the plan predicts the largest batch: within 5% and never too high."""
        errors = [each.rows_error for each in self.found if each.rows_error is not None]
        if not errors or self._settings.quick:
            return []
        within = sum(abs(error) <= _BAR for error in errors)
        high = sum(
            (each.predicted_rows or 0) >= (each.refused_rows or (each.rows or 0) + 1)
            for each in self.found
        )
        worst = max(errors, key=abs)
        return [
            f"Of {len(errors)} predicted batches {within} are within {_BAR:.0%}, {high} are too "
            f"high, and the worst is {worst:+.0%} off.",
            "",
        ]


_BAR = 0.05
_CLOSE = 0.01
"""Relative difference between the largest batch and one that does not fit."""


def beside(
    value: int | None, error: float | None, text: Callable[[int], str], without: str
) -> Sequence[str]:
    """Return a predicted value and its relative error as cells of a table.

    Args:
        value: The value, None if there is none.
        error: Its relative error, None if it is unknown.
        text: Returns a value as text.
        without: Text in place of a value.
    """
    if value is None:
        return [without, ""]
    return [text(value), "" if error is None else f"{error:+.1%}"]


def ended(each: Largest) -> str:
    """Return the error of a set-up, or of the batch that did not fit.

    Args:
        each: Result of the set-up.
    """
    if each.error:
        return f"{each.model}, {each.set_up}: {each.error}"
    return f"{each.model}, {each.set_up}, batch {each.refused_rows}: {each.why}"
