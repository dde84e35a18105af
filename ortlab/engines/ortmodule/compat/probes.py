"""Probes of the rows of `patches`: each returns True if the row's symptom does not occur.

Without its row, each probe shows the symptom with the installed versions; the tests check that.
Functions import onnxruntime themselves: it is optional, and rows must precede its import.
"""

from __future__ import annotations

import copy
import importlib
import io
import logging
import pickle
import sys
import warnings
from typing import Any

import onnx
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ortlab.engines.ortmodule.compat.base import MAX_IR, MAX_OPSET, ORT_LOG_FORMAT
from ortlab.engines.torchscript.failures import explain

PACKAGE = "onnxruntime.training.ortmodule"


def _ort(name: str = "") -> Any:
    """Return ORTModule's package, or a module in it; it has no type annotations."""
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def _wrapped(model: nn.Module) -> Any:
    package = _ort()
    return package.ORTModule(model, package.DebugOptions(log_level=package.LogLevel.ERROR))


def exporter_names_resolve() -> bool:
    """Return True if the exporter's modules can be imported by their old names."""
    try:
        importlib.import_module("torch.onnx._globals")
        importlib.import_module("torch.onnx._internal.jit_utils")
    except ImportError:
        return False
    return hasattr(importlib.import_module("torch.onnx.symbolic_opset9"), "_convolution")


def extensions_found() -> bool:
    """Return True if ORT's extensions can be found."""
    return f"{PACKAGE}.torch_cpp_extensions.aten_op_executor" in sys.modules


def deepspeed_was_not_asked_for() -> bool:
    """Return True if importing ORTModule did not import DeepSpeed."""
    return not hasattr(_ort(), "original_deepspeed_checkpoint")


def deepspeed_can_be_imported() -> bool:
    """Return True if DeepSpeed is no longer hidden from imports."""
    return sys.modules.get("deepspeed", sys) is not None


def interop_waits() -> bool:
    """Return True if ORT does not load its interop extension at import."""
    from onnxruntime.capi import _pybind_state  # optional: onnxruntime

    return not _pybind_state.is_torch_interop_default_on()


def no_init_exception() -> bool:
    """Return True if ORTModule recorded no failure at import."""
    return _ort()._FALLBACK_INIT_EXCEPTION is None


def torch_is_its_own() -> bool:
    """Return True if torch's seed and checkpoint functions are torch's own."""
    functions = (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint)
    return all(not function.__module__.startswith("onnxruntime") for function in functions)


def fallback_is_off() -> bool:
    """Return True if ORTModule never falls back to plain torch."""
    return bool(_ort().ORTMODULE_FALLBACK_POLICY.is_disabled())


def nvtx_is_quiet() -> bool:
    """Return True if ORT's profiling ranges do not raise without NVTX."""
    from onnxruntime.training.utils import torch_profile_utils  # optional: onnxruntime

    try:
        torch_profile_utils.torch_nvtx_range_push("probe")
        torch_profile_utils.torch_nvtx_range_pop()
    except RuntimeError:
        return False
    return True


def cpu_has_a_name() -> bool:
    """Return True if ORT can name the device 'cpu'."""
    name = _ort("_utils").get_device_str
    try:
        return {name("cpu"), name(torch.device("cpu"))} == {"cpu:0"}
    except (RuntimeError, AssertionError):
        return False


def copies_and_pickles() -> bool:
    """Return True if a wrapped model can be copied and pickled."""
    module = _wrapped(nn.Linear(2, 2))
    try:
        twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    except KeyError:
        return False
    x = torch.ones(1, 2)
    return all(torch.equal(twin(x), module(x)) for twin in twins)


def buffers_survive_the_checks() -> bool:
    """Return True if a model with a buffer passes ORT's checks in its second forward."""
    module = _wrapped(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    options = module._torch_module._execution_manager(True)._runtime_options
    options.skip_check = _ort("options")._SkipCheck.SKIP_CHECK_DISABLED
    try:
        for _ in range(2):
            module(torch.ones(3, 2))
    except AssertionError:
        return False
    return True


def second_gradients_are_refused() -> bool:
    """Return True if ``create_graph=True`` raises."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    loss = _wrapped(model)(torch.ones(1, 2)).sum()
    try:
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    except RuntimeError:
        return True
    return False


class _Caches(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        from transformers import DynamicCache  # optional: transformers

        return {"y": super().forward(x), "cache": DynamicCache()}


def caches_are_left_out() -> bool:
    """Return True if a DynamicCache in the outputs becomes None."""
    try:
        return _wrapped(_Caches(2, 2))(torch.ones(1, 2))["cache"] is None
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False


class _Named(nn.Linear):
    @classmethod
    def own(cls) -> type:
        return cls


def class_methods_get_the_class() -> bool:
    """Return True if a class method of a wrapped model receives its class."""
    return _wrapped(_Named(2, 2)).own() is _Named


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x * 2 if x.sum() > 0 else x)
        return found


def decisions_are_outputs() -> bool:
    """Return True if a branch on a tensor's value adds an output to the graph."""
    module = _wrapped(_Branch())
    module(torch.ones(1, 2))
    transitions = module._torch_module._execution_manager(True)._graph_transition_manager
    return len(transitions._exported_model_info.exported_model.graph.output) == 2


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(2, 2), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.layer(x), labels)
        return found


def padded_labels_are_plain() -> bool:
    """Return True if a loss over padded labels adds no PythonOp."""
    module = _wrapped(_Loss())
    try:
        module(torch.ones(2, 2), torch.tensor([0, -100])).backward()
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False
    graph = module._torch_module._execution_manager(True)._onnx_models.optimized_model.graph
    return all(node.op_type != "PythonOp" for node in graph.node)


class _Twice(torch.autograd.Function):
    """Function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class _Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = _Twice.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return doubled


def export_is_routed() -> bool:
    """Return True if ORTModule exports with the TorchScript exporter."""
    try:
        _wrapped(nn.Linear(2, 2))(torch.ones(1, 2))
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False
    return True


def functions_train() -> bool:
    """Return True if an autograd.Function is trained with its own backward."""
    model = _Custom(2, 2)
    try:
        _wrapped(model)(torch.ones(1, 2)).sum().backward()
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False
    return torch.equal(model.weight.grad, torch.full((2, 2), 3.0))  # type: ignore[arg-type]


def frozen_layers_stay_frozen() -> bool:
    """Return True if a layer in evaluation mode stays in it when its model is wrapped."""
    frozen = nn.Dropout().eval()
    model = nn.Sequential(nn.Linear(2, 2), frozen)
    x = torch.ones(8, 2)
    return torch.allclose(_wrapped(model)(x), model(x)) and not frozen.training


class _Stateful(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if x.shape[0] > 2:  # the tracer warns about it
            x = x * 2
        return super().forward(x) + self.calls


def export_changes_nothing() -> bool:
    """Return True if an export changes no buffer or random state and warns of nothing."""
    model = _Stateful()
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _wrapped(model)(torch.ones(3, 2))
    same = int(model.calls) == 0 and torch.equal(state, torch.get_rng_state())
    return same and not heard


class _Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).softmax(1)
        return y.square().sum(), y


def outputs_survive_backward() -> bool:
    """Return True if backward does not overwrite an output."""
    loss, y = _wrapped(_Softmax())(torch.ones(16, 32))
    before = y.detach().clone()
    loss.backward()
    return torch.equal(y.detach(), before)


class _Grouped(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(4, 4, 1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).diff()


def rules_are_registered() -> bool:
    """Return True if the export rules of `symbolics` are used."""
    try:
        module = _wrapped(_Grouped())
        module(torch.ones(1, 4, 3)).sum().backward()
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False
    graph = module._torch_module._execution_manager(True)._onnx_models.optimized_model.graph
    return all(node.op_type != "ConvGrad" for node in graph.node)


def frozen_parameters_get_nothing() -> bool:
    """Return True if exactly the frozen parameters get no gradient."""
    try:
        module = _Grouped()
        for parameter in list(module.parameters())[1:]:
            parameter.requires_grad = False
        _wrapped(module)(torch.ones(1, 4, 3)).sum().backward()
    except Exception:  # noqa: BLE001 - any failure is the symptom
        return False
    return [p.grad is None for p in module.parameters()] == [
        not p.requires_grad for p in module.parameters()
    ]


class _Determinant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.det(super().forward(x))
        return found


def failures_are_located() -> bool:
    """Return True if a missing gradient is reported with the user's line."""
    try:
        _wrapped(_Determinant(2, 2))(torch.ones(2, 2))
    except Exception as error:  # noqa: BLE001 - its explanation is checked
        failure = explain(error)
        return failure.operator == "Det" and "linalg.det" in (failure.source or "")
    return False


class _Dropped(nn.Module):
    """Model linear in `last`: the sum of its outputs is the product of `last` and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 64), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.layer(x))
        return nn.functional.dropout(hidden, 0.5, self.training) * self.last


def recomputed_dropouts_agree() -> bool:
    """Return True if a dropout has the same mask in forward and backward."""
    model = _Dropped()
    module = _wrapped(model)
    options = module._torch_module._execution_manager(True)._runtime_options
    options.memory_optimization_level = 1
    module(torch.ones(8, 4))
    total = module(torch.ones(8, 4)).sum()
    total.backward()
    gradient = model.last.grad
    return gradient is not None and torch.allclose(gradient.sum(), total, rtol=1e-3)


def streams_need_no_descriptor() -> bool:
    """Return True if ORT's stream filter works with a `sys.stdout` without descriptor."""
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        with _ort("_logger")._suppress_os_stream_output():
            pass
    except (OSError, TypeError):
        return False
    finally:
        sys.stdout = stdout
    return True


def is_quiet() -> bool:
    """Return True if ORT's log messages do not reach the root logger."""
    root, heard = logging.getLogger(), io.StringIO()
    formats = [handler.formatter and handler.formatter._fmt for handler in root.handlers]
    handler = logging.StreamHandler(heard)
    root.addHandler(handler)
    try:
        for name in ("orttraining", "onnxruntime.tools.symbolic_shape_infer"):
            logging.getLogger(name).warning("banner")
    finally:
        root.removeHandler(handler)
    return heard.getvalue() == "" and ORT_LOG_FORMAT not in formats


def onnx_is_capped() -> bool:
    """Return True if ORT's training API writes a version of ONNX that it can read."""
    from onnxruntime.training import onnxblock  # optional: onnxruntime

    with onnxblock.empty_base() as base:
        model = base.model
    opset = {entry.domain: entry.version for entry in model.opset_import}[""]
    return bool(model.ir_version <= MAX_IR and opset <= MAX_OPSET)


def infos_are_made() -> bool:
    """Return True if shape inference can write the types of sequences and of symbolic sizes."""
    import sympy  # optional: onnxruntime
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    helper = symbolic_shape_infer.helper
    info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [sympy.Symbol("rows")])
    row = info.type.tensor_type.shape.dim[0].dim_param
    return bool(row == "rows") and hasattr(helper, "make_sequence_value_info")


def losses_have_their_shape() -> bool:
    """Return True if shape inference finds one loss for each sample without a reduction."""
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    make = onnx.helper.make_tensor_value_info
    given = [make("x", onnx.TensorProto.FLOAT, [2, 3]), make("y", onnx.TensorProto.INT64, [2])]
    loss = onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["x", "y"], ["z"], reduction="none")
    graph = onnx.helper.make_graph([loss], "g", given, [make("z", onnx.TensorProto.FLOAT, None)])
    imports = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=imports)
    found = symbolic_shape_infer.SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    return [dim.dim_value for dim in found.graph.output[0].type.tensor_type.shape.dim] == [2]


def shapes_are_optional() -> bool:
    """Return True if shape inference returns a model whose shapes it cannot infer."""
    from onnxruntime.tools import symbolic_shape_infer  # optional: onnxruntime

    make = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Gather", ["x", "index"], ["y"], axis=3)  # x has 1 dimension
    given = [make("x", onnx.TensorProto.FLOAT, [2]), make("index", onnx.TensorProto.INT64, [1])]
    graph = onnx.helper.make_graph([node], "g", given, [make("y", onnx.TensorProto.FLOAT, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    try:
        symbolic_shape_infer.SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception:  # noqa: BLE001  # it raises anything
        return False
    return True
