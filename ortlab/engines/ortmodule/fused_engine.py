"""The engine ``offload``: forward, backward and optimizer in one graph of ORT's, one call a step.

It is how the ORTTrainer of 2020 trained. Everything else is as with the engine ``ort``, whose
checked graph it is; evaluation is torch's, on the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import (
    Batch,
    Capabilities,
    LossFunction,
    Report,
    StateBytes,
    StepResult,
)
from ortlab.engines.ortmodule.engine import OrtModuleEngine, execution_of, is_wrapped, reseed
from ortlab.engines.ortmodule.fused_step import FusedStep, WithLoss
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.stepper import TorchStepper, autocast_for, trains_on_cpu
from ortlab.settings import EngineSettings, FinetuneSettings


class FusedEngine(OrtModuleEngine):
    """The whole step in ORT."""

    name = "offload"
    capabilities = Capabilities(recompute=True, ort_options=True)

    def refuses(self, settings: EngineSettings) -> str | None:
        """See `Engine.refuses`."""
        if not trains_on_cpu(settings):
            return "engine 'offload' runs on a CPU; choose device='cpu', or engine='ort'"
        if settings.precision == "fp16":
            return (
                "precision='fp16' needs a loss scale, which engine 'offload' has not; choose "
                "precision='bf16' or 'fp32', or engine='ort'"
            )
        return super().refuses(settings)

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`; ValueError for a parameter with hooks, which nobody would call."""
        assert stepper is TorchStepper
        wrapped = model if is_wrapped(model) else self.wrap(model, settings)
        owner = self.unwrap(wrapped)
        _refuse_hooks(owner)
        owner.to("cpu")
        # With the model: what was exported for one loss is there when a run comes back.
        made: dict[LossFunction | None, nn.Module]
        made = wrapped.__dict__.setdefault("_ortlab_with_loss", {})
        kept = made.pop(loss) if loss in made else self.wrap(WithLoss(owner, loss), settings)
        made[loss] = kept
        return FusedStepper(owner, kept, loss, settings, processes)

    def report(self, wrapped: nn.Module) -> Report:
        """See `Engine.report`; a loop of the user's own steps an optimizer of its own."""
        remark = (
            "engine 'offload' keeps the optimizer in ORT in finetune, race and ORTTrainer; in a "
            "loop of your own, whose optimizer is yours, it is engine 'ort'"
        )
        found = super().report(wrapped)
        return dataclasses.replace(found, remarks=(*found.remarks, remark))


def with_loss(wrapped: nn.Module) -> nn.Module | None:
    """What of `wrapped`, which `FusedEngine.wrap` gave, a run has executed last: an ORTModule."""
    made = list(wrapped.__dict__.get("_ortlab_with_loss", {}).values())
    return made[-1] if made else None


class FusedStepper(TorchStepper):
    """Trains `owner` by calls of a session; where the graph falls back, torch takes the steps.

    `wrapped` is what `OrtModuleEngine.wrap` gave of `owner` with its loss.
    """

    def __init__(
        self,
        owner: nn.Module,
        wrapped: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        processes: Processes,
    ) -> None:
        execution = execution_of(wrapped)
        report = execution.begin_run(settings)
        device = torch.device("cpu")
        reseed(settings.seed)
        super().__init__(
            owner,
            loss,
            settings,
            owner=owner,
            device=device,
            report=functools.partial(_told, report),
            close=execution.end_run,
            rest=execution.rest,
            autocast=functools.partial(autocast_for, settings.precision, device),
            reseed=reseed,
            processes=processes,
        )
        self._whole = FusedStep(execution, self._optimizer, self._bad)

    def _step(
        self, batches_: Sequence[Batch], lr: float, kept: Sequence[torch.Tensor]
    ) -> StepResult:
        if not self._module.training:
            self._module.train()
        served = [(batch, self._whole.served(batch)) for batch in batches_]
        if any(each is None for _, each in served):
            return super()._step(batches_, lr, kept)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        started = time.perf_counter()
        losses, samples, tokens = [], 0, 0
        for number, (batch, each) in enumerate(served, 1):
            assert each is not None
            more_samples, more_tokens = batches.count(batch)
            samples, tokens = samples + more_samples, tokens + more_tokens
            outcome = self._whole.run(
                each, batch, number=number, of=len(served), clip_norm=self._clip_norm
            )
            losses.append(outcome.outputs[0].reshape(()) / len(served))
        loss = self._processes.total(losses, samples)
        self._keep_finite(kept, self._bad.bool())
        return StepResult(
            loss=loss,
            samples=samples,
            tokens=tokens,
            grad_norm=outcome.norm,
            lr=lr,
            forward_ms=(time.perf_counter() - started) * 1e3,
            backward_ms=math.nan,
            optimizer_ms=math.nan,
        )

    def bytes(self) -> StateBytes:
        """What this process holds of the training's state now."""
        held = super().bytes()
        return StateBytes(
            held.parameters, held.gradients + self._whole.gradient_bytes(), held.optimizer_state
        )

    def rest(self) -> None:
        """See `Stepper.rest`."""
        self._whole.close()
        super().rest()

    def close(self) -> None:
        """See `Stepper.close`."""
        self._whole.close()
        super().close()


def _told(report: Callable[[], Report]) -> Report:
    """A run's `report`, of the step that holds the optimizer too."""
    found = report()
    if found.engine_used != "ort":
        return found
    one = "forward, backward and optimizer are one call: its time stands under forward"
    remarks = (*found.remarks, one)
    return dataclasses.replace(found, engine_used=FusedEngine.name, remarks=remarks)


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook on its gradient, which engine 'offload' keeps within ORT; "
                "remove it, or use engine='ort'"
            )
