"""ORTModule's own options, for one model: those that it reads from its environment for all models.

`ortlab.settings.EngineSettings` declares them, each with the variable of the environment or the key
of ORT's JSON file that it comes from. A variable that is set stands where nothing else is chosen;
it is read when settings are made. What has no setting is never on, see `UNUSED`.
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
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.kernels.recompute import UnknownPlan
from ortlab.engines.torch.stepper import refuses_precision, trains_on_cpu
from ortlab.settings import EngineSettings, unknown_name

UNUSED = {
    "ORTMODULE_CACHE_DIR": "it finds graphs by the printed model, which does not show its code",
    "ORTMODULE_FALLBACK_POLICY": "fallback=True lets torch go on where ORT cannot, and shows it",
    "ORTMODULE_FALLBACK_RETRY": "fallback=True tries again where the model was edited",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "checkpoints are traced through, and recomputed in ORT",
    "ORTMODULE_PRINT_INPUT_DENSITY": "only the sparsity optimizers measure it",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": "ortlab's graphs take every weight as an input",
}
"""Variables of ORTModule's that have no effect here, and why. One that is set is warned of."""
_ATTENTION = "the setting attention chooses, and graphs from the cache follow that alone"
REFUSED = {
    "ORTMODULE_ENABLE_ZERO_STAGE3": "ORT's hooks import a name that DeepSpeed no longer has",
    "ORTMODULE_ATEN_SDPA_FALLBACK": _ATTENTION,
    "ORTMODULE_USE_EFFICIENT_ATTENTION": _ATTENTION,
    "ORTMODULE_USE_FLASH_ATTENTION": _ATTENTION,
    "ORTMODULE_TRITON_CONFIG_FILE": "graphs from the cache would not follow the file",
}
"""Variables of ORTModule's that cannot be on, and why."""
_ON_BY_ANY_TEXT = ("ORTMODULE_ATEN_SDPA_FALLBACK", "ORTMODULE_TRITON_CONFIG_FILE")
"""Those of them that ORT takes as on where they say 0, too."""
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
_REFUSED_KEYS = {
    "EnableGradAccOptimization": "a weight that is changed through .data would go unseen",
    "UseStaticShape": "one graph serves many shapes here",
}


_KERNELS = ("precision", "kernels", "attention")


def names() -> tuple[str, ...]:
    """The settings that are ORTModule's own options."""
    return tuple(name for name, each in EngineSettings.declarations().items() if each.source)


def key(settings: EngineSettings) -> Hashable:
    """What of `settings` an exported graph is made with: another value asks for another export."""
    chosen = tuple((name, getattr(settings, name)) for name in (*_KERNELS, *names()))
    return (*chosen, ("recompute", ort_plans(settings)))


def ask_for_an_export(settings: EngineSettings) -> bool:
    """Whether `settings` ask for what only an export gives: its stages, ORT's messages of it."""
    return settings.save_onnx is not None or _PYTHON_LEVELS[settings.log_level] < logging.WARNING


def changed(before: EngineSettings, after: EngineSettings) -> str:
    """The options that differ, as a phrase: "opset=15, cast_level=0"; "" when none does."""
    pairs = [(name, getattr(after, name)) for name in (*_KERNELS, *names())]
    return ", ".join(f"{name}={value!r}" for name, value in pairs if getattr(before, name) != value)


def told(settings: EngineSettings) -> str:
    """What a graph for `settings` is called: its precision, and the options that are no default."""
    declared = EngineSettings.declarations()
    plain = settings.replace(**{n: declared[n].default for n in (*_KERNELS[1:], *names())})
    again = f"recompute={settings.recompute!r}" if ort_plans(settings) else ""
    return ", ".join(filter(None, (settings.precision, changed(plain, settings), again)))


def check(settings: EngineSettings) -> None:
    """ValueError names an option that cannot work here, and why; warns of what has no effect."""
    _check_precision(settings)
    gpu = torch.cuda.is_available()
    declared = EngineSettings.declarations()
    chosen = [name for name in names() if getattr(settings, name) != declared[name].default]
    for name in chosen:
        if name in _ON_CUDA and not gpu:
            raise ValueError(
                f"{_said(settings, name)} is for CUDA devices, and torch sees none; leave it out"
            )
    for name in ("label_sparsity", "embedding_sparsity"):
        if getattr(settings, name):
            raise ValueError(
                f"{_said(settings, name)} cannot run: ORT marks sparse inputs by an "
                "autograd.Function of its own, which prints in every step; leave it out"
            )
    for variable, why in REFUSED.items():
        off = "" if variable in _ON_BY_ANY_TEXT else "0"
        if os.environ.get(variable, off) != off:
            raise ValueError(f"{variable} cannot be on: {why}; unset it")
    idle = [f"{variable}: {why}" for variable, why in UNUSED.items() if variable in os.environ]
    if not gpu and settings.conv_algo_search != "heuristic":
        idle.append(f"{_said(settings, 'conv_algo_search')}: it is for CUDA devices")
    if settings.tuning_ms and not settings.tuning:
        idle.append(f"{_said(settings, 'tuning_ms')}: tuning is off")
    if idle:
        warnings.warn(f"without effect on engine 'ort': {'; '.join(idle)}", stacklevel=2)
    if settings.save_onnx is not None:
        _saved_to(settings.save_onnx)
    if settings.memory_plans is not None:
        _plans(settings.memory_plans)
    recomputed(settings)
    if settings.tuning_results is not None and not os.path.isdir(settings.tuning_results):
        raise ValueError(f"{_said(settings, 'tuning_results')} is no folder; make it first")


def _check_precision(settings: EngineSettings) -> None:
    if (reason := refuses_precision(settings)) is not None:
        raise ValueError(reason)
    chosen = f"precision={settings.precision!r}"
    if settings.precision == "fp16" and trains_on_cpu(settings):
        raise ValueError(
            f"{chosen} is not what engine 'ort' would compute in on a CPU: ORT's CPU kernels take "
            "float16 as float32; choose precision='bf16', or engine='eager' to check numerics"
        )
    if settings.precision != "bf16":
        return
    if settings.kernels == "ort":
        raise ValueError(
            f"{chosen} needs torch's kernels: ORT's own have none on a CPU; leave kernels='ort' out"
        )
    if recomputes(settings):
        raise ValueError(
            f"{chosen} does not go with ORT's recompute plans, which know its own kernels alone; "
            "leave out memory_level and memory_plans, or choose modules: recompute='layers'"
        )


def recomputes(settings: EngineSettings) -> bool:
    """Whether ORT computes activations again, by plans that find them by ORT's own operators."""
    return bool(settings.memory_level or settings.memory_plans or ort_plans(settings))


def recomputed(settings: EngineSettings) -> tuple[str, ...]:
    """The plans of `ortlab.engines.ortmodule.kernels.recompute` that `settings` choose.

    ValueError where they are mixed with ORT's, or ORT's are malformed.
    """
    chosen = _recompute(settings)
    theirs = ort_plans(settings)
    if not theirs:
        return chosen
    if theirs != chosen:
        other = next(plan for plan in chosen if plan not in theirs)
        raise ValueError(
            f"recompute={settings.recompute!r}: {other!r} is no plan of ORT's such as "
            "BiasGelu+:1:-1, which go with no others"
        )
    for plan in theirs:
        _check_plan(plan, f"recompute={settings.recompute!r}")
    return ()


def ort_plans(settings: EngineSettings) -> tuple[str, ...]:
    """The plans of ORT's own among those of the setting `recompute`: cluster:type:count."""
    return tuple(plan for plan in _recompute(settings) if ":" in plan)


def _recompute(settings: EngineSettings) -> tuple[str, ...]:
    names = (name.strip() for name in settings.recompute.split(","))
    return tuple(name for name in names if name and name != "off")


@functools.cache
def _plans_in_a_file(plans: tuple[str, ...]) -> str:
    """The name of a file with `plans` as ORT reads them, which is there until the process ends."""
    file = tempfile.NamedTemporaryFile("w+", suffix=".json")  # noqa: SIM115
    json.dump(plans, file)
    file.flush()
    _files.append(file)
    return file.name


_files: list[Any] = []


def _said(settings: EngineSettings, name: str) -> str:
    """The option as it was chosen; the variable is named where it may have been."""
    declaration = EngineSettings.declarations()[name]
    by_variable = declaration.variable in os.environ
    text = f"{name}={getattr(settings, name)!r}"
    return f"{text} (from {declaration.variable})" if by_variable else text


def _saved_to(path: str) -> tuple[str, str]:
    """Folder and first letters of the files that `save_onnx` names."""
    folder, prefix = os.path.split(os.path.abspath(os.path.expanduser(path)))
    if path.endswith(os.sep) or not prefix:
        raise ValueError(f"save_onnx={path!r} names a folder: end with the files' first letters")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"save_onnx={path!r}: {folder} is not a folder that can be written to")
    return folder, prefix


def _plans(path: str) -> list[str]:
    """The recompute plans in the file at `path`: "cluster:type:-1", several joined by commas."""
    try:
        plans = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"memory_plans={path!r} cannot be read: {error}") from None
    if not isinstance(plans, list) or not all(isinstance(plan, str) for plan in plans):
        raise ValueError(f"memory_plans={path!r} must hold a list of plans such as BiasGelu+:1:-1")
    for plan in (part for each in plans for part in each.split(",")):
        _check_plan(plan, f"memory_plans={path!r}")
    return plans


def _check_plan(plan: str, said: str) -> None:
    if not _PLAN.fullmatch(plan):
        cluster, kind, *_ = [*plan.split(":"), "1"]
        nearest = f"{cluster or 'BiasGelu+'}:{kind if kind in ('1', '2') else 1}:-1"
        raise ValueError(
            f"{said}: {plan!r} is no plan such as {nearest}. The type is 1 or 2, and ORT "
            "recomputes a wrong number of layers for another count than -1"
        )


def debug_options(settings: EngineSettings) -> Any:
    """ORT's DebugOptions by `settings` alone: its environment would come before them."""
    ort = compat.ortmodule()
    level = ort.LogLevel[settings.log_level.upper()]
    debug = ort.DebugOptions(log_level=level)
    debug.logging._log_level = level
    if settings.save_onnx is not None:
        saved = debug.save_onnx_models
        saved._path, saved._name_prefix = _saved_to(settings.save_onnx)
        saved._save = True
    return debug


def apply(ort_module: nn.Module, settings: EngineSettings) -> None:
    """Sets the options on `ort_module`, an ORTModule, for the graphs that it exports from now on.

    Sources: onnxruntime/training/ortmodule/options.py and experimental/json_config of 1.19.2.
    """
    compat.use_opset(settings.opset)
    if settings.triton:
        compat.use_triton()
    ort_module.__dict__["_logger"] = _logger(settings.log_level)
    debug = debug_options(settings)
    model: Any = ort_module._torch_module
    for training in (True, False):
        manager = model._execution_manager(training)
        manager._debug_options = manager._graph_transition_manager._debug_options = debug
        _set(manager, settings)


def share(given: Any, taking: Any, *, save: bool = True) -> None:
    """Gives the graph manager `taking` the options of `given`; without `save` it saves no ONNX."""
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
    options = manager._runtime_options
    options.onnx_opset_version = settings.opset
    options.run_symbolic_shape_infer = settings.shape_inference
    options.deepcopy_before_model_export = settings.copy_for_export
    options.enable_compute_optimizer = settings.compute_optimizer
    strategies = type(options.propagate_cast_ops_strategy).__members__
    options.propagate_cast_ops_strategy = strategies[settings.cast_propagation.upper()]
    options.propagate_cast_ops_level = settings.cast_level
    options.propagate_cast_ops_allow = [op.strip() for op in settings.cast_ops.split(",") if op]
    options.use_memory_efficient_gradient = settings.memory_efficient_gradient
    options.enable_cpu_mem_arena = settings.arena  # for `restoring.open_session`
    without = settings.kernels == "ort" or recomputes(settings)
    options.torch_kernels = "" if without else settings.kernels
    options.spinning = without  # what ORT's idle workers do, for `restoring.open_session` too
    options.without_workers = False  # which says so of a session whose workers find no room
    options.low_precision = settings.precision == "bf16"
    options.tf32 = settings.precision == "tf32"  # for `restoring.open_session`
    options.attention = settings.attention
    options.memory_optimization_level = type(options.memory_optimization_level)(
        settings.memory_level
    )
    # The second figure keeps recomputed parts within one layer each, which the levels need.
    options.recompute_probe_config = "1:1" if settings.memory_level else "1:0"
    file = settings.memory_plans or ""
    if theirs := ort_plans(settings):
        file = _plans_in_a_file(theirs)
    options.memory_optimizer_config_file_path = file
    options.print_memory_stat_by_step = settings.memory_stats
    options.enable_custom_autograd_function = settings.custom_autograd
    options.skip_check = _skip_checks(settings)
    options.use_external_gpu_allocator = (
        settings.external_allocator and manager._torch_alloc is not None
    )
    options.conv_algo_search = settings.conv_algo_search.upper()
    options.enable_triton = settings.triton
    options.enable_tuning = settings.tuning
    options.max_tuning_duration_ms = settings.tuning_ms
    options.tuning_results_path = settings.tuning_results or ""
    # Whatever the environment says of them, see UNUSED; `check` refuses the first two.
    options.enable_label_sparse_optimizer = options.enable_embedding_sparse_optimizer = False
    options.ortmodule_cache_dir = ""
    options.print_input_density = False
    options.enable_mem_efficient_grad_management = False
    options.enable_zero_stage3_support = False


def _skip_checks(settings: EngineSettings) -> Any:
    checks = compat.ortmodule().SkipCheck
    skipped = checks(0)
    for name in settings.skip_checks.split(","):
        skipped |= checks[f"SKIP_CHECK_{name.upper()}"]
    return skipped


class _Printed(logging.Handler):
    """Prints to what is standard error by then: in a notebook, the cell that runs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"ORT {record.levelname.lower()}: {self.format(record)}", file=sys.stderr)


def _logger(level: str) -> logging.Logger:
    """A logger for one model: ORT's own is one for all, at the level of the last."""
    logger = logging.Logger("orttraining", _PYTHON_LEVELS[level])
    logger.parent = logging.getLogger("orttraining")  # who listens there goes on to hear it
    if logger.level < logging.ERROR:
        logger.addHandler(_Printed())
    return logger


def check_plans(manager: Any, settings: EngineSettings) -> None:
    """UnknownPlan where a recompute plan names what the graph of `manager` has none of.

    ORT itself ignores such a plan.
    """
    chosen = ort_plans(settings)
    if settings.memory_plans is not None:
        chosen = tuple(_plans(settings.memory_plans))
    if not chosen:
        return
    memory = manager._runtime_inspector.memory_ob
    combinations = memory.cluster_id_combination_to_saving_symbolics_map
    known = {plan.rpartition(":")[0] for each in combinations for plan in each.split(",")}
    for plan in (part for each in chosen for part in each.split(",")):
        cluster = plan.rpartition(":")[0]
        if cluster not in known:
            raise UnknownPlan(
                f"nothing in the graph is {cluster!r}, to recompute it: "
                f"{unknown_name(cluster, known)}"
            )


def from_json(path: str) -> dict[str, Any]:
    """The settings in a file of ORTModule's JSON form, by their names here.

    The form is that of ``onnxruntime.training.ortmodule.experimental.json_config``: keys such as
    ``OnnxOpsetVersion``, ``PropagateCastOps`` and ``DebugOptions``. ValueError names a key that is
    unknown, or that cannot be honoured and why.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object; it is a {type(data).__name__}")
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
                raise ValueError(f"{path}: {name} is not of ORTModule's form: {error!r}") from None
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
"""The keys of ORTModule's JSON form, and the settings that each one's value makes."""
