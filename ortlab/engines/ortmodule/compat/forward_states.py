"""States of a forward pass that live until its backward: of autograd Functions and attention."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any


class ForwardStates(threading.local):
    """The states of the forward pass that this thread is in.

    ORT would hold a node's state until its backward, which for a forward alone never comes. So ORT
    gets a weak reference, and the states live as long as what holds the run: the graph of autograd
    that its outputs hang on.
    """

    states: list[Any] | None = None

    def keep(self, state: Any) -> Any:
        assert self.states is not None, "a PythonOp outside of run_forward"
        self.states.append(state)
        state.reference = weakref.ref(state)  # ORT insists that somebody else holds it, too
        return state.reference


RUNS = ForwardStates()


@contextlib.contextmanager
def keeping_states() -> Iterator[list[Any]]:
    """For a forward pass in this thread: gives the list of what its nodes left, to be held."""
    before, RUNS.states = RUNS.states, []
    try:
        yield RUNS.states
    finally:
        RUNS.states = before


def hold(state: object) -> bool:
    """Holds `state` for as long as the pass that this thread is in may go back; no without one."""
    if RUNS.states is None:
        return False
    RUNS.states.append(state)
    return True
