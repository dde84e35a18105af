"""Claim that ORT's gradient graph is built only for what is trained: its nodes, and the step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ortlab.bench import models
from ortlab.bench.claims.claim import GradientSettings
from ortlab.bench.interleaved import (
    WARMUP,
    Spread,
    TimedTrial,
    enough,
    reasons,
    rounds,
    take_turns,
)
from ortlab.bench.result import milliseconds, table
from ortlab.engines.base import tell, wrapped_model
from ortlab.engines.batch import to_device
from ortlab.engines.registry import engine
from ortlab.settings import FinetuneSettings

if TYPE_CHECKING:
    from ortlab.engines.ort.model import OrtModel

RANK = 8
"""Rank of the adapters."""
ALL, LORA, LAST = "all", "adapters (LoRA)", "last layer"
METHOD = (
    f"All set-ups of a model train side by side and take turns. Adapters: LoRA of rank {RANK} on "
    "every linear layer (Hu et al., 2021), and nothing else is trained. Backward "
    "nodes: on ORT's engines, nodes of the backward pass in the gradient graph; in eager torch, "
    "functions that autograd recorded. Compare them within one engine only."
)


class Adapted(nn.Module):
    """Linear layer that is not trained, plus a product of two small matrices that are.

    Args:
        base: The layer.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = base.weight
        self.down = nn.Parameter(torch.empty(RANK, base.in_features).to(like))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK).to(like))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the adapter's added."""
        added = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        found: torch.Tensor = self.base(x) + added
        return found


def _adapted(model: nn.Module) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))


def _last_layer(model: nn.Module) -> None:
    model.requires_grad_(False)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    linear[-1].requires_grad_(True)


CHOICES: dict[str, Callable[[nn.Module], object]] = {
    ALL: lambda _: None,
    LORA: _adapted,
    LAST: _last_layer,
}
"""Parameters to train, with the function that selects them in a model."""


@dataclass(frozen=True)
class Timed:
    """Steps of a model that trains some of its parameters.

    Attributes:
        model: Name of the model.
        trained: Key of `CHOICES`.
        engine: Name of the engine.
        parameters: Number of trained parameters.
        nodes: Nodes of the backward pass.
        step_ms: Milliseconds of a step in each round.
        reason: Reason why it was not timed.
    """

    model: str
    trained: str
    engine: str
    parameters: int = 0
    nodes: int = 0
    step_ms: tuple[float, ...] = ()
    reason: str = ""

    def of(self, other: Timed | None) -> Spread | None:
        """Return the time of a step as a share of another's, compared in each round.

        Args:
            other: What it is compared with; None gives None.
        """
        pairs = list(zip(self.step_ms, other.step_ms if other else (), strict=False))
        return Spread.of([ours / theirs for ours, theirs in pairs]) if pairs else None


class MinimalGradient:
    """Measurement of the claim.

    Args:
        settings: Settings of the claim.
    """

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self._trials: dict[tuple[str, str], TimedTrial] = {}
        self._timed: dict[tuple[str, str, str], Timed] = {}
        self._turns = 0

    @property
    def timed(self) -> list[Timed]:
        """Results so far."""
        return list(self._timed.values())

    def run(self) -> None:
        """See `Measurement.run`."""
        for name in self._settings.models.split(","):
            with contextlib.ExitStack() as stack:
                self._trials = {}
                self._side_by_side(name, stack)

    def _side_by_side(self, name: str, stack: contextlib.ExitStack) -> None:
        _, batch = models.build(name, quick=self._settings.quick)
        for trained, used in itertools.product(CHOICES, self._settings.engines.split(",")):
            tell(f"{name}, {used}: {trained}")
            self._timed[name, trained, used] = Timed(name, trained, used, reason="interrupted")
            fail = self._failing(name)
            with reasons(functools.partial(fail, (trained, used))):
                self._begin(name, trained, used, batch, stack)
        steps = 1
        for key, first in itertools.islice(self._trials.copy().items(), 1):
            with reasons(functools.partial(self._failing(name), key)):
                steps = enough(first.turn([[batch]], seed=0), quick=self._settings.quick)
        orders = rounds(list(self._trials), WARMUP + self._settings.rounds)

        def turn(key: tuple[str, str]) -> float:
            self._turns += 1
            return self._trials[key].turn([[batch]] * steps, seed=self._turns)

        for number, order in enumerate(orders, start=1 - WARMUP):
            running = [key for key in order if key in self._trials]
            for key, ms in take_turns(running, turn, self._failing(name)).items():
                if number > 0:
                    taken = (*self._timed[name, *key].step_ms, ms)
                    self._note((name, *key), step_ms=taken, reason="")
            if number > 0:
                tell(f"{name}: round {number} of {self._settings.rounds}")

    def _begin(
        self, name: str, trained: str, used: str, batch: Any, stack: contextlib.ExitStack
    ) -> None:
        """Make the first step of a set-up, and count its nodes."""
        model, _ = models.build(name, quick=self._settings.quick)
        CHOICES[trained](model)
        settings = FinetuneSettings.of(engine=used, device=self._settings.device, cache=False)
        chosen = engine(used)
        wrapped = chosen.wrap(model, settings.model)
        trial = TimedTrial(lambda: chosen.prepare(wrapped, None, settings), [batch], lr=0.0, seed=0)
        stack.callback(trial.stepper.close)
        report = trial.stepper.report()
        if report.engine_used != used:
            raise RuntimeError(f"{report.engine_used} ran instead: {report.fallback_reason}")
        found = sum(p.numel() for p in model.parameters() if p.requires_grad)
        nodes = backward_nodes(wrapped, batch, used)
        self._note((name, trained, used), parameters=found, nodes=nodes)
        self._trials[trained, used] = trial

    def _failing(self, name: str) -> Callable[[tuple[str, str], str], None]:
        def fail(key: tuple[str, str], reason: str) -> None:
            self._trials.pop(key, None)
            self._note((name, *key), reason=reason, step_ms=())

        return fail

    def _note(self, key: tuple[str, str, str], **values: Any) -> None:
        self._timed[key] = dataclasses.replace(self._timed[key], **values)

    def as_dict(self) -> dict[str, Any]:
        """See `Measurement.as_dict`."""
        return {"method": METHOD, "timed": [dataclasses.asdict(each) for each in self.timed]}

    def tables(self) -> list[str]:
        """See `Measurement.tables`."""
        return [*shown(self._timed), "", METHOD]


def shown(found: dict[tuple[str, str, str], Timed]) -> list[str]:
    """Return a table of the results, as lines of Markdown.

    Args:
        found: Results by model, parameters and engine.
    """
    rows = []
    for (model, trained, used), each in found.items():
        names = [model, used, trained]
        if each.reason:
            rows.append([*names, f"not timed: {each.reason}", *[""] * 5])
            continue
        whole = found.get((model, ALL, used))
        rows.append(
            [
                *names,
                f"{each.parameters:,}",
                str(each.nodes),
                f"{each.nodes / whole.nodes:.0%}" if whole and whole.nodes else "",
                milliseconds(Spread.of(each.step_ms).median),
                _spread(each.of(whole)),
                _spread(each.of(found.get((model, trained, "eager")))),
            ]
        )
    heads = ["model", "engine", "trained", "parameters", "backward nodes", "of all", "step"]
    return table([*heads, "of all's", "of eager's"], rows)


def _spread(found: Spread | None) -> str:
    return "" if found is None else str(found)


def backward_nodes(wrapped: nn.Module, batch: Any, used: str) -> int:
    """Return the number of nodes of the backward pass of a model that made a step.

    Args:
        wrapped: The model.
        batch: Batch, for an engine without a graph.
        used: Name of the engine.
    """
    # heavy: torch's compiler
    from ortlab.graph import capture, captured

    if used == "ortmodule":
        stage = capture.capture(wrapped).gradient
    elif used == "ort":
        stage = captured.graphs(cast("OrtModel", wrapped_model(wrapped)), None).gradient
    else:
        device = next(wrapped.parameters()).device
        found = wrapped(**to_device(batch, device))
        return _autograd_nodes(getattr(found, "loss", found))
    return sum(node.phase == "backward" for node in stage.nodes)


def _autograd_nodes(loss: torch.Tensor) -> int:
    """Return the number of functions that autograd recorded, without those that add gradients."""
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return sum(type(node).__name__ != "AccumulateGrad" for node in seen)
