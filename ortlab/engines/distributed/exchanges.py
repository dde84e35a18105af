"""Exchanges of ranks that share layers, as operators that torch.compile leaves in its graphs.

The four functions are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
Operators of torch.library run in eager torch, and between the segments of an engine. Torch takes
them for draws of random numbers, so that every rank runs them in the order of the program.
"""

from __future__ import annotations

import itertools
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import distributed as dist

from ortlab.engines.distributed.comm_timer import Clock
from ortlab.utils.rng import RandomStates

_NUMBERS: Final = itertools.count(1)
_KNOWN: Final[WeakValueDictionary[int, Neighbors]] = WeakValueDictionary()
_ORDERED: Final = (torch.Tag.nondeterministic_seeded,)

NO_REGION: Final = -1
"""Region of a layer that opens or closes none."""


class Neighbors:
    """Ranks that share layers, and the regions whose activations are split among them.

    Outside of regions these ranks draw the same random numbers, inside each draws its own. The seed
    of a region is the next number drawn outside, so a region that is recomputed (gradient
    checkpointing restores the generator's state) draws the same masks again.

    Attributes:
        number: Number by which an operator of a graph finds this object.
        group: The process group.
        device: Device of the exchanged tensors.
        rank: This rank in the group.
        size: Number of ranks.
        clock: Time of the exchanges.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.number = next(_NUMBERS)
        self.group, self.device, self.clock = group, device, Clock()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._inside = NO_REGION
        self._outside: RandomStates | None = None
        _KNOWN[self.number] = self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Neighbors:
        """Return this object: a copy of a model exchanges with the same ranks."""
        return self

    def begin(self) -> None:
        """Close any open region, such as one whose recomputation stopped early."""
        self._inside, self._outside = NO_REGION, None

    def enter(self, region: int) -> None:
        """Open a region, unless another of its layers has opened it.

        Args:
            region: Number of the region, or `NO_REGION`.
        """
        if region in (NO_REGION, self._inside):
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._inside, self._outside = region, RandomStates.now()
        own = int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0])
        torch.manual_seed(own)

    def leave(self, region: int) -> None:
        """Close a region, if it is open, and restore the generators that all ranks share.

        Args:
            region: Number of the region, or `NO_REGION`.
        """
        if self._inside == region and self._outside is not None:
            self._outside.give_back()
            self.begin()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors.

        Args:
            tensor: This rank's tensor.
        """
        total = tensor.clone(memory_format=torch.contiguous_format)
        with self.clock:
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of the ranks.

        Args:
            tensor: This rank's tensor; those of the others have the same shape.
        """
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
        found += [torch.empty_like(found[0]) for _ in range(1, self.size)]
        with self.clock:
            dist.all_gather(found, tensor.contiguous(), group=self.group)
        return found

    def any(self, found: bool) -> bool:
        """Return whether `found` is True on any rank.

        Args:
            found: This rank's answer.
        """
        return bool(self.sum(torch.tensor(float(found), device=self.device)))


def _contiguous(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("ortlab::entered", mutates_args=(), tags=_ORDERED)
def entered(x: torch.Tensor, neighbors: int, region: int) -> torch.Tensor:
    """Return a copy of `x`, the input of a split layer; its gradient is the sum of all ranks'.

    Args:
        x: Activation that is the same on all ranks.
        neighbors: Number of the `Neighbors`.
        region: Region to enter, or `NO_REGION`.
    """
    _KNOWN[neighbors].enter(region)
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("ortlab::summed", mutates_args=(), tags=_ORDERED)
def summed(x: torch.Tensor, neighbors: int, region: int) -> torch.Tensor:
    """Return the sum of all ranks' `x`; the gradient of each is that of the sum.

    Args:
        x: This rank's summand.
        neighbors: Number of the `Neighbors`.
        region: Region to leave, or `NO_REGION`.
    """
    _KNOWN[neighbors].leave(region)
    return _KNOWN[neighbors].sum(x)


@torch.library.custom_op("ortlab::gathered", mutates_args=(), tags=_ORDERED)
def gathered(x: torch.Tensor, neighbors: int) -> torch.Tensor:
    """Return all ranks' `x`, one after the other in the last dimension.

    Args:
        x: This rank's part.
        neighbors: Number of the `Neighbors`.
    """
    return torch.cat(_KNOWN[neighbors].gather(x), -1)


entered.register_fake(_contiguous)
summed.register_fake(_contiguous)


@gathered.register_fake
def _(x: torch.Tensor, neighbors: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * _KNOWN[neighbors].size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.neighbors = inputs[1]


def _sum_of_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return summed(gradient, ctx.neighbors, NO_REGION), None, None


def _same_gradient(_ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return gradient, None, None


def _own_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    ranks = _KNOWN[ctx.neighbors]
    return gradient.chunk(ranks.size, -1)[ranks.rank], None


entered.register_autograd(_sum_of_gradients, setup_context=_keep)
summed.register_autograd(_same_gradient)
gathered.register_autograd(_own_gradient, setup_context=_keep)
