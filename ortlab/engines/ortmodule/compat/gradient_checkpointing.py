"""ORT's recomputation as a replacement for torch's gradient checkpointing.

A graph contains no calls of torch.utils.checkpoint: the tracer records their contents. But ORT can
itself drop activations and recompute them in the backward pass according to plans: kinds of
subgraphs, each named by its operators. This module chooses all plans that ORT finds except those
that recompute the residual stream, because every other subgraph is recomputed from the kept
residual stream. If it is recomputed as well, as at ORT's own memory level 1, a BERT is recomputed
from its first layer all at once, which saves nothing.

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
"""Metadata property of an exported model: how many times it called checkpointing."""
_MIB = 2**20
CHOSEN = "gradient checkpointing: replaced by the selected recompute plans"
LAYERS = "gradient checkpointing: replaced by recomputing each layer of a list"
NOTHING = "gradient checkpointing saves no memory in ORT, which finds nothing to recompute"


def mark(model: Any, checkpoints: int) -> None:
    """Record in an exported ONNX model how many times it called checkpointing.

    Args:
        model: Exported ONNX model.
        checkpoints: Number of calls.
    """
    if checkpoints:
        entry = model.metadata_props.add()
        entry.key, entry.value = _ASKED, str(checkpoints)


def asks_for_checkpointing(manager: Any) -> bool:
    """Return True if the exported model called checkpointing.

    Args:
        manager: ORT's execution manager, after its export.
    """
    exported = manager._graph_transition_manager._exported_model_info.exported_model
    return any(entry.key == _ASKED for entry in exported.metadata_props)


def replace_checkpointing(manager: Any) -> str:
    """Choose recompute plans for a graph whose model calls checkpointing.

    Plans that were selected before are kept.

    Args:
        manager: ORT's execution manager of a graph with a gradient, before its session is created.

    Returns:
        A remark for the user about the outcome.
    """
    options = manager._runtime_options
    if options.memory_optimizer_is_enabled():
        return CHOSEN
    found = opportunities(manager)
    plans = [name for name in found if _leaves_residuals(name)]
    if not plans:
        return NOTHING
    memory = manager._runtime_inspector.memory_ob
    # ORT's own attribute for its plan file, which a session reads when it is created.
    file = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - needed as long as the graph
    memory._json_file_for_layerwise_recompute = file
    json.dump(plans, file)
    file.flush()
    options.memory_optimizer_config_file_path = file.name
    saved = [found[name].evaluated_saving for name in plans]
    told = "gradient checkpointing: replaced by ORT's recomputation"
    if all(isinstance(each, float) for each in saved):
        told += f"; estimated saving {sum(saved) / _MIB:.3g} MiB for a batch like the first"
    return told


def withdraw(manager: Any) -> None:
    """Undo `replace_checkpointing`, because plans for modules replace its choice.

    Args:
        manager: ORT's execution manager that was passed to `replace_checkpointing`.
    """
    options = manager._runtime_options
    file = manager._runtime_inspector.memory_ob._json_file_for_layerwise_recompute
    if file is not None and options.memory_optimizer_config_file_path == file.name:
        options.memory_optimizer_config_file_path = ""


def opportunities(manager: Any) -> dict[str, Any]:
    """Return the plans that ORT finds for the graph ("BiasGelu+:1:-1") and their savings.

    Creates the manager's session.

    Args:
        manager: ORT's execution manager of a graph with a gradient.
    """
    memory = manager._runtime_inspector.memory_ob
    memory._is_enabled = False  # otherwise ORT creates a second session for the same purpose
    manager._create_execution_agent()
    memory.find_memory_optimization_opportunity(manager._execution_agent, manager._runtime_options)
    found: dict[str, Any] = memory.cluster_id_combination_to_saving_symbolics_map
    return found


def without_dropout(find: Callable[..., None]) -> Callable[..., None]:
    """Wrap MemoryObserver.find_memory_optimization_opportunity to find no plans with a dropout.

    ORT gives a dropout and its copy in the backward pass the same seed, but each counts its own
    runs: after a forward pass without a backward pass they draw different masks.

    Args:
        find: Method to wrap.

    Returns:
        The wrapped method.
    """

    @functools.wraps(find)
    def find_memory_optimization_opportunity(self: Any, agent: Any, *options: Any) -> None:
        find(self, _Deterministic(agent), *options)

    return find_memory_optimization_opportunity


class _Deterministic:
    """TrainingAgent that reports no plan with a dropout."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def get_serialized_ortmodule_memory_stat(self, *how: Any) -> tuple[str, Mapping[str, Any]]:
        """Return ORT's text and its plans without those that recompute a dropout."""
        text, plans = self._agent.get_serialized_ortmodule_memory_stat(*how)
        return text, {name: value for name, value in plans.items() if "Dropout" not in name}


def _leaves_residuals(plan: str) -> bool:
    """Return True if a plan recomputes neither a sublayer's final sum nor its normalization.

    Type 1 recomputes all operators that a plan names; combinations only join single plans.
    """
    operators, kind = plan.split(":")[:2]
    return (
        "," not in plan
        and kind == "1"
        and "LayerNormalization" not in operators
        and not operators.endswith("Add+")
    )
