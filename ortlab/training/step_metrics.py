"""Samples that a run records: one for each step, and one for each rank of a step."""

from __future__ import annotations

import torch

from ortlab.engines.base import RankStep, StepResult
from ortlab.metrics.recorder import NAN, Sample
from ortlab.utils.process_memory import Memory, Meter


def step_sample(
    result: StepResult,
    *,
    step: int,
    epoch: float,
    time_s: float,
    step_s: float,
    data_s: float,
    meter: Meter | None = None,
    rated: bool = True,
) -> Sample:
    """Return the sample of one optimizer step.

    Values that are on another device than the CPU stay tensors; the recorder fetches them later.

    Args:
        result: Result of the step.
        step: Optimizer steps done, this one included.
        epoch: Epochs done, with the fraction of the current one.
        time_s: Seconds since the run began.
        step_s: Seconds that the step took, its data included.
        data_s: Seconds of these that reading the data took.
        meter: Memory meter of this process; None to leave the memory unknown.
        rated: False to leave out the rates of a step that exported, compiled or warmed up.

    Returns:
        The sample.
    """
    on_host = result.loss.device.type == "cpu"

    def number(value: torch.Tensor | None) -> float | torch.Tensor:
        if value is None:
            return NAN
        return float(value) if on_host else value

    rate_s = step_s if rated else NAN
    return Sample(
        step=step,
        time_s=time_s,
        epoch=epoch,
        loss=number(result.loss),
        lr=result.lr,
        grad_norm=number(result.grad_norm),
        samples=result.samples,
        tokens=result.tokens or NAN,
        samples_per_s=result.samples / rate_s,
        tokens_per_s=result.tokens / rate_s or NAN,
        step_ms=step_s * 1e3,
        data_ms=data_s * 1e3,
        forward_ms=result.forward_ms,
        backward_ms=result.backward_ms,
        optimizer_ms=result.optimizer_ms,
        communication_ms=result.communication_ms if result.ranks else NAN,
        loss_scale=number(result.loss_scale),
        skipped=number(result.skipped),
        **_memory(result, meter).as_dict(),
    )


def rank_sample(told: RankStep, *, step: int, epoch: float, time_s: float) -> Sample:
    """Return the sample of one rank of an optimizer step.

    Args:
        told: The rank's part of the step's result.
        step: Optimizer steps done, this one included.
        epoch: Epochs done, with the fraction of the current one.
        time_s: Seconds since the run began.

    Returns:
        The sample.
    """
    return Sample(
        step=step,
        time_s=time_s,
        epoch=epoch,
        loss=told.loss,
        samples=told.samples,
        samples_per_s=told.samples / told.step_ms * 1e3,
        step_ms=told.step_ms,
        communication_ms=told.communication_ms,
        parameter_bytes=told.held.parameters,
        gradient_bytes=told.held.gradients,
        optimizer_bytes=told.held.optimizer_state,
        host_bytes=told.held.host,
        base_bytes=told.base_bytes,
        **told.memory.as_dict(),
    )


def _memory(result: StepResult, meter: Meter | None) -> Memory:
    """Return the memory of this process, or of all ranks together if ranks train."""
    if result.ranks:
        return Memory.of_all([told.memory for told in result.ranks])
    return meter.take() if meter is not None else Memory()
