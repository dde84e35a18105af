"""Division of an FX graph into ORT segments and torch segments.

An operator runs in ORT if a rule lowers it; all others run in torch, in the same step. Segments
alternate, and each operator is in the earliest one that its inputs allow, so that their number is
as small as the graph permits.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import onnx
import sympy
import torch
from torch import fx
from torch.fx.graph import CodeGen

from ortlab.engines.ort import arena, draws, recurrence, session
from ortlab.engines.ort.lowering.graph import (
    HALVES,
    ONNX_TYPES,
    RULES,
    VIEWS,
    NotLowered,
    OnnxGraph,
    Value,
    carried,
    hints,
    lower,
)
from ortlab.engines.ort.onnx_model import (
    TANGENTS,
    NodeNotLowered,
    bind_number,
    bytes_of,
    elements_of,
    is_number,
    lowered,
    operator_of,
    source_line,
    tensors_in,
    values_of,
)
from ortlab.engines.ort.session import Options, Session, SessionFailed
from ortlab.engines.torch.cpu import has_instructions
from ortlab.engines.torch.thread_count import end_idle_threads
from ortlab.utils.errors import short_of_memory
from ortlab.utils.session_profile import Ran

aten = torch.ops.aten

_READ_STRIDES: Final = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})
"""Operators whose result depends on the strides of their input."""

FASTER_IN_TORCH: Final[dict[Any, str]] = {
    aten.embedding_dense_backward.default: "torch adds the rows faster than ORT",
    **dict.fromkeys(recurrence.IN_ONEDNN, "oneDNN computes all steps of the layer in one operator"),
}
"""Operators that ORT could run, alone or step by step, with the reason why torch does."""

_LARGE_CONVOLUTION: Final = 5_000_000
"""Products from which on torch runs a convolution.

ResNet-18 of 32 x 32 pixels on two cores took 2.3 times as long with its convolutions in ORT, which
lays out the windows anew for each image. MobileNetV2 of 64 x 64 pixels took 1.3 times as long with
those of 1 x 1 and the gradients of ReLU6 in ORT. Small ones do not make up for another segment.
"""

_ONE_PASS: Final = "and torch computes it in one pass, ORT node by node"
_SCATTER: Final = "and ORT scatters in one thread"
_SELECTION: Final = "and ORT selects in one thread"
_PIECEWISE: Final = "and ORT copies a few elements at a time"
_FASTER_WHEN_LARGE: Final[dict[Any, tuple[int, str]]] = {
    aten._native_batch_norm_legit_functional.default: (15_000, _ONE_PASS),
    aten.native_batch_norm_backward.default: (15_000, _ONE_PASS),
    aten._log_softmax_backward_data.default: (500_000, _ONE_PASS),
    aten.nll_loss_backward.default: (500_000, _SCATTER),
    aten.max_pool2d_with_indices_backward.default: (300_000, _SCATTER),
    aten.constant_pad_nd.default: (100_000, _PIECEWISE),
    aten.where.self: (300_000, _SELECTION),
    aten.masked_fill.Scalar: (300_000, _SELECTION),
    aten.masked_fill.Tensor: (300_000, _SELECTION),
    aten.threshold_backward.default: (300_000, _SELECTION),
    aten.hardtanh_backward.default: (300_000, _SELECTION),
}
"""Operators that ORT could run, with the elements from which on torch does, and the reason why.

On two cores the gradient of a ReLU of 3 million elements took 19 ms in ORT and 2 in torch, batch
normalization with a ReLU, both passes, 37 and 12, and GPT-2's backward pass 3.3 s with the gradient
of its loss in ORT, 2.7 s without. Padding a gradient of 512 x 512 x 3 x 3 took 8 ms in ORT, 0.5 in
torch. Other operators do not make up for another segment, after which torch's threads spin for a
while: with GELU's gradient, 22 and 6 ms, BERT's step took as long, and its memory was predicted
less exactly for other sizes.
"""

_MANY_RUNS, _SHORT_RUN = 100_000, 8
"""Least number of runs in a slice that torch selects, and the length below which a run is short.

A run consists of adjacent elements, which torch reads in place. For the 262,144 middle elements of
a weight of 512 x 512 x 3 x 3, ORT took 3 ms.
"""


def _selects_short_runs(node: fx.Node) -> bool:
    """Return True if a slice consists of many runs of a few adjacent elements."""
    given: list[Any] = [*node.args]
    x, dim, _, _, step = given + [0, None, None, 1][len(given) - 1 :]
    sizes = hints(node)
    if sizes == hints(x):
        return False
    run = math.prod(sizes[dim:] if step == 1 else sizes[dim:][1:])
    return run < _SHORT_RUN and math.prod(sizes) >= _MANY_RUNS * run > 0


def _faster_in_torch(node: fx.Node) -> str | None:
    """Return why torch runs a node that ORT could run; None if it does not."""
    given: tuple[Any, ...] = node.args
    if node.target in _FASTER_WHEN_LARGE:
        least, reason = _FASTER_WHEN_LARGE[node.target]
        nodes = (node, *node.all_input_nodes)
        tensors = [tensor for each in nodes for tensor in tensors_in(each.meta.get("val"))]
        most = max(map(elements_of, tensors))
        return None if most < least else f"it is large, {reason}"
    if node.target is aten.slice.Tensor:
        return f"it is large, {_PIECEWISE}" if _selects_short_runs(node) else None
    if node.target is aten.convolution.default:
        (x, weight), y, transposed = given[:2], node, given[6]
    elif node.target is aten.convolution_backward.default:
        (y, x, weight), transposed = given[:3], given[7]
    else:
        return FASTER_IN_TORCH.get(node.target)
    kernel, places = map(hints, (weight, x if transposed else y))
    positions = math.prod(places) // max(1, places[1])  # where the kernel is applied
    if positions * math.prod(kernel) < _LARGE_CONVOLUTION:
        return None
    return "it is large, and torch has faster kernels for it"


_FEW: Final = 3
"""Operators that run in torch if they would be all of an ORT segment after a torch segment.

A segment takes some 0.1 ms, and torch's threads spin when it starts. ResNet-18 has a ReLU, or an
addition and a ReLU, between any two convolutions. A segment with one of `PRODUCTS` stays.
"""

_FEW_AMONG_HALVES: Final = 8
"""Same as `_FEW`, for graphs whose products run in torch in 16 bits and take less time.

With AVX512-BF16, BERT 4 x 256 has additions and norms of at most 6 operators between its products.
A step took 1.00 of eager torch's time with those in ORT and 0.94 without.
"""

PRODUCTS: Final = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
)

TOO_FEW: Final = "a segment for so few operators after others in torch would take longer"

QUICK: Final[dict[Any, Callable[..., Any]]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.reshape.default: torch.reshape,
    aten.transpose.int: torch.transpose,
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.expand.default: torch.Tensor.expand,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.detach.default: torch.detach,
}
"""Functions that take a third to a half of the time of a call of the operator, some 2 us."""

FREE: Final = VIEWS | {operator.getitem, *QUICK.values()}
"""Operators that no kernel computes: views, and elements of tuples."""

OF_MODEL: Final = ("primals_", "arg")
"""Names that AOTAutograd gives to arguments of the model, which outlive a graph that reads them."""

_LONG_S: Final = 0.02
"""Mean time of a segment from which on torch's spinning threads end before it.

They spin for 7 ms, and on a busy machine torch can wait as long for those that it creates again.
"""

_PARTS: Final = 8
_SMALL_PART: Final = 16 << 20
"""Bytes that a session may keep; it takes some 0.1 ms."""


@dataclass
class TorchOperators:
    """Operators of one kind that run in torch.

    Attributes:
        operator: Name, such as "aten.histc".
        reason: Why ORT does not run it.
        lines: Source lines of the model that call it.
    """

    operator: str
    reason: str
    lines: list[str] = field(default_factory=list)


def _unfit(node: fx.Node) -> str | None:
    """Return why ORT cannot run a node whatever its rule is."""
    inputs = [
        tensor for each in node.all_input_nodes for tensor in tensors_in(each.meta.get("val"))
    ]
    for tensor in [*inputs, *tensors_in(node.meta.get("val"))]:
        if tensor.dtype in HALVES:
            if has_instructions(tensor.dtype):
                return f"this CPU has instructions for {_short(tensor.dtype)}, which torch uses"
        elif tensor.dtype not in ONNX_TYPES:
            return f"tensors of type {_short(tensor.dtype)}"
        if tensor.device.type != "cpu":
            return f"tensors on the device {tensor.device.type}"
        if tensor.layout is not torch.strided:
            return f"tensors with the layout {tensor.layout}"
    if draws.is_random(node):
        return "it draws random numbers"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Segments


class OrtSegment(torch.nn.Module):
    """Part of a graph that ORT runs.

    Attributes:
        graph: The same part as an FX graph, which torch can run.
        lowered: Its ONNX model.
        seconds: Time in ORT so far.
        calls: Number of calls of ORT so far.
        divided: The segment in parts, after one of its operators has failed in ORT.
    """

    def __init__(self, graph: fx.GraphModule, options: Options | None = None) -> None:
        """Lower the graph and create its session.

        Args:
            graph: FX graph whose output is a list of tensors.
            options: Options of the model's sessions; None for the default ones.

        Raises:
            NodeNotLowered: If a node cannot be lowered, or ORT refuses it.
        """
        super().__init__()
        self.graph = graph
        self.lowered = lowered(graph)
        self._inputs, self._lasting, plain = self._ordered_inputs()
        reads = [self.lowered.inputs[name] for name in self._inputs]
        self._plain, self._others = [i for i, _ in reads[:plain]], reads[plain:]
        self._halves = self._half_outputs()
        self.seconds, self.calls = 0.0, 0
        self.divided: Division | None = None
        self._options = options or Options()
        self._session: Session | None = None
        self._largest = [0, 0]  # elements of all inputs but lasting ones, and the longest dimension
        self.restart()

    def _ordered_inputs(self) -> tuple[list[str], int, int]:
        """Return the inputs, the number of those that mostly stay, and of those read as they are.

        Tensors of the model with fixed shapes come first, then other tensors, then numbers, 16-bit
        floats, and tensors whose dimensions have another order in memory.
        """
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]

        def group(name: str) -> int:
            i, order = self.lowered.inputs[name]
            node = placeholders[i]
            if order is not None or is_number(node):
                return 2
            value = node.meta["val"]
            if value.dtype in HALVES:
                return 2
            fixed = all(isinstance(size, int) for size in value.shape)
            return 0 if fixed and node.name.startswith(OF_MODEL) else 1

        names = sorted(self.lowered.inputs, key=group)
        groups = [group(name) for name in names]
        return names, groups.count(0), len(names) - groups.count(2)

    def _half_outputs(self) -> list[tuple[int, torch.dtype]]:
        """Return the outputs that are 16-bit floats in torch, float32 in ORT, and their types."""
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        types = [node.meta["val"].dtype for node in output.args[0]]
        return [(i, dtype) for i, dtype in enumerate(types) if dtype in HALVES]

    def restart(self, *, optimize: bool = True) -> None:
        """Create the session again.

        Args:
            optimize: False to run the nodes as they are, without ORT's optimizations.

        Raises:
            NodeNotLowered: If ORT refuses a node.
        """
        self._optimize, self._arena = optimize, self._options.arena
        if self._arena:
            arena.prepare()
        if self.lowered.outputs:  # ORT refuses a graph without nodes
            try:
                self._session = self._new_session()
            except SessionFailed as error:
                raise _blamed(self.graph, str(error)) from error

    def _new_session(self, profiles: Path | None = None) -> Session:
        return Session(
            self.lowered.model,
            self._inputs,
            self.lowered.outputs,
            lasting=self._lasting,
            optimize=self._optimize,
            options=self._options,
            profiles=profiles,
        )

    @contextlib.contextmanager
    def profiled(self, folder: Path) -> Iterator[Callable[[], list[Ran]]]:
        """Run in a session of its own that is profiled.

        Args:
            folder: Folder of the profile's file.

        Yields:
            Function that ends the profile and returns what each call ran.
        """
        if self._session is None:
            yield list
            return
        self._follow_options()
        own = self._session
        self._session = twin = self._new_session(folder)
        try:
            yield twin.end_profile
        finally:
            self._session = own

    def executed(self) -> onnx.ModelProto:
        """Return the ONNX model after ORT's optimizations."""
        return session.executed(self.lowered.model, optimize=self._optimize)

    def forward(self, *arguments: Any) -> list[torch.Tensor]:
        """Run the segment."""
        if self.divided is not None:
            found: list[torch.Tensor] = self.divided.module.forward(list(arguments))
            return found
        started = time.perf_counter()
        made: list[torch.Tensor] = []
        if self._session is not None:
            try:
                given = [arguments[i].contiguous() for i in self._plain]
                given += [_fed(arguments[i], order) for i, order in self._others]
                if self.calls and self.seconds > self.calls * _LONG_S:
                    end_idle_threads()
                made = self._run(given)
                for i, dtype in self._halves:
                    made[i] = made[i].to(dtype)
            except SessionFailed as error:
                blamed = _blamed(self.graph, str(error))
                if blamed.node is None:
                    self.move_all_to_torch(blamed.reason)
                else:
                    self.move_to_torch(blamed.node, blamed.reason)
                return self.forward(*arguments)
        self.seconds += time.perf_counter() - started
        self.calls += 1
        return made

    def _run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the session, with the arena as the options have it now."""
        self._follow_options()
        assert self._session is not None
        if not self._arena:
            return self._session(given)
        own = given[self._lasting :]
        size = [sum(x.numel() for x in own), max((max(x.shape, default=0) for x in own), default=0)]
        if any(map(operator.gt, size, self._largest)):
            arena.release()
            self._largest = list(map(max, size, self._largest))
        return arena.run(self._session, given)

    def _follow_options(self) -> None:
        """Create the session again if the options have another arena now."""
        if self._arena != self._options.arena:
            self.restart(optimize=self._optimize)
            if not self._arena:
                arena.release()

    def move_to_torch(self, node: fx.Node, reason: str) -> None:
        """Divide the segment again, with an operator in torch.

        Args:
            node: Call of the operator in `graph`; all calls with the same types are moved.
            reason: Why ORT does not run it.
        """
        in_torch: dict[fx.Node, str] = {}
        _add_alike(self.graph, in_torch, node, reason)
        self._divide_again(in_torch)

    def move_all_to_torch(self, reason: str) -> None:
        """Let torch run the whole segment.

        Args:
            reason: Why ORT does not run it.
        """
        self._divide_again(dict.fromkeys(filter(_computes, self.graph.graph.nodes), reason))

    def _divide_again(self, in_torch: Mapping[fx.Node, str]) -> None:
        self.divided = divide(self.graph, in_torch, self._options)
        self._session = None


def _fed(value: Any, order: list[int] | None) -> torch.Tensor:
    """Return a number, a 16-bit float or a tensor with another order in memory as ORT reads it."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else None)
    moved: torch.Tensor = value if order is None else value.permute(order)
    return moved.to(carried(moved.dtype)).contiguous()


_NO_KERNEL: Final = re.compile(r"Could not find an implementation for (\w+)\(")


def _blamed(graph: fx.GraphModule, message: str) -> NodeNotLowered:
    """Return the error about the first node of a graph that a message of ORT names."""
    if missing := _NO_KERNEL.search(message):
        reason = f"ORT has no kernel of {missing[1]} for its types"
    elif short_of_memory(message):
        reason = "memory ran out while ORT computed it"
    else:
        reason = " ".join(message.split())[:200]
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for node in sorted(nodes, key=lambda node: -len(node.name)):
        if f"{node.name}/" in message:
            return NodeNotLowered(operator_of(node), reason)
    return NodeNotLowered(None, reason)


@dataclass
class Division:
    """A graph that is divided into segments.

    Attributes:
        module: Graph that calls the segments; it takes a list of arguments and empties it.
        segments: Segments that ORT runs.
        in_torch: Reasons for the operators that torch runs.
        torch_segments: Number of segments that torch runs.
    """

    module: fx.GraphModule
    segments: list[OrtSegment]
    in_torch: dict[fx.Node, str]
    torch_segments: int

    def parts(self) -> Iterator[Division]:
        """Iterate over this division and those of its segments that were divided again."""
        yield self
        for segment in self.segments:
            if segment.divided is not None:
                yield from segment.divided.parts()

    def ort_segments(self) -> Iterator[OrtSegment]:
        """Iterate over the segments that ORT runs now, those of segments divided again included."""
        for part in self.parts():
            yield from (segment for segment in part.segments if segment.divided is None)

    @property
    def ort_seconds(self) -> float:
        """Time in ORT so far."""
        return sum(segment.seconds for part in self.parts() for segment in part.segments)

    def torch_operators(self) -> list[TorchOperators]:
        """Return the operators that torch runs although they compute, without random draws."""
        found: dict[tuple[str, str], TorchOperators] = {}
        for part in self.parts():
            for node, reason in part.in_torch.items():
                if not _counts(node):
                    continue
                name = str(node.target).removesuffix(".default")
                operators = found.setdefault((name, reason), TorchOperators(name, reason))
                if (line := source_line(node)) and line not in operators.lines:
                    operators.lines.append(line)
        return list(found.values())


def _counts(node: fx.Node) -> bool:
    """Return True for an operator in torch that computes, without random draws and assertions."""
    if node.target in VIEWS or isinstance(node.target, draws.Draw):
        return False
    return next(tensors_in(node.meta.get("val")), None) is not None


def divide(
    module: fx.GraphModule,
    chosen: Mapping[fx.Node, str] | None = None,
    options: Options | None = None,
) -> Division:
    """Divide a graph into ORT segments and torch segments.

    Args:
        module: Graph of ATen operators.
        chosen: Operators that torch is to run, with the reasons, in addition to those that it must.
        options: Options of the model's sessions; None for the default ones.

    Returns:
        The divided graph, ready to run.
    """
    options = options or Options()
    in_torch = {**_not_lowered(module), **(chosen or {})}
    in_torch |= dict.fromkeys(_Divider(module, in_torch, options).too_few(), TOO_FEW)
    while True:
        try:
            return _Divider(module, in_torch, options).divided()
        except NodeNotLowered as error:
            if error.node is not None:
                named = next(node for node in module.graph.nodes if node.name == error.node.name)
                _add_alike(module, in_torch, named, error.reason)
            elif refused := _refused_alone(module, in_torch):
                in_torch |= refused
            else:
                in_torch = dict.fromkeys(filter(_computes, module.graph.nodes), error.reason)


def _refused_alone(module: fx.GraphModule, in_torch: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Return the operators that ORT refuses in a segment of their own.

    ORT's message names no node if it stands for several, as Gelu does in float64.
    """
    found: dict[fx.Node, str] = {}
    tried = set(map(_kind, in_torch))
    computing = list(filter(_computes, module.graph.nodes))
    for node in computing:
        if _kind(node) not in tried and node.target not in FREE:
            tried.add(_kind(node))
            own = {node, *(user for user in node.users if user.target is operator.getitem)}
            others = dict.fromkeys((other for other in computing if other not in own), "")
            try:
                _Divider(module, others, Options(arena=False)).divided()
            except NodeNotLowered as error:
                _add_alike(module, found, node, error.reason)
    return found


def _viewed(node: fx.Node) -> fx.Node:
    """Follow views back to the node that owns the memory."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _computes(node: fx.Node) -> bool:
    """Return True for an operator on tensors."""
    return node.op == "call_function" and not is_number(node)


def _add_alike(
    module: fx.GraphModule, in_torch: dict[fx.Node, str], named: fx.Node, reason: str
) -> None:
    """Let all calls of an operator with the same types run in torch, with its results."""
    for node in module.graph.nodes:
        if node.op == "call_function" and _kind(node) == _kind(named):
            in_torch[node] = reason


def _kind(node: fx.Node) -> tuple[Any, tuple[torch.dtype, ...]]:
    """Return the operator that a node calls, and the types of its results."""
    return node.target, tuple(tensor.dtype for tensor in tensors_in(node.meta.get("val")))


def _not_lowered(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the operators that no rule covers, with the reason."""
    graph, known = OnnxGraph(), dict[fx.Node, Any]()
    names = (f"value.{i}" for i in range(10**9))
    found: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(module, node.target)
            if not isinstance(tensor, torch.Tensor):
                continue
            node.meta.setdefault("val", tensor)
        if _computes(node):
            if node.target is operator.getitem:
                known[node] = known[node.args[0]][node.args[1]]
                continue
            reason = _unfit(node) or _faster_in_torch(node)
            if reason is None and node.target in RULES:
                try:
                    known[node] = lower(graph, node, known)
                    continue
                except NotLowered as error:
                    reason = str(error)
            found[node] = reason or "no rule for this operator"
        if node.op != "output":
            known[node] = values_of(node, names)
            values = known[node] if isinstance(known[node], list) else [known[node]]
            for value in values:
                if isinstance(value, sympy.Expr):
                    bind_number(graph, node, value)
                elif isinstance(value, Value):
                    graph.bind_shape(value)
    return found


class _Emptied(CodeGen):
    """Code of a function that takes a list of arguments and empties it, to release them early."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [each.split(":")[0].split("=")[0].strip() for each in free_vars]
        unpacked = "".join(f"{name}, " for name in names if name != "self")
        lines = [f"def forward(self, arguments){maybe_return_annotation}:"]
        lines += [f"    {unpacked}= arguments"] if unpacked else []
        return "\n".join([*lines, "    arguments.clear()"])


class _Divider:
    """One division of a graph, with a given set of operators in torch."""

    def __init__(
        self, module: fx.GraphModule, in_torch: Mapping[fx.Node, str], options: Options
    ) -> None:
        self._module, self._in_torch, self._options = module, dict(in_torch), options
        self._nodes = list(module.graph.nodes)
        self._is_backward = any(node.name.startswith(TANGENTS) for node in self._nodes)
        self._torch = self._torch_nodes()
        self._last_reader = self._last_readers()
        self._levels = self._in_parts(self._levels_of())
        self._outer = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._root = torch.nn.Module()
        self._segments: list[OrtSegment] = []

    def _torch_nodes(self) -> set[fx.Node]:
        """Return the nodes in torch, with the views that only they read."""
        found = set(self._in_torch)
        for node in self._nodes:
            if node.target is operator.getitem and node.args[0] in found:
                found.add(node)
        for node in reversed(self._nodes):
            if node.target in VIEWS and node.users and all(each in found for each in node.users):
                found.add(node)
        return found

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """Iterate over the operators that a node reads, also through numbers computed from them."""
        for each in node.all_input_nodes:
            if _computes(each):
                yield each
            elif each.op == "call_function":
                yield from self._sources(each)

    def _sizes_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """Iterate over the operators whose results' sizes a number is computed from."""
        return self._sources(node) if is_number(node) and node.op == "call_function" else iter(())

    def _levels_of(self) -> dict[fx.Node, int]:
        """Return the segment of each operator: even ones in torch, odd ones in ORT.

        What is computed again comes after the gradients that the partitioner put before it, if that
        is most of what a backward pass reads. Otherwise all of it could be in the first segments,
        and in memory from there on, for it needs no gradient.
        """
        levels: dict[fx.Node, int] = {}
        last_draw = last_gradient = 0
        late = self._mostly_again()
        for node in filter(_computes, self._nodes):
            in_torch = node in self._torch
            level = 0 if in_torch else 1
            for source in self._sources(node):
                same = (source in self._torch) == in_torch
                level = max(level, levels[source] + (0 if same else 1))
            if in_torch and draws.is_random(node):
                level = last_draw = max(level, last_draw)  # in the order of the program
            if not self._is_again(node):
                last_gradient = max(level, last_gradient)
            elif late and level < last_gradient:
                level = last_gradient + (last_gradient - level) % 2
            levels[node] = level
        return levels

    def too_few(self) -> list[fx.Node]:
        """Return the operators of very small ORT segments that follow on torch segments."""
        segments: dict[int, list[fx.Node]] = defaultdict(list)
        for node, (level, _) in self._levels.items():
            if level % 2 and node.target not in FREE:
                segments[level].append(node)
        in_halves = any(
            node.target in PRODUCTS and node.meta["val"].dtype in HALVES for node in self._torch
        )
        few = _FEW_AMONG_HALVES if in_halves else _FEW
        found: list[fx.Node] = []
        for nodes in segments.values():
            read = {source for node in nodes for source in self._sources(node)} & self._torch
            if (
                len(nodes) <= few
                and PRODUCTS.isdisjoint(node.target for node in nodes)
                and not all(map(draws.is_random, read))
            ):
                found += nodes
        return found

    def _in_parts(self, levels: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int, int]]:
        """Return the segment of each operator: those in ORT end where they have read much.

        A session keeps what it is given until it ends, and computes gradients of weights last. In
        one session, a backward pass would keep all activations until the last gradient is there.
        """
        released: dict[fx.Node, int] = defaultdict(int)
        for each, node in self._last_reader.items():
            released[node] += bytes_of(each)
        most = sum(released.values()) // _PARTS
        if not self._mostly_again():
            most = max(_SMALL_PART, most)
        parts: dict[int, int] = defaultdict(int)
        sizes: dict[int, int] = defaultdict(int)
        found: dict[fx.Node, tuple[int, int]] = {}
        for node, level in levels.items():
            if node.target is operator.getitem:
                found[node] = found[node.all_input_nodes[0]]  # no segment returns a tuple
                continue
            if level % 2 and sizes[level] >= most:
                parts[level] += 1
                sizes[level] = 0
            sizes[level] += released[node]
            found[node] = (level, parts[level])
        return found

    def _last_readers(self) -> dict[fx.Node, fx.Node]:
        """Return the activations that operators read, each with the last one that reads it."""
        found: dict[fx.Node, fx.Node] = {}
        for node in filter(_computes, self._nodes):
            for each in map(_viewed, node.all_input_nodes):
                if self._is_activation(each):
                    found[each] = node
        return found

    def _mostly_again(self) -> bool:
        """Return True if most of what is read is computed again, so that memory counts most."""
        again = sum(bytes_of(each) for each in self._last_reader if each.op != "placeholder")
        return 2 * again > sum(map(bytes_of, self._last_reader))

    def _is_again(self, node: fx.Node) -> bool:
        """Return True for an operator of a backward pass that the forward pass has, too."""
        return self._is_backward and node.meta.get("partitioner_tag") == "is_forward"

    def _is_activation(self, node: fx.Node) -> bool:
        """Return True for a tensor that a graph is given, not the model's, or computes again."""
        if node.op == "placeholder":
            return not node.name.startswith(OF_MODEL)
        return self._is_again(node) and isinstance(node.meta.get("val"), torch.Tensor)

    def divided(self) -> Division:
        """Return the divided graph."""
        by_level: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            if node.op == "placeholder":
                self._made[node] = self._outer.node_copy(node)
            elif node in self._levels:
                by_level[self._levels[node]].append(node)
        exported = self._exported()
        for level in sorted(by_level):
            if level[0] % 2:
                self._add_segment(by_level[level], exported)
            else:
                for node in by_level[level]:
                    self._made[node] = self._for_torch(node)
        output = self._nodes[-1]
        self._outer.node_copy(output, self._in_outer)
        self._outer.set_codegen(_Emptied())
        self._outer.lint()
        made = fx.GraphModule(self._root, self._outer)
        in_torch = {self._levels[node] for node in self._in_torch if _counts(node)}
        return Division(made, self._segments, self._in_torch, len(in_torch))

    def _in_outer(self, node: fx.Node) -> fx.Node:
        """Return a node in the outer graph: numbers, constants and views of inputs on demand."""
        if node not in self._made:
            if node.op == "get_attr":
                setattr(self._root, str(node.target), getattr(self._module, str(node.target)))
            self._made[node] = self._for_torch(node)
        return self._made[node]

    def _for_torch(self, node: fx.Node) -> fx.Node:
        """Return a node that torch runs, on tensors whose strides need not be those of the capture.

        Results of ORT are contiguous where torch's may not be.
        """
        source = next(iter(node.all_input_nodes), None)
        if source and node.target is source.target is aten.t.default:
            return self._in_outer(source.all_input_nodes[0])  # gradients of weights are t().t()
        made = self._outer.node_copy(node, self._in_outer)
        made.target = arena.placed(node, self._options)
        if node.target in QUICK:
            made.target = QUICK[node.target]
        elif node.target is operator.truediv:
            made.target = _quotient
        elif node.target in _READ_STRIDES:
            assert source is not None
            if not source.meta["val"].is_contiguous():
                layout = draws.Layout(source.meta["val"])
                with self._outer.inserting_before(made):
                    symbols = draws.known_symbols(self._outer, layout)
                    copied = self._outer.call_function(
                        draws.LaidOut(layout), (made.args[0], *symbols)
                    )
                made.args = (copied, *made.args[1:])
        return made

    def _exported(self) -> dict[fx.Node, None]:
        """Return the results of ORT segments that something outside of their segment reads.

        Of a view, that is what it is a view of: whoever reads the view makes it, without a copy.
        """
        found: dict[fx.Node, None] = {}

        def read(by: fx.Node, level: tuple[int, int] | None) -> None:
            for each in by.all_input_nodes:
                if each.op == "call_function" and is_number(each):
                    read(each, level)
                elif _computes(each) and each not in self._torch and self._levels[each] != level:
                    if each.target in VIEWS:
                        read(each, level)
                    else:
                        found[each] = None

        for node in self._nodes:
            if node.op == "output" or _computes(node):
                read(node, None if node in self._torch else self._levels.get(node))
        return found

    def _add_segment(self, nodes: Sequence[fx.Node], exported: Mapping[fx.Node, None]) -> None:
        """Add an ORT segment and the call of it."""
        inner = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        arguments: list[fx.Node] = []
        root = torch.nn.Module()
        mine = set(nodes)
        first = inner.output([])  # so that placeholders can be put before everything else

        def placed(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            if node.op == "get_attr":
                setattr(root, str(node.target), getattr(self._module, str(node.target)))
            elif not (
                node in mine
                or (node.target in VIEWS and node not in self._torch)
                or any(source in mine for source in self._sizes_of(node))
            ):
                arguments.append(self._in_outer(node))
                with inner.inserting_before(_after_placeholders(inner)):
                    made[node] = inner.placeholder(node.name)
                made[node].meta = dict(node.meta)
                return made[node]
            with inner.inserting_before(first):
                made[node] = inner.node_copy(node, placed)
            return made[node]

        for node in nodes:
            placed(node)
        wanted = [node for node in nodes if node in exported]
        if not wanted:
            return
        first.args = ([made[node] for node in wanted],)
        graph = fx.GraphModule(root, inner)
        segment = OrtSegment(graph, self._options)
        name = f"segment_{len(self._segments)}"
        self._segments.append(segment)
        self._root.add_module(name, segment)
        call = self._outer.call_module(name, tuple(arguments))
        for i, node in enumerate(wanted):
            # By its name in the forward graph a backward graph finds what it is given.
            taken = self._outer.create_node(
                "call_function", operator.getitem, (call, i), name=node.name
            )
            taken.meta = dict(node.meta)
            self._made[node] = taken


def _quotient(one: float, other: float) -> float:
    """Divide numbers as torch's kernels do, also by the size of a selection without elements."""
    return one / other if other else float(torch.tensor(one, dtype=torch.float64) / other)


def _after_placeholders(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return node
