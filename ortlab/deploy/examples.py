"""Example batch of an export: the one that is given, or the last one that the model has seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ortlab.deploy.lab import Lab
from ortlab.engines.base import Batch, wrapped_model
from ortlab.engines.batch import signature, tensors
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading
from ortlab.utils.rng import RandomStates


def of(lab: Lab, model: nn.Module, module: nn.Module, given: Any) -> Batch:
    """Return the example batch of an export.

    Args:
        lab: The session, which knows the data of the runs.
        model: The model, wrapped or not.
        module: The user's module inside the model.
        given: A batch or data; None for the arguments of the last call, or the data of the last
            run.

    Raises:
        ValueError: If no batch is given and none was seen.
    """
    if given is not None:
        return first(given)
    wrapped = wrapped_model(model)
    if wrapped is not None and (example := wrapped.example()) is not None:
        args, kwargs = example
        names = list(kwargs)
        if not args:
            return kwargs
        if not names:
            return args
        raise ValueError(
            f"the last call had positional and keyword arguments ({', '.join(names)}); give a batch"
        )
    data = lab.last_data(module)
    if data is not None:
        return first(data)
    raise ValueError(
        f"no batch of this {type(module).__name__} was seen yet; give one for {signature(module)}"
    )


def first(given: Any) -> Batch:
    """Return a batch unchanged, or the first batch of a loader, a dataset or a list of batches.

    Random states are restored, so the loader's later order does not change.

    Args:
        given: A batch or data.

    Raises:
        ValueError: If the data has no batch with a tensor.
    """
    if isinstance(given, torch.Tensor | Mapping | tuple):
        return given
    if isinstance(given, list) and given and isinstance(given[0], torch.Tensor):
        return given
    found = data_loading.batches(given, FinetuneSettings.of(engine="eager"))
    states = RandomStates.now()
    generators = [(each, each.get_state()) for each in found.generators]
    try:
        taken = data_loading.Epoch(found.open(0, 0), found.size, 0).take(1)
    finally:
        states.give_back()
        for generator, state in generators:
            generator.set_state(state)
    if not taken or not tensors(taken[0]):
        raise ValueError("the data has no batch with a tensor; give one as batch=...")
    return taken[0]
