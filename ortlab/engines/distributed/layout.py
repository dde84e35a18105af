"""Layout of ranks: pipeline stages x data parallel replicas x ranks that share each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist

from ortlab.engines.compatibility import data_parallel_size
from ortlab.engines.distributed.data_parallel import leave
from ortlab.settings import ParallelSettings


@dataclass(frozen=True)
class Layout:
    """Process groups that this rank belongs to.

    Neighbors in the order of ranks share layers, then come the replicas, then the stages: with 8
    ranks and 2 of each, ranks 0 and 1 share layers, 0 and 2 train on different rows, and 0 and 4
    have different stages.

    Attributes:
        stages: Ranks with the other stages of this rank's model.
        data: Ranks with the same part of a model, which train on different rows.
        tensor: Ranks that share each layer.
    """

    stages: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: dist.ProcessGroup

    def leave(self) -> None:
        """Destroy the groups."""
        leave(self.stages, self.data, self.tensor)


def layout_of(parallel: ParallelSettings, everyone: dist.ProcessGroup) -> Layout:
    """Make the process groups of all ranks; every rank calls it.

    Args:
        parallel: Settings of the processes.
        everyone: The process group of all ranks.

    Returns:
        This rank's groups.
    """
    size = dist.get_world_size(everyone)
    shape = parallel.pipeline_stages, data_parallel_size(parallel, size), parallel.tensor_parallel
    ranks = torch.arange(size).reshape(shape)
    own = dist.get_rank(everyone)
    found = []
    for dim, length in enumerate(shape):
        for line in ranks.movedim(dim, -1).reshape(-1, length).tolist():
            group = dist.new_group(line)
            if own in line:
                found.append(group)
    return Layout(*found)
