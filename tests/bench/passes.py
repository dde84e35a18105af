"""Benchmark of the cost of a forward and a backward outside ORT's session.

Run ``python -m tests.bench.passes``. The limit is 0.15 ms plus 4 microseconds for every parameter
tensor. For comparison, in the same rounds: the time that torch itself takes, all in C++, to stack
as many small parameters and compute the gradient of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule.engine import execution_of

LAYERS, WIDTH, ROWS = (4, 40, 120), 8, 4
ROUNDS, CALLS, WARMUP = 15, 40, 40


class Timed:
    """Execution agent that adds up the seconds of its runs; otherwise the same as `agent`."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.took_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, *args: Any) -> Any:
        return self._add(self._agent.run_forward, args)

    def run_backward(self, *args: Any) -> Any:
        return self._add(self._agent.run_backward, args)

    def _add(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        started = time.perf_counter()
        found = run(*args)
        self.took_s += time.perf_counter() - started
        return found


class Case:
    """A stack of linear layers trained in ORT, and the same stack in eager torch."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        stack = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.eager = nn.Sequential(*stack)
        self.wrapped = ortlab.wrap(nn.Sequential(*stack), engine="ortmodule", cache=False)
        self.parameters = list(self.eager.parameters())
        self._stacked = [nn.Parameter(torch.zeros(WIDTH)) for _ in self.parameters]
        self._x, self._gradient = torch.randn(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
        self.pass_ms(self.wrapped)
        (export,) = execution_of(self.wrapped).exports()
        self._session = Timed(export.manager._execution_agent)
        export.manager._execution_agent = self._session
        for _ in range(WARMUP):
            self.pass_ms(self.wrapped)
            self.pass_ms(self.eager)

    def pass_ms(self, model: nn.Module) -> float:
        """Return the milliseconds of a forward and a backward."""
        for parameter in self.parameters:
            parameter.grad = None
        started = time.perf_counter()
        model(self._x).backward(self._gradient)
        return (time.perf_counter() - started) * 1e3

    def stack_ms(self) -> float:
        """Return the milliseconds of torch.stack and its backward for as many parameters."""
        for parameter in self._stacked:
            parameter.grad = None
        started = time.perf_counter()
        torch.stack(self._stacked).sum().backward()
        return (time.perf_counter() - started) * 1e3

    def beside_session_ms(self) -> float:
        """Return the milliseconds of a forward and a backward in ORT, minus the session's time."""
        before_s = self._session.took_s
        whole = self.pass_ms(self.wrapped)
        return whole - (self._session.took_s - before_s) * 1e3


def main() -> None:
    """Print a line for each size: medians of a round, their median and range."""
    print("parameters   beside the session, ms    bar    torch.stack, ms   eager torch whole, ms")
    for case in map(Case, LAYERS):
        beside, stacked, eager = [], [], []
        for _ in range(ROUNDS):
            beside.append(statistics.median(case.beside_session_ms() for _ in range(CALLS)))
            stacked.append(statistics.median(case.stack_ms() for _ in range(CALLS)))
            eager.append(statistics.median(case.pass_ms(case.eager) for _ in range(CALLS)))
        number = len(case.parameters)
        bar, whole = 0.15 + 0.004 * number, statistics.median(eager)
        print(f"{number:10}   {_spread(beside):22} {bar:6.2f}    {_spread(stacked)}  {whole:.2f}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
