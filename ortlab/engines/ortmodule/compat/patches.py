"""Patches that let onnxruntime-training 1.19.2 run on current torch versions: one row per symptom.

Importing this module patches nothing. `apply` runs once, when ORTModule is first requested: it
applies the rows for before the import, imports ORTModule, and applies the other rows. A row changes
modules of ORT or restores names that torch has removed; torch and the user's own code are not
affected.

Functions import onnxruntime themselves: it is optional, and some rows must precede its import.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
import torch.utils.checkpoint

from ortlab.engines.ortmodule.compat import (
    exporting,
    gradient_checkpointing,
    outputs,
    probes,
    symbolics,
    traced_decisions,
)
from ortlab.engines.ortmodule.compat.base import MAX_IR, MAX_OPSET, ORT_LOG_FORMAT
from ortlab.engines.ortmodule.compat.passes import Passes
from ortlab.engines.ortmodule.compat.probes import PACKAGE
from ortlab.engines.ortmodule.compat.symbolics import builder
from ortlab.engines.torchscript import streams

Addresses = Mapping[str, Mapping[str, int]]
"""Result of `extensions.load`: extension -> function -> address."""

_EXTENSIONS = f"{PACKAGE}.torch_cpp_extensions"
_EXPORTER = "torch.onnx._internal.torchscript_exporter"


@dataclass(frozen=True)
class Versions:
    """Versions and devices that determine whether a row applies."""

    torch: tuple[int, ...]
    onnx: tuple[int, ...]
    cuda: bool


@dataclass(frozen=True)
class Patch:
    """One failure of the runtime and its workaround.

    Attributes:
        target: Name that is patched.
        symptom: What happens without the patch.
        link: Source of the failure.
        apply: Applies the patch, and may run twice. Called after torch is imported.
        probe: Returns True if the symptom does not occur. Called after torch is imported.
        applies_to: Returns True if the versions need the patch.
        before_import: Whether the patch is applied before ORTModule is imported, not after.
    """

    target: str
    symptom: str
    link: str
    apply: Callable[[Addresses], None]
    probe: Callable[[], bool]
    applies_to: Callable[[Versions], bool] = lambda _versions: True
    before_import: bool = False


def apply(addresses: Addresses, *, leave_out: str | None = None) -> None:
    """Import ORTModule and apply every row that the installed versions need.

    Args:
        addresses: Result of `extensions.load`.
        leave_out: Target of a row to skip, for tests.
    """
    with warnings.catch_warnings():
        # Importing ORT warns about its unknown CUDA version and about deprecated torch functions.
        warnings.simplefilter("ignore")
        versions = installed()
        rows = [row for row in ROWS if row.applies_to(versions) and row.target != leave_out]
        for row in rows:
            if row.before_import:
                row.apply(addresses)
        importlib.import_module(PACKAGE)
        for row in rows:
            if not row.before_import:
                row.apply(addresses)


def installed() -> Versions:
    """Return the versions in this process."""
    return Versions(_numbers(torch.__version__), _numbers(onnx.__version__), _has_gpu())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute with `make(original)`, unless it was replaced before."""
    current = getattr(owner, name)
    if getattr(current, "_ortlab", False):
        return
    changed = make(current)
    changed._ortlab = True
    setattr(owner, name, changed)


class _View:
    """View of a module with some names replaced; the module itself is unchanged."""

    _ortlab = True

    def __init__(self, module: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ---- before ORTModule is imported ---------------------------------------------------------------


def _exporter_modules() -> Iterator[tuple[str, str]]:
    """Yield the old and the new name of each exporter module that ORT uses."""
    for name in ("jit_utils", "registration"):
        yield f"torch.onnx._internal.{name}", f"{_EXPORTER}.{name}"
    for name in ("_globals", "_type_utils", "symbolic_helper", "utils"):
        yield f"torch.onnx.{name}", f"{_EXPORTER}.{name}"
    for opset in range(9, 18):
        yield f"torch.onnx.symbolic_opset{opset}", f"{_EXPORTER}.symbolic_opset{opset}"


def _restore_exporter_names(_addresses: Addresses) -> None:
    for old, new in _exporter_modules():
        module = importlib.import_module(new)
        try:
            present = importlib.import_module(old)
        except ImportError:
            parent, _, name = old.rpartition(".")
            sys.modules[old] = module
            setattr(importlib.import_module(parent), name, module)
        else:
            for name, value in vars(module).items():
                if not hasattr(present, name):  # torch's shims omit the private names
                    setattr(present, name, value)


def _stand_in_for_extensions(addresses: Addresses) -> None:
    """Register the extensions as the submodules of site-packages in which ORT looks for them."""
    for extension, functions in addresses.items():
        module = types.ModuleType(f"{_EXTENSIONS}.{extension}")
        for name, address in functions.items():
            setattr(module, name, _constant(address))
        sys.modules[module.__name__] = module
    interop = types.ModuleType(f"{_EXTENSIONS}.torch_interop_utils")
    interop.clear_all_grad_fns = lambda: None  # type: ignore[attr-defined]
    sys.modules[interop.__name__] = interop


def _constant(value: int) -> Callable[[], int]:
    return lambda: value


def _interop_later(_addresses: Addresses) -> None:
    from onnxruntime.capi import _pybind_state  # optional: onnxruntime

    _replace(_pybind_state, "is_torch_interop_default_on", lambda _original: lambda: False)


_ABSENT = object()
_hidden: list[Any] = []
"""Entry of DeepSpeed in `sys.modules`, saved while ORTModule is imported."""


def _hide_deepspeed(_addresses: Addresses) -> None:
    if PACKAGE not in sys.modules and not _hidden:
        _hidden.append(sys.modules.get("deepspeed", _ABSENT))
        sys.modules["deepspeed"] = None  # type: ignore[assignment]  # None makes its import fail


# ---- after it is imported -----------------------------------------------------------------------


def _extensions_present(addresses: Addresses) -> None:
    package = importlib.import_module(PACKAGE)
    if "aten_op_executor" in addresses:
        package._FALLBACK_INIT_EXCEPTION = None  # type: ignore[attr-defined]


def _give_torch_back(_addresses: Addresses) -> None:
    for owner, name, kept_as in (
        (torch, "manual_seed", "torch_manual_seed"),
        (torch.cuda, "manual_seed", "torch_cuda_manual_seed"),
        (torch.utils.checkpoint, "checkpoint", "original_torch_checkpoint"),
    ):
        function = getattr(owner, name)
        # Wrapped more than once if the user's own import of onnxruntime.training failed halfway.
        while function.__module__ == PACKAGE:
            function = function.__globals__[kept_as]
        setattr(owner, name, function)


def _show_deepspeed(_addresses: Addresses) -> None:
    if _hidden:  # otherwise the first export would import it, and with it DeepSpeed
        importlib.import_module("onnxruntime.training.utils.hooks._zero_offload_subscriber")
    while _hidden:
        module = _hidden.pop()
        if module is _ABSENT:
            del sys.modules["deepspeed"]
        else:
            sys.modules["deepspeed"] = module


def _interop_ready(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _custom_autograd_function  # optional: onnxruntime

    _custom_autograd_function.custom_autograd_function_enabler.state = True


def _no_fallback(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _fallback  # optional: onnxruntime

    package: Any = importlib.import_module(PACKAGE)
    package.ORTMODULE_FALLBACK_POLICY = _fallback._FallbackPolicy.FALLBACK_DISABLE


def _no_nvtx(_addresses: Addresses) -> None:
    from onnxruntime.training.utils import torch_profile_utils  # optional: onnxruntime

    for name in ("torch_nvtx_range_push", "torch_nvtx_range_pop"):
        _replace(torch_profile_utils, name, lambda _original: lambda *_message: None)


def _device_names(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _utils  # optional: onnxruntime

    def make(original: Callable[[Any], str]) -> Callable[[Any], str]:
        def get_device_str(device: Any) -> str:
            if str(device) == "cpu":
                return "cpu:0"
            return original(device)

        return get_device_str

    _replace(_utils, "get_device_str", make)


def _allocator_fields(addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    def make(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def _get_torch_gpu_allocator_function_addresses(self: Any) -> None:
            # __getstate__ deletes the three by name even if they were never set.
            self._torch_alloc = self._torch_free = self._torch_empty_cache = None
            if "torch_gpu_allocator" not in addresses:
                self._runtime_options.use_external_gpu_allocator = False
            original(self)

        return _get_torch_gpu_allocator_function_addresses

    _replace(GraphExecutionManager, "_get_torch_gpu_allocator_function_addresses", make)


def _check_buffers(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _reprocess_check(flatten_module: Any, *args: Any, **kwargs: Any) -> Any:
            named = [*flatten_module.named_parameters(), *flatten_module.named_buffers()]
            return original(_View(flatten_module, named_parameters=lambda: named), *args, **kwargs)

        return _reprocess_check

    _replace_static(GraphTransitionManager, "_reprocess_check", make)


def _replace_static(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, "_ortlab", False):
        return
    changed = make(original)
    changed._ortlab = True
    setattr(owner, name, staticmethod(changed))


def _quiet(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    _replace(GraphExecutionManager, "_log_feature_stats", lambda _original: lambda _self: None)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if handler.formatter is not None and handler.formatter._fmt == ORT_LOG_FORMAT:
            root.removeHandler(handler)
    # To receive these messages: logging.getLogger("orttraining").addHandler(...).
    for name in ("orttraining", "onnxruntime"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def _cap_onnx(_addresses: Addresses) -> None:
    from onnxruntime.training.onnxblock import model_accessor  # optional: onnxruntime

    def view(onnx: Any) -> _View:
        opset = min(MAX_OPSET, onnx.defs.onnx_opset_version())
        defs = _View(onnx.defs, onnx_opset_version=lambda: opset)
        return _View(onnx, IR_VERSION=min(MAX_IR, onnx.IR_VERSION), defs=defs)

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            # `model` is already a copy. No opset up to 21 uses the additions of IR 11 to 14.
            model.ir_version = min(MAX_IR, model.ir_version)
            original(self, model, *args, **kwargs)

        return init

    _replace(model_accessor, "onnx", view)
    _replace(model_accessor.ModelAccessor, "__init__", make)


def _current_infos(_addresses: Addresses) -> None:
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    def view(helper: Any) -> _View:
        def info(name: str, kind: int, shape: Sequence[Any] | None, *rest: Any) -> Any:
            if shape is not None:
                shape = [size(each) for each in shape]
            return helper.make_tensor_value_info(name, kind, shape, *rest)

        def size(of_sympy: Any) -> int | str | None:
            if of_sympy is None or isinstance(of_sympy, int | str):
                return of_sympy
            return int(of_sympy) if of_sympy.is_Integer else str(of_sympy)

        return _View(
            helper,
            make_sequence_value_info=helper.make_tensor_sequence_value_info,
            make_tensor_value_info=info,
        )

    _replace(symbolic_shape_infer, "helper", view)


def _shapes_of_losses(_addresses: Addresses) -> None:
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    def make(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def infer(self: Any, node: Any) -> None:
            original(self, node)
            if symbolic_shape_infer.get_attribute(node, "reduction", b"mean") == b"none":
                info = self.known_vi_[node.output[0]]
                kind, shape = info.type.tensor_type.elem_type, self._get_shape(node, 1)
                make_info = symbolic_shape_infer.helper.make_tensor_value_info
                info.CopyFrom(make_info(info.name, kind, shape))

        return infer

    inference = symbolic_shape_infer.SymbolicShapeInference
    _replace(inference, "_infer_SoftmaxCrossEntropyLoss", make)


def _shapes_if_found(_addresses: Addresses) -> None:
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def infer_shapes(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(model, *args, **kwargs)
            except Exception:  # noqa: BLE001  # it raises anything, and ORT infers shapes itself
                return model

        return infer_shapes

    def make_pass(original: Callable[..., Any]) -> Callable[..., Any]:
        def infer(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes = getattr(self, "passes", 0) + 1
            if self.passes > _MOST_PASSES:  # it can merge the same sizes again and again
                raise RuntimeError("the shapes of this graph are not inferred")
            return original(self, *args, **kwargs)

        return infer

    _replace_static(symbolic_shape_infer.SymbolicShapeInference, "infer_shapes", make)
    _replace(symbolic_shape_infer.SymbolicShapeInference, "_infer_impl", make_pass)


# ---- the export ----------------------------------------------------------------------------------


def _route_export(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _graph_transition_manager  # optional: onnxruntime

    def view(torch: Any) -> _View:
        onnx = _View(torch.onnx, export=exporting.legacy_export(torch.onnx.export))
        return _View(torch, onnx=onnx)

    _replace(_graph_transition_manager, "torch", view)


def _leave_modes(_addresses: Addresses) -> None:

    _replace(importlib.import_module(PACKAGE).ORTModule, "__init__", exporting.wrap_untouched)


def _bind_methods(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _utils  # optional: onnxruntime

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def bind(ortmodule: Any, user_module: Any, logger: Any) -> None:
            original(ortmodule, user_module, logger)
            for name, bound in list(vars(ortmodule).items()):
                if isinstance(bound, types.MethodType) and inspect.ismethod(
                    getattr(type(user_module), name, None)
                ):
                    vars(ortmodule)[name] = getattr(user_module, name)

        return bind

    name = "check_for_name_collisions_and_bind_methods_to_ortmodule"
    _replace(_utils, name, make)


def _leave_caches_out(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _io  # optional: onnxruntime

    _replace(_io, "_extract_schema", outputs.without_caches)


def _watch_decisions(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _io  # optional: onnxruntime

    _replace(_io._FlattenedModule, "forward", traced_decisions.with_decisions)


def _restore_after_export(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    _replace_static(GraphTransitionManager, "_export_model", exporting.repeatable)


def _copy_outputs(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def configure(self: Any) -> Any:
            options, *rest = original(self)
            # ORTModule adds an Identity before each output, which copies it unless it is removed.
            options.add_session_config_entry(
                "optimization.disable_specified_optimizers", "EliminateIdentity"
            )
            return (options, *rest)

        return configure

    _replace(GraphExecutionManager, "_get_session_config", make)


def _register_rules(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    symbolics.register(CustomOpSymbolicRegistry, CustomGradientRegistry)


def _fit_masks(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule.graph_optimizer_registry import register_graph_optimizer

    register_graph_optimizer()(builder.ask_for_what_is_taken)


def _locate_failures(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._inference_manager import InferenceManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    for manager in (TrainingManager, InferenceManager):
        graph = functools.partial(exporting.located, of_graph=True)
        session = functools.partial(exporting.located, of_graph=False)
        _replace(manager, "_build_graph", graph)
        _replace(manager, "_create_execution_agent", session)


def _passes_of_ours(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    _replace(TrainingManager, "_create_autofunction_class", lambda _original: lambda it: Passes(it))


def _keep_dropouts(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._runtime_inspector import MemoryObserver

    name = "find_memory_optimization_opportunity"
    _replace(MemoryObserver, name, gradient_checkpointing.without_dropout)


def _filter_streams(_addresses: Addresses) -> None:
    from onnxruntime.training.ortmodule import _logger  # optional: onnxruntime

    _replace(_logger, "_suppress_os_stream_output", lambda _original: streams.streams_filtered)


def _no_label_hooks(_addresses: Addresses) -> None:
    # optional: onnxruntime
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    def make(_original: Any) -> Callable[..., list[Any]]:
        return lambda *_args, **_kwargs: []

    _replace_static(GraphTransitionManager, "_add_check_label_sparsity_hook", make)


_MOST_PASSES = 100
"""Passes of shape inference over a graph; BERT takes 2."""

_SHAPE_INFERENCE = (
    "https://github.com/microsoft/onnxruntime/blob/v1.19.2/onnxruntime/python/tools/"
    "symbolic_shape_infer.py"
)
_ORT = (
    "https://github.com/microsoft/onnxruntime/blob/v1.19.2/orttraining/orttraining/python/training/"
)
_TORCH = "https://github.com/pytorch/pytorch/tree/main/torch/onnx"


def _on_cpu(versions: Versions) -> bool:
    return not versions.cuda


ROWS = (
    Patch(
        target="import deepspeed",
        symptom="importing ORTModule imports DeepSpeed, which takes a second and prints a warning",
        link=f"{_ORT}ortmodule/__init__.py",
        apply=_hide_deepspeed,
        probe=probes.deepspeed_was_not_asked_for,
        before_import=True,
    ),
    Patch(
        target="torch.onnx._internal",
        symptom="ImportError: the exporter's modules moved, and their old names were removed",
        link=f"{_TORCH}/_internal/torchscript_exporter",
        apply=_restore_exporter_names,
        probe=probes.exporter_names_resolve,
        applies_to=lambda versions: versions.torch >= (2, 9),
        before_import=True,
    ),
    Patch(
        target=f"{_EXTENSIONS}.*",
        symptom="ImportError: ORT looks for its extensions inside site-packages",
        link=f"{_ORT}ortmodule/torch_cpp_extensions/__init__.py",
        apply=_stand_in_for_extensions,
        probe=probes.extensions_found,
        before_import=True,
    ),
    Patch(
        target="is_torch_interop_default_on",
        symptom="the import loads the interop extension, which does not compile with this torch",
        link=f"{_ORT}ortmodule/_custom_autograd_function.py",
        apply=_interop_later,
        probe=probes.interop_waits,
        before_import=True,
    ),
    Patch(
        target="sys.modules['deepspeed']",
        symptom="DeepSpeed, hidden while ORTModule is imported, cannot be imported afterwards",
        link=f"{_ORT}ortmodule/__init__.py",
        apply=_show_deepspeed,
        probe=probes.deepspeed_can_be_imported,
    ),
    Patch(
        target="custom_autograd_function_enabler",
        symptom="an autograd.Function is exported without its own backward or not at all",
        link=f"{_ORT}ortmodule/_custom_autograd_function_exporter.py",
        apply=_interop_ready,
        probe=probes.functions_train,
    ),
    Patch(
        target=f"{PACKAGE}._FALLBACK_INIT_EXCEPTION",
        symptom="ORTModule refuses to start because its own folder contains no extension",
        link=f"{_ORT}ortmodule/__init__.py",
        apply=_extensions_present,
        probe=probes.no_init_exception,
    ),
    Patch(
        target="torch.manual_seed",
        symptom="importing ORTModule replaces torch's seed and checkpoint functions process-wide",
        link=f"{_ORT}ortmodule/__init__.py",
        apply=_give_torch_back,
        probe=probes.torch_is_its_own,
    ),
    Patch(
        target=f"{PACKAGE}.ORTMODULE_FALLBACK_POLICY",
        symptom="ORTModule falls back to plain torch after a single log line",
        link=f"{_ORT}ortmodule/_fallback.py",
        apply=_no_fallback,
        probe=probes.fallback_is_off,
    ),
    Patch(
        target="onnxruntime.training.utils.torch_profile_utils",
        symptom="RuntimeError: NVTX functions not installed, in every forward",
        link=f"{_ORT}utils/torch_profile_utils.py",
        apply=_no_nvtx,
        probe=probes.nvtx_is_quiet,
        applies_to=_on_cpu,
    ),
    Patch(
        target=f"{PACKAGE}._utils.get_device_str",
        symptom="AssertionError: Torch not compiled with CUDA enabled, on the device 'cpu'",
        link=f"{_ORT}ortmodule/_utils.py",
        apply=_device_names,
        probe=probes.cpu_has_a_name,
    ),
    Patch(
        target="GraphExecutionManager._get_torch_gpu_allocator_function_addresses",
        symptom="KeyError: '_torch_alloc' when a wrapped model is copied or pickled",
        link=f"{_ORT}ortmodule/_graph_execution_manager.py",
        apply=_allocator_fields,
        probe=probes.copies_and_pickles,
    ),
    Patch(
        target="GraphTransitionManager._reprocess_check",
        symptom="AssertionError in the second forward of a model with a buffer, with checks on",
        link=f"{_ORT}ortmodule/_graph_transition_manager.py",
        apply=_check_buffers,
        probe=probes.buffers_survive_the_checks,
    ),
    Patch(
        target="GraphTransitionManager._add_check_label_sparsity_hook",
        symptom="a loss over padded labels calls an autograd.Function that prints in each step",
        link=f"{_ORT}ortmodule/_graph_transition_manager.py",
        apply=_no_label_hooks,
        probe=probes.padded_labels_are_plain,
    ),
    Patch(
        target="_graph_transition_manager.torch.onnx.export",
        symptom="the dynamo exporter is the default and accepts none of ORTModule's arguments",
        link=f"{_ORT}ortmodule/_graph_transition_manager.py",
        apply=_route_export,
        probe=probes.export_is_routed,
    ),
    Patch(
        target="ORTModule.__init__",
        symptom="wrapping switches a layer in evaluation mode to training mode",
        link=f"{_ORT}ortmodule/ortmodule.py",
        apply=_leave_modes,
        probe=probes.frozen_layers_stay_frozen,
    ),
    Patch(
        target="_utils.check_for_name_collisions_and_bind_methods_to_ortmodule",
        symptom="a class method of the model gets the model instead of its class: save_pretrained "
        "fails",
        link=f"{_ORT}ortmodule/_utils.py",
        apply=_bind_methods,
        probe=probes.class_methods_get_the_class,
    ),
    Patch(
        target=f"{PACKAGE}._io._extract_schema",
        symptom="TypeError: Unsupported flatten data type: DynamicCache, which decoders return",
        link=f"{_ORT}ortmodule/_io.py",
        apply=_leave_caches_out,
        probe=probes.caches_are_left_out,
    ),
    Patch(
        target="_FlattenedModule.forward",
        symptom="a branch that depends on a tensor's value is frozen at export",
        link=f"{_ORT}ortmodule/_io.py",
        apply=_watch_decisions,
        probe=probes.decisions_are_outputs,
    ),
    Patch(
        target="GraphTransitionManager._export_model",
        symptom="the traced forward counts as a step in BatchNorm's statistics",
        link=f"{_ORT}ortmodule/_graph_transition_manager.py",
        apply=_restore_after_export,
        probe=probes.export_changes_nothing,
    ),
    Patch(
        target="GraphExecutionManager._get_session_config",
        symptom="backward overwrites outputs that the model returned, such as a softmax or a view",
        link="https://github.com/microsoft/onnxruntime/blob/v1.19.2/onnxruntime/core/framework/allocation_planner.cc",
        apply=_copy_outputs,
        probe=probes.outputs_survive_backward,
    ),
    Patch(
        target=f"{PACKAGE}._custom_op_symbolic_registry",
        symptom="operators without an export rule, a kernel or a correct gradient: see symbolics",
        link=f"{_ORT}ortmodule/_custom_op_symbolic_registry.py",
        apply=_register_rules,
        probe=probes.rules_are_registered,
    ),
    Patch(
        target="GraphOptimizerRegistry",
        symptom="'invalid index -1' in the backward of a convolution with a frozen weight or bias",
        link=f"{_ORT}ortmodule/graph_optimizer_registry.py",
        apply=_fit_masks,
        probe=probes.frozen_parameters_get_nothing,
    ),
    Patch(
        target="TrainingManager._build_graph",
        symptom="a missing kernel or gradient is reported without the model's source line",
        link=f"{_ORT}ortmodule/_training_manager.py",
        apply=_locate_failures,
        probe=probes.failures_are_located,
    ),
    Patch(
        target="TrainingManager._create_autofunction_class",
        symptom="create_graph=True: the gradient of a gradient penalty is silently zero",
        link=f"{_ORT}ortmodule/_training_manager.py",
        apply=_passes_of_ours,
        probe=probes.second_gradients_are_refused,
    ),
    Patch(
        target="MemoryObserver.find_memory_optimization_opportunity",
        symptom="after a forward without a backward, a recomputed dropout draws a different mask",
        link=f"{_ORT}ortmodule/_runtime_inspector.py",
        apply=_keep_dropouts,
        probe=probes.recomputed_dropouts_agree,
    ),
    Patch(
        target=f"{PACKAGE}._logger._suppress_os_stream_output",
        symptom="UnsupportedOperation: fileno; the exporter's C++ warnings appear in the cell",
        link=f"{_ORT}ortmodule/_logger.py",
        apply=_filter_streams,
        probe=probes.streams_need_no_descriptor,
    ),
    Patch(
        target="logging.getLogger('orttraining')",
        symptom="a banner with color codes on standard error, and a handler on the root logger",
        link=f"{_ORT}ortmodule/_graph_execution_manager.py",
        apply=_quiet,
        probe=probes.is_quiet,
    ),
    Patch(
        target="onnxruntime.training.onnxblock.model_accessor",
        symptom="the training API cannot read its own artifacts: the newest onnx writes IR 14",
        link=f"{_ORT}onnxblock/model_accessor.py",
        apply=_cap_onnx,
        probe=probes.onnx_is_capped,
        applies_to=lambda versions: versions.onnx > (1, 17),
    ),
    Patch(
        target="onnxruntime.tools.symbolic_shape_infer.helper",
        symptom="onnx.helper no longer has make_sequence_value_info, or takes sympy's symbols",
        link=_SHAPE_INFERENCE,
        apply=_current_infos,
        probe=probes.infos_are_made,
        applies_to=lambda versions: versions.onnx > (1, 17),
    ),
    Patch(
        target="onnxruntime.tools.symbolic_shape_infer.SymbolicShapeInference",
        symptom="a loss of each sample is taken for a scalar",
        link=_SHAPE_INFERENCE,
        apply=_shapes_of_losses,
        probe=probes.losses_have_their_shape,
    ),
    Patch(
        target="onnxruntime.tools.symbolic_shape_infer.SymbolicShapeInference.infer_shapes",
        symptom="an export fails, or never ends, because optional shapes are not inferred",
        link=_SHAPE_INFERENCE,
        apply=_shapes_if_found,
        probe=probes.shapes_are_optional,
    ),
)
