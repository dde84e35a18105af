"""Memory of a training step: a warning before the first one, and settings that need less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ortlab.engines import compatibility
from ortlab.engines.registry import refusal
from ortlab.metrics.zero_bytes import MOMENTS
from ortlab.utils.hardware import host_memory
from ortlab.utils.process_memory import free_bytes, memory

if TYPE_CHECKING:
    from torch import nn

    from ortlab.settings import FinetuneSettings

_MARGIN: Final = 0.01
"""Fraction of the available memory that a step leaves free."""

Peak = Callable[["FinetuneSettings"], "int | None"]
"""Predicts the peak bytes of a step, weights and optimizer included; None if unknown."""


def available_bytes(device: str) -> int:
    """Return the bytes that this process may still allocate.

    On the host, the limits of its control group and its own address space (RLIMIT_AS) count too.

    Args:
        device: "cpu" or "cuda".

    Returns:
        Free bytes.
    """
    free = free_bytes(device)
    if device == "cuda":
        return free
    import psutil  # heavy: psutil

    own = psutil.Process().memory_info()
    limit = host_memory().limit_bytes
    rooms = [free] if limit is None else [free, limit - own.rss]
    with contextlib.suppress(ImportError):
        import resource  # optional: not on Windows

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        rooms += [] if most == resource.RLIM_INFINITY else [most - own.vms]
    return max(0, min(rooms))


def advice(
    settings: FinetuneSettings, *, own_batches: bool, room_bytes: int, peak_bytes: Peak
) -> dict[str, Any]:
    """Return changes of settings under which a step may fit into memory.

    The first advice is smaller micro-batches, with as many more of them in a step, so that its
    number of samples stays: the largest whose predicted peak fits into `room_bytes`, or half the
    size if there is no prediction. If the batches are the loader's own, or have one sample for
    each of the workers, the ORT engines can compute activations again, and several workers can
    shard the optimizer's state.

    Args:
        settings: Settings of the step that does not fit.
        own_batches: True if the data makes its own batches, whose size cannot be changed.
        room_bytes: Available bytes, including those that model and optimizer occupy already.
        peak_bytes: Predicts the peak bytes of a step.

    Returns:
        Values of settings, by name; empty if nothing smaller is known.
    """
    model = settings.model
    if not own_batches:
        smaller = list(_smaller(settings))
        for change in smaller:
            found = peak_bytes(settings.replace(**change))
            if found is None or found <= room_bytes * (1 - _MARGIN):
                return change
        if smaller:
            return smaller[-1]
    if model.engine == "ort":
        for budget in _BUDGETS:
            if model.activation_budget > budget:
                return {"activation_budget": budget}
    if model.engine == "ortmodule" and model.recompute == "off":
        return {"recompute": "layers"}
    return {"zero_stage": 1} if _can_share(settings, settings.parallel.workers) else {}


_BUDGETS: Final = (0.5, 0.3, 0.1)
"""Activation budgets that are advised one after the other. Not every model has layers to name."""

_MOST_PARTS: Final = 64
"""Largest number of micro-batches in a step that is advised, unless the step has more than half.

Thousands of micro-batches of one sample would take minutes, and more memory than fewer: each has
its own.
"""


def _smaller(settings: FinetuneSettings) -> Iterator[dict[str, Any]]:
    """Yield smaller micro-batches that divide the current one, the largest first."""
    data = settings.data
    now, parts = data.batch_size, data.gradient_accumulation_steps
    most = max(_MOST_PARTS, 2 * parts)
    workers = settings.parallel.workers
    least = compatibility.data_parallel_size(settings.parallel, workers)  # each needs a sample
    for size in range(now // 2, least - 1, -1):
        if now % size == 0 and parts * (now // size) <= most:
            yield {"batch_size": size, "gradient_accumulation_steps": parts * (now // size)}


def _can_share(settings: FinetuneSettings, workers: int) -> bool:
    """Return whether ZeRO's first stage would shard optimizer state that nothing shards yet."""
    if workers < 2 or settings.parallel.zero_stage:
        return False
    return refusal(settings.replace(workers=workers, zero_stage=1)) is None


def foretold(
    model: nn.Module, settings: FinetuneSettings, device: str, peak_bytes: Peak
) -> str | None:
    """Return a warning if a step of a model will not fit into memory.

    The prediction is the graph's memory plan if there is one, and otherwise a lower bound for any
    batch size: weights, gradients and the optimizer's state. Separate processes have these in
    addition to the weights in this process: on the host all of them together, on GPUs one process
    each.

    Args:
        model: The model.
        settings: Settings of the run.
        device: "cpu" or "cuda".
        peak_bytes: Predicts the peak bytes of a step.

    Returns:
        The warning, or None if a step may fit.
    """
    parallel = settings.parallel
    whole, what = peak_bytes(settings), "a step, by the memory plan,"
    if whole is None:
        whole = _state_bytes(model, settings, device)
        what = f"weights, gradients and {settings.optim.optimizer}'s state alone"
    room = available_bytes(device)
    if not parallel.elsewhere:
        room += sum(p.nbytes for p in model.parameters() if p.device.type == device)
    elif device == "cpu" and parallel.workers > 1:
        whole *= parallel.workers
        what += f" on {parallel.workers} workers"
    if whole <= room:
        return None
    told = f"{what} need {memory(whole)} of memory, and {memory(room)} are available"
    return told + _shared_out(settings, device)


def _state_bytes(model: nn.Module, settings: FinetuneSettings, device: str) -> int:
    """Return the bytes of weights, gradients and optimizer state of one process on `device`.

    ZeRO's stages shard them one after the other (arXiv:1910.02054, section 5).
    """
    parallel = settings.parallel
    model_parts = parallel.tensor_parallel * parallel.pipeline_stages
    sharing = parallel.workers // model_parts
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = trained * MOMENTS.get(settings.optim.optimizer, 0) // 4  # fp32; your own: unknown
    if parallel.offload_optimizer and device == "cuda":
        state = 0
    each = (3, weights), (2, trained), (1, state)
    held = sum(size // sharing if parallel.zero_stage >= stage else size for stage, size in each)
    return held // model_parts


def hint(changes: Mapping[str, Any], settings: FinetuneSettings, device: str) -> str:
    """Return the effect of advised changes in words.

    Args:
        changes: Result of `advice`.
        settings: Settings of the step that does not fit.
        device: "cpu" or "cuda".

    Returns:
        The effect, or without changes what else may help.
    """
    if "batch_size" in changes:
        size, times = changes["batch_size"], changes["gradient_accumulation_steps"]
        each = size * times
        return f"{times} micro-batches of {size} make the same {each} samples of a step"
    if "zero_stage" in changes:
        return "each worker keeps only its shard of the optimizer's state"
    if "activation_budget" in changes:
        share = changes["activation_budget"]
        return f"{share:.0%} of the activations are stored, and the others computed again"
    if changes:
        return "the layers' activations are recomputed instead of stored"
    return (
        f"no smaller step is known than batch_size={settings.data.batch_size}: free memory, or "
        f"pass a Dataset, whose batches can be smaller{_shared_out(settings, device)}"
    )


def _shared_out(settings: FinetuneSettings, device: str) -> str:
    """Return advice to use ZeRO on a machine with several GPUs; "" if it is impossible or no help.

    On the host it is no help: all shards lie in one memory, next to the weights of every rank.
    """
    import torch  # heavy: torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if not _can_share(settings, gpus):
        return ""
    return f"; workers={gpus}, zero_stage=1 shards batch and optimizer state across {gpus} GPUs"


class MemoryAdvisor:
    """Advice on settings that need less memory, with the step that did not fit last.

    Args:
        peak_bytes: Predicts the peak memory of a step under given settings.
        own_batches: True if the data makes its own batches, whose size cannot be changed.
    """

    def __init__(self, peak_bytes: Peak, *, own_batches: bool) -> None:
        self._peak_bytes = peak_bytes
        self._own_batches = own_batches
        self._too_large: tuple[int, FinetuneSettings] | None = None

    def remember(self, step: int, settings: FinetuneSettings) -> None:
        """Remember that the step after `step` ran out of memory.

        Args:
            step: Optimizer steps done.
            settings: Settings that were in effect.
        """
        self._too_large = step, settings

    def is_too_large(self, step: int, settings: FinetuneSettings) -> bool:
        """Return whether the step after `step` is known to run out of memory.

        Args:
            step: Optimizer steps done.
            settings: Settings to look up.

        Returns:
            True if exactly this was remembered last.
        """
        return (step, settings) == self._too_large

    def advice(
        self, settings: FinetuneSettings, device: str, held_bytes: int = 0
    ) -> dict[str, Any]:
        """Return changes under which a step may fit that did not fit under `settings`.

        Args:
            settings: Settings of the step that did not fit.
            device: "cpu" or "cuda".
            held_bytes: Memory that model and optimizer occupy already, which the prediction
                includes.

        Returns:
            Values of settings, by name; empty if nothing smaller is known. See `advice`.
        """
        return advice(
            settings,
            own_batches=self._own_batches,
            room_bytes=available_bytes(device) + held_bytes,
            peak_bytes=self._peak_bytes,
        )
