"""Random small graphs in an engine and in eager torch: ``python -m tests.support.fuzz ENGINE A B``.

Runs the graphs of the seeds from A to B and prints a line of JSON for each: its seed, and "right",
"refused" or "wrong" with the reason. Sizes are 0, 1 and more. A death of the process loses the
graph that ran alone: `results` goes on with the next one in a new process.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ortlab

_SIZES = (0, 1, 1, 2, 3, 5)
_LARGEST = 1e4
_TOLERANCE = 2e-3
_WEIGHTS = 12

Step = Callable[[list[Tensor], Tensor], Tensor]
"""One operator: a function of the results so far and the weights."""


@dataclass(frozen=True)
class Outcome:
    """Result of one graph.

    Attributes:
        seed: Seed of the graph.
        verdict: "right", "refused", "wrong" or "died".
        said: Reason, and the names of the operators.
    """

    seed: int
    verdict: str
    said: str


def _axis(x: Tensor, draw: random.Random) -> int:
    return draw.randrange(x.dim())


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: x.clamp(max=2).exp(),
    "abs": torch.abs,
    "neg": torch.neg,
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "log": lambda x: (x.abs() + 1).log(),
    "square": torch.square,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "masked fill": lambda x: x.masked_fill(x > 1, 0.3),
    "float of a comparison": lambda x: x * (x > 0).float(),
}
_ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "sum, kept": lambda x, dim: x.sum(dim, keepdim=True),
    "mean": lambda x, dim: x.mean(dim),
    "mean, kept": lambda x, dim: x.mean(dim, keepdim=True),
    "largest": lambda x, dim: x.amax(dim),
    "max": lambda x, dim: x.max(dim).values,
    "variance": lambda x, dim: x.var(dim, unbiased=False),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log softmax": lambda x, dim: x.log_softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "product": lambda x, dim: x.clamp(-1, 1).prod(dim),
    "any": lambda x, dim: x + (x > 0).any(dim, keepdim=True).float(),
    "all": lambda x, dim: x + (x > 0).all(dim, keepdim=True).float(),
    "place of the largest": lambda x, dim: x + x.argmax(dim, keepdim=True).float(),
    "sorted": lambda x, dim: x.sort(dim).values,
    "two largest": lambda x, dim: x.topk(2, dim).values,
    "unsqueezed": lambda x, dim: x.unsqueeze(dim),
    "squeezed": lambda x, dim: x.squeeze(dim),
    "but the first": lambda x, dim: x.narrow(dim, 1, x.shape[dim] - 1),
    "every other": lambda x, dim: x.transpose(0, dim)[::2].transpose(0, dim),
    "flipped": lambda x, dim: x.flip(dim),
    "rolled": lambda x, dim: x.roll(1, dim),
    "half": lambda x, dim: x.chunk(2, dim)[0],
    "twice": lambda x, dim: torch.cat([x, -x], dim),
    "first in last": lambda x, dim: x.transpose(0, dim).flatten(dim if dim else 0),
    "by index": lambda x, dim: x.index_select(dim, torch.tensor([0, 0])),
    "turned": lambda x, dim: x.transpose(0, dim),
    "gathered": lambda x, dim: x.gather(dim, torch.zeros_like(x, dtype=torch.long)),
    "scattered": lambda x, dim: x.scatter_add(dim, torch.zeros_like(x, dtype=torch.long), x.sin()),
    "selected": lambda x, dim: x.transpose(0, dim)[x.transpose(0, dim).flatten(1).sum(1) > 0],
}
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, 2 * y),
    "matmul": torch.matmul,
    "matmul, turned": lambda x, y: x @ y.transpose(-1, -2),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], -1),
    "as the other": lambda x, y: x.expand_as(y),
}
_LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w[:4, : x.shape[-1]], w[4, :4]),
    "layer norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[0, : x.shape[-1]]),
    "convolution": lambda x, w: F.conv1d(x[:, None], w[:6].reshape(-1, 1, 3)[:2], padding=1),
    "embedding": lambda x, w: F.embedding((x.abs() * 3).long().clamp(max=11), w[:, :3]),
    "pooled": lambda x, w: F.avg_pool1d(x[:, None], 2) + w[0, 0],
    "padded": lambda x, w: F.pad(x, (1, 0)) + w[0, 0],
}


class Graph(nn.Module):
    """A module that runs drawn operators, with the inputs that they were drawn with.

    Attributes:
        names: Names of its operators.
        batches: Inputs: two numbers of rows, in turn.
    """

    def __init__(self, seed: int) -> None:
        """Draw between 5 and 15 operators that eager torch can run on all batches."""
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(_WEIGHTS, _WEIGHTS))
        self.names: list[str] = []
        self._steps: list[Step] = []
        shape = [draw.choice(_SIZES) for _ in range(draw.choice((1, 2, 2, 3)))]
        rows = draw.sample(_SIZES[1:], 2)
        self.batches = [torch.randn(n, *shape) for n in (*rows, rows[0], 0)]
        states = [[x * self.weight[0, 0]] for x in self.batches]
        wanted = draw.randint(5, 15)
        for _ in range(20 * wanted):
            if len(self._steps) == wanted:
                break
            name, step = self._drawn(draw, states[0])
            try:
                made = [step(each, self.weight) for each in states]
            except (RuntimeError, IndexError, ValueError):
                continue
            sizes = [x.numel() for x in made]
            if max(sizes) <= 2000 and all(_is_tame(x) for x in made):
                self.names.append(name)
                self._steps.append(step)
                for state, x in zip(states, made, strict=True):
                    state.append(x)

    def _drawn(self, draw: random.Random, state: list[Tensor]) -> tuple[str, Step]:
        at, other = (max(0, len(state) - 1 - int(draw.expovariate(0.8))) for _ in range(2))
        family = draw.choice((_ELEMENTWISE, _ALONG, _ALONG, _PAIRS, _LAYERS))
        name = draw.choice(sorted(family))
        apply: Any = family[name]
        if family is _ELEMENTWISE:
            return name, lambda state, _: apply(state[at])
        if family is _ALONG:
            dim = draw.randrange(max(1, state[at].dim()))
            return name, lambda state, _: apply(state[at], dim)
        if family is _PAIRS:
            return name, lambda state, _: apply(state[at], state[other])
        return name, lambda state, weight: apply(state[at], weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss to which all results contribute."""
        state = [x * self.weight[0, 0]]
        for step in self._steps:
            state.append(step(state, self.weight))
        loss = self.weight.square().sum()
        for made in state:
            loss = loss + made.tanh().sum()
        return loss


def _is_tame(x: Tensor) -> bool:
    """Return False for values whose differences would be rounding alone."""
    return bool((x.isnan() | (x.abs() < _LARGEST)).all())


def _observed(model: nn.Module, run: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return loss.detach(), weight.grad.clone()


def _is_off(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return any(
        not torch.equal(ours.isnan(), theirs.isnan())
        or bool(
            (ours - theirs).nan_to_num().norm()
            > _TOLERANCE * theirs.double().nan_to_num().norm() + 1e-4
        )
        for ours, theirs in zip(found, expected, strict=True)
    )


def outcome(seed: int, engine: str) -> Outcome:
    """Run one graph in an engine and in eager torch.

    Args:
        seed: Seed of the graph.
        engine: Name of the engine.
    """
    graph = Graph(seed)
    twin, names = copy.deepcopy(graph), ", ".join(graph.names)
    torch._dynamo.reset()
    wrapped = ortlab.wrap(graph, engine=engine, cache=False)
    for x in graph.batches:
        if x.numel() == 0 and engine == "ortmodule":
            continue  # refused before it runs
        expected = _observed(twin, twin, x)
        try:
            found = _observed(graph, wrapped, x)
        except Exception as error:  # noqa: BLE001 - any refusal; eager torch has run it
            return Outcome(seed, "refused", f"{names}: {type(error).__name__}: {error}"[:400])
        if _is_off(found, expected):
            double = copy.deepcopy(twin).double()
            exact = _observed(double, double, x.double())
            if not _is_off(expected, exact):
                said = f"{names}; {list(x.shape)}: {found}, {expected}"
                return Outcome(seed, "wrong", said[:400])
    return Outcome(seed, "right", names)


def results(engine: str, first: int, end: int) -> Iterator[Outcome]:
    """Run the graphs of seeds in child processes, each of which runs on until one ends it.

    Args:
        engine: Name of the engine.
        first: First seed.
        end: Seed after the last one.
    """
    while first < end:
        command = [sys.executable, "-m", "tests.support.fuzz", engine, str(first), str(end)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in child.stdout.splitlines():
            if line.startswith("{"):
                yield (found := Outcome(**json.loads(line)))
                first = found.seed + 1
        if first < end:
            names = ", ".join(Graph(first).names)
            last = child.stderr.strip().splitlines()[-1:]
            yield Outcome(first, "died", f"{names}: exit code {child.returncode} {last}")
            first += 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        if str(number) == os.environ.get("ORTLAB_TEST_FUZZ_DIES"):
            os.abort()
        print(json.dumps(vars(outcome(number, sys.argv[1]))), flush=True)
