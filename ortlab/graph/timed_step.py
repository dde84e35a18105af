"""A training step without its optimizer: forward, and backward from the loss; and a clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from ortlab.engines.batch import tensors
from ortlab.engines.torch import autograd

PHASES: Final = ("forward", "backward")
WARMUP = 2
"""Steps before the first that counts: allocations, and what is chosen at the first call."""
_SEED = 20210301


class Watch(Protocol):
    """What sees the phases of a step."""

    def within(self, phase: str, roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A phase runs within it; `roots` is what backward begins at."""
        ...


@dataclass(frozen=True)
class Step:
    """A call of `module` and its backward pass; gradients are dropped, ``.grad`` is not written.

    Backward begins at the model's own loss where it returns one, else at all its outputs, with
    random gradients. A model in evaluation mode, or one whose outputs require no gradient, has a
    forward pass alone.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the model's modules; one that is there twice has two."""
        return tuple(name for name, _ in self.module.named_modules(remove_duplicate=False))

    def run(self, call: Callable[..., Any], watch: Watch) -> None:
        """Has `call` compute forward; `watch` sees each phase."""
        with torch.set_grad_enabled(self.module.training):
            with watch.within("forward", ()):
                outputs = call(*self.args, **self.kwargs)
            roots = _roots(outputs)
            if not roots:
                return
            cotangents = _cotangents(roots)
            leaves: list[torch.Tensor] = [p for p in self.module.parameters() if p.requires_grad]
            leaves += [t for t in tensors([self.args, self.kwargs]) if t.requires_grad]
            del outputs
            with watch.within("backward", roots):
                autograd.gradients(roots, leaves, cotangents)


def _roots(outputs: Any) -> list[torch.Tensor]:
    """What backward begins at: the loss, else every output that requires a gradient."""
    found = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
        return [found]
    return [value for value in tensors(outputs) if value.requires_grad]


def _cotangents(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of one root 1 where it is a loss; else random ones, which are nowhere zero."""
    if len(roots) == 1 and roots[0].numel() == 1:
        return [torch.ones_like(roots[0])]
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(root.shape, generator=generator).to(root) for root in roots]


class Clock:
    """Microseconds of each phase of each step, in `us` by the name of the phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.us: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def within(self, phase: str, roots: Sequence[torch.Tensor]) -> Iterator[None]:  # noqa: ARG002
        """See `Watch`; a phase lasts to the end of what it put on the device."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.us.setdefault(phase, []).append((time.perf_counter() - started) * 1e6)

    def median_us(self) -> float:
        """A whole step, without those to warm up."""
        whole = [sum(phases) for phases in zip(*self.us.values(), strict=True)]
        median: float = statistics.median(whole[WARMUP:])
        return median
