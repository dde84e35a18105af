"""ORTModule's own options, set for one model; ORTModule reads them from the environment for all.

`ortlab.settings.EngineSettings` declares them, each with its environment variable or key of ORT's
JSON file. An environment variable is the default of its setting and is read when settings are
created. Features of ORTModule without a setting are always off; see `UNUSED`.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortlab.engines import plan_names
from ortlab.engines.ortmodule import compat
from ortlab.engines.plan_names import UnknownPlan
from ortlab.engines.torch.stepper import refuses_precision, trains_on_cpu
from ortlab.settings import EngineSettings, OrtModuleSettings, unknown_name
from ortlab.utils.files import file_prefix

UNUSED = {
    "ORTMODULE_CACHE_DIR": "it identifies graphs by the printed model, which omits its code",
    "ORTMODULE_FALLBACK_POLICY": "use fallback=True to continue in torch when ORT fails",
    "ORTMODULE_FALLBACK_RETRY": "fallback=True tries ORT again after the model was edited",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "checkpoints are always traced and recomputed in ORT",
    "ORTMODULE_PRINT_INPUT_DENSITY": "only the sparsity optimizers measure it",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": "ortlab's graphs take every weight as an input",
}
"""Environment variables of ORTModule without effect, and the reason; a set one causes a warning."""
_ATTENTION = "use the setting attention, the only one that graphs from the cache follow"
REFUSED = {
    "ORTMODULE_ENABLE_ZERO_STAGE3": "ORT's hooks import a name that DeepSpeed no longer has",
    "ORTMODULE_ATEN_SDPA_FALLBACK": _ATTENTION,
    "ORTMODULE_USE_EFFICIENT_ATTENTION": _ATTENTION,
    "ORTMODULE_USE_FLASH_ATTENTION": _ATTENTION,
    "ORTMODULE_TRITON_CONFIG_FILE": "graphs from the cache would not follow the file",
}
"""Environment variables of ORTModule that cannot be on, and the reason."""
_ON_BY_ANY_TEXT = ("ORTMODULE_ATEN_SDPA_FALLBACK", "ORTMODULE_TRITON_CONFIG_FILE")
"""Variables among `REFUSED` that ORT also treats as on if their value is 0."""
_ON_CUDA = ("triton", "tuning", "tuning_ms", "tuning_results", "memory_stats")
_PYTHON_LEVELS = {
    "verbose": logging.DEBUG,
    "devinfo": logging.INFO,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_PLAN = re.compile(r"[^:,]+:[12]:-1")
_OLD_PLANS = "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"
"""Variable of ORT's pull request 12852, later renamed to ORTMODULE_MEMORY_OPT_CONFIG."""
_OLD_PLAN = re.compile(r"\s*([^:,\s]+):([012])(?::(-1|\d+))?\s*")
"""Plan as ORT read it from a variable: of operators or a subgraph, with or without a count."""
_REFUSED_KEYS = {
    "EnableGradAccOptimization": "it would not notice a weight that is changed through .data",
    "UseStaticShape": "one graph serves many shapes in ortlab",
}


_KERNELS = ("precision", "kernels", "attention")


def names() -> tuple[str, ...]:
    """Return the names of the settings that are ORTModule's own options."""
    return tuple(OrtModuleSettings.declarations())


def key(settings: EngineSettings) -> Hashable:
    """Return the part of the settings that an exported graph depends on.

    Args:
        settings: Settings of the engine.

    Returns:
        A key; settings with another key need another export.
    """
    chosen = tuple((name, settings[name]) for name in (*_KERNELS, *names()))
    return (*chosen, ("recompute", ort_plans(settings)))


def ask_for_an_export(settings: EngineSettings) -> bool:
    """Return True if the settings request outputs of an export: saved stages, or ORT's messages.

    Args:
        settings: Settings of the engine.
    """
    own = settings.ortmodule
    return own.save_onnx is not None or _PYTHON_LEVELS[own.log_level] < logging.WARNING


def changed(before: EngineSettings, after: EngineSettings) -> str:
    """Return the options that differ as text, such as "opset=15, cast_level=0"; "" if none.

    Args:
        before: Settings up to now.
        after: New settings.
    """
    pairs = [(name, after[name]) for name in (*_KERNELS, *names())]
    return ", ".join(f"{name}={value!r}" for name, value in pairs if before[name] != value)


def told(settings: EngineSettings) -> str:
    """Return a name for the graph of the settings: its precision and its non-default options.

    Args:
        settings: Settings of the engine.
    """
    declared = EngineSettings.declarations()
    plain = settings.replace(**{n: declared[n].default for n in (*_KERNELS[1:], *names())})
    again = f"recompute={settings.recompute!r}" if ort_plans(settings) else ""
    return ", ".join(filter(None, (settings.precision, changed(plain, settings), again)))


def check(settings: EngineSettings, device: str = "auto") -> None:
    """Check that all options can work here; warn of options without effect.

    Args:
        settings: Settings of the engine.
        device: Chosen device, "auto" for the best one.

    Raises:
        ValueError: If an option cannot work; the message names it and the reason.
    """
    own = settings.ortmodule
    _check_precision(settings, device)
    gpu = torch.cuda.is_available()
    declared = EngineSettings.declarations()
    chosen = [name for name in names() if settings[name] != declared[name].default]
    for name in chosen:
        if name in _ON_CUDA and not gpu:
            raise ValueError(
                f"{_said(settings, name)} is for CUDA devices, and torch sees none; leave it out"
            )
    for name in ("label_sparsity", "embedding_sparsity"):
        if settings[name]:
            raise ValueError(
                f"{_said(settings, name)} cannot run: ORT marks sparse inputs by its own "
                "autograd.Function, which prints in every step; leave it out"
            )
    for variable, why in REFUSED.items():
        off = "" if variable in _ON_BY_ANY_TEXT else "0"
        if os.environ.get(variable, off) != off:
            raise ValueError(f"{variable} cannot be on: {why}; unset it")
    _refuse_old_plans(os.environ.get(_OLD_PLANS, ""))
    idle = [f"{variable}: {why}" for variable, why in UNUSED.items() if variable in os.environ]
    if not gpu and own.conv_algo_search != "heuristic":
        idle.append(f"{_said(settings, 'conv_algo_search')}: it is for CUDA devices")
    if own.tuning_ms and not own.tuning:
        idle.append(f"{_said(settings, 'tuning_ms')}: tuning is off")
    if idle:
        warnings.warn(f"without effect on engine 'ortmodule': {'; '.join(idle)}", stacklevel=2)
    if own.save_onnx is not None:
        file_prefix(own.save_onnx, "save_onnx")
    if own.memory_plans is not None:
        _plans(own.memory_plans)
    recomputed(settings)
    if own.tuning_results is not None and not os.path.isdir(own.tuning_results):
        raise ValueError(f"{_said(settings, 'tuning_results')} is not a folder; create it first")


def _check_precision(settings: EngineSettings, device: str) -> None:
    if (reason := refuses_precision(settings.precision, device)) is not None:
        raise ValueError(reason)
    chosen = f"precision={settings.precision!r}"
    if settings.precision == "fp16" and trains_on_cpu(device):
        raise ValueError(
            f"{chosen} is not supported by engine 'ortmodule' on a CPU: ORT's CPU kernels compute "
            "float16 in float32; choose precision='bf16', or engine='eager' to check numerics"
        )
    if settings.precision != "bf16":
        return
    if settings.kernels == "ort":
        raise ValueError(
            f"{chosen} needs torch's kernels: ORT's own have none on a CPU; leave kernels='ort' out"
        )
    if recomputes(settings):
        raise ValueError(
            f"{chosen} does not work with ORT's recompute plans, which support only ORT's own "
            "kernels; leave out memory_level and memory_plans, or choose modules: "
            "recompute='layers'"
        )


def recomputes(settings: EngineSettings) -> bool:
    """Return True if ORT recomputes activations, by plans that refer to ORT's own operators.

    Args:
        settings: Settings of the engine.
    """
    own = settings.ortmodule
    return bool(own.memory_level or own.memory_plans or ort_plans(settings))


def recomputed(settings: EngineSettings) -> tuple[str, ...]:
    """Return the plans of `kernels.recomputed_graph` that the settings choose.

    Args:
        settings: Settings of the engine.

    Returns:
        The plans; empty if the settings choose ORT's own plans, or none.

    Raises:
        ValueError: If they are mixed with ORT's plans, or one of ORT's plans is malformed.
    """
    chosen = _recompute(settings)
    theirs = ort_plans(settings)
    if not theirs:
        return chosen
    if theirs != chosen:
        other = next(plan for plan in chosen if plan not in theirs)
        raise ValueError(
            f"recompute={settings.recompute!r}: {other!r} is not a plan of ORT's, such as "
            "BiasGelu+:1:-1, and cannot be combined with one"
        )
    _check_plans(theirs, f"recompute={settings.recompute!r}")
    return ()


def ort_plans(settings: EngineSettings) -> tuple[str, ...]:
    """Return ORT's own plans among those of the setting `recompute`: cluster:type:count.

    Args:
        settings: Settings of the engine.
    """
    return tuple(plan for plan in _recompute(settings) if ":" in plan)


def _recompute(settings: EngineSettings) -> tuple[str, ...]:
    return plan_names.split(settings.recompute)


@functools.cache
def _plans_in_a_file(plans: tuple[str, ...]) -> str:
    """Return the name of a file with `plans` in ORT's format, deleted when the process ends."""
    file = tempfile.NamedTemporaryFile("w+", suffix=".json")  # noqa: SIM115
    json.dump(plans, file)
    file.flush()
    _files.append(file)
    return file.name


_files: list[Any] = []


def _said(settings: EngineSettings, name: str) -> str:
    """Return an option and its value, with its environment variable if that is set."""
    declaration = EngineSettings.declarations()[name]
    by_variable = declaration.variable in os.environ
    text = f"{name}={settings[name]!r}"
    return f"{text} (from {declaration.variable})" if by_variable else text


def _plans(path: str) -> list[str]:
    """Read the recompute plans in a file: "cluster:type:-1", several joined by commas."""
    try:
        plans = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if renewed := _renewed(path):
            raise ValueError(
                f"memory_plans={path!r} is not the name of a JSON file, which ORT reads plans from "
                f"by now; use {renewed}"
            ) from None
        raise ValueError(f"memory_plans={path!r} cannot be read: {error}") from None
    if not isinstance(plans, list) or not all(isinstance(plan, str) for plan in plans):
        raise ValueError(f"memory_plans={path!r} must be a JSON list of plans, as BiasGelu+:1:-1")
    _check_plans((part for each in plans for part in each.split(",")), f"memory_plans={path!r}")
    return plans


def _check_plans(plans: Iterable[str], said: str) -> None:
    """Raise ValueError for a malformed plan, or for two of a subgraph: ORT drops one of them."""
    known: dict[str, str] = {}
    for plan in plans:
        cluster, kind, *_ = [*plan.split(":"), "1"]
        if not _PLAN.fullmatch(plan):
            nearest = f"{cluster or 'BiasGelu+'}:{kind if kind in ('1', '2') else 1}:-1"
            raise ValueError(
                f"{said}: {plan!r} is not a valid plan, such as {nearest}. The type must be 1 or 2 "
                "and the count -1: with another count ORT recomputes a wrong number of layers"
            )
        if cluster in known:
            others = "" if plan == known[cluster] else f", as {known[cluster]} and {plan}"
            raise ValueError(f"{said} names the subgraph {cluster} twice{others}; name it once")
        known[cluster] = plan


def _renewed(plans: str) -> str:
    """Return the setting that replaces a list of plans in ORT's old forms; "" if it is malformed.

    The forms are "Gelu:1" for operators, "BiasGelu+:1" and "BiasGelu+:1:12", joined by commas.
    """
    found = [_OLD_PLAN.fullmatch(plan) for plan in plans.split(",")]
    parts = [match.groups() for match in found if match is not None]
    if len(parts) < len(found):
        return ""
    on = {name: (kind, count) for name, kind, count in parts if kind != "0"}
    if not on:
        return "recompute='off'"
    if any(not name.endswith("+") for name in on):
        return "recompute with plans that %ort recompute MODEL --subgraphs lists"
    new = ",".join(f"{name}:{kind}:-1" for name, (kind, _) in on.items())
    some = any(count not in (None, "-1") for _, count in on.values())
    return f"recompute={new!r}" + (", which recomputes every occurrence" if some else "")


def _refuse_old_plans(given: str) -> None:
    """Raise ValueError if the variable of ORT's first plans is set; name the setting to use."""
    if not given:
        return
    renewed = _renewed(given)
    said = f"{_OLD_PLANS}={given!r}"
    if renewed == "recompute='off'":  # which is the default
        return
    if not renewed:
        raise ValueError(
            f"{said} is not a list of plans, such as BiasGelu+:1:-1; unset it, and use recompute"
        )
    raise ValueError(f"{said} is no longer read; unset it, and use {renewed}")


def debug_options(settings: EngineSettings) -> Any:
    """Return ORT's DebugOptions from the settings; environment variables are overridden.

    Args:
        settings: Settings of the engine.
    """
    own = settings.ortmodule
    ort = compat.ortmodule()
    level = ort.LogLevel[own.log_level.upper()]
    debug = ort.DebugOptions(log_level=level)
    debug.logging._log_level = level
    if own.save_onnx is not None:
        saved = debug.save_onnx_models
        saved._path, saved._name_prefix = file_prefix(own.save_onnx, "save_onnx")
        saved._save = True
    return debug


def apply(ort_module: nn.Module, settings: EngineSettings) -> None:
    """Set the options of an ORTModule for its future exports.

    Sources: onnxruntime/training/ortmodule/options.py and experimental/json_config of 1.19.2.

    Args:
        ort_module: An ORTModule.
        settings: Settings of the engine.
    """
    own = settings.ortmodule
    compat.use_opset(own.opset)
    if own.triton:
        compat.use_triton()
    ort_module.__dict__["_logger"] = _logger(own.log_level)
    debug = debug_options(settings)
    model: Any = ort_module._torch_module
    for training in (True, False):
        manager = model._execution_manager(training)
        manager._debug_options = manager._graph_transition_manager._debug_options = debug
        _set(manager, settings)


def share(given: Any, taking: Any, *, save: bool = True) -> None:
    """Copy the options of one graph manager to another.

    Args:
        given: Graph manager to copy from.
        taking: Graph manager to change.
        save: False if `taking` must not save ONNX files.
    """
    vars(taking._runtime_options).update(vars(given._runtime_options))
    taking._runtime_inspector.memory_ob.enable_memory_stats_by_step(
        given._runtime_options.print_memory_stat_by_step
    )
    if not save:
        debug = copy.copy(given._debug_options)
        debug._save_onnx_models = copy.copy(debug._save_onnx_models)
        debug._save_onnx_models._save = False
        taking._debug_options = taking._graph_transition_manager._debug_options = debug


def _set(manager: Any, settings: EngineSettings) -> None:
    own = settings.ortmodule
    options = manager._runtime_options
    options.onnx_opset_version = own.opset
    options.run_symbolic_shape_infer = own.shape_inference
    options.deepcopy_before_model_export = own.copy_for_export
    options.enable_compute_optimizer = own.compute_optimizer
    strategies = type(options.propagate_cast_ops_strategy).__members__
    options.propagate_cast_ops_strategy = strategies[own.cast_propagation.upper()]
    options.propagate_cast_ops_level = own.cast_level
    options.propagate_cast_ops_allow = [op.strip() for op in own.cast_ops.split(",") if op]
    options.use_memory_efficient_gradient = own.memory_efficient_gradient
    options.enable_cpu_mem_arena = own.arena  # for `restoring.open_session`
    without = settings.kernels == "ort" or recomputes(settings)
    options.torch_kernels = "" if without else settings.kernels
    options.without_workers = False  # set by it if a session cannot start its thread pool
    options.low_precision = settings.precision == "bf16"
    options.tf32 = settings.precision == "tf32"  # for `restoring.open_session`
    options.attention = settings.attention
    options.memory_optimization_level = type(options.memory_optimization_level)(own.memory_level)
    # The second number limits a recomputed part to one layer, which the levels require.
    options.recompute_probe_config = "1:1" if own.memory_level else "1:0"
    file = own.memory_plans or ""
    if theirs := ort_plans(settings):
        file = _plans_in_a_file(theirs)
    options.memory_optimizer_config_file_path = file
    options.print_memory_stat_by_step = own.memory_stats
    options.enable_custom_autograd_function = own.custom_autograd
    options.skip_check = _skip_checks(settings)
    options.use_external_gpu_allocator = own.external_allocator and manager._torch_alloc is not None
    options.conv_algo_search = own.conv_algo_search.upper()
    options.enable_triton = own.triton
    options.enable_tuning = own.tuning
    options.max_tuning_duration_ms = own.tuning_ms
    options.tuning_results_path = own.tuning_results or ""
    # Off regardless of the environment, see UNUSED; `check` refuses the first two.
    options.enable_label_sparse_optimizer = options.enable_embedding_sparse_optimizer = False
    options.ortmodule_cache_dir = ""
    options.print_input_density = False
    options.enable_mem_efficient_grad_management = False
    options.enable_zero_stage3_support = False


def _skip_checks(settings: EngineSettings) -> Any:
    checks = compat.ortmodule().SkipCheck
    skipped = checks(0)
    for name in settings.ortmodule.skip_checks.split(","):
        skipped |= checks[f"SKIP_CHECK_{name.upper()}"]
    return skipped


class _Printed(logging.Handler):
    """Handler that prints to the current standard error, in a notebook that of the running cell."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"ORT {record.levelname.lower()}: {self.format(record)}", file=sys.stderr)


def _logger(level: str) -> logging.Logger:
    """Return a logger for one model: ORT's own is shared and has the level of the last model."""
    logger = logging.Logger("orttraining", _PYTHON_LEVELS[level])
    logger.parent = logging.getLogger("orttraining")  # so that its handlers still get the records
    if logger.level < logging.ERROR:
        logger.addHandler(_Printed())
    return logger


def check_plans(manager: Any, settings: EngineSettings) -> None:
    """Check that every recompute plan refers to a part of the graph; ORT ignores other plans.

    Args:
        manager: ORT's graph manager with the graph.
        settings: Settings with the plans.

    Raises:
        UnknownPlan: If the graph has no such part; the message suggests the nearest one.
    """
    own = settings.ortmodule
    chosen = ort_plans(settings)
    if own.memory_plans is not None:
        chosen = tuple(_plans(own.memory_plans))
    if not chosen:
        return
    memory = manager._runtime_inspector.memory_ob
    combinations = memory.cluster_id_combination_to_saving_symbolics_map
    known = {plan.rpartition(":")[0] for each in combinations for plan in each.split(",")}
    for plan in (part for each in chosen for part in each.split(",")):
        cluster = plan.rpartition(":")[0]
        if cluster not in known:
            raise UnknownPlan(
                f"cannot recompute {cluster!r}: the graph has no such part; "
                f"{unknown_name(cluster, known)}"
            )


def from_json(path: str) -> dict[str, Any]:
    """Read settings from a file in ORTModule's JSON format.

    The format is that of ``onnxruntime.training.ortmodule.experimental.json_config``, with keys
    such as ``OnnxOpsetVersion``, ``PropagateCastOps`` and ``DebugOptions``.

    Args:
        path: Path of the file.

    Returns:
        The values by name of the setting.

    Raises:
        ValueError: If the file cannot be read, or a key is unknown or not supported; the message
            names the key and the reason.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must contain a JSON object, not a {type(data).__name__}")
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name in _REFUSED_KEYS:
            if value:
                raise ValueError(f"{path}: {name} cannot be on: {_REFUSED_KEYS[name]}")
        elif name not in _KEYS:
            known = (*_KEYS, *_REFUSED_KEYS)
            raise ValueError(f"{path}: unknown key {name!r}: {unknown_name(name, known)}")
        else:
            try:
                found |= _KEYS[name](value)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: {name} is not in ORTModule's format: {error!r}"
                ) from None
    return found


def _cast_ops(value: Mapping[str, Any]) -> dict[str, Any]:
    readers: dict[str, Callable[[Any], tuple[str, Any]]] = {
        "Strategy": lambda strategy: ("cast_propagation", strategy.lower()),
        "Level": lambda level: ("cast_level", level),
        "Allow": lambda ops: ("cast_ops", ",".join(ops)),
    }
    return dict(readers[name](each) for name, each in value.items())


def _debug(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    if "LogLevel" in value:
        found["log_level"] = value["LogLevel"].lower()
    if value.get("SaveONNX"):
        found["save_onnx"] = os.path.join(value.get("SaveONNXPath", ""), value["ONNXPrefix"])
    return found


_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "OnnxOpsetVersion": lambda value: {"opset": value},
    "PropagateCastOps": _cast_ops,
    "RunSymbolicShapeInference": lambda value: {"shape_inference": value},
    "UseExternalGPUAllocator": lambda value: {"external_allocator": value},
    "UseMemoryEfficientGradient": lambda value: {"memory_efficient_gradient": value},
    "EnableCustomAutogradFunction": lambda value: {"custom_autograd": value},
    "SkipCheck": lambda value: {
        "skip_checks": ",".join(name.removeprefix("SKIP_CHECK_").lower() for name in value)
    },
    "DebugOptions": _debug,
    "FallbackPolicy": lambda value: {"fallback": "FALLBACK_DISABLE" not in value},
}
"""Keys of ORTModule's JSON format, with functions that convert a value to settings."""
