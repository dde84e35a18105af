"""ORT's recomputation in the place of torch's gradient checkpointing.

A graph has no calls of torch.utils.checkpoint: they are traced through. But ORT can drop
activations itself and compute them again in the backward pass, by plans: kinds of subgraphs, each
named by its operators. Chosen here are all that ORT finds but those that compute the residual
stream: what stays of that is what every other part starts from again. With it as well, as in ORT's
own memory level 1, a BERT is computed again from its first layer, at once, and saves nothing.

Measured on CPU without ORT's memory arena, 16 x 256 tokens, 6 layers of width 256: the peak of a
step above the idle model falls from 517 to 164 MB for BERT (eager torch: from 406 to 105), from 551
to 280 MB for GPT-2.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

_ASKED = "ortlab_checkpoints"
"""The property of an exported model that says how often checkpointing was asked for."""
_MIB = 2**20
CHOSEN = "gradient checkpointing: the recompute plans that were chosen take its place"
LAYERS = "gradient checkpointing: each layer of a list is computed again in its place"
NOTHING = "gradient checkpointing saves no memory in ORT, which finds nothing to recompute"


def mark(model: Any, checkpoints: int) -> None:
    """Writes into an exported ONNX model how often it asked for checkpointing."""
    if checkpoints:
        entry = model.metadata_props.add()
        entry.key, entry.value = _ASKED, str(checkpoints)


def asks_for_checkpointing(manager: Any) -> bool:
    """Whether the model that `manager`, ORT's execution manager, has exported asked for it."""
    exported = manager._graph_transition_manager._exported_model_info.exported_model
    return any(entry.key == _ASKED for entry in exported.metadata_props)


def replace_checkpointing(manager: Any) -> str:
    """Chooses recompute plans for a graph whose model asks for checkpointing; says what it did.

    `manager` is ORT's execution manager of a graph with a gradient, before its session is made.
    Plans that were chosen before stay.
    """
    options = manager._runtime_options
    if options.memory_optimizer_is_enabled():
        return CHOSEN
    found = _opportunities(manager)
    plans = [name for name in found if _leaves_residuals(name)]
    if not plans:
        return NOTHING
    memory = manager._runtime_inspector.memory_ob
    # Where ORT keeps the file of its own plans, which a session reads when it is made.
    file = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - it lives as long as the graph
    memory._json_file_for_layerwise_recompute = file
    json.dump(plans, file)
    file.flush()
    options.memory_optimizer_config_file_path = file.name
    saved = [found[name].evaluated_saving for name in plans]
    told = "gradient checkpointing: ORT recomputes activations in its place"
    if all(isinstance(each, float) for each in saved):
        told += f"; it estimates to save {sum(saved) / _MIB:.3g} MiB of a batch like the first"
    return told


def withdraw(manager: Any) -> None:
    """Takes back what `replace_checkpointing` chose: plans of modules take its place."""
    options = manager._runtime_options
    file = manager._runtime_inspector.memory_ob._json_file_for_layerwise_recompute
    if file is not None and options.memory_optimizer_config_file_path == file.name:
        options.memory_optimizer_config_file_path = ""


def _opportunities(manager: Any) -> dict[str, Any]:
    """The plans that ORT finds for the graph, "BiasGelu+:1:-1", with their savings."""
    memory = manager._runtime_inspector.memory_ob
    memory._is_enabled = False  # else it makes a second session for the same
    manager._create_execution_agent()
    memory.find_memory_optimization_opportunity(manager._execution_agent, manager._runtime_options)
    found: dict[str, Any] = memory.cluster_id_combination_to_saving_symbolics_map
    return found


def without_dropout(find: Callable[..., None]) -> Callable[..., None]:
    """MemoryObserver.find_memory_optimization_opportunity, for plans that recompute no dropout.

    ORT gives a dropout and its twin in the backward pass the same seed, and each counts its own
    runs: after a forward pass without a backward pass they draw different masks.
    """

    @functools.wraps(find)
    def find_memory_optimization_opportunity(self: Any, agent: Any, *options: Any) -> None:
        find(self, _Deterministic(agent), *options)

    return find_memory_optimization_opportunity


class _Deterministic:
    """A TrainingAgent that tells of no plan with a dropout."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def get_serialized_ortmodule_memory_stat(self, *how: Any) -> tuple[str, Mapping[str, Any]]:
        text, plans = self._agent.get_serialized_ortmodule_memory_stat(*how)
        return text, {name: value for name, value in plans.items() if "Dropout" not in name}


def _leaves_residuals(plan: str) -> bool:
    """Whether a plan recomputes neither sums that end a sublayer nor what is normalized of them.

    Type 1 recomputes everything that a plan names; combinations name plans that are there alone.
    """
    operators, kind = plan.split(":")[:2]
    return (
        "," not in plan
        and kind == "1"
        and "LayerNormalization" not in operators
        and not operators.endswith("Add+")
    )
