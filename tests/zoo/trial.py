"""Trial of one cell: train a model with ``ortlab.wrap`` against the same model in eager torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ort.model import CaptureFailed, OrtModel
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.self_check import SMALLEST, Observed, SelfCheckFailed, nudged, rounding
from ortlab.utils.rng import RandomStates
from tests.zoo import nodes, specs
from tests.zoo.dropout import DropoutDiffers, Replay
from tests.zoo.outcome import FAILED, OK, REFUSED, WRONG, Outcome

LOSS_TOLERANCE: Final = 1e-4
GRADIENT_TOLERANCE: Final = 1e-3
BUFFER_TOLERANCE: Final = 1e-4
STEPS: Final = 10
STEPS_TOLERANCE: Final = 1e-3
LEARNING_RATE: Final = 3e-3
EPSILON: Final = 1e-6
"""BERT's epsilon. AdamW divides a gradient by its size: with 1e-8, a gradient that is zero in exact
arithmetic, such as that of the last bias before a softmax, becomes a step of rounding noise."""


Gradients: TypeAlias = dict[str, Tensor]


class Differs(AssertionError):
    """Raised when ORT's loss, a gradient or a buffer differs from eager torch's."""


class FellBack(RuntimeError):
    """Raised when a model runs in eager torch although that is not allowed."""


class OwnMasks(Exception):
    """Raised when engine auto chose ORTModule, whose dropout masks are replayed only by name."""


def trial(cell: specs.Cell, engine: str = "ortmodule") -> Outcome:
    """Try `cell` on `engine` in this process. See `Pair` for the conditions that must hold."""
    started = time.perf_counter()
    try:
        found = _tried(cell, engine)
    except OwnMasks:
        found = _tried(cell, "ortmodule")
        if found.status == REFUSED:  # as auto does
            found = _tried(cell, "ort")
    return dataclasses.replace(found, seconds=time.perf_counter() - started)


def _tried(cell: specs.Cell, engine: str) -> Outcome:
    pair = None
    status, reason = OK, ""
    try:
        first, second = specs.batches(cell)
        options: dict[str, Any] = {}
        if engine == "ortmodule":
            family = specs.FAMILIES.get(cell.family)
            # The replayed masks are those of ORT's own dropout.
            options = {"kernels": "ort" if cell.dropout else "torch"}
            options |= family.options if family else {}
        pair = Pair(specs.model(cell), engine, drops=bool(cell.dropout), **options)
        with pair.replay or contextlib.nullcontext():
            for batch in (first, second, first):
                pair.compare(batch)
            pair.train([first, second] * (STEPS // 2))
    except (ExportFailed, SelfCheckFailed, CaptureFailed, FellBack) as error:
        status, reason = REFUSED, str(error)
    except (Differs, DropoutDiffers) as error:
        status, reason = WRONG, str(error)
    except OwnMasks:
        raise
    except Exception:  # noqa: BLE001 - the table shows any error
        status, reason = FAILED, traceback.format_exc(limit=-3)
    errors = {} if pair is None else pair.errors | pair.coverage()
    return Outcome(cell.name, status, reason, **errors)


class Pair:
    """A model in ORT and its twin in eager torch, which uses the same dropout masks.

    The engine ``ort`` draws what eager torch draws, so the twin starts from the same random states.
    The masks of ``ortmodule`` are replayed; with engine ``auto``, a model that `drops` and stays on
    ``ortmodule`` raises `OwnMasks`.
    """

    def __init__(
        self, model: nn.Module, engine: str = "ortmodule", *, drops: bool = False, **options: Any
    ) -> None:
        self.twin = copy.deepcopy(model)
        self.model = model
        if engine != "ort":
            options["cache"] = False  # only an export made here has dropouts that can be replayed
        self.wrapped = ortlab.wrap(model, engine=engine, fallback=False, **options)
        self.replay = Replay() if engine == "ortmodule" else None
        self.drops = drops
        self.errors: dict[str, Any] = {}

    def compare(self, batch: Mapping[str, Any]) -> None:
        """Raise Differs where the loss, a gradient or a buffer differs from eager torch's.

        Tolerances are relative: 1e-4 for the loss, and 1e-3 of its norm for a gradient. A
        gradient that is almost zero, such as one that is zero in exact arithmetic, is
        compared with a thousandth of the norm of all gradients. Buffers must agree within
        1e-4 of their norm. Engine ``ort`` may also be as close to float64 as eager torch, or as
        eager torch with parameters that are changed by a few rounding errors: where a ReLU's
        input is almost 0, they give one of two gradients.
        """
        ours, theirs = self._losses(batch)
        self._hold("loss", "loss_error", _relative(ours, theirs), LOSS_TOLERANCE)
        found, wanted = _gradients(self.model, ours), _gradients(self.twin, theirs)
        # Torch's compiled graphs return zeros where only unused outputs depend on a parameter.
        only_ours = [name for name, p in self.twin.named_parameters() if p.grad is None]
        if self.replay is None and (nonzero := [name for name in only_ours if found[name].any()]):
            raise Differs(f"gradient of {', '.join(nonzero)} is None in eager torch")
        least = SMALLEST * float(torch.stack([g.norm() for g in wanted.values()]).norm())
        errors = {name: _relative(found[name], wanted[name], least) for name in wanted}
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        off = not errors[worst] <= GRADIENT_TOLERANCE
        if off and self.replay is None:
            off = not self._is_rounding(batch, (theirs, wanted), (ours, found))
        tolerance = GRADIENT_TOLERANCE if off else math.inf
        self._hold(f"gradient of {worst}", "gradient_error", errors[worst], tolerance)
        buffers = dict(self.model.named_buffers())
        for name, buffer in self.twin.named_buffers():
            error = _relative(buffers[name].double(), buffer.double())
            self._hold(f"buffer {name}", "gradient_error", error, BUFFER_TOLERANCE)

    def train(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Raise Differs where a step's loss is off from eager torch's by 1e-3 or the loss rises.

        Engine ``ort`` may be off further if eager torch is, too, once its parameters are changed by
        a rounding error: a ReLU that is almost 0 then decides how training goes on.
        """
        start, states = copy.deepcopy(self.twin), RandomStates.now()
        optimizers = [_optimizer(module) for module in (self.model, self.twin)]
        losses, wanted, errors = [], [], []
        for batch in batches:
            pair = self._losses(batch)
            for loss, optimizer in zip(pair, optimizers, strict=True):
                _step(loss, optimizer)
            losses.append(float(pair[0].detach()))
            wanted.append(pair[1].detach())
            errors.append(_relative(*pair))
        tolerance = STEPS_TOLERANCE
        if max(errors) > tolerance and self.replay is None:
            tolerance = max(tolerance, _sensitivity(start, states, batches, wanted))
        for i, error in enumerate(errors):
            self._hold(f"loss after {i} steps", "steps_error", error, tolerance)
        if not sum(losses[-2:]) < sum(losses[:2]):
            raise Differs(f"the loss does not fall: {losses[:2]} first, {losses[-2:]} at last")

    def _is_rounding(self, batch: Mapping[str, Any], *results: tuple[Tensor, Gradients]) -> bool:
        """Return True if rounding explains how ORT differs from eager torch, the first."""

        def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
            self._states.give_back()
            loss = _loss(module(*args, **kwargs))
            return observed(loss, _gradients(module, loss))

        def observed(loss: Tensor, gradients: Gradients) -> Observed:
            return Observed({"loss": loss.detach()}, gradients, {}, drew=False)

        theirs, ours = itertools.starmap(observed, results)
        after = RandomStates.now()
        try:
            return bool(rounding(self.twin, ((), dict(batch)), theirs, ours, run))
        finally:
            after.give_back()

    def _losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        states = self._states = RandomStates.now()
        ours = _loss(self.wrapped(**batch))
        if self.replay is not None:
            return ours, self.replay.loss(lambda: _loss(self.twin(**batch)))
        record = wrapped_model(self.wrapped)
        assert record is not None
        if (report := record.report()).engine_used == "eager":
            raise FellBack(f"runs in eager torch: {report.fallback_reason}")
        if report.engine_used == "ortmodule" and self.drops:
            raise OwnMasks
        states.give_back()
        return ours, _loss(self.twin(**batch))

    def coverage(self) -> dict[str, Any]:
        """Return the fields of `Outcome` about the engine in use and its graphs."""
        record = wrapped_model(self.wrapped)
        assert record is not None
        if isinstance(record, GraphDispatcher) and record._successor is not None:
            record = wrapped_model(record._successor)
        found = {"engine": record.report().engine_used}
        if isinstance(record, GraphDispatcher):
            return found | {"exports": len(record.exports())}
        return found | (nodes.coverage(record) if isinstance(record, OrtModel) else {})

    def _hold(self, what: str, kind: str, error: float, tolerance: float) -> None:
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        if not error <= tolerance:
            raise Differs(f"{what} is off by {error:.1e}")


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def _step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _sensitivity(
    start: nn.Module,
    states: RandomStates,
    batches: Sequence[Mapping[str, Any]],
    wanted: Sequence[Tensor],
) -> float:
    """Return how far eager torch's losses are off after rounding errors in the parameters."""
    now = RandomStates.now()
    found = 0.0
    for moved, _, _ in nudged(start, (), {}):
        twin = copy.deepcopy(moved)  # with the buffers from before
        optimizer = _optimizer(twin)
        states.give_back()
        for batch, right in zip(batches, wanted, strict=True):
            loss = _loss(twin(**batch))
            found = max(found, _relative(loss, right))
            _step(loss, optimizer)
    now.give_back()
    return found


def _loss(outputs: Any) -> Tensor:
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs["loss"]
    return loss


def _gradients(module: nn.Module, loss: Tensor) -> Gradients:
    module.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }


def _relative(a: Tensor, b: Tensor, least: float = 1e-12) -> float:
    """Return ||a - b|| / ||b||, or NaN where either is not finite."""
    a, b = a.detach().double(), b.detach().double()
    if a.shape != b.shape:
        return math.inf
    return float((a - b).norm()) / max(float(b.norm()), least)
