"""Data parallel ranks: the processes of one group that take every step together.

Each rank has the model, gets every batch and trains on its own rows of it (torch's
DistributedDataParallel around the module that an engine executes). ZeRO stage 0 (Rajbhandari et al.
2020, arXiv:1910.02054) shards nothing; stage 1 shards the optimizer's state across the ranks, stage
2 also the gradients, stage 3 also the weights. DeepSpeed implements the stages where it is
installed (`ortlab.engines.distributed.deepspeed`); without it stage 1 is torch's
ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ortlab.engines import compatibility
from ortlab.engines.base import Batch, LossFunction, Report
from ortlab.engines.distributed import adasum
from ortlab.engines.distributed.batch_split import share_of, weights_of
from ortlab.engines.distributed.comm_timer import Clock
from ortlab.engines.distributed.zero1 import ShardedOptimizer
from ortlab.engines.own_optimizer import OwnOptim
from ortlab.engines.single_process import OneProcess, Share
from ortlab.settings import FinetuneSettings
from ortlab.utils.errors import Concise
from ortlab.utils.rng import RandomStates, undisturbed_random

MOST_NUMBERS = 5
"""Most numbers that ranks add up in the collective that also checks that none has failed."""


class RankFailed(Concise, RuntimeError):
    """Raised when another rank, named in the message, has failed and no rank took the step."""

    follows = True
    """Marks an error that is the consequence of another rank's, which says why."""


def leave(*groups: dist.ProcessGroup) -> None:
    """Destroy process groups that were made for a stepper, except the default group.

    Args:
        *groups: The process groups; repeated ones are destroyed once.
    """
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class _Objective(nn.Module):
    """Module that returns the loss of a batch, as DistributedDataParallel expects.

    DistributedDataParallel then waits for the gradients of the parameters that the loss depends on.
    """

    def __init__(self, inner: OneProcess) -> None:
        super().__init__()
        self.module = inner.module
        self._inner = inner
        # Always unused; without an unused parameter each rank prints a warning that there is none.
        self.unused = nn.Parameter(torch.zeros(1, device=inner.device))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss of `batch`; see `OneProcess.objective`."""
        return self._inner.objective(batch)


class Ranks(OneProcess):
    """Ranks of a process group that take steps together; see `steppers.prepare`.

    Args:
        module: The module that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings.
        group: The process group across which batches are split.
        everyone: The process group of all ranks; None means `group`. If it is larger, several ranks
            train on the same rows and compute the same numbers.
        given: The user's optimizer or scheduler; None for those of the settings.
    """

    sharer = "torch's ZeroRedundancyOptimizer"
    """Library that shards the state from ZeRO stage 1 on."""

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
        *,
        settings: FinetuneSettings,
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup | None = None,
        given: OwnOptim | None = None,
    ) -> None:
        parallel = settings.parallel
        super().__init__(module, loss, owner, device, given)
        self._group = group
        self._everyone = everyone or group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._stage = parallel.zero_stage
        # Adasum of one rank's gradient is that gradient, with any optimizer.
        self._reduction = parallel.reduction if self._size > 1 else "mean"
        self._by_change = self._reduction == "adasum" and settings.optim.optimizer != "sgd"
        self._clock = Clock()
        self._agreed = True
        self._random = RandomStates.now()
        self.reseeded(settings.data.seed)
        # Before 2.13 DistributedDataParallel synchronizes the parameters only.
        self.equalize(list(owner.buffers()))
        self._parallel: Any = self._made_parallel()

    def _made_parallel(self) -> Any:
        # With broadcasts in forward, a rank that fails before its forward would leave the others
        # waiting in theirs. torch 2.13 renamed the argument and warns about the old name.
        known = inspect.signature(DistributedDataParallel).parameters
        names = ("forward_sync_buffers", "broadcast_buffers")
        no_broadcast: dict[str, Any] = {next(name for name in names if name in known): False}
        made = DistributedDataParallel(
            _Objective(OneProcess(self.module, self.loss, self.owner, self.device)),
            process_group=self._group,
            **no_broadcast,
            # Parameters without a gradient in one process have none here either. This also prevents
            # rebuilding the buckets, which would be a collective in forward.
            find_unused_parameters=True,
            gradient_as_bucket_view=True,  # otherwise gradients take twice their memory
        )
        # DistributedDataParallel checks the hook's annotations and would reject a bound method.
        made.register_comm_hook(None, lambda _, bucket: self._reduced(bucket))
        return made

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Return the optimizer: sharded at ZeRO stage 1, combined after its step by Adasum.

        Args:
            kind: The optimizer's class.
            groups: Parameter groups as torch's optimizers take them.
            **defaults: Further arguments of the class.

        Returns:
            The optimizer.

        Raises:
            ValueError: If the parameters have several types at stage 1.
        """
        if self._by_change:
            return adasum.AdasumAdamW(groups, group=self._group, clock=self._clock, **defaults)
        if self._stage == 0:
            return kind(groups, **defaults)
        return ShardedOptimizer(groups, kind, group=self._group, clock=self._clock, **defaults)

    def _reduced(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Return the gradients in `bucket`, reduced over the ranks."""
        flat = bucket.buffer()
        if self._reduction == "mean":
            return self._summed(flat)
        if not self._by_change:
            with self._clock:
                sizes = [parameter.numel() for parameter in bucket.parameters()]
                adasum.combine(flat, sizes, self._group)
        devices = None if flat.device.type == "cpu" else [flat.device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(flat)
        return done

    def _summed(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self._clock.begin()
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._clock.end()
            return future.value()[0]

        gradients: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
        return gradients

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; a step draws random numbers from this rank's generators."""
        if training and self._parallel is None:
            self._parallel = self._made_parallel()
        self._agreed = False
        try:
            with self._drawing() if training else contextlib.nullcontext():
                yield
        except BaseException as error:
            if training:  # it waits for the backward of a forward that failed
                self._let_go()
            if not self._agreed:
                self._agree([], failed=True)
            elif training and not isinstance(error, RankFailed):
                # Collectives may be in flight, or only some of the weights updated.
                error.midway = True  # type: ignore[attr-defined]
            raise

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with undisturbed_random():
            self._random.give_back()
            yield
            self._random = RandomStates.now()

    def _agree(self, numbers: Sequence[torch.Tensor], *, failed: bool = False) -> torch.Tensor:
        """Return the sums of all ranks' `numbers` in float64; RankFailed if another rank failed.

        A rank that has failed itself passes no numbers, and raises its own error.
        """
        self._agreed = True  # even if this raises: a failure is reported once
        rank, size = dist.get_rank(self._everyone), dist.get_world_size(self._everyone)
        told = torch.zeros(MOST_NUMBERS + size, dtype=torch.float64, device=self.device)
        if numbers:
            told[: len(numbers)] = torch.stack([number.double() for number in numbers])
        told[MOST_NUMBERS + rank] = float(failed)
        with self._clock:
            dist.all_reduce(told, group=self._everyone)
        ranks = [str(rank) for rank, one in enumerate(told[MOST_NUMBERS:].tolist()) if one]
        if ranks and not failed:
            raise RankFailed(
                f"rank {', '.join(ranks)} of {size} has failed, so no rank has taken the step; its "
                "own error says why"
            )
        return told[: len(numbers)] / (size // self._size)

    def share(self, batch: Batch) -> Share:
        """Return this rank's rows; see `ortlab.engines.distributed.batch_split`.

        Args:
            batch: The whole batch.
        """
        weights = weights_of(batch, self.loss, self.owner)
        share = share_of(batch, self._rank, self._size, weights)
        if self._reduction == "mean":
            return share
        return dataclasses.replace(share, factor=float(share.part > 0))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `OneProcess.micro_batch`."""
        if last:
            return contextlib.nullcontext()
        assert self._parallel is not None
        waiting: AbstractContextManager[None] = self._parallel.no_sync()
        return waiting

    def objective(self, batch: Batch) -> torch.Tensor:
        """See `OneProcess.objective`."""
        assert self._parallel is not None
        loss: torch.Tensor = self._parallel(batch)
        return loss

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
        """See `OneProcess.total`; RuntimeError if the ranks were given different batches."""
        loss = super().total(losses, samples)
        count = torch.tensor(samples, device=self.device)
        agreed = self._agree([loss, count, count.square()])
        mean = float(agreed[1]) / self._size
        if float(agreed[2]) != mean**2 * self._size:  # their variance, the same on every rank
            raise RuntimeError(
                f"the ranks were given {mean:g} samples on average, and this rank {samples}; give "
                "every rank the same micro-batches"
            )
        return agreed[0].to(loss.dtype)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; after their reduction the gradients are the same on every rank."""
        norm = super().norm(gradients)
        if not self._by_change:
            return norm
        squares = self._agree([norm.double().square()])[0]
        return (squares / self._size).sqrt().to(norm.dtype)

    def equalize(self, statistics: Sequence[torch.Tensor]) -> None:
        """Broadcast rank 0's running statistics, one collective for each type.

        Args:
            statistics: Buffers of the model; changed in place.
        """
        for dtype in dict.fromkeys(each.dtype for each in statistics):
            alike = [each for each in statistics if each.dtype == dtype]
            flat = torch.cat([each.reshape(-1) for each in alike])
            with self._clock:
                dist.broadcast(flat, group_src=0, group=self._group)
            pieces = torch.split(flat, [each.numel() for each in alike])
            for each, piece in zip(alike, pieces, strict=True):
                each.copy_(piece.view(each.shape))

    def evaluated(
        self, loss: torch.Tensor, part: float, correct: int, predicted: int
    ) -> tuple[torch.Tensor, int, int]:
        """See `OneProcess.evaluated`; a rank without samples counts no predictions."""
        hits = torch.tensor([correct, predicted], device=self.device) * (part > 0)
        total, right, of = self._agree([loss * part, *hits])
        return total.to(loss.dtype), int(right), int(of)

    def reseeded(self, seed: int) -> int:
        """See `OneProcess.reseeded`; every rank has another seed."""
        own = int(np.random.SeedSequence([seed, self._rank]).generate_state(1)[0]) >> 1
        with undisturbed_random():
            random.seed(own)
            np.random.seed(own)
            torch.manual_seed(own)
            self._random = RandomStates.now()
        return own

    def communication_ms(self) -> float:
        """See `OneProcess.communication_ms`; on CUDA it is only the time of the launches."""
        return self._clock.taken_ms()

    def check(self, settings: FinetuneSettings) -> None:
        """See `OneProcess.check`."""
        if (reason := compatibility.ranks_conflict(settings, self._size)) is not None:
            raise ValueError(reason)

    def told(self, report: Report) -> Report:
        """Return the report with a note on the ranks and a remark on BatchNorm.

        Args:
            report: The engine's report.
        """
        sharer = f" by {self.sharer}" if self._stage else ""
        note = (
            f"rank {dist.get_rank(self._everyone)} of {dist.get_world_size(self._everyone)} over "
            f"{dist.get_backend(self._group)}: ZeRO stage {self._stage}{sharer}, reduction "
            f"{self._reduction}"
        )
        normed = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.owner.modules()
        )
        remarks = ("BatchNorm normalizes each rank's samples separately",) if normed else ()
        return dataclasses.replace(
            report, notes=(*report.notes, note), remarks=(*report.remarks, *remarks)
        )

    def close(self) -> None:
        """Release the gradient buckets, which take as much memory as the gradients."""
        self._let_go()

    def _let_go(self) -> None:
        """Release `_parallel`; where something keeps it alive, it reduces no gradient any more.

        A traceback does, and torch.compile keeps those of graph breaks.
        """
        if isinstance(self._parallel, DistributedDataParallel):
            self._parallel._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._parallel = None
