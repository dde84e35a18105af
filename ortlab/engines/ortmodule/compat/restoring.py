"""Conversion of an ORTModule export to plain data, and its restoration without exporting again.

ORTModule exports a graph, infers shapes, runs the graph builder and creates a session, which
optimizes the graph again. To restore an export, each of these steps is replaced by its resulting
graph, stored as ONNX without weights: the exported graph with shapes; the graph built from it,
forward and backward or forward alone; and the graph that the session optimized.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.torch.autograd import read_by
from ortlab.utils import plain_onnxruntime

EXPORTED, BUILT, OPTIMIZED = "exported.onnx", "built.onnx", "optimized.onnx"
_CODE = {"PythonOp", "PythonOpGrad", "TritonOp"}
"""Operators that refer to Python objects of the exporting process."""
_MOST_FRACTIONS = 64
_T = TypeVar("_T")


@functools.cache
def versions() -> dict[str, str]:
    """Return all that determines a graph besides the model.

    These are the versions of the libraries, the processor, the extensions, and a hash of ortlab's
    own export rules.
    """
    import onnx  # heavy: onnx
    import onnxruntime  # optional: onnxruntime-training
    import torch  # heavy: torch

    rules = hashlib.sha256()
    ours = Path(__file__).parents[1]
    made_by = [
        *ours.glob("compat/**/*.py"),
        *ours.glob("kernels/*.py"),
        *ours.parent.glob("torchscript/*.py"),
        ours / "export.py",
    ]
    for file in sorted(made_by):
        rules.update(file.read_bytes())
    return {
        "python": sys.version,
        "machine": platform.machine(),
        "processor": extensions.processor(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "extension": extensions.ATEN.path().name,
        "kernels": extensions.KERNELS.path().name,
        "rules": rules.hexdigest(),
    }


class NotPlain(Exception):
    """Raised when an export cannot be converted to plain data; the message names the reason."""


def take_apart(manager: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Convert the export of an execution manager to plain data.

    Args:
        manager: ORT's execution manager, with an exported and built graph.

    Returns:
        The exported and the built graph by file name, and further data of JSON types.

    Raises:
        NotPlain: If the graph runs Python code, its outputs have classes that cannot be found by
            name, or it has constants that may have been computed from weights.
    """
    transitions = manager._graph_transition_manager
    processed = transitions._post_export_processed_model_info
    exported = processed._post_export_processed_model
    if processed.is_mem_efficient_grad_management_enabled:
        raise NotPlain("it fetches parameters itself")
    _refuse_code(exported.graph)
    _refuse_weights(exported.graph)
    info = manager._graph_info
    facts = {
        "outputs": _schema_to_plain(processed.module_forward_output_schema),
        "graph": {
            name: _plain(getattr(info, name)) for name in dir(info) if not name.startswith("_")
        },
    }
    graphs = {
        EXPORTED: exported.SerializeToString(),
        BUILT: manager._onnx_models.optimized_model.SerializeToString(),
    }
    return graphs, facts


def put_together(
    manager: Any,
    graphs: Mapping[str, bytes],
    facts: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Restore an export from the data that `take_apart` returned. The session is not yet created.

    Args:
        manager: ORT's execution manager to restore into.
        graphs: The graphs by file name.
        facts: Further data from `take_apart`.
        args: Positional arguments of the call that the graph is for.
        kwargs: Keyword arguments of that call.

    Raises:
        ValueError: If the data does not match the manager's model or the call.
    """
    import onnx  # heavy: onnx
    from onnxruntime.training.ortmodule import (  # optional: onnxruntime-training
        _graph_transition_manager,
        _io,
        _utils,
    )

    transitions = manager._graph_transition_manager
    if transitions._device is None:
        transitions._device = _utils.get_device_from_module_and_inputs(
            manager._original_module, args, kwargs
        )
    call = _io.parse_inputs_for_onnx_export(
        transitions._module_forward_func_parameters,
        args,
        kwargs,
        True,
        transitions._device,
        transitions._export_mode,
        transitions._logger,
        transitions._export_extra_kwargs,
    )
    exported = onnx.load_model_from_string(graphs[EXPORTED])
    names = [value.name for value in exported.graph.input]
    parameters = {name for name, _ in manager._flattened_module.named_parameters()}
    buffers = {name for name, _ in manager._flattened_module.named_buffers()}
    unknown = set(names) - parameters - buffers - set(call.onnx_graph_input_names)
    if unknown:
        raise ValueError(f"the graph has unknown inputs: {', '.join(sorted(unknown))}")
    trained = {n for n, p in manager._flattened_module.named_parameters() if p.requires_grad}
    differentiated = _within(names, {*trained, *call.onnx_graph_input_names_require_grad})
    transitions._model_info_for_export = call
    transitions._exported_model_info = _graph_transition_manager.ExportedModelInfo(
        module_forward_args_schema=call.onnx_graph_input_arg_schema,
        module_forward_kwargs_schema=call.onnx_graph_input_kwarg_schema,
        onnx_graph_input_names=names,
        onnx_graph_input_names_require_grad=differentiated,
        onnx_graph_input_names_user_defined=_within(call.onnx_graph_input_names, names),
        onnx_graph_input_names_require_grad_user_defined=_within(
            call.onnx_graph_input_names_require_grad, differentiated
        ),
        exported_model=exported,
        module_forward_output_schema=_schema_from_plain(facts["outputs"]),
    )
    # Shapes were inferred before the graph was stored; no other processing is enabled.
    manager_class = _graph_transition_manager.GraphTransitionManager
    transitions._post_export_processed_model_info = manager_class._post_export_process(
        flatten_module=manager._flattened_module,
        export_mode=transitions._export_mode,
        exported_model_info=transitions._exported_model_info,
        model_info_for_export=call,
        enable_custom_autograd_function=False,
        enable_zero_stage3_support=False,
        run_symbolic_shape_infer=False,
        stage3_param_handle=transitions,
        enable_mem_efficient_grad_management=False,
        logger=transitions._logger,
    )
    manager._graph_info = SimpleNamespace(**facts["graph"])
    manager._onnx_models.optimized_model = onnx.load_model_from_string(graphs[BUILT])
    # The same numbering of the gradients as in TrainingManager._build_graph.
    places = iter(range(len(differentiated)))
    manager._gradient_map = [next(places) if name in differentiated else -1 for name in names]
    manager._detect_from_inputs(args, kwargs)


def open_session(
    manager: Any,
    optimized: bytes | None = None,
    *,
    configure: Callable[[Any], None] | None = None,
    in_file_order: bool = False,
) -> bytes | None:
    """Create the session of an execution manager.

    Args:
        manager: ORT's execution manager with a built graph.
        optimized: Graph that an earlier session returned, to run without optimizing it again, which
            takes most of a session's creation time. Not for recompute plans, which the session
            applies.
        configure: Called with ORT's session options, to change them.
        in_file_order: Run the nodes of `optimized`, in which those of backward are marked, in the
            order of the file.

    Returns:
        The graph that the session runs; None if it is not available. It is available only on a CPU.
    """
    runtime = manager._runtime_options
    planned = runtime.memory_optimizer_is_enabled()
    # Otherwise ORT creates another session just to find what could be recomputed.
    manager._runtime_inspector.memory_ob._is_enabled = planned
    changes = _as_wished(runtime)
    changes += [] if configure is None else [configure]
    if manager._device.type != "cpu" or manager._debug_options.save_onnx_models.save:
        _made(manager, changes, manager._create_execution_agent)
        return None
    if optimized is not None:
        changes += [_in_file_order] if in_file_order else []
        _made(manager, [_as_it_is, *changes], functools.partial(_create, manager, optimized))
        return optimized
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
        told = functools.partial(_told_in, path)
        _made(manager, [told, *changes], manager._create_execution_agent)
        return path.read_bytes()


def plain_session(manager: Any, graph: bytes, *, in_file_order: bool) -> Any:
    """Create an onnxruntime.InferenceSession of a graph without optimizing it.

    Args:
        manager: ORT's execution manager whose session options are used.
        graph: Serialized ONNX model.
        in_file_order: Run the nodes in the order of the file.

    Returns:
        The session.
    """
    import onnxruntime  # optional: onnxruntime-training

    def make() -> Any:
        options, providers, provided = manager._get_session_config()
        return onnxruntime.InferenceSession(
            graph, options, providers=providers, provider_options=provided
        )

    changes = [_in_file_order] if in_file_order else []
    return _made(manager, [_as_it_is, *_as_wished(manager._runtime_options), *changes], make)


def _made(manager: Any, changes: Sequence[Callable[[Any], None]], make: Callable[[], _T]) -> _T:
    """Call `make` with changed session options; if ORT cannot start threads, again without them.

    A thread's stack (8 MB) must be a memory mapping, which may be unavailable if the address space
    is limited, although much of malloc's memory is free.
    """
    manager._runtime_options.without_workers = False  # a new session may find enough memory again
    try:
        with _session_options(manager, changes):
            return make()
    except RuntimeError as error:
        if "pthread_create failed" not in str(error):
            raise
    manager._runtime_options.without_workers = True
    with _session_options(manager, [*changes, _without_workers]):
        return make()


def _without_workers(options: Any) -> None:
    options.intra_op_num_threads = options.inter_op_num_threads = 1


def _create(manager: Any, optimized: bytes) -> None:
    import onnx  # heavy: onnx

    built = manager._onnx_models.optimized_model
    manager._onnx_models.optimized_model = onnx.load_model_from_string(optimized)
    try:
        manager._create_execution_agent()
    finally:
        manager._onnx_models.optimized_model = built


def in_order(model: Any) -> Any:
    """Sort the nodes of a session's graph in the order in which the session runs them.

    This is not the order of the file: ORT traverses the graph backward from the nodes whose outputs
    no node reads, the last of them first, and runs Shape and Size as soon as their input is
    available (GraphViewer and Graph::ReverseDFSFrom in onnxruntime/core/graph, 1.19.2, for
    ExecutionOrder::DEFAULT).

    Args:
        model: Graph of a session, changed in place.

    Returns:
        `model`.
    """
    nodes = list(model.graph.node)
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    before = [sorted({makers[name] for name in read_by(node) if name in makers}) for node in nodes]
    inner = {i for each in before for i in each}
    waiting = [(i, False) for i in range(len(nodes)) if i not in inner]
    sizes_of: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.op_type in ("Shape", "Size"):
            sizes_of.setdefault(makers.get(node.input[0], -1), []).append(i)
    order = sizes_of.get(-1, [])[:]
    early = {i for each in sizes_of.values() for i in each}
    seen: set[int] = set()
    while waiting:
        i, done = waiting.pop()
        if done and i not in early:
            order += [i, *sizes_of.get(i, ())]
        if done:
            continue
        if i not in seen:
            seen.add(i)
            waiting.append((i, True))
            waiting += [(each, False) for each in before[i] if each not in seen]
    del model.graph.node[:]
    model.graph.node.extend(nodes[i] for i in order)
    return model


def _as_it_is(options: Any) -> None:
    import onnxruntime  # optional: onnxruntime-training

    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def _in_file_order(options: Any) -> None:
    """Select priority-based order, which runs ready nodes in the order of the file.

    Nodes marked as backward run after all others, and Shape and Size before all others
    (PriorityNodeCompare in onnxruntime/core/graph/graph_viewer.cc, 1.19.2).
    """
    import onnxruntime  # optional: onnxruntime-training

    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED


def _as_wished(runtime: Any) -> list[Callable[[Any], None]]:
    """Return the changes to session options that ORTModule's options `runtime` request."""
    return [
        functools.partial(_with_arena, runtime.enable_cpu_mem_arena),
        with_threads_of_torch,
        plain_onnxruntime.let_threads_sleep,
    ]


def _with_arena(on: bool, options: Any) -> None:
    options.enable_cpu_mem_arena = on


def with_threads_of_torch(options: Any) -> None:
    """Give a session as many threads as torch; by default ORT has one per core, pinned to it.

    Args:
        options: An ``onnxruntime.SessionOptions``, changed in place.
    """
    import torch  # heavy: torch

    options.intra_op_num_threads = torch.get_num_threads()


def _told_in(path: Path, options: Any) -> None:
    options.optimized_model_filepath = str(path)


@contextlib.contextmanager
def _session_options(manager: Any, changes: Sequence[Callable[[Any], None]]) -> Iterator[None]:
    """Apply `changes` to the options of sessions that ORTModule creates in this context."""
    configure = manager._get_session_config

    def configured() -> Any:
        options, names, provided = configure()
        for change in changes:
            change(options)
        if names is not None and "CUDAExecutionProvider" in names:
            # On is ORT's default; its fp32 would differ from torch's. The option is new in 1.18.
            tf32 = manager._runtime_options.tf32
            provided[names.index("CUDAExecutionProvider")]["use_tf32"] = str(int(tf32))
        return options, names, provided

    manager._get_session_config = configured
    try:
        yield
    finally:
        del manager._get_session_config


def forward_graph(manager: Any) -> Any:
    """Return the forward graph as ORT optimized it before it built the gradient.

    Args:
        manager: ORT's execution manager; after `put_together` the graph is built again.
    """
    import onnx  # heavy: onnx

    builder: Any = manager._graph_builder
    if builder is None:
        processed = manager._graph_transition_manager._post_export_processed_model_info
        manager._initialize_graph_builder(processed)
        builder = manager._graph_builder
        builder.build(manager._get_graph_transformer_config())
    return onnx.load_model_from_string(builder.get_forward_model())


def _within(names: Sequence[str], found: Collection[str]) -> list[str]:
    return [name for name in names if name in found]


def _refuse_code(graph: Any) -> None:
    node = next((node for node in graph.node if node.op_type in _CODE), None)
    if node is not None:
        raise NotPlain(f"it runs Python code ({node.op_type})")


def _refuse_weights(graph: Any) -> None:
    """Raise NotPlain if a constant of the graph may have been computed from weights.

    Weights are inputs of the graph; its float constants have few elements, or all equal ones.
    Integers are positions and masks, also from buffers: the exporter makes those constants.
    """
    from onnx import TensorProto, numpy_helper  # heavy: onnx

    if len(graph.initializer) or len(graph.sparse_initializer):
        raise NotPlain("the exporter stored weights in the graph")
    for tensor in _constants(graph):
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL):
            continue
        values = numpy_helper.to_array(tensor)
        if values.size > _MOST_FRACTIONS and (values != values.flat[0]).any():
            raise NotPlain(f"a constant of {values.size} elements may come from weights")


def _constants(graph: Any) -> list[Any]:
    """Return the tensors in the attributes of all nodes, including those in branches and loops."""
    found = []
    for node in graph.node:
        for attribute in node.attribute:
            found += [attribute.t] if attribute.HasField("t") else []
            found += attribute.tensors
            inner = [attribute.g] if attribute.HasField("g") else []
            for branch in (*inner, *attribute.graphs):
                found += _constants(branch)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | int):
        return value
    return [_plain(item) for item in value]


# The structure of the outputs: ORT's stubs for tensors in the user's containers.


def _schema_to_plain(schema: Any) -> dict[str, Any]:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub  # optional: ORT

    if isinstance(schema, _TensorStub):
        stub = {"name": schema.name, "dtype": schema.dtype, "shape_dims": schema.shape_dims}
        return {"tensor": schema.tensor_idx, **stub}
    if schema is None or isinstance(schema, str | bool | int | float):
        return {"value": schema}
    kind = type(schema)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_called(name) is not kind:
        raise NotPlain(
            f"it returns a {kind.__qualname__}, which other processes cannot find by name"
        )
    if isinstance(schema, Mapping):
        items = [[key, _schema_to_plain(item)] for key, item in schema.items()]
        return {"mapping": name, "items": items}
    return {"sequence": name, "items": [_schema_to_plain(item) for item in schema]}


def _schema_from_plain(plain: Mapping[str, Any]) -> Any:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub  # optional: ORT

    if "tensor" in plain:
        return _TensorStub(
            plain["tensor"], plain["name"], plain["dtype"], shape_dims=plain["shape_dims"]
        )
    if "value" in plain:
        return plain["value"]
    if "mapping" in plain:
        kind = _class_called(plain["mapping"])
        if kind is not None and issubclass(kind, Mapping):
            return kind(**{key: _schema_from_plain(item) for key, item in plain["items"]})
    else:
        kind = _class_called(plain["sequence"])
        if kind is not None and issubclass(kind, Sequence):
            items = [_schema_from_plain(item) for item in plain["items"]]
            make = getattr(kind, "_make", kind)  # of a named tuple
            return make(items)
    raise ValueError(f"unknown class of outputs: {plain}")


def _class_called(name: str) -> Any:
    """Return the class of this name if its module is already imported, else None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
