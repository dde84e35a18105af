"""Profiling of a wrapped model in eager torch and in ORT, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ortlab.engines.base import Batch, tell, wrapped_model
from ortlab.engines.batch import arguments, describe, signature, tensors
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.ortmodule.compat import interop
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.torchscript.isolation import inputs_kept, undisturbed
from ortlab.graph import profile_captured, profile_ort, profile_torch
from ortlab.graph.capture import execution_behind
from ortlab.graph.profile import Profile
from ortlab.graph.profile_ort import OrtProfile
from ortlab.graph.profile_torch import Eager
from ortlab.graph.timed_step import Step

_FAR = 1.5
_ALONE = threading.Lock()
"""Serializes profiles, because two at a time would slow each other down."""


def profile(
    model: nn.Module, batch: Batch | None, steps: int, notes: Iterable[str] = ()
) -> Profile:
    """Time steps of the wrapped `model` in eager torch and in ORT.

    The model, its buffers and gradients, random states and existing sessions are not changed. Other
    threads that call the model wait. On a GPU, which is not tested, the time of nodes and modules
    is the time to launch their kernels, and the time of phases includes the kernels.

    Args:
        model: Model wrapped in engine "ortmodule" or "ort".
        batch: Batch to run. If None, made-up values in the shapes of the last call.
        steps: Number of steps.
        notes: Further lines to show with the result.

    Returns:
        The profile. Its time in ORT is None if torch runs the model.

    Raises:
        ValueError: If the model is not wrapped in such an engine or the batch does not fit.
    """
    record = wrapped_model(model)
    execution = record if isinstance(record, OrtModel) else execution_behind(model)
    args, kwargs = _call(execution, batch)
    step = Step(execution.module, args, kwargs)
    device = next(execution.module.parameters()).device
    with _ALONE, execution.held():
        export = None if isinstance(execution, OrtModel) else execution.export_for(args, kwargs)
        tell(f"timing {steps} steps in eager torch")
        with _as_it_was(step), _fitting(made_up=batch is None):
            eager = profile_torch.profile(step, steps, device)
        ort = None
        with _as_it_was(step):
            if isinstance(execution, OrtModel):
                ort = profile_captured.profile(step, execution, steps)
            elif export is not None:
                tell(f"timing {steps} steps in ORT")
                ort = profile_ort.profile(step, export, steps, device)
    told = [*medians(steps, ort, eager), *_notes(execution, step, batch is None, ort), *notes]
    return Profile(type(step.module).__name__, step.modules, ort=ort, eager=eager, notes=told)


@contextlib.contextmanager
def _as_it_was(step: Step) -> Iterator[None]:
    given = tensors([step.args, step.kwargs])
    with undisturbed(step.module), inputs_kept(given), interop.without_reentry():
        yield


def _call(
    execution: GraphDispatcher | OrtModel, batch: Batch | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the batch as arguments of forward, or placeholders for those of the last call."""
    if batch is not None:
        return arguments(execution.module, batch)
    example = execution.example()
    if example is not None:
        return example
    name, takes = type(execution.module).__name__, signature(execution.module)
    raise ValueError(f"{name} has not been called yet: give a batch for {takes}")


@contextlib.contextmanager
def _fitting(*, made_up: bool) -> Iterator[None]:
    """Turn errors that made-up values cause in forward into a ValueError that asks for a batch."""
    try:
        yield
    # Forward is user code and may raise anything.
    except Exception as error:
        if not made_up:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"made-up values do not fit forward ({first}); give a batch") from error


def medians(steps: int, ort: OrtProfile | None, eager: Eager) -> Iterator[str]:
    """Yield lines that say how the values were measured and whether they are reliable.

    Args:
        steps: Number of steps that were timed.
        ort: Time in ORT, or None if torch runs the model.
        eager: Time in eager torch.
    """
    took = f"{eager.watched_us / 1000:.2f} ms in eager torch"
    if ort is not None:
        took = f"{ort.watched_us / 1000:.2f} ms in ORT, {took}"
    of = f"medians of {steps} steps each" if steps > 1 else "a single step each"
    yield f"{of}; tables show instrumented steps, which took {took}"
    both = (eager,) if ort is None else (eager, ort)
    if any(max(t.watched_us, t.plain_us) > _FAR * min(t.watched_us, t.plain_us) for t in both):
        yield (
            "instrumented steps differ a lot from plain ones: the model is small or the machine "
            "is busy"
        )


def _notes(
    execution: GraphDispatcher | OrtModel, step: Step, made_up: bool, ort: OrtProfile | None
) -> Iterator[str]:
    if made_up:
        given = ", ".join(filter(None, (describe(step.args)[1:-1], describe(step.kwargs))))
        yield f"made-up values in the shapes of the last call: {given}"
    if not step.module.training:
        yield "the model is in evaluation mode: forward pass only"
    if ort is None:
        report = execution.report()
        yield f"the model runs on engine {report.engine_used!r}: {report.fallback_reason}"
    elif ort.joined < 1:
        yield f"{ort.joined:.1%} of the kernel time is in nodes of the graph"
