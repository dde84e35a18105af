"""The engine ``ort_fused``: forward, backward and optimizer in one ORT graph, one call per step.

ORTTrainer of 2020 trained in this way. The engine extends the checked graph of the engine
``ortmodule`` and shares everything else with it. Evaluation runs in torch, on the same weights.
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
    """Engine that runs the whole step, including the optimizer, in ORT."""

    name = "ort_fused"
    capabilities = Capabilities(recompute=True, ort_options=True)

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """See `Engine.refuses`."""
        if not trains_on_cpu(device):
            return (
                "engine 'ort_fused' runs only on a CPU; choose device='cpu', or engine='ortmodule'"
            )
        if settings.precision == "fp16":
            return (
                "precision='fp16' needs loss scaling, which engine 'ort_fused' does not support; "
                "choose precision='bf16' or 'fp32', or engine='ortmodule'"
            )
        return super().refuses(settings, device)

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`; a parameter with hooks is refused, because ORT would skip them."""
        assert stepper is TorchStepper
        wrapped = model if is_wrapped(model) else self.wrap(model, settings.model)
        owner = self.unwrap(wrapped)
        _refuse_hooks(owner)
        owner.to("cpu")
        # Stored with the model, so that a later run with the same loss reuses its exports.
        made: dict[LossFunction | None, nn.Module]
        made = wrapped.__dict__.setdefault("_ortlab_with_loss", {})
        kept = made.pop(loss) if loss in made else self.wrap(WithLoss(owner, loss), settings.model)
        made[loss] = kept
        return FusedStepper(owner, kept, loss, settings, processes)

    def report(self, wrapped: nn.Module) -> Report:
        """See `Engine.report`; the user's own training loop uses its own optimizer."""
        remark = (
            "engine 'ort_fused' runs the optimizer in ORT only in finetune, race and ORTTrainer; "
            "in your own training loop, which has its own optimizer, it works like 'ortmodule'"
        )
        found = super().report(wrapped)
        return dataclasses.replace(found, remarks=(*found.remarks, remark))


def with_loss(wrapped: nn.Module) -> nn.Module | None:
    """Return the ORTModule of model and loss that the last run executed.

    Args:
        wrapped: Result of `FusedEngine.wrap`.

    Returns:
        The ORTModule, or None before the first run.
    """
    made = list(wrapped.__dict__.get("_ortlab_with_loss", {}).values())
    return made[-1] if made else None


class FusedStepper(TorchStepper):
    """Stepper that runs each step in ORT; after a fallback the steps run in torch.

    Args:
        owner: The user's module.
        wrapped: Result of `OrtModuleEngine.wrap` for `owner` with its loss.
        loss: Loss function, or None if the module returns its own loss.
        settings: Settings of the run.
        processes: Factory of the process group.
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
        report = execution.begin_run(settings.model)
        device = torch.device("cpu")
        reseed(settings.data.seed)
        super().__init__(
            owner,
            loss,
            settings,
            owner=owner,
            device=device,
            report=functools.partial(_told, report),
            close=execution.end_run,
            rest=execution.rest,
            autocast=functools.partial(autocast_for, settings.model.precision, device),
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
                each, batch, number=number, of=len(served), max_grad_norm=self._max_grad_norm
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
        """Return the size of this process's training state."""
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
    """Return a run's report with the name of this engine and a remark on its times."""
    found = report()
    if found.engine_used != "ortmodule":
        return found
    one = "forward, backward and optimizer are one call: its time is shown under forward"
    remarks = (*found.remarks, one)
    return dataclasses.replace(found, engine_used=FusedEngine.name, remarks=remarks)


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook on its gradient, which engine 'ort_fused' cannot call, because "
                "gradients stay in ORT; remove it, or use engine='ortmodule'"
            )
