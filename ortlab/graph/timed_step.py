"""Training step without its optimizer, and a clock that times it: forward, then backward."""

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
"""Steps that are not counted, because the first ones allocate memory and select kernels."""
_SEED = 20210301


class Watch(Protocol):
    """Observer of the phases of a step."""

    def within(self, phase: str, roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which one phase runs.

        Args:
            phase: Name of the phase.
            roots: Tensors at which the backward pass begins.
        """
        ...


@dataclass(frozen=True)
class Step:
    """A call of a module and its backward pass.

    Gradients are discarded and ``.grad`` is not written. Backward begins at the model's own loss if
    it returns one, otherwise at all its outputs, with random gradients. A model in evaluation mode,
    or one whose outputs require no gradient, has a forward pass only.

    Attributes:
        module: Model to call.
        args: Positional arguments of forward.
        kwargs: Keyword arguments of forward.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the model's modules. A module that is registered twice has two."""
        return tuple(name for name, _ in self.module.named_modules(remove_duplicate=False))

    def run(self, call: Callable[..., Any], watch: Watch) -> None:
        """Run the step.

        Args:
            call: Function that computes the forward pass.
            watch: Observer of the phases.
        """
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
    """Return the tensors where backward begins: the loss, or outputs that require a gradient."""
    found = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
        return [found]
    return [value for value in tensors(outputs) if value.requires_grad]


def _cotangents(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return 1 for a single loss, otherwise random gradients, so that none is 0."""
    if len(roots) == 1 and roots[0].numel() == 1:
        return [torch.ones_like(roots[0])]
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(root.shape, generator=generator).to(root) for root in roots]


class Clock:
    """Microseconds of each phase of each step, in `us`, keyed by the name of the phase.

    Args:
        device: Device that the model is on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.us: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def within(self, phase: str, roots: Sequence[torch.Tensor]) -> Iterator[None]:  # noqa: ARG002
        """Time a phase until the work that it queued on the device is done. See `Watch`.

        Args:
            phase: Name of the phase.
            roots: Not used.
        """
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.us.setdefault(phase, []).append((time.perf_counter() - started) * 1e6)

    def median_us(self) -> float:
        """Return the median time of a whole step in microseconds, without the warm-up steps."""
        whole = [sum(phases) for phases in zip(*self.us.values(), strict=True)]
        median: float = statistics.median(whole[WARMUP:])
        return median
