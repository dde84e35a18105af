"""Search for the operator whose result in ORT is wrong, and its move to torch.

`self_check` compares a whole step with eager torch. Where it differs, each ORT segment of the step
is compared with its own FX graph, which torch runs on the same inputs and masks. The backend of
torch.compile has no eager step to compare with: its option `self_check` compares each segment.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from ortlab.engines import plan_names
from ortlab.engines.ort.onnx_model import NodeNotLowered, is_number, source_line
from ortlab.engines.ort.segments import QUICK, OrtSegment
from ortlab.engines.self_check import distance

_TOLERANCE: Final = 1e-4
_NEAR: Final = 3.0
"""Error of ORT against double precision that counts as rounding, in errors of torch itself."""


@dataclass(frozen=True)
class Moved:
    """Part of a segment that runs otherwise from now on.

    Attributes:
        operator: Name of the operator, or "" for a whole segment.
        error: Relative error of ORT's result.
        where: Source line of the operator; "" if unknown.
        how: What runs it now.
    """

    operator: str
    error: float
    where: str
    how: str

    def __str__(self) -> str:
        what = self.operator or "a segment"
        at = f" at {self.where}" if self.where else ""
        return f"{what}{at} runs {self.how}: ORT's result was off by {self.error:.1e}"


@contextlib.contextmanager
def layers_recomputed(module: nn.Module) -> Iterator[None]:
    """Let the backward pass of calls within the context compute the model's layers again.

    The check of a step that recomputes would otherwise take the memory of one that does not. A
    layer with side effects, or with random numbers that are not torch's, may raise an error or
    return other results. Layers with buffers, which a second call could change, are not recomputed.

    Args:
        module: Model, which runs in eager torch.
    """
    layers = [
        each
        for path, each in module.named_modules()
        if plan_names.whole_layers([plan_names.plan_of(path)]) and not list(each.buffers())
    ]
    own = [(each, each.__dict__.get("forward")) for each in layers]
    for each in layers:
        each.__dict__["forward"] = _recomputed(each.forward)
    try:
        yield
    finally:
        for each, forward in own:
            each.__dict__.pop("forward", None)
            if forward is not None:
                each.__dict__["forward"] = forward


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False)

    return recomputed


@contextlib.contextmanager
def recorded(segments: Iterable[OrtSegment]) -> Iterator[dict[OrtSegment, list[Any]]]:
    """Keep the inputs of the segments that run within the context, the first time of each.

    Args:
        segments: Segments to watch.

    Yields:
        Inputs by segment, filled while segments run.
    """
    inputs: dict[OrtSegment, list[Any]] = {}
    hooks = [
        segment.register_forward_pre_hook(
            lambda each, given: inputs.setdefault(each, list(given)) and None
        )
        for segment in segments
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def mended(inputs: Mapping[OrtSegment, list[Any]]) -> list[Moved]:
    """Move what ORT computes wrongly to torch.

    Args:
        inputs: Inputs of each segment, from `recorded`.

    Returns:
        The moves; empty if ORT's results agree with torch's in every segment.
    """
    found = []
    with torch.no_grad():
        for segment, given in inputs.items():
            error = _error(segment.graph, segment(*given), given)
            if error > _TOLERANCE:
                found.append(_move(segment, given, error))
    return found


def check_first_calls(segments: Iterable[OrtSegment], tell: Callable[[Moved], object]) -> None:
    """Compare the first call of each segment with torch.

    Operators whose results are wrong run in torch, in that call and in all later ones.

    Args:
        segments: Segments that have not run yet.
        tell: Called with each move.
    """
    for segment in segments:
        _check_first_call(segment, tell)


def _check_first_call(segment: OrtSegment, tell: Callable[[Moved], object]) -> None:
    def compare(_: OrtSegment, arguments: tuple[Any, ...], made: list[torch.Tensor]) -> Any:
        hook.remove()
        given = list(arguments)
        with torch.no_grad():
            moved = None
            if segment.divided is None:  # a kernel that fails divides its segment as well
                error = _error(segment.graph, made, given)
                if error <= _TOLERANCE:
                    return made
                moved = _move(segment, given, error)
            if segment.divided is not None:
                check_first_calls(segment.divided.ort_segments(), tell)
            if moved is not None:
                tell(moved)
            return segment(*given)

    hook = segment.register_forward_hook(compare)


def _move(segment: OrtSegment, given: list[Any], error: float) -> Moved:
    node, own_error = _first_wrong(segment.graph, given)
    if node is not None:
        segment.move_to_torch(node, "ORT's result differed from torch's")
        name = str(node.target).removesuffix(".default")
        return Moved(name, own_error, source_line(node), "in torch")
    # Each operator alone is right, so ORT's optimizer has made something wrong of several.
    segment.restart(optimize=False)
    if _error(segment.graph, segment(*given), given) <= _TOLERANCE:
        return Moved("", error, "", "without ORT's optimizations")
    segment.move_all_to_torch("ORT's result differed from torch's")
    return Moved("", error, "", "in torch")


def _first_wrong(graph: fx.GraphModule, given: list[Any]) -> tuple[fx.Node | None, float]:
    """Return the first operator whose result in ORT differs on torch's inputs, and its error."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(given)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = getattr(graph, str(node.target))
        elif node.op == "call_function":
            read = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
            values[node] = QUICK.get(node.target, node.target)(*read[0], **read[1])
            if node.target is operator.getitem or is_number(node):
                continue
            error = _error_alone(node, values)
            if error > _TOLERANCE:
                return node, error
    return None, 0.0


def _error_alone(node: fx.Node, values: Mapping[fx.Node, Any]) -> float:
    """Return the error of one operator in ORT on given inputs."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for each in node.all_input_nodes:
        made[each] = graph.placeholder(each.name)
        made[each].meta = dict(each.meta)
    call = graph.node_copy(node, lambda each: made[each])
    meant = node.meta["val"]
    outputs = [call]
    if isinstance(meant, list | tuple):
        outputs = []
        for i, value in enumerate(meant):
            if value is not None and any(user.args[1] == i for user in node.users):
                taken = graph.call_function(operator.getitem, (call, i))
                taken.meta["val"] = value
                outputs.append(taken)
    graph.output(outputs)
    given = [values[each] for each in node.all_input_nodes]
    alone = fx.GraphModule({}, graph)
    try:
        return _error(alone, OrtSegment(alone)(*given), given)
    except NodeNotLowered:  # its sizes are known in the whole segment only
        return 0.0


def _error(graph: fx.GraphModule, found: list[torch.Tensor], given: list[Any]) -> float:
    """Return the largest relative error of ORT's results; 0 if rounding explains it."""
    expected = _InTorch(graph).run(*given)
    errors = [_apart(one, other) for one, other in zip(expected, found, strict=True)]
    worst = max(errors, default=0.0)
    if worst <= _TOLERANCE:
        return worst
    try:
        exact = _InTorch(graph, in_double=True).run(*map(_doubled, given))
    except RuntimeError:  # types do not fit in double precision
        return worst
    pairs = zip(exact, expected, found, strict=True)
    explained = all(_apart(e, o) <= max(_TOLERANCE, _NEAR * _apart(e, t)) for e, t, o in pairs)
    return 0.0 if explained else worst


class _InTorch(fx.Interpreter):
    """Run a segment's graph in torch, on results of ORT, whose orders in memory may be others.

    Args:
        graph: FX graph of a segment.
        in_double: True to cast to double precision where the graph casts to another.
    """

    def __init__(self, graph: fx.GraphModule, *, in_double: bool = False) -> None:
        super().__init__(graph)
        self._in_double = in_double

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        if self._in_double:
            args, kwargs = fx.node.map_aggregate((args, kwargs), _doubled_type)
        return super().call_function(QUICK.get(target, target), args, kwargs)


def _doubled_type(given: Any) -> Any:
    is_float = isinstance(given, torch.dtype) and given.is_floating_point
    return torch.float64 if is_float else given


def _doubled(value: Any) -> Any:
    is_single = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_single else value


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ||a - b|| / ||a||."""
    if one.dtype != other.dtype:
        one, other = one.double(), other.double()
    difference, norm = distance(one, other)
    return difference / max(norm, 1e-12) if difference else 0.0
