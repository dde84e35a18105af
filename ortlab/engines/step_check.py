"""A comparison of a model's next step with eager torch that the user asks for, and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.utils.tables import Column, Table
from ortlab.utils.wording import counted


@dataclass(frozen=True)
class Difference:
    """Largest relative difference among tensors of a kind, ||a - b|| / ||a||.

    Attributes:
        kind: "output", "gradient" or "buffer".
        count: Number of tensors that were compared.
        largest: Largest difference between ORT and eager torch.
        name: Name of the tensor with it.
        of_ort: Largest difference of ORT from eager torch in double precision; None if that was
            not computed.
        of_eager: The same of eager torch.
    """

    kind: str
    count: int
    largest: float
    name: str
    of_ort: float | None
    of_eager: float | None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


_COLUMNS: Final[tuple[Column[Difference], ...]] = (
    Column("compared", lambda row: counted(row.count, row.kind)),
    Column("ORT vs eager", lambda row: _number(row.largest), number=True),
    Column("largest for", lambda row: row.name or "-"),
    Column("ORT vs float64", lambda row: _number(row.of_ort), number=True),
    Column("eager vs float64", lambda row: _number(row.of_eager), number=True),
)


class StepCheck:
    """A comparison of one whole step with eager torch, made at the next call of a model.

    In a notebook it is a line that becomes a table when the call has been made.

    Args:
        model: Name of the model, for the text.

    Attributes:
        passed: True if the results agree or ORT's part was corrected; None before the call.
        verdict: Result in words.
        differences: Largest differences, by kind of tensor.
    """

    def __init__(self, model: str) -> None:
        self.passed: bool | None = None
        self.verdict = f"waiting: the next call of {model} is compared with eager torch"
        self.differences: tuple[Difference, ...] = ()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """True once the call has been compared."""
        return self._done.is_set()

    def finish(self, passed: bool, verdict: str, differences: Sequence[Difference] = ()) -> None:
        """Set the result.

        Args:
            passed: True if the results agree.
            verdict: Result in words.
            differences: Largest differences.
        """
        with self._lock:
            self.passed, self.verdict, self.differences = passed, verdict, tuple(differences)
            self._done.set()
        for listener in self._listeners:
            listener()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the call, which another thread makes.

        Args:
            timeout: Longest time to wait, in seconds; None waits without end.

        Returns:
            True once the call has been compared.
        """
        return self._done.wait(timeout)

    def when_done(self, listener: Callable[[], None]) -> None:
        """Call a function once the call has been compared, in the thread that made it.

        Args:
            listener: The function; called at once if the check is done.
        """
        with self._lock:
            if not self.done:
                self._listeners.append(listener)
                return
        listener()

    def _table(self) -> Table[Difference]:
        said = {None: "", True: "right: ", False: "wrong: "}[self.passed] + self.verdict
        if not self.differences:
            return Table((), _COLUMNS, empty=said)
        return Table(self.differences, _COLUMNS, notes=[said])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()
