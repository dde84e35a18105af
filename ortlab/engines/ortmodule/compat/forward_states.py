"""States that a forward pass keeps for its backward pass: autograd Functions and attention."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any


class ForwardStates(threading.local):
    """States of the forward pass that this thread is running; None outside of one.

    ORT would keep a node's state until its backward pass, which never comes after a forward pass
    alone. ORT therefore gets a weak reference, and the states live as long as the autograd graph of
    the run's outputs.
    """

    states: list[Any] | None = None

    def keep(self, state: Any) -> Any:
        """Keep `state` for the current forward pass and return a weak reference to it.

        Args:
            state: State of one node; its attribute ``reference`` is set to the weak reference.
        """
        assert self.states is not None, "a PythonOp outside of run_forward"
        self.states.append(state)
        state.reference = weakref.ref(state)  # ORT requires another owner of the reference
        return state.reference


RUNS = ForwardStates()


@contextlib.contextmanager
def keeping_states() -> Iterator[list[Any]]:
    """Collect the states of a forward pass in this thread.

    Yields:
        The list of the states; the caller keeps it until the backward pass.
    """
    before, RUNS.states = RUNS.states, []
    try:
        yield RUNS.states
    finally:
        RUNS.states = before


def hold(state: object) -> bool:
    """Keep `state` until the backward pass of the forward pass that this thread is running.

    Args:
        state: State to keep.

    Returns:
        False if this thread is not running a forward pass; the state is then not kept.
    """
    if RUNS.states is None:
        return False
    RUNS.states.append(state)
    return True
