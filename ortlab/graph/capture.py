"""The graphs that ORT makes of a model, stage by stage, as plain ONNX.

They are read from an export that is there; nothing is trained for it.
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
from ortlab.engines.torchscript.failures import module_path
from ortlab.graph import STAGES
from ortlab.settings import EngineSettings, unknown_name
from ortlab.utils.onnx_shapes import bytes_of, follows, size_of
from ortlab.utils.tables import Column, Table

_ROOT = "_original_module"
_YIELD = "YieldOp"
_LINE = re.compile(r"(?:\S.*\.\w+:\d+|cell line \d+)(?:: |$)")
_GRADIENT, _SUM = "_Grad", "AccumulateGrad_"
_CALL = re.compile(r"_\d+$")  # the exporter's mark of a module's second call, and the next


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    ``op`` is ONNX's name, with its domain where that is not ONNX's own. ``phase`` is forward or
    backward; the yield, where ORT hands the outputs to torch, is the last of forward. ``module`` is
    the path of the module that it computes for ("encoder.layer.0"), empty for the model itself or
    where the graph does not say. ``of`` is the name of the forward node whose gradient it computes.
    ``source`` is the line that it comes from, outside of torch ("model.py:12: return x + y"); empty
    where the exporter did not keep it. A gradient has that of its forward node.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    phase: str
    module: str
    of: str | None
    source: str = ""


@dataclass(frozen=True)
class Overlay:
    """A figure for nodes of a stage, by their names, which a view colours and tells.

    ``name`` is what it is ("time"), ``unit`` one of "us", "bytes".
    """

    name: str
    unit: str
    values: Mapping[str, float]


class Stage:
    """One graph: ``model`` is the ONNX model without weights, ``name`` one of `STAGES`.

    `modules` and `trained` are the paths of the user's modules and of the parameters that train,
    `before` is the stage that this one was made of.
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
        self.graphs: Graphs | None = None
        """The stages that it is one of."""
        self._modules = modules
        self._trained = trained
        self._before = before
        self._scopes: dict[str, str | None] = {}  # a scope has many nodes

    def of(self, model: onnx.ModelProto) -> Stage:
        """The stage with another graph of the same model in its place."""
        return Stage(self.name, model, self._modules, self._trained, self._before)

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """In the order of the graph, which is one in which it can be computed."""
        nodes = self.model.graph.node
        makers = {output: node.name for node in nodes for output in node.output}
        at = next((i for i, node in enumerate(nodes) if node.op_type == _YIELD), len(nodes))
        found = []
        modules = {node.name: self._module(node) for node in nodes}
        lines = {node.name: self._line(node) for node in nodes}
        for i, node in enumerate(nodes):
            of = node.name.rpartition(_GRADIENT + "/")[0]
            if node.name.startswith(_SUM):
                # Of what several nodes read: the sum of the gradients that they give.
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
        """As the exporter told, or of a node before that gave the same result.

        ORT writes of its own into some: only what has the form of a line is one.
        """
        if _LINE.match(node.doc_string):
            return node.doc_string
        known = {} if self._before is None else self._before.lines
        return next((known[name] for name in node.output if name in known), "")

    @functools.cached_property
    def lines(self) -> dict[str, str]:
        """The line that each result comes from, as far as it is known."""
        return {name: node.source for node in self.nodes if node.source for name in node.outputs}

    def _module(self, node: onnx.NodeProto) -> str:
        """The path of the module that `node` computes for, as its name or that of a result says.

        A node that ORT has made of several often has a name of its own; its results keep theirs.
        """
        for name in (node.name, *node.output):
            _, found, path = name.partition(f"/{_ROOT}/")
            scope = path.partition(_GRADIENT + "/")[0].rpartition("/")[0] if found else ""
            if scope:
                return self._module_of(scope) or ""
        return ""

    def _module_of(self, scope: str) -> str | None:
        """The innermost module whose call the exporter calls `scope`, or part of it."""
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
        """The one module that the exporter may call `path`, which leaves out what is not called.

        That is a ModuleDict, or another module that only holds some: "wte" for "transformer.wte".
        The number of an item stays with its list.
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
        """How often each operator is there."""
        return Counter(node.op for node in self.nodes)

    @functools.cached_property
    def gradients(self) -> dict[str, tuple[Node, ...]]:
        """For each forward node that has any, by name, the nodes that compute its gradient."""
        found: dict[str, tuple[Node, ...]] = {}
        for node in self.nodes:
            if node.of is not None:
                found[node.of] = (*found.get(node.of, ()), node)
        return found

    @functools.cached_property
    def parameter_gradients(self) -> dict[str, str]:
        """The output of the graph that holds the gradient of each parameter, by its own name."""
        outputs = {value.name for value in self.model.graph.output}
        return {
            name: f"{_ROOT}.{name}_grad"
            for name in sorted(self._trained)
            if f"{_ROOT}.{name}_grad" in outputs
        }

    @functools.cached_property
    def dims(self) -> tuple[str, ...]:
        """The sizes that a batch decides, by ORT's names: an input's, with the dimension's number.

        Inputs that have a size in common share its name where the exporter knew.
        """
        sizes = [size for name in self._inputs for size in self.tensors.get(name, (0, ()))[1]]
        return tuple(dict.fromkeys(size for size in sizes if isinstance(size, str)))

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """What `dims` are for inputs of these shapes, as far as they tell."""
        told = _tensors(self.model.graph.input)
        known = ((told[name][1], shape) for name, shape in shapes.items() if name in told)
        pairs = (pair for sizes, shape in known for pair in zip(sizes, shape, strict=False))
        return {dim: size for dim, size in pairs if isinstance(dim, str)}

    @property
    def parameter_bytes(self) -> int:
        """Of the parameters and buffers that the graph reads."""
        return sum(bytes_of(*self.tensors[name], {}) for name in self.parameters.values())

    def activation_bytes(self, **dims: int) -> int:
        """What all results of forward's nodes take together, for the sizes that are given.

        They are not all there at the same time, and views of one another count each. Results whose
        size the graph does not tell are left out, see `unsized`. ValueError names a missing size.
        """
        missing = [name for name in self.dims if name not in dims]
        if missing:
            raise ValueError(f"give the sizes {', '.join(missing)}")
        return sum(self.bytes_of(name, dims) or 0 for name in self._results)

    def bytes_of(self, tensor: str, dims: Mapping[str, int]) -> int | None:
        """What a tensor takes, for values of all `dims`; None where the graph does not tell."""
        return bytes_of(*self.tensors[tensor], dims) if self._sized(tensor) else None

    def shape_of(self, tensor: str, dims: Mapping[str, int]) -> tuple[int | str, ...] | None:
        """A tensor's sizes, those that follow from `dims` as numbers; None where none are told."""
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
        """The parameters and buffers that the graph reads: its input for each, by their names."""
        prefix = f"{_ROOT}."
        return {n.removeprefix(prefix): n for n in self._inputs if n.startswith(prefix)}

    @property
    def unsized(self) -> tuple[str, ...]:
        """The results of forward's nodes whose size does not follow from `dims`."""
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
        """The element type and sizes of each tensor that the graph tells them of."""
        graph = self.model.graph
        return _tensors((*graph.input, *graph.value_info, *graph.output))

    def table(self) -> Table[str]:
        """How often each operator is there, in forward and in backward."""
        phases = Counter((node.op, node.phase) for node in self.nodes)
        columns: list[Column[str]] = [Column("operator", lambda op: op)]
        for phase in ("forward", "backward"):
            count = functools.partial(lambda phase, op: str(phases[op, phase]), phase)
            columns.append(Column(phase, count, number=True))
        ops = [op for op, _ in self.ops.most_common()]
        return Table(ops, columns, notes=[f"{len(self.nodes)} nodes {STAGES[self.name]}"])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _op(node: onnx.NodeProto) -> str:
    """With its domain; of a node that calls a kernel of torch's, the name of that."""
    if node.op_type == "ATen":
        kernel = next((each.s.decode() for each in node.attribute if each.name == "operator"), "")
        return f"{node.domain}.{kernel}".removesuffix(".").replace("::", ".")
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _ending(path: str) -> str:
    return path.rpartition(".")[2]


class Graphs:
    """The stages of one model: ``graphs.gradient`` and so on; shown as a table of them.

    ``sizes`` are those of the last call, for `Stage.dims`; ``measured`` gives figures for the nodes
    of a stage, one for each kind of figure that is at hand; ``notes`` are to be told with them.
    """

    def __init__(
        self,
        model: str,
        stages: Mapping[str, Stage],
        *,
        sizes: Mapping[str, int] | None = None,
        measured: Iterable[Callable[[Stage], Overlay]] = (),
        notes: Iterable[str] = (),
    ) -> None:
        self.model = model
        self.stages = dict(stages)
        for stage in self.stages.values():
            stage.graphs = stage.graphs or self
        self.sizes = dict(sizes or {})
        self.measured = list(measured)
        self.notes = tuple(notes)

    def stage(self, name: str) -> Stage:
        """One of `STAGES`; ValueError says why it is not there."""
        if name not in STAGES:
            raise ValueError(f"there is no stage {name!r}: {unknown_name(name, STAGES)}")
        if name not in self.stages:
            raise ValueError(f"{self.model} has no {name} graph: {_absent(name)}")
        return self.stages[name]

    def overlays(self, stage: str) -> list[Overlay]:
        """What was measured of the nodes of a stage."""
        return [each(self.stage(stage)) for each in self.measured]

    @property
    def exported(self) -> Stage:
        """What torch's exporter made of forward."""
        return self.stage("exported")

    @property
    def forward(self) -> Stage:
        """Forward as ORT optimized it before it built the gradient."""
        return self.stage("forward")

    @property
    def gradient(self) -> Stage:
        """Forward and backward in one graph, split at the yield."""
        return self.stage("gradient")

    @property
    def execution(self) -> Stage:
        """What ORT's session made of the gradient graph, and runs."""
        return self.stage("execution")

    @property
    def eval(self) -> Stage:
        """Forward alone, as it was exported for evaluation."""
        return self.stage("eval")

    def diff(self, before: str, after: str) -> Table[tuple[str, int, int]]:
        """How often each operator is in one stage and in another, where that is not the same."""
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
        """A row for each stage that is there."""
        stages = list(self.stages.values())
        notes = [*self.notes, f"a batch decides the sizes {', '.join(stages[-1].dims)}"]
        notes += [f"no {name}: {_absent(name)}" for name in STAGES if name not in self.stages]
        return Table(stages, _COLUMNS, notes=notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_COLUMNS: Final[tuple[Column[Stage], ...]] = (
    Column("stage", lambda stage: stage.name),
    Column("what it is", lambda stage: STAGES[stage.name]),
    Column("nodes", lambda stage: str(len(stage.nodes)), number=True),
    Column("forward", lambda stage: str(_count(stage, "forward")), number=True),
    Column("backward", lambda stage: str(_count(stage, "backward")), number=True),
    Column("parameters", lambda stage: f"{stage.parameter_bytes / 2**20:.1f} MiB", number=True),
    Column("most frequent", lambda stage: _most(stage)),
)


def _absent(name: str) -> str:
    if name == "execution":
        return "ORT tells what it runs on a CPU, after a call in training"
    if name == "eval":
        return "call the model once with a batch after model.eval(), under torch.no_grad()"
    return "call the model once with a batch, in training"


def _count(stage: Stage, phase: str) -> int:
    return sum(node.phase == phase for node in stage.nodes)


def _most(stage: Stage) -> str:
    ops = ((op.rpartition(".")[2], count) for op, count in stage.ops.most_common(4))
    return ", ".join(f"{count} {op}" for op, count in ops)


def with_loss(wrapped: nn.Module) -> nn.Module | None:
    """Return what a run has executed last of a model wrapped in the fused engine, or None."""
    return fused_engine.with_loss(wrapped)


def execution_behind(model: nn.Module) -> GraphDispatcher:
    """How the wrapped `model` runs; ValueError where it is not wrapped in engine ort."""
    if not is_wrapped(model):
        raise ValueError(
            f"this {type(model).__name__} has no ORT graphs; wrap it: %%ort, or ortlab.wrap(model)"
        )
    return execution_of(model)


def capture(
    model: nn.Module, batch: Batch | None = None, settings: EngineSettings | None = None
) -> Graphs:
    """The stages of the exports that the wrapped `model` used last, for training and evaluation.

    With a `batch` those that serve it, made now where there are none; the model stays as it is.
    With `settings` those made for them, which may wait for a return.
    ValueError where it is not wrapped in engine ort, has not been called yet, or runs in torch.
    """
    execution = execution_behind(model)
    name = type(execution.module).__name__
    if batch is not None:
        execution.export_for(*arguments(execution.module, batch))
    if (reason := execution.report().fallback_reason) is not None:
        raise ValueError(f"{name} runs in torch and has no graph: {reason}")
    modules = frozenset(n for n, _ in execution.module.named_modules(remove_duplicate=False))
    trained = frozenset(n for n, p in execution.module.named_parameters() if p.requires_grad)
    found: dict[str, Stage] = {}
    sizes: dict[str, dict[str, int]] = {}
    for export in execution.exports(settings):  # the one that was used last at the end
        before: Stage | None = None
        for stage, graph in export.stages().items():
            found[stage] = before = Stage(stage, graph, modules, trained, before)
            sizes[stage] = found[stage].sizes(export.input_shapes())
    if not found:
        takes = signature(execution.module)
        raise ValueError(f"{name} has no graph yet; call it once, or give a batch for {takes}")
    ordered = {stage: found[stage] for stage in STAGES if stage in found}
    # Where training and evaluation had different batches, it is training's that counts.
    last = {dim: size for stage in reversed(ordered) for dim, size in sizes[stage].items()}
    edited = execution.edited()
    notes = [] if edited is None else [f"changed since the graph was made: {edited}"]
    return Graphs(name, ordered, sizes=last, notes=notes)


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[int, tuple[int | str, ...]]]:
    found = {}
    for value in values:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            found[value.name] = (tensor.elem_type, sizes)
    return found
