"""Profiles a wrapped model: the batch, and both engines one after the other, undisturbed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ortlab.engines.base import Batch, tell
from ortlab.engines.batch import arguments, describe, signature, tensors
from ortlab.engines.ortmodule.compat import interop
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.torchscript.isolation import inputs_kept, undisturbed
from ortlab.graph import profile_ort, profile_torch
from ortlab.graph.capture import execution_behind
from ortlab.graph.profile import Profile
from ortlab.graph.profile_ort import OrtProfile
from ortlab.graph.profile_torch import Eager
from ortlab.graph.timed_step import Step

_FAR = 1.5
_ALONE = threading.Lock()
"""Two profiles at a time would measure each other."""


def profile(
    model: nn.Module, batch: Batch | None, steps: int, notes: Iterable[str] = ()
) -> Profile:
    """What `steps` steps of the wrapped `model` take in ORT and in eager torch.

    Without a `batch` made-up values stand in for the last call's. `notes` are told with it. The
    model, its buffers and gradients, random states, and the sessions that it has are left as they
    are; other threads that call it wait. ValueError where it is not wrapped in engine ort or the
    batch does not fit. On a GPU, which is not tested, nodes and modules have the time that it takes
    to launch their kernels, and phases all of it.
    """
    execution = execution_behind(model)
    args, kwargs = _call(execution, batch)
    step = Step(execution.module, args, kwargs)
    device = next(execution.module.parameters()).device
    with _ALONE, execution.held():
        export = execution.export_for(args, kwargs)
        tell(f"timing {steps} steps in eager torch")
        with _as_it_was(step), _fitting(made_up=batch is None):
            eager = profile_torch.profile(step, steps, device)
        ort = None
        if export is not None:
            tell(f"timing {steps} steps in ORT")
            with _as_it_was(step):
                ort = profile_ort.profile(step, export, steps, device)
    told = [*medians(steps, ort, eager), *_notes(execution, step, batch is None, ort), *notes]
    return Profile(type(step.module).__name__, step.modules, ort=ort, eager=eager, notes=told)


@contextlib.contextmanager
def _as_it_was(step: Step) -> Iterator[None]:
    given = tensors([step.args, step.kwargs])
    with undisturbed(step.module), inputs_kept(given), interop.without_reentry():
        yield


def _call(
    execution: GraphDispatcher, batch: Batch | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as arguments of forward, or what stands in for those of the last call."""
    if batch is not None:
        return arguments(execution.module, batch)
    if execution.last_call is not None:
        return execution.last_call.placeholders()
    name, takes = type(execution.module).__name__, signature(execution.module)
    raise ValueError(f"{name} has not been called yet: give a batch for {takes}")


@contextlib.contextmanager
def _fitting(*, made_up: bool) -> Iterator[None]:
    """What made-up values make forward raise, such as an index out of range, asks for a batch."""
    try:
        yield
    # Forward is the user's, and may raise anything.
    except Exception as error:
        if not made_up:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"made-up values do not fit forward ({first}); give a batch") from error


def medians(steps: int, ort: OrtProfile | None, eager: Eager) -> Iterator[str]:
    """What the figures are of, and whether to trust them, in lines."""
    took = f"{eager.watched_us / 1000:.2f} ms in eager torch"
    if ort is not None:
        took = f"{ort.watched_us / 1000:.2f} ms in ORT, {took}"
    of = f"medians of {steps} steps each" if steps > 1 else "a single step each"
    yield f"{of}; in the tables of steps that were watched: {took}"
    both = (eager,) if ort is None else (eager, ort)
    if any(max(t.watched_us, t.plain_us) > _FAR * min(t.watched_us, t.plain_us) for t in both):
        yield "watched steps are far from others: the model is small, or the machine busy"


def _notes(
    execution: GraphDispatcher, step: Step, made_up: bool, ort: OrtProfile | None
) -> Iterator[str]:
    if made_up:
        given = ", ".join(filter(None, (describe(step.args)[1:-1], describe(step.kwargs))))
        yield f"made-up values in the form of the last call: {given}"
    if not step.module.training:
        yield "the model is in evaluation mode: forward alone"
    if ort is None:
        yield f"the model runs in torch: {execution.report().fallback_reason}"
    elif ort.joined < 1:
        yield f"{ort.joined:.1%} of the kernels' time is in nodes that the graph has"
