"""The example that a model is exported for: as it is given, or the last that ortlab saw."""

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
    """The batch that was `given`, or the first of the data, or what `model` was called with last.

    `module` is the user's own in `model`. ValueError where there is none.
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
        raise ValueError(f"the last call had places and names ({', '.join(names)}); give a batch")
    data = lab.last_data(module)
    if data is not None:
        return first(data)
    raise ValueError(
        f"no batch of this {type(module).__name__} was seen yet: give one for {signature(module)}"
    )


def first(given: Any) -> Batch:
    """`given` where it is a batch, or the first batch of a loader, a dataset, a list of batches.

    Random states are as before, so a loader's order stays what it would have been.
    """
    if isinstance(given, torch.Tensor | Mapping | tuple):
        return given
    if isinstance(given, list) and given and isinstance(given[0], torch.Tensor):
        return given
    found = data_loading.batches(given, FinetuneSettings(engine="eager"))
    states = RandomStates.now()
    generators = [(each, each.get_state()) for each in found.generators]
    try:
        taken = data_loading.Epoch(found.open(0, 0), found.size, 0).take(1)
    finally:
        states.give_back()
        for generator, state in generators:
            generator.set_state(state)
    if not taken or not tensors(taken[0]):
        raise ValueError("the data has no batch with a tensor in it; give one as batch=...")
    return taken[0]
