"""An export of ORTModule's taken apart into plain data, and put together again without exporting.

ORTModule goes from export through shape inference and graph builder to a session, which optimizes
the graph once more. Here each step is replaced by the graph that it gave, as ONNX without weights:
what was exported, with shapes; what was built of it, forward and backward or forward alone; and
what the session made of that.
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

from ortlab.engines.torch.autograd import read_by

EXPORTED, BUILT, OPTIMIZED = "exported.onnx", "built.onnx", "optimized.onnx"
_CODE = {"PythonOp", "PythonOpGrad", "TritonOp"}
"""Operators that name objects of the process that exported them."""
_MOST_FRACTIONS = 64
_T = TypeVar("_T")


@functools.cache
def versions() -> dict[str, str]:
    """What makes a graph besides the model: libraries, processor, ORT's extension, our rules."""
    import onnx
    import onnxruntime
    import torch

    from ortlab.engines.ortmodule.compat import extensions

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
    """An export that is more than plain data; the message says what."""


def take_apart(manager: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The first two graphs of a graph execution manager, by name, and facts of JSON's types.

    NotPlain where they would not do: Python code in the graph, outputs of classes that cannot be
    found again by name, or constants that may have been computed from weights.
    """
    transitions = manager._graph_transition_manager
    processed = transitions._post_export_processed_model_info
    exported = processed._post_export_processed_model
    if processed.is_mem_efficient_grad_management_enabled:
        raise NotPlain("parameters are fetched by the graph itself")
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
    """Gives `manager` what `take_apart` took of another. ValueError where it does not fit.

    `args` and `kwargs` are the call that it is for. The session is still to be made.
    """
    import onnx
    from onnxruntime.training.ortmodule import _graph_transition_manager, _io, _utils

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
        raise ValueError(f"the graph asks for {', '.join(sorted(unknown))}")
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
    # Shapes were inferred before the graph was kept; no other processing is switched on.
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
    # As TrainingManager._build_graph numbers the gradients.
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
    """Makes the session of `manager`; returns the graph that it runs, or None where that is unsaid.

    With `optimized`, which an earlier session gave, that is run as it is: optimizing it takes most
    of a session's time; not with recompute plans, which the session applies. The graph is told on
    a CPU alone. `configure` is given ORT's session options, to change them. With `in_file_order`
    the nodes of `optimized` run in their order there, where those of backward are marked.
    """
    runtime = manager._runtime_options
    planned = runtime.memory_optimizer_is_enabled()
    # ORT makes a session more, only to see what could be recomputed.
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
    """An onnxruntime.InferenceSession of `graph` as it is, with the options of `manager`'s own."""
    import onnxruntime

    def make() -> Any:
        options, providers, provided = manager._get_session_config()
        return onnxruntime.InferenceSession(
            graph, options, providers=providers, provider_options=provided
        )

    changes = [_in_file_order] if in_file_order else []
    return _made(manager, [_as_it_is, *_as_wished(manager._runtime_options), *changes], make)


def _made(manager: Any, changes: Sequence[Callable[[Any], None]], make: Callable[[], _T]) -> _T:
    """What `make` gives with `changes` to a session's options, or one without workers.

    A thread's stack (8 MB) has to be a mapping, which may not be had where the address space is
    limited, although much of what malloc holds is free.
    """
    manager._runtime_options.without_workers = False  # of the last session: there may be room again
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
    import onnx

    built = manager._onnx_models.optimized_model
    manager._onnx_models.optimized_model = onnx.load_model_from_string(optimized)
    try:
        manager._create_execution_agent()
    finally:
        manager._onnx_models.optimized_model = built


def in_order(model: Any) -> Any:
    """`model`, a session's graph, with its nodes in the order in which the session runs them.

    That is not the order of its file: ORT goes backwards from the nodes whose results no node
    reads, the last of them first, and takes sizes as soon as there is what has them (GraphViewer
    and Graph::ReverseDFSFrom in onnxruntime/core/graph, 1.19.2, for ExecutionOrder::DEFAULT).
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
    import onnxruntime

    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def _in_file_order(options: Any) -> None:
    """By priority a node that is ready comes before those behind it in the file.

    Those that are marked as backward wait for all others, and sizes for none
    (PriorityNodeCompare in onnxruntime/core/graph/graph_viewer.cc, 1.19.2).
    """
    import onnxruntime

    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED


def _as_wished(runtime: Any) -> list[Callable[[Any], None]]:
    """The changes of a session's options that `runtime`, ORTModule's options, asks for."""
    found: list[Callable[[Any], None]] = [
        functools.partial(_with_arena, runtime.enable_cpu_mem_arena)
    ]
    return found if runtime.spinning else [*found, leave_cores_to_torch]


def _with_arena(on: bool, options: Any) -> None:
    options.enable_cpu_mem_arena = on


def leave_cores_to_torch(options: Any) -> None:
    """ORT's idle workers would spin on the cores that torch's threads compute on."""
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


def _told_in(path: Path, options: Any) -> None:
    options.optimized_model_filepath = str(path)


@contextlib.contextmanager
def _session_options(manager: Any, changes: Sequence[Callable[[Any], None]]) -> Iterator[None]:
    """Has `changes` made to the options of the session that ORTModule makes meanwhile."""
    configure = manager._get_session_config

    def configured() -> Any:
        options, names, provided = configure()
        for change in changes:
            change(options)
        if names is not None and "CUDAExecutionProvider" in names:
            # ORT's own choice is on: its fp32 would not be torch's. The option is ORT 1.18's.
            tf32 = manager._runtime_options.tf32
            provided[names.index("CUDAExecutionProvider")]["use_tf32"] = str(int(tf32))
        return options, names, provided

    manager._get_session_config = configured
    try:
        yield
    finally:
        del manager._get_session_config


def forward_graph(manager: Any) -> Any:
    """Forward as ORT optimized it before it built the gradient; made again after `put_together`."""
    import onnx

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
    """Weights are inputs of the graph; its own fractions are few, or all the same.

    Whole numbers are positions and masks, from buffers too: the exporter makes constants of those.
    """
    from onnx import TensorProto, numpy_helper

    if len(graph.initializer) or len(graph.sparse_initializer):
        raise NotPlain("the exporter put weights into the graph")
    for tensor in _constants(graph):
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL):
            continue
        values = numpy_helper.to_array(tensor)
        if values.size > _MOST_FRACTIONS and (values != values.flat[0]).any():
            raise NotPlain(f"a constant of {values.size} numbers in it may come from weights")


def _constants(graph: Any) -> list[Any]:
    """The tensors among the attributes of all nodes, also within branches and loops."""
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


# The form of the outputs: ORT's stubs for tensors in the user's containers.


def _schema_to_plain(schema: Any) -> dict[str, Any]:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub

    if isinstance(schema, _TensorStub):
        stub = {"name": schema.name, "dtype": schema.dtype, "shape_dims": schema.shape_dims}
        return {"tensor": schema.tensor_idx, **stub}
    if schema is None or isinstance(schema, str | bool | int | float):
        return {"value": schema}
    kind = type(schema)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_called(name) is not kind:
        raise NotPlain(f"it returns a {kind.__qualname__}, which no other process would find")
    if isinstance(schema, Mapping):
        items = [[key, _schema_to_plain(item)] for key, item in schema.items()]
        return {"mapping": name, "items": items}
    return {"sequence": name, "items": [_schema_to_plain(item) for item in schema]}


def _schema_from_plain(plain: Mapping[str, Any]) -> Any:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub

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
            make = getattr(kind, "_make", kind)  # a named tuple has it
            return make(items)
    raise ValueError(f"no such class of outputs: {plain}")


def _class_called(name: str) -> Any:
    """The class of that name among what this process has imported already; None without one."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
