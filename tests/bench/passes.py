"""What a forward and a backward cost beside ORT's session: python -m tests.bench.passes

The bar: 0.15 ms, and 4 microseconds for every parameter tensor.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule import execution_of

LAYERS, WIDTH, ROWS = (4, 40, 120), 8, 4
ROUNDS, CALLS, WARMUP = 15, 40, 40


class _Timed:
    """ORT's agent of a session, with the seconds that it spent in the session."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, *given: Any) -> None:
        with self._counted():
            self._agent.run_forward(*given)

    def run_backward(self, *given: Any) -> None:
        with self._counted():
            self._agent.run_backward(*given)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


class Case:
    """A stack of linear layers in training in ORT, and the same in eager torch."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        stack = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.eager = nn.Sequential(*stack)
        self.wrapped = ortlab.wrap(nn.Sequential(*stack), engine="ort", cache=False)
        self.parameters = list(self.eager.parameters())
        self._x, self._gradient = torch.randn(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
        self.pass_ms(self.wrapped)
        (export,) = execution_of(self.wrapped).exports()
        self.timed = export.manager._execution_agent = _Timed(export.manager._execution_agent)
        for _ in range(WARMUP):
            self.pass_ms(self.wrapped)
            self.pass_ms(self.eager)

    def pass_ms(self, model: nn.Module) -> float:
        """Milliseconds of a forward and a backward."""
        for parameter in self.parameters:
            parameter.grad = None
        started = time.perf_counter()
        model(self._x).backward(self._gradient)
        return (time.perf_counter() - started) * 1e3

    def beside_session_ms(self) -> float:
        """The same in ORT, less the time in its session."""
        self.timed.seconds = 0.0
        whole = self.pass_ms(self.wrapped)
        return whole - self.timed.seconds * 1e3


def main() -> None:
    """Prints a line for each size: medians of a round, their median and range."""
    print("parameters   beside the session, ms    bar    eager torch whole, ms")
    for case in map(Case, LAYERS):
        beside, eager = [], []
        for _ in range(ROUNDS):
            beside.append(statistics.median(case.beside_session_ms() for _ in range(CALLS)))
            eager.append(statistics.median(case.pass_ms(case.eager) for _ in range(CALLS)))
        number = len(case.parameters)
        spread = f"({min(beside):.2f}-{max(beside):.2f})"
        bar, whole = 0.15 + 0.004 * number, statistics.median(eager)
        print(f"{number:10}   {statistics.median(beside):.2f} {spread:16} {bar:8.2f}   {whole:.2f}")


if __name__ == "__main__":
    main()
