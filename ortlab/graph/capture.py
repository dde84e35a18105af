"""Graphs that ORT builds from a model, stage by stage, as plain ONNX.

The graphs are read from an existing export. Nothing is trained to obtain them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx
from torch import nn

from ortlab.engines.base import Batch
from ortlab.engines.batch import arguments, signature
from ortlab.engines.ortmodule import fused_engine
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.ortmodule.engine import execution_of, is_wrapped
from ortlab.engines.registry import refusal
from ortlab.engines.torchscript.failures import module_path
from ortlab.graph import STAGES
from ortlab.settings import EngineSettings, unknown_name
from ortlab.utils.onnx_shapes import bytes_of, follows, size_of
from ortlab.utils.tables import Column, Table

_ROOT = "_original_module"
_VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_YIELD = "YieldOp"
_LINE = re.compile(r"(?:\S.*\.\w+:\d+|cell line \d+)(?:: |$)")
_GRADIENT, _SUM = "_Grad", "AccumulateGrad_"
_CALL = re.compile(r"_\d+$")  # the exporter's suffix for a module's second and later calls


Place = tuple[str, int]
"""File of a line of code, and its number."""


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        name: Name of the node in the graph.
        op: ONNX's operator name, prefixed with its domain unless that is ONNX's own.
        inputs: Names of the input tensors.
        outputs: Names of the output tensors.
        phase: "forward" or "backward". The yield node, where ORT passes the outputs to torch, is
            the last node of the forward phase.
        module: Path of the module that the node computes for ("encoder.layer.0"). Empty for the
            model itself or if the graph does not record it.
        of: Name of the forward node whose gradient this node computes, or None.
        source: Line of user code, outside of torch, that the node comes from ("model.py:12: return
            x + y"). Empty if the exporter did not record it. A gradient node has the line of its
            forward node.
        place: File and number of that line; None if torch's capture did not record them.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    phase: str
    module: str
    of: str | None
    source: str = ""
    place: Place | None = None


@dataclass(frozen=True)
class Overlay:
    """Measured values for the nodes of a stage, which a view shows as colors and labels.

    Attributes:
        name: What is measured, for example "time".
        unit: "us" or "bytes".
        values: Value of each node, keyed by node name.
    """

    name: str
    unit: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Sessions:
    """Sessions that run the nodes of a stage, with operators in torch between them.

    Attributes:
        ends: Index of the last node of the session that each node is part of; None if torch runs
            the node.
        shapes: Element type and shape of each tensor whose shape ORT knows before it runs.
    """

    ends: Sequence[int | None]
    shapes: Mapping[str, tuple[int, tuple[int | str, ...]]]


class Stage:
    """One graph of a model, shown as a table of its operators.

    Args:
        name: One of `STAGES`.
        model: ONNX model without weights.
        modules: Paths of the user's modules.
        trained: Names of the trainable parameters.
        before: Stage that this one was built from, if any.
    """

    def __init__(
        self,
        name: str,
        model: onnx.ModelProto,
        modules: frozenset[str] = frozenset(),
        trained: frozenset[str] = frozenset(),
        before: Stage | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.sessions: Sessions | None = None
        """Sessions that the nodes run in; None if one runs them all."""
        self.graphs: Graphs | None = None
        """All stages of the same model."""
        self._modules = modules
        self._trained = trained
        self._before = before
        self._scopes: dict[str, str | None] = {}  # cached: many nodes share a scope

    def of(self, model: onnx.ModelProto) -> Stage:
        """Return a copy of this stage that holds another graph of the same model.

        Args:
            model: Graph to use instead, as an ONNX model without weights.
        """
        return Stage(self.name, model, self._modules, self._trained, self._before)

    @property
    def backward(self) -> int:
        """Index of the first node of the backward pass; the number of nodes if there is none."""
        at = (i for i, node in enumerate(self.nodes) if node.phase == "backward")
        return next(at, len(self.nodes))

    def is_view(self, node: Node) -> bool:
        """Return True if the output of a node shares the memory of its first input.

        Args:
            node: Node of this stage.
        """
        return node.op in _VIEWS

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes in graph order, which is a valid order of execution."""
        nodes = self.model.graph.node
        makers = {output: node.name for node in nodes for output in node.output}
        at = next((i for i, node in enumerate(nodes) if node.op_type == _YIELD), len(nodes))
        found = []
        modules = {node.name: self._module(node) for node in nodes}
        lines = {node.name: self._line(node) for node in nodes}
        for i, node in enumerate(nodes):
            of = node.name.rpartition(_GRADIENT + "/")[0]
            if node.name.startswith(_SUM):
                # The sum of the gradients of a tensor that several nodes read.
                of = makers.get(node.output[0].removesuffix("_grad"), "")
            found.append(
                Node(
                    node.name,
                    _op(node),
                    tuple(node.input),
                    tuple(node.output),
                    "forward" if i <= at else "backward",
                    modules[node.name] or modules.get(of, ""),
                    of or None,
                    lines[node.name] or lines.get(of, ""),
                )
            )
        return tuple(found)

    def _line(self, node: onnx.NodeProto) -> str:
        """Return the source line from the exporter or from an earlier node with the same output.

        ORT writes its own text into some doc strings, so only text in the form of a line counts.
        """
        if _LINE.match(node.doc_string):
            return node.doc_string
        known = {} if self._before is None else self._before.lines
        return next((known[name] for name in node.output if name in known), "")

    @functools.cached_property
    def lines(self) -> dict[str, str]:
        """Source line of each tensor, where it is known."""
        return {name: node.source for node in self.nodes if node.source for name in node.outputs}

    def _module(self, node: onnx.NodeProto) -> str:
        """Return the path of the module that `node` computes for, from its name and its outputs.

        A node that ORT fused from several often has a new name, but its outputs keep their names.
        """
        for name in (node.name, *node.output):
            _, found, path = name.partition(f"/{_ROOT}/")
            scope = path.partition(_GRADIENT + "/")[0].rpartition("/")[0] if found else ""
            if scope:
                return self._module_of(scope) or ""
        return ""

    def _module_of(self, scope: str) -> str | None:
        """Return the innermost module whose call matches `scope` or an enclosing scope."""
        if scope not in self._scopes:
            path = module_path(f"{_ROOT}/{scope}") or ""
            paths = (path, _CALL.sub("", path))
            known = [each for each in paths if each in self._modules]
            known = known or [module for each in paths if (module := self._contained(each))]
            around = scope.rpartition("/")[0]
            module = known[0] if known else self._module_of(around) if around else None
            self._scopes[scope] = module
        return self._scopes[scope]

    def _contained(self, path: str) -> str | None:
        """Return the only module that `path` can stand for, or None.

        The exporter leaves out modules that are not called themselves, such as a ModuleDict or
        another container: "wte" stands for "transformer.wte". An item's number stays with its list.
        """
        names = re.split(r"\.(?!\d)", path)
        form = re.compile(r"(.+\.)?" + r"\.(.+\.)?".join(map(re.escape, names)))
        ending_alike = self._modules_by_ending[_ending(path)]
        found = [module for module in ending_alike if form.fullmatch(module)]
        return found[0] if len(found) == 1 else None

    @functools.cached_property
    def _modules_by_ending(self) -> Mapping[str, Sequence[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for module in self._modules:
            found[_ending(module)].append(module)
        return found

    @functools.cached_property
    def ops(self) -> Counter[str]:
        """Number of nodes of each operator."""
        return Counter(node.op for node in self.nodes)

    @functools.cached_property
    def gradients(self) -> dict[str, tuple[Node, ...]]:
        """Nodes that compute the gradient of each forward node, keyed by forward node name."""
        found: dict[str, tuple[Node, ...]] = {}
        for node in self.nodes:
            if node.of is not None:
                found[node.of] = (*found.get(node.of, ()), node)
        return found

    @functools.cached_property
    def parameter_gradients(self) -> dict[str, str]:
        """Graph output that holds the gradient of each parameter, keyed by parameter name."""
        outputs = {value.name for value in self.model.graph.output}
        return {
            name: f"{_ROOT}.{name}_grad"
            for name in sorted(self._trained)
            if f"{_ROOT}.{name}_grad" in outputs
        }

    @functools.cached_property
    def dims(self) -> tuple[str, ...]:
        """Names of the sizes that depend on the batch: an input's name with the dimension's number.

        Inputs that share a size also share its name if the exporter knew that they are equal.
        """
        sizes = [size for name in self._inputs for size in self.tensors.get(name, (0, ()))[1]]
        return tuple(dict.fromkeys(size for size in sizes if isinstance(size, str)))

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the values of `dims` that follow from these input shapes.

        Args:
            shapes: Shape of each input, keyed by input name.

        Returns:
            Value of each size that the shapes determine, keyed by the name in `dims`.
        """
        told = _tensors(self.model.graph.input)
        known = ((told[name][1], shape) for name, shape in shapes.items() if name in told)
        pairs = (pair for sizes, shape in known for pair in zip(sizes, shape, strict=False))
        return {dim: size for dim, size in pairs if isinstance(dim, str)}

    @property
    def parameter_bytes(self) -> int:
        """Size in bytes of the parameters and buffers that the graph reads."""
        return sum(bytes_of(*self.tensors[name], {}) for name in self.parameters.values())

    def activation_bytes(self, **dims: int) -> int:
        """Return the total size of all outputs of forward nodes, for the given sizes.

        The outputs are not all in memory at the same time, and views are counted separately.
        Outputs of unknown size are left out, see `unsized`.

        Args:
            **dims: Value of each size in `dims`.

        Returns:
            Total size in bytes.

        Raises:
            ValueError: If a size is missing.
        """
        missing = [name for name in self.dims if name not in dims]
        if missing:
            raise ValueError(f"missing sizes: {', '.join(missing)}; pass them as keyword arguments")
        return sum(self.bytes_of(name, dims) or 0 for name in self._results)

    def bytes_of(self, tensor: str, dims: Mapping[str, int]) -> int | None:
        """Return the size of a tensor in bytes, or None if the graph does not determine it.

        Args:
            tensor: Name of the tensor.
            dims: Values of all sizes in `dims`.
        """
        return bytes_of(*self.tensors[tensor], dims) if self._sized(tensor) else None

    def shape_of(self, tensor: str, dims: Mapping[str, int]) -> tuple[int | str, ...] | None:
        """Return the shape of a tensor, or None if the graph does not record one.

        Args:
            tensor: Name of the tensor.
            dims: Values of sizes. Dimensions that do not follow from them stay symbolic names.
        """
        if tensor not in self.tensors:
            return None
        sizes = self.tensors[tensor][1]
        given = tuple(dims)
        return tuple(
            size_of(size, dims) if isinstance(size, int) or follows(size, given) else size
            for size in sizes
        )

    @functools.cached_property
    def parameters(self) -> dict[str, str]:
        """Graph input of each parameter and buffer that the graph reads, keyed by its name."""
        prefix = f"{_ROOT}."
        return {n.removeprefix(prefix): n for n in self._inputs if n.startswith(prefix)}

    @property
    def unsized(self) -> tuple[str, ...]:
        """Outputs of forward nodes whose size does not follow from `dims`."""
        return tuple(name for name in self._results if not self._sized(name))

    @functools.cached_property
    def _results(self) -> tuple[str, ...]:
        forward = (node for node in self.nodes if node.phase == "forward")
        return tuple(name for node in forward for name in node.outputs if name)

    def _sized(self, name: str) -> bool:
        if name not in self.tensors:
            return False
        sizes = self.tensors[name][1]
        return all(isinstance(size, int) or follows(size, self.dims) for size in sizes)

    @functools.cached_property
    def _inputs(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.model.graph.input)

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, tuple[int | str, ...]]]:
        """Element type and shape of each tensor for which the graph records them."""
        graph = self.model.graph
        return _tensors((*graph.input, *graph.value_info, *graph.output))

    def table(self) -> Table[str]:
        """Return a table with the number of forward and backward nodes of each operator."""
        phases = Counter((node.op, node.phase) for node in self.nodes)
        columns: list[Column[str]] = [Column("operator", lambda op: op)]
        for phase in ("forward", "backward"):
            count = functools.partial(lambda phase, op: str(phases[op, phase]), phase)
            columns.append(Column(phase, count, number=True))
        ops = [op for op, _ in self.ops.most_common()]
        about = STAGES if self.graphs is None else self.graphs.about
        return Table(ops, columns, notes=[f"{len(self.nodes)} nodes {about[self.name]}"])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _op(node: onnx.NodeProto) -> str:
    """Return the operator's name with its domain, or the name of the torch kernel it calls."""
    if node.op_type == "ATen":
        kernel = next((each.s.decode() for each in node.attribute if each.name == "operator"), "")
        return f"{node.domain}.{kernel}".removesuffix(".").replace("::", ".")
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _ending(path: str) -> str:
    return path.rpartition(".")[2]


class Graphs:
    """Stages of one model, accessible as attributes (``graphs.gradient``) and shown as a table.

    Args:
        model: Name of the model's class.
        stages: Available stages, keyed by name.
        sizes: Sizes of the last call, keyed by the names in `Stage.dims`.
        measured: Functions that return measured values for the nodes of a stage, one function for
            each kind of measurement.
        notes: Lines shown with the table.
        about: Descriptions of all stages that the model can have, by name.
    """

    def __init__(
        self,
        model: str,
        stages: Mapping[str, Stage],
        *,
        sizes: Mapping[str, int] | None = None,
        measured: Iterable[Callable[[Stage], Overlay]] = (),
        notes: Iterable[str] = (),
        about: Mapping[str, str] = STAGES,
    ) -> None:
        self.model = model
        self.about = about
        self.stages = dict(stages)
        for stage in self.stages.values():
            stage.graphs = stage.graphs or self
        self.sizes = dict(sizes or {})
        self.measured = list(measured)
        self.notes = tuple(notes)

    def stage(self, name: str) -> Stage:
        """Return the stage with this name.

        Args:
            name: One of `STAGES`.

        Raises:
            ValueError: If the name is unknown or the stage is not available. The message says why.
        """
        if name == "exported" and name not in self.about:
            name = "captured"  # what torch hands over
        if name not in self.about:
            raise ValueError(f"unknown stage {name!r}: {unknown_name(name, self.about)}")
        if name not in self.stages:
            raise ValueError(f"{self.model} has no {name} graph: {_absent(name)}")
        return self.stages[name]

    def overlays(self, stage: str) -> list[Overlay]:
        """Return all measured values for the nodes of a stage.

        Args:
            stage: Name of the stage.
        """
        return [each(self.stage(stage)) for each in self.measured]

    @property
    def exported(self) -> Stage:
        """Forward graph as exported by torch; on engine ``ort``, the captured graphs."""
        return self.stage("exported")

    @property
    def captured(self) -> Stage:
        """Forward and backward as captured by torch; on engine ``ort`` only."""
        return self.stage("captured")

    @property
    def forward(self) -> Stage:
        """Forward graph as optimized by ORT before it builds the gradient."""
        return self.stage("forward")

    @property
    def gradient(self) -> Stage:
        """Forward and backward in one graph, separated by the yield node."""
        return self.stage("gradient")

    @property
    def execution(self) -> Stage:
        """Graph that ORT's session made from the gradient graph and executes."""
        return self.stage("execution")

    @property
    def eval(self) -> Stage:
        """Forward graph as exported for evaluation."""
        return self.stage("eval")

    def diff(self, before: str, after: str) -> Table[tuple[str, int, int]]:
        """Return a table of the operators whose number of nodes differs between two stages.

        Args:
            before: Name of the first stage.
            after: Name of the second stage.

        Raises:
            ValueError: If a stage is unknown or not available.
        """
        first, second = self.stage(before).ops, self.stage(after).ops
        rows = [(op, first[op], second[op]) for op in sorted({*first, *second})]
        changed = sorted(
            (row for row in rows if row[1] != row[2]), key=lambda row: -abs(row[2] - row[1])
        )
        return Table(
            changed,
            (
                Column("operator", lambda row: row[0]),
                Column(before, lambda row: str(row[1]), number=True),
                Column(after, lambda row: str(row[2]), number=True),
                Column("change", lambda row: f"{row[2] - row[1]:+d}", number=True),
            ),
            notes=[f"{sum(first.values())} nodes before, {sum(second.values())} after"],
            empty=f"{before} and {after} have the same operators",
        )

    def table(self) -> Table[Stage]:
        """Return a table with one row for each available stage."""
        stages = list(self.stages.values())
        notes = [*self.notes, f"sizes that depend on the batch: {', '.join(stages[-1].dims)}"]
        notes += [f"no {name}: {_absent(name)}" for name in self.about if name not in self.stages]
        columns = list(_COLUMNS)
        columns.insert(1, Column("what it is", lambda stage: self.about[stage.name]))
        return Table(stages, columns, notes=notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_COLUMNS: Final[tuple[Column[Stage], ...]] = (
    Column("stage", lambda stage: stage.name),
    Column("nodes", lambda stage: str(len(stage.nodes)), number=True),
    Column("forward", lambda stage: str(_count(stage, "forward")), number=True),
    Column("backward", lambda stage: str(_count(stage, "backward")), number=True),
    Column("parameters", lambda stage: f"{stage.parameter_bytes / 2**20:.1f} MiB", number=True),
    Column("most frequent", lambda stage: _most(stage)),
)


def _absent(name: str) -> str:
    if name == "execution":
        return "ORT exports the executed graph on a CPU only, after a call in training mode"
    if name == "eval":
        return "call the model once with a batch after model.eval(), under torch.no_grad()"
    return "call the model once with a batch, in training mode"


def _count(stage: Stage, phase: str) -> int:
    return sum(node.phase == phase for node in stage.nodes)


def _most(stage: Stage) -> str:
    ops = ((op.rpartition(".")[2], count) for op, count in stage.ops.most_common(4))
    return ", ".join(f"{count} {op}" for op, count in ops)


def with_loss(wrapped: nn.Module) -> nn.Module | None:
    """Return the model with loss that a run executed last in the fused engine, or None.

    Args:
        wrapped: Model that the fused engine wrapped.
    """
    return fused_engine.with_loss(wrapped)


def execution_behind(model: nn.Module) -> GraphDispatcher:
    """Return the dispatcher that executes the wrapped `model`.

    Args:
        model: Model wrapped in engine "ortmodule".

    Raises:
        ValueError: If the model is not wrapped in engine "ortmodule".
    """
    if not is_wrapped(model):
        missing = refusal(EngineSettings(engine="ortmodule"))
        raise ValueError(
            f"this {type(model).__name__} has no ORT graphs; "
            + (missing or "wrap it: %%ort, or ortlab.wrap(model)")
        )
    return execution_of(model)


def capture(
    model: nn.Module, batch: Batch | None = None, settings: EngineSettings | None = None
) -> Graphs:
    """Return the graphs of the exports that `model` used last, in training and evaluation.

    Args:
        model: Model wrapped in engine "ortmodule".
        batch: If given, return the graphs that serve this batch, and export them first if there are
            none. The model is not changed.
        settings: If given, return the graphs made for these settings, cached ones included.

    Raises:
        ValueError: If the model is not wrapped in engine "ortmodule", has not been called yet,
            or runs in torch.
    """
    execution = execution_behind(model)
    name = type(execution.module).__name__
    if batch is not None:
        execution.export_for(*arguments(execution.module, batch))
    report = execution.report()
    if report.fallback_reason is not None:
        where = f"on engine {report.engine_used!r}"
        raise ValueError(f"{name} runs {where} and has no graph: {report.fallback_reason}")
    modules = frozenset(n for n, _ in execution.module.named_modules(remove_duplicate=False))
    trained = frozenset(n for n, p in execution.module.named_parameters() if p.requires_grad)
    found: dict[str, Stage] = {}
    sizes: dict[str, dict[str, int]] = {}
    for export in execution.exports(settings):  # ordered by last use
        before: Stage | None = None
        for stage, graph in export.stages().items():
            found[stage] = before = Stage(stage, graph, modules, trained, before)
            sizes[stage] = found[stage].sizes(export.input_shapes())
    if not found:
        takes = signature(execution.module)
        raise ValueError(f"{name} has no graph yet; call it once, or give a batch for {takes}")
    ordered = {stage: found[stage] for stage in STAGES if stage in found}
    # If training and evaluation had different batches, training's sizes count.
    last = {dim: size for stage in reversed(ordered) for dim, size in sizes[stage].items()}
    edited = execution.edited()
    notes = [] if edited is None else [f"changed since the graph was exported: {edited}"]
    return Graphs(name, ordered, sizes=last, notes=notes)


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[int, tuple[int | str, ...]]]:
    found = {}
    for value in values:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            found[value.name] = (tensor.elem_type, sizes)
    return found
