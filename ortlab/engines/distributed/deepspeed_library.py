"""The imported DeepSpeed library: its process group, its environment, and what it leaves behind.

This is the only module that imports DeepSpeed. It runs over torch's own process group, prints
nothing into the user's cell, and leaves the environment variables unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("barrier", "broadcast", "broadcast_object_list"),
)


@functools.cache
def imported(device_type: str) -> Any:
    """Return the `deepspeed` module, imported for one type of device and without its log output.

    Args:
        device_type: "cpu" or "cuda"; a process uses one of them.

    Returns:
        The module.
    """
    with _environment(DS_ACCELERATOR=device_type):
        import deepspeed  # optional: deepspeed
    # Its log handler writes to standard output, which is the user's cell.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment `variables` within the context, and undo what DeepSpeed's import sets."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def collectives() -> Any:
    """Return DeepSpeed's communication backend: torch's process group, with a `watcher`.

    Returns:
        The backend. Its attribute ``watcher`` is None, or a function that is called with each
        collective and has to call it.
    """
    from deepspeed.comm import comm  # optional: deepspeed
    from deepspeed.utils import groups  # optional: deepspeed

    if getattr(comm.cdb, "watcher", comm) is comm:
        comm.cdb = _watched_class()()
    # Without this DeepSpeed opens a second group with its own sockets, and keeps using it after the
    # default process group has changed.
    groups._WORLD_GROUP = dist.group.WORLD
    return comm.cdb


@functools.cache
def _watched_class() -> type[Any]:
    from deepspeed.comm.backend import Backend  # optional: deepspeed
    from deepspeed.comm.torch import TorchBackend  # optional: deepspeed

    class Watched(TorchBackend):  # type: ignore[misc]
        def __init__(self) -> None:
            # TorchBackend.__init__ would compile and load a kernel that only inference uses.
            Backend.__init__(self)
            self.watcher: Callable[[Callable[[], Any]], Any] | None = None
            self.name = "torch"
            self.initialized = True
            self.using_mpi = False
            self.has_all_reduce_coalesced = True
            self.has_coalescing_manager = True
            # torch 2.13 renamed these functions and warns about the old names.
            self.all_gather_function = _first("all_gather_single", "all_gather_into_tensor")
            self.reduce_scatter_function = _first("reduce_scatter_single", "reduce_scatter_tensor")

    def watched(name: str) -> Callable[..., Any]:
        def collective(self: Watched, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(getattr(TorchBackend, name), self, *args, **kwargs)
            return call() if self.watcher is None else self.watcher(call)

        return collective

    for name in _COLLECTIVES:
        setattr(Watched, name, watched(name))
    return Watched


def _first(*names: str) -> Callable[..., Any]:
    """Return the first function of `names` that this version of torch.distributed has."""
    found: Callable[..., Any] = getattr(dist, next(name for name in names if hasattr(dist, name)))
    return found


def library(device: torch.device) -> Any:
    """Return the `deepspeed` module, set up for a device over torch's own process group.

    Args:
        device: The device that this process trains on.

    Returns:
        The module.
    """
    found = imported(device.type)
    collectives()
    # DeepSpeed reads the variable when it is initialized, and in every step.
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    return found


def initialized(device: torch.device, **arguments: Any) -> Any:
    """Return the engine of ``deepspeed.initialize``, with the environment left unchanged.

    Args:
        device: The device that this process trains on.
        **arguments: Arguments of ``deepspeed.initialize``.

    Returns:
        The DeepSpeed engine.
    """
    deepspeed = library(device)
    deepspeed.utils.groups.mpu = None  # a user's PipelineModule leaves its own behind
    with _environment():
        engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
    return engine


def repartition(zero: Any, root: nn.Module) -> None:
    """Partition the parameters of stage 3 that an unfinished pass left whole or in flight.

    Args:
        zero: DeepSpeed's stage 3 optimizer.
        root: The module that DeepSpeed was given as the model.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # optional: deepspeed

    offload = zero.parameter_offload
    offload.param_coordinator._clean_inflight_param_registry()
    parameter: Any  # DeepSpeed has added attributes to it
    for parameter in root.parameters():
        # Its gathering was announced, and then a rank failed.
        if parameter.ds_status == ZeroParamStatus.INFLIGHT:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    offload.partition_all_parameters()


def forget(root: nn.Module) -> None:
    """Remove the global references to a model that stage 3 would keep forever.

    They are a list of modules and the cache of a method.

    Args:
        root: The module that DeepSpeed was given as the model.
    """
    from deepspeed.runtime.zero import parameter_offload as offload  # optional: deepspeed
    from deepspeed.runtime.zero.partitioned_param_coordinator import (  # optional: deepspeed
        PartitionedParameterCoordinator as Coordinator,
    )

    own = {id(module) for module in root.modules()}
    stack = offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in own]
    method = getattr(Coordinator, f"_{Coordinator.__name__}__params_to_release")
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


class Attributes:
    """Snapshot of the attribute names of a model's modules and parameters.

    Args:
        owner: The user's model, before DeepSpeed is initialized with it.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._modules = [(each, set(vars(each)), each._parameters) for each in owner.modules()]
        self._parameters = [(each, set(vars(each))) for each in owner.parameters()]

    def restore(self) -> None:
        """Remove the attributes that were added since the snapshot was taken."""
        for module, names, parameters in self._modules:
            for name in set(vars(module)) - names:
                delattr(module, name)
            module._parameters = parameters
        for parameter, names in self._parameters:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
