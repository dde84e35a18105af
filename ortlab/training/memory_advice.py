"""What of a step fits into memory: said before the first one, and what would fit after all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ortlab.engines.distributed import compatibility
from ortlab.utils.process_memory import free_bytes, memory

if TYPE_CHECKING:
    from torch import nn

    from ortlab.settings import FinetuneSettings

_MARGIN: Final = 0.01
"""Of the memory that there is, what a step leaves free."""
_STATE_WORDS: Final = {"adamw": 2, "lamb": 2, "sgd": 1}
"""What an optimizer keeps of each number that it trains."""

Peak = Callable[["FinetuneSettings"], "int | None"]
"""Predicts the bytes of a step under settings, weights and optimizer included; None if unknown."""


def available_bytes(device: str) -> int:
    """What this process may still take of the memory of `device`, "cpu" or "cuda".

    On the host within the limits of its control group and its own address space (RLIMIT_AS).
    """
    free = free_bytes(device)
    if device == "cuda":
        return free
    import psutil

    from ortlab.utils.hardware import host_memory

    own = psutil.Process().memory_info()
    limit = host_memory().limit_bytes
    rooms = [free] if limit is None else [free, limit - own.rss]
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        rooms += [] if most == resource.RLIM_INFINITY else [most - own.vms]
    return max(0, min(rooms))


def advice(
    settings: FinetuneSettings, *, own_batches: bool, room_bytes: int, peak_bytes: Peak
) -> dict[str, Any]:
    """The settings by name under which a step may fit; nothing where there are none.

    First smaller micro-batches, with as many more of them for a step, so that it has the samples
    that it had: the largest of which the prediction fits into `room_bytes`, or half as many where
    nothing predicts. Where batches are the loader's own or of one sample for each of the workers,
    engine 'ort' can compute activations again, and several workers can share out the optimizer's
    state.
    """
    if not own_batches:
        smaller = list(_smaller(settings))
        for change in smaller:
            found = peak_bytes(settings.replace(**change))
            if found is None or found <= room_bytes * (1 - _MARGIN):
                return change
        if smaller:
            return smaller[-1]
    if settings.engine == "ort" and settings.recompute == "off":
        return {"recompute": "layers"}
    return {"zero_stage": 1} if _can_share(settings, settings.workers) else {}


_MOST_PARTS: Final = 64
"""The micro-batches of a step that are advised at once; where it has them, twice as many are.

Thousands of one sample would take minutes, and more memory than fewer: each has its own.
"""


def _smaller(settings: FinetuneSettings) -> Iterator[dict[str, Any]]:
    """Micro-batches of which a whole number makes one of now, from half the size down."""
    now, parts = settings.batch_size, settings.accumulation
    most = max(_MOST_PARTS, 2 * parts)
    least = compatibility.data_parallel_size(settings, settings.workers)  # which have a sample each
    for size in range(now // 2, least - 1, -1):
        if now % size == 0 and parts * (now // size) <= most:
            yield {"batch_size": size, "accumulation": parts * (now // size)}


def _can_share(settings: FinetuneSettings, workers: int) -> bool:
    """Whether ZeRO's first stage would share out among `workers` what nothing shares out yet."""
    from ortlab.engines.registry import refusal

    if workers < 2 or settings.zero_stage:
        return False
    return refusal(settings.replace(workers=workers, zero_stage=1)) is None


def foretold(
    model: nn.Module, settings: FinetuneSettings, device: str, peak_bytes: Peak
) -> str | None:
    """Why a step of `model` will not fit, before one was made; None where it may.

    By the graph's memory plan where there is one, and else by what is there whatever the batch:
    weights, gradients and the optimizer's state. Processes of their own have that beside the
    weights that are here: on the host all of them, each on a GPU of its own.
    """
    whole, what = peak_bytes(settings), "a step, by the memory plan,"
    if whole is None:
        whole = _state_bytes(model, settings, device)
        what = f"weights, gradients and {settings.optimizer}'s state alone"
    room = available_bytes(device)
    if not settings.elsewhere:
        room += sum(p.nbytes for p in model.parameters() if p.device.type == device)
    elif device == "cpu" and settings.workers > 1:
        whole *= settings.workers
        what += f" on {settings.workers} workers"
    if whole <= room:
        return None
    told = f"{what} take {memory(whole)}, and there are {memory(room)}: it will not fit"
    return told + _shared_out(settings, device)


def _state_bytes(model: nn.Module, settings: FinetuneSettings, device: str) -> int:
    """What a process has of weights, gradients and the optimizer's state on `device`.

    ZeRO's stages share them out one after the other (arXiv:1910.02054, section 5).
    """
    model_parts = settings.tensor_parallel * settings.pipeline_stages
    sharing = settings.workers // model_parts
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = trained * _STATE_WORDS[settings.optimizer]
    if settings.offload_optimizer and device == "cuda":
        state = 0
    each = (3, weights), (2, trained), (1, state)
    held = sum(size // sharing if settings.zero_stage >= stage else size for stage, size in each)
    return held // model_parts


def hint(changes: Mapping[str, Any], settings: FinetuneSettings, device: str) -> str:
    """What `changes` that were advised would do, in words; without any, what may help `device`."""
    if "batch_size" in changes:
        size, times = changes["batch_size"], changes["accumulation"]
        each = size * times
        return f"{times} micro-batches of {size} make the same {each} samples of a step"
    if "zero_stage" in changes:
        return "each worker keeps its share of the optimizer's state alone"
    if changes:
        return "the layers' activations are computed again rather than kept"
    return (
        f"nothing smaller is known than this ({settings.batch_size} at a time): free memory, or "
        f"give a Dataset, whose batches can be made smaller{_shared_out(settings, device)}"
    )


def _shared_out(settings: FinetuneSettings, device: str) -> str:
    """What ZeRO does on a machine with several GPUs; nothing where it cannot, or would not help.

    On the host it would not: all shares lie in one memory, beside the weights of every rank.
    """
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if not _can_share(settings, gpus):
        return ""
    return f"; workers={gpus}, zero_stage=1 shares batch and optimizer state out to {gpus} GPUs"


class MemoryAdvisor:
    """Advises settings that need less memory, and remembers what did not fit.

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
