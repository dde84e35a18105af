"""Adasum, a sum of gradients that adapts to their angle (Maleki et al. 2021, arXiv:2006.02924).

The Adasum of two vectors a and b is (1 - ab/2aa) a + (1 - ab/2bb) b: their sum if they are
orthogonal, their mean if they are parallel. For more vectors it is the Adasum of the two halves'
Adasums. It is computed tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed as dist

from ortlab.engines.distributed.comm_timer import Clock


def combine(flat: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace a flat tensor by the Adasum of all ranks' tensors, bitwise the same on each rank.

    The ranks exchange halves of ever smaller pieces, then send the combined pieces back: algorithm
    1 of the paper, with scalar products in float64.

    Args:
        flat: Concatenated tensors, [elements]; changed in place.
        sizes: Number of elements of each tensor, which has coefficients of its own.
        group: The process group; its size is a power of two.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    bounds = [0, *accumulate(sizes)]
    levels = []
    low, high, distance = 0, flat.numel(), 1
    while distance < size:
        partner, middle = rank ^ distance, (low + high) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        is_left = rank & distance == 0
        kept, given = (lower, upper) if is_left else (upper, lower)
        own = flat[kept]
        other = torch.empty_like(own)
        _exchange(flat[given], other, partner, group)
        left, right = (own, other) if is_left else (other, own)
        within = [min(max(bound, kept.start), kept.stop) - kept.start for bound in bounds]
        parts = [slice(begin, end) for begin, end in pairwise(within)]
        products = torch.stack([_products(left[part], right[part]) for part in parts])
        # Several ranks have a piece each of the two vectors: they add up their products.
        for step in (1 << level for level in range(distance.bit_length())):
            more = torch.empty_like(products)
            _exchange(products, more, rank ^ step, group)
            products += more
        for part, (factor, other_factor) in zip(parts, _coefficients(products), strict=True):
            own[part] = (left[part] * factor + right[part] * other_factor).to(own.dtype)
        levels.append((partner, kept, given))
        low, high, distance = kept.start, kept.stop, 2 * distance
    for partner, kept, given in reversed(levels):
        _exchange(flat[kept], flat[given], partner, group)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the scalar products left*right, left*left and right*right, [3]."""
    a, b = left.double(), right.double()
    return torch.stack([a.dot(b), a.dot(a), b.dot(b)])


def _coefficients(products: torch.Tensor) -> torch.Tensor:
    """Return the factors of each tensor's two vectors, [tensors, 2]; 1 for a vector of zeros."""
    shared, norms = products[:, :1], products[:, 1:]
    return torch.where(norms == 0, 1.0, 1 - shared / (2 * norms))


def _exchange(
    given: torch.Tensor, received: torch.Tensor, partner: int, group: dist.ProcessGroup
) -> None:
    """Send `given` to the rank `partner` and receive `received`; empty tensors are skipped."""
    wanted = [(dist.isend, given), (dist.irecv, received)]
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=partner)
        for operation, tensor in wanted
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


class AdasumAdamW(torch.optim.AdamW):
    """AdamW where each rank steps by its own gradient and the weight changes are combined.

    The paper describes this form for adaptive optimizers. Each rank has moments of its own
    gradient.

    Args:
        groups: Parameter groups as torch's optimizers take them.
        group: The process group.
        clock: Measures the time of the collectives.
        **defaults: Further arguments of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        group: dist.ProcessGroup,
        clock: Clock,
        **defaults: Any,
    ) -> None:
        super().__init__(groups, **defaults)
        self._process_group = group
        self._clock = clock

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step on every rank, after which all ranks have the same parameters.

        Args:
            closure: See `torch.optim.Optimizer.step`.

        Returns:
            The closure's loss, or None.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        loss = super().step(closure)
        with self._clock:
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                changed = [
                    (parameter, was)
                    for parameter, was in zip(parameters, before, strict=True)
                    if parameter.dtype == dtype
                ]
                sizes = [was.numel() for _, was in changed]
                flat = torch.cat([(now - was).reshape(-1) for now, was in changed])
                combine(flat, sizes, self._process_group)
                for (parameter, was), delta in zip(changed, torch.split(flat, sizes), strict=True):
                    parameter.copy_(was + delta.view(was.shape))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the mean of the ranks' moments; all ranks call it.

        Every rank's own moments become that mean too, so that this run and a run that is resumed
        from the state take the same steps.
        """
        size = dist.get_world_size(self._process_group)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        dist.all_reduce(value, group=self._process_group)
                        value.div_(size)
        return super().state_dict()
