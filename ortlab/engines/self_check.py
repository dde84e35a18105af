"""Comparison of an engine with eager torch: outputs, gradients and buffers.

With engine ``ortmodule``, dropout is off on both sides: in eager torch a function mode makes every
dropout call the identity, and in ORT's graph the ratio of every Dropout node is zero. With engine
``ort`` both draw the same masks. The compared gradients are those of the sum of <v, y>, with
outputs y and random vectors v of the same shapes, so that every output counts, even one that a loss
would ignore.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import random
import sys
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlab.engines.batch import tensors
from ortlab.engines.step_check import Difference
from ortlab.engines.torch import autograd
from ortlab.engines.torchscript import undifferentiated
from ortlab.engines.torchscript.isolation import NotInGraph, undisturbed
from ortlab.utils import errors
from ortlab.utils.errors import Concise
from ortlab.utils.rng import RandomStates
from ortlab.utils.wording import counted

OUTPUT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 5e-2
_TOLERANCES = {
    "output": OUTPUT_TOLERANCE,
    "buffer": OUTPUT_TOLERANCE,
    "gradient": GRADIENT_TOLERANCE,
}
_NEAR = 3.0
_NUDGE = 2.0**-21
"""Maximum relative change of a parameter in `nudged`: a few rounding errors."""
_NUDGES = 8
# A gradient that is zero in exact arithmetic (an attention key's bias) is rounding noise on both
# sides, so errors are relative to at least this fraction of the whole gradient's norm.
SMALLEST = 1e-3

_MANY_ROWS = 4
_FEW_TOKENS = 32
_MOST_STRIDE = 8
_SEED = 20210301
_DRAWN = 65_537
"""Period of a cotangent's random numbers: a prime, so that no two rows get the same numbers."""
_PIECE = 1 << 15
"""Elements that torch processes in one thread: its grain size."""


class SelfCheckFailed(Concise, RuntimeError):
    """Raised when outputs or gradients differ from eager torch; the message names the worst."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison that passed.

    Attributes:
        outputs: Number of compared outputs.
        gradients: Number of compared gradients.
        output_error: Largest relative error of an output, by norm.
        gradient_error: Largest relative error of a gradient, by norm.
    """

    outputs: int
    gradients: int
    output_error: float
    gradient_error: float

    def __str__(self) -> str:
        text = f"{counted(self.outputs, 'output')} within {self.output_error:.1e} of eager torch"
        if self.gradients:
            text += f", {counted(self.gradients, 'gradient')} within {self.gradient_error:.1e}"
        return text


class EagerOnly(TorchFunctionMode):
    """Function mode that raises NotInGraph for operations that no graph contains.

    These are hooks on a computed tensor, which ORT never calls, and setting ``.data``.

    Attributes:
        data: Parameters whose ``.data`` forward reads, each with that tensor.
        unfit: What forward does first of what ORT's gradients end the process or fail on, with the
            line; None for nothing. Selections by a tensor's values are not looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.unfit: str | None = None
        self._made: list[weakref.ref[torch.Tensor]] = []

    def keeps_tensors(self) -> bool:
        """Return True if something still holds a tensor with a gradient that forward computed."""
        if any(each() is not None for each in self._made):
            gc.collect()  # it may be a cycle that nothing refers to
        return any(each() is not None for each in self._made)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the call and run it."""
        if func in _HOOKING and not args[0].is_leaf:
            raise NotInGraph(
                f"forward calls {func.__name__} on a tensor that it computes, which ORT's backward "
                "would ignore; remove it, or use engine='eager'"
            )
        if undifferentiated.sets_data(func):
            raise NotInGraph(
                "forward sets a tensor's .data, which ORT's graph would not; set it outside of "
                "forward, or use engine='eager'"
            )
        result = func(*args, **(kwargs or {}))
        if undifferentiated.is_data(func) and isinstance(args[0], nn.Parameter):
            self.data.append((args[0], result))
        made = [each for each in tensors(result) if each.grad_fn is not None]
        self._made += map(weakref.ref, made)
        if self.unfit is None and (what := _unfit(func, args, dict(kwargs or {}), made)):
            frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
            self.unfit = f"{what} ({errors.users_line(frames) or func.__name__})"
        return result


def _unfit(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sequence[torch.Tensor],
) -> str | None:
    """Return what a call does that ORT's CPU gradients end the process or fail on."""
    if made and func is nn.functional.layer_norm:
        sizes = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if math.prod(sizes) == 1:
            return "normalizes one element at a time"
    if any(each.numel() == 0 for each in made):
        given = tensors([args, kwargs])
        if all(each.numel() and each.dtype != torch.bool for each in given):
            return "leaves no element"
    return None


_HOOKING = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call: positional arguments and keyword arguments."""


def parts_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, again: bool = False
) -> list[Call]:
    """Return calls with a part of the batch, for a faster check.

    A part has a quarter of the rows, evenly spaced: at least two, and all rows if there are fewer
    than four. If the batch consists of token ids, the smallest part also has only an eighth of the
    tokens, evenly spaced, but at least 32. Rows are the first dimension, if all tensors of the
    arguments have the same size there. A model with BatchNorm gets no parts: over few rows its
    gradient is mostly rounding error.

    Args:
        module: Module to call.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        again: True for the second check of a graph, for data of the first batch that it may
            contain. The part is then the last of every eight rows, at least one, with all tokens.

    Returns:
        The calls, smallest part first; empty if only the whole batch can be checked.
    """
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        return []
    given = [tensor for tensor in tensors([args, kwargs]) if tensor.dim() > 0]
    counts = {tensor.shape[0] for tensor in given}
    if len(counts) != 1:
        return []
    rows, count = None, counts.pop()
    if count >= _MANY_ROWS:
        number = max(1, count // 8) if again else max(2, count // 4)
        apart = count // number
        rows = torch.arange(number) * apart + (apart - 1 if again else 0)
    stride = 1 if again else _token_stride(given)
    strides = [stride] * (stride > 1) + [1] * (rows is not None)
    found = (
        _changed(args, kwargs, functools.partial(_part, rows=rows, stride=each)) for each in strides
    )
    return [call for call in found if call is not None]


def _token_stride(given: Sequence[torch.Tensor]) -> int:
    """Return the stride that selects a part of the tokens; 1 if the second dimension is not tokens.

    It is the token dimension if all tensors with two dimensions have the same size there and are
    integer or boolean: ids, masks and labels. Any selection of a row's tokens in order is a valid
    row, and evenly spaced ones have the same fraction of padding.
    """
    wide = [tensor for tensor in given if tensor.dim() > 1]
    sizes = {tensor.shape[1] for tensor in wide}
    if len(sizes) != 1 or any(
        each.dim() > 2 or each.is_floating_point() or each.is_complex() for each in wide
    ):
        return 1
    return min(_MOST_STRIDE, max(1, sizes.pop() // _FEW_TOKENS))


def _part(tensor: torch.Tensor, *, rows: torch.Tensor | None, stride: int) -> torch.Tensor:
    """Select rows (all if None) and every `stride`-th column of a tensor."""
    if rows is not None and tensor.dim() > 0:
        tensor = tensor.index_select(0, rows.to(tensor.device))
    return tensor[:, ::stride].contiguous() if stride > 1 and tensor.dim() > 1 else tensor


def in_double(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """Return a copy of a module and the arguments of a call in double precision.

    Args:
        module: Module to copy.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        Module, positional arguments and keyword arguments; None if they cannot be copied.
    """

    def doubled(tensor: torch.Tensor) -> torch.Tensor:  # copied, because forward may change it
        return tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)

    call = _changed(args, kwargs, doubled)
    try:
        return None if call is None else (copy.deepcopy(module).double(), *call)
    # Objects in a module may not support copying, and raise anything.
    except Exception:  # noqa: BLE001
        return None


def nudged(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, by: float = _NUDGE
) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Iterate over copies of a call whose parameters are perturbed by a few rounding errors.

    Args:
        module: Module to copy.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        by: Largest relative change of an element.

    Yields:
        Module, positional arguments and keyword arguments; nothing if they cannot be copied.
    """
    try:
        copied = copy.deepcopy(module)
    except Exception:  # noqa: BLE001 - as in `in_double`
        return
    parameters = [(each, each.detach().clone()) for each in copied.parameters()]
    for i in range(_NUDGES):
        generator = torch.Generator().manual_seed(_SEED + i // 2)
        most = by * (-1) ** i  # opposite signs, so that one of two crosses a nearby kink
        with torch.no_grad():
            for parameter, before in parameters:
                change = torch.rand(before.shape, generator=generator).sub_(0.5).mul_(2 * most)
                parameter.copy_(before * (1 + change.to(before.device)))
        call = _changed(args, kwargs, torch.clone)
        if call is None:
            return
        yield copied, *call


def _changed(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Call | None:
    """Return arguments with `change` applied to all tensors; None for unknown containers."""

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value.detach()).detach().requires_grad_(value.requires_grad)
        if type(value) is dict:
            return {name: each(item) for name, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(each, value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(type(value))

    try:
        return tuple(map(each, args)), each(dict(kwargs))
    except TypeError:
        return None


@dataclass(frozen=True)
class Observed:
    """Results of one run of a module.

    Attributes:
        outputs: Outputs by name.
        gradients: Gradients by name.
        buffers: Buffers after the run, by name.
        drew: True if random numbers were drawn, by another source than dropout if that is off.
        wrote: Names of the attributes that forward set.
        kept: Names of those of them that hold tensors with a gradient.
        rebound: Names of the buffers that forward replaced by another tensor with other values.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    drew: bool
    wrote: frozenset[str] = frozenset()
    rebound: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def is_finite(self) -> bool:
        """Return True if no output and no gradient is infinite or NaN."""
        return self.has_finite_outputs() and _are_finite(self.gradients)

    def has_finite_outputs(self) -> bool:
        """Return True if no output is infinite or NaN."""
        return _are_finite(self.outputs)


def _are_finite(values: Mapping[str, torch.Tensor]) -> bool:
    # The sum is much faster to test, but it can overflow.
    return all(bool(each.sum().isfinite() or each.isfinite().all()) for each in values.values())


def observe(
    call: Callable[[], Any], module: nn.Module, *, inputs: Sequence[torch.Tensor], gradients: bool
) -> Observed:
    """Run a forward pass, and a backward pass from random cotangents.

    The cotangents depend only on the order and shapes of the outputs, so that two engines get the
    same. The module and all random states are restored afterwards.

    Args:
        call: Function that calls `module`.
        module: Module that is called.
        inputs: Tensors among the arguments; gradients are computed of those that require one, and
            of the trainable parameters.
        gradients: False to skip the backward pass.

    Returns:
        The results of the run.
    """
    with undisturbed(module) as wrote:
        before, registered = RandomStates.now(), dict(module.named_buffers())
        with torch.enable_grad() if gradients else torch.no_grad():
            outputs = dict(_floating("output", call()))
            roots = {name: value for name, value in outputs.items() if value.requires_grad}
            found: dict[str, torch.Tensor] = {}
            if gradients and roots:
                found = _gradients(module, roots, inputs)
        now = dict(module.named_buffers())
        rebound = tuple(n for n in now if not _is_as_before(registered.get(n), now[n]))
        buffers = {name: buffer.detach().clone() for name, buffer in now.items()}
        drew = not before.same_as(RandomStates.now())
        holding = _holding_gradients(module)
    kept = tuple(sorted(wrote & holding))
    detached = {name: value.detach() for name, value in outputs.items()}
    return Observed(detached, found, buffers, drew, frozenset(wrote), rebound, kept)


def _holding_gradients(module: nn.Module) -> set[str]:
    """Return the names, as in `undisturbed`, of attributes that hold tensors with a gradient."""
    return {
        f"{name or type(child).__name__}.{key}"
        for name, child in module.named_modules()
        for key, held in child.__dict__.items()
        if key not in ("_parameters", "_buffers", "_modules")
        if any(each.grad_fn is not None for each in tensors(held))
    }


def _is_as_before(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    """Return True for the same tensor, or a new one with equal values, as a recomputed table."""
    if now is before or before is None:
        return now is before
    return before.dtype == now.dtype and torch.equal(before, now.to(before.device))


def depends_on_seed(
    reference: Observed,
    call: Callable[[], Any],
    module: nn.Module,
    *,
    inputs: Sequence[torch.Tensor],
    drawn_by_torch: bool,
) -> bool:
    """Return True if a call gives other results or gradients with other random numbers.

    Args:
        reference: Results of an earlier run of the call.
        call: Function that calls `module`.
        module: Module that is called.
        inputs: As of `observe`.
        drawn_by_torch: True to change torch's random numbers, False for those of Python and numpy.
    """

    def with_other_numbers() -> Any:
        if drawn_by_torch:
            torch.manual_seed(_SEED)
        else:
            random.seed(_SEED)
            np.random.seed(_SEED)
        return call()

    gradients = bool(reference.gradients)
    other = observe(with_other_numbers, module, inputs=inputs, gradients=gradients)
    try:
        compare(reference, other, low_precision=False)
    except SelfCheckFailed:
        return True
    return False


def _gradients(
    module: nn.Module, roots: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    leaves: dict[str, torch.Tensor] = {
        name: p for name, p in module.named_parameters() if p.requires_grad
    }
    leaves |= {f"input {i}": value for i, value in enumerate(inputs) if value.requires_grad}
    cotangents = []
    for i, value in enumerate(roots.values()):
        drawn = torch.randn(
            min(value.numel(), _DRAWN), generator=torch.Generator().manual_seed(_SEED + i)
        )
        repeated = drawn.repeat(-(-value.numel() // _DRAWN))[: value.numel()]
        cotangents.append(repeated.reshape(value.shape).to(value))
    found = autograd.gradients(list(roots.values()), list(leaves.values()), cotangents)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def _floating(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floating(f"{name}.{key}", item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _floating(f"{name}[{i}]", item)


def compare(reference: Observed, other: Observed, *, low_precision: bool) -> Verdict:
    """Compare the results of a run with a reference.

    Errors are ||a - b|| / ||a|| of each tensor. For a gradient, ||a|| is at least a thousandth of
    the norm of the whole gradient, for a buffer of all of its name, such as the running means of
    all layers. Tolerances: 1e-4 for outputs and buffers, 1e-3 for gradients,
    5e-2 for all under autocast or in half precision.

    Args:
        reference: Results of eager torch.
        other: Results of the engine.
        low_precision: True under autocast or in half precision.

    Returns:
        The largest errors.

    Raises:
        SelfCheckFailed: If an error exceeds its tolerance; the message names the largest errors.
    """
    if len(reference.outputs) != len(other.outputs):
        raise SelfCheckFailed(
            f"eager torch returns {len(reference.outputs)} outputs, ORT {len(other.outputs)}"
        )
    errors = _all_errors(reference, other)
    for kind, of_kind in errors.items():
        tolerance = LOW_PRECISION_TOLERANCE if low_precision else _TOLERANCES[kind]
        wrong = {name: error for name, error in of_kind.items() if not error <= tolerance}
        if wrong:
            raise SelfCheckFailed(_complaint(kind, wrong, len(of_kind), tolerance))
    outputs, gradients = errors["output"], errors["gradient"]
    return Verdict(
        outputs=len(outputs),
        gradients=len(gradients),
        output_error=max(outputs.values(), default=0.0),
        gradient_error=max(gradients.values(), default=0.0),
    )


def rounding(
    module: nn.Module,
    call: Call,
    reference: Observed,
    other: Observed,
    run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Observed],
    anywhere: Callable[[bool], bool] = bool,
) -> str:
    """Return why rounding explains the errors of a run in single precision; "" if it does not.

    Both the engine and eager torch are compared with double precision, also with parameters
    perturbed by a few rounding errors.

    Args:
        module: Module that was called.
        call: Arguments of the call.
        reference: Results of eager torch.
        other: Results of the engine.
        run: Function that calls a copy of the module in eager torch, and returns the results.
        anywhere: See `OneProcess.anywhere`; all processes call the copies as often.
    """
    exact = exact_results(module, call, run)
    if exact is None:
        return ""
    if not anywhere(not is_rounding([reference], other, exact)):
        return AS_CLOSE
    moved = [attempted(run, *each) for each in nudged(module, *call)]
    if is_at_a_kink(exact, other, filter(None, moved)):
        return "as close as eager torch with parameters changed by a few rounding errors"
    return ""


def exact_results(
    module: nn.Module,
    call: Call,
    run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Observed],
) -> Observed | None:
    """Return the results of a call in double precision; None if it cannot be made.

    Args:
        module: Module that was called.
        call: Arguments of the call.
        run: Function that calls a copy of the module in eager torch, and returns the results.
    """
    doubled = in_double(module, *call)
    return attempted(run, *doubled) if doubled else None


def differences(
    reference: Observed, other: Observed, exact: Observed | None
) -> tuple[Difference, ...]:
    """Return the largest differences between a run and eager torch, by kind of tensor.

    Args:
        reference: Results of eager torch.
        other: Results of the engine.
        exact: Results of eager torch in double precision, if known.
    """
    if len(reference.outputs) != len(other.outputs):
        return ()
    of_ort: dict[str, float] = {}
    of_eager: dict[str, float] = {}
    if exact is not None and len(exact.outputs) == len(other.outputs):
        exact = _in_double(exact)
        for worst, each in ((of_ort, other), (of_eager, reference)):
            for kind, found in _all_errors(exact, _in_double(each)).items():
                worst[kind] = max(found.values(), default=0.0)
    rows = []
    for kind, found in _all_errors(reference, other).items():
        if found:
            name = max(found, key=lambda each: found[each])
            largest = found[name]
            rows.append(
                Difference(
                    kind=kind,
                    count=len(found),
                    largest=largest,
                    name=name if largest else "",
                    of_ort=of_ort.get(kind),
                    of_eager=of_eager.get(kind),
                )
            )
    return tuple(rows)


def attempted(run: Callable[..., Observed], *call: Any) -> Observed | None:
    """Return the results of a run; None if it raises, as a forward that mixes types does.

    Args:
        run: Function that returns results.
        *call: Its arguments.
    """
    try:
        return run(*call)
    except Exception:  # noqa: BLE001 - then it is no evidence
        return None


AS_CLOSE = "as close to eager torch in higher precision as eager torch itself"
"""Verdict on an engine that is right although it differs from eager torch."""


def is_rounding(references: Sequence[Observed], other: Observed, exact: Observed) -> bool:
    """Return True if rounding explains the errors of a run.

    It does if each error against `exact` is within the tolerance, or at most three times the error
    of eager torch itself: at a kink such as that of ReLU, rounding determines the side.

    Args:
        references: Results of eager torch, with other rounding errors each, at least one.
        other: Results of the engine.
        exact: Results of eager torch in higher precision.
    """
    if any(len(each.outputs) != len(exact.outputs) for each in (other, *references)):
        return False
    exact = _in_double(exact)
    ours, *of_eager = (_all_errors(exact, _in_double(each)) for each in (other, *references))

    def allowed(kind: str, name: str) -> float:
        theirs = max(each[kind][name] for each in of_eager)
        return max(_TOLERANCES[kind], _NEAR * theirs) if math.isfinite(theirs) else -1.0

    return all(
        error <= allowed(kind, name)
        for kind, errors in ours.items()
        for name, error in errors.items()
    )


def is_at_a_kink(exact: Observed, other: Observed, moved: Iterable[Observed]) -> bool:
    """Return True if a few rounding errors change eager's gradient as much as `other` differs.

    In a model with millions of ReLUs, one can be so close to its kink that engines take different
    sides of it. All gradients before it then differ, outputs and buffers do not by more than those
    rounding errors change them. A gradient's error above 5e-2 is not explained in this way.

    Args:
        exact: Results of eager torch in double precision.
        other: Results of the engine.
        moved: Results of eager torch with `nudged` parameters.
    """
    if len(exact.outputs) != len(other.outputs):
        return False
    exact = _in_double(exact)
    errors = _all_errors(exact, _in_double(other))
    gradients = errors.pop("gradient").values()
    off = max(gradients, default=0.0)
    if not all(error <= LOW_PRECISION_TOLERANCE for error in gradients):
        return False

    def explains(by: Mapping[str, Mapping[str, float]]) -> bool:
        if not all(math.isfinite(error) for found in by.values() for error in found.values()):
            return False
        return off <= _NEAR * max(by["gradient"].values(), default=0.0) and all(
            error <= max(_TOLERANCES[kind], _NEAR * by[kind][name])
            for kind, found in errors.items()
            for name, error in found.items()
        )

    return any(explains(_all_errors(exact, _in_double(each))) for each in moved)


def _in_double(observed: Observed) -> Observed:
    """Return results with all floating-point tensors in double precision."""

    def doubled(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: value.double() if value.is_floating_point() else value
            for name, value in values.items()
        }

    return dataclasses.replace(
        observed,
        outputs=doubled(observed.outputs),
        gradients=doubled(observed.gradients),
        buffers=doubled(observed.buffers),
    )


def _all_errors(reference: Observed, other: Observed) -> dict[str, dict[str, float]]:
    """Return the errors of all tensors by kind and name."""
    return {
        "output": _errors(reference.outputs, other.outputs),
        "buffer": _buffer_errors(reference.buffers, other.buffers),
        "gradient": _errors(reference.gradients, other.gradients, smallest=SMALLEST),
    }


def _buffer_errors(
    reference: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the errors of buffers; a running mean may be rounding alone, so that kinds count."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in reference:
        kinds[name.rpartition(".")[2]].append(name)
    found: dict[str, float] = {}
    for names in kinds.values():
        pair = ({name: each[name] for name in names} for each in (reference, other))
        found |= _errors(*pair, smallest=SMALLEST)
    return found


def _complaint(kind: str, wrong: Mapping[str, float], total: int, tolerance: float) -> str:
    worst = sorted(wrong, key=lambda name: -wrong[name])[:3]
    named = ", ".join(f"{name} (off by {wrong[name]:.1e})" for name in worst)
    return (
        f"{len(wrong)} of {total} {kind}s differ from eager torch by more than {tolerance:.0e}: "
        f"{named}"
    )


def _errors(
    reference: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    *,
    smallest: float = 0.0,
) -> dict[str, float]:
    """Return ||a - b|| / ||a|| of each tensor; ||a|| is at least `smallest` of the total norm."""
    apart = {
        name: distance(a, b) for (name, a), b in zip(reference.items(), other.values(), strict=True)
    }
    floor = max(smallest * math.hypot(*(norm for _, norm in apart.values())), 1e-12)
    return {
        name: difference / max(norm, floor) if difference else 0.0
        for name, (difference, norm) in apart.items()
    }


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return ||a - b|| and ||a||; two NaN, or two equal infinities, count as equal.

    Tensors are processed in pieces that fit the processor's cache: all at once takes thirty times
    as long. A piece is small enough for one thread: on a busy machine, two threads that wait for
    each other at every piece took 8 s for 47 million elements, one takes 0.04 s. Squares are added
    in single precision unless the sum overflows, which is four times as fast.

    Args:
        a: Reference.
        b: Tensor to compare; if its shape or type is another, the first number is infinite.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, 0.0
    difference = norm = 0.0
    pieces = (torch.split(tensor.reshape(-1), _PIECE) for tensor in (a, b))
    for x, y in zip(*pieces, strict=True):
        if x.dtype == torch.float32:
            square, whole = _square(x - y), _square(x)
            if math.isfinite(square + whole):
                difference += square
                norm += whole
                continue
        x, y = x.double(), y.double()
        apart = x - y
        square = _square(apart)
        if not math.isfinite(square):
            same = (x == y) | (x.isnan() & y.isnan())
            square = _square(torch.where(same, 0.0, apart))
            x = torch.where(torch.isfinite(x), x, 0.0)
        difference += square
        norm += _square(x)
    return math.sqrt(difference) if math.isfinite(difference) else math.inf, math.sqrt(norm)


def _square(x: torch.Tensor) -> float:
    """Return the sum of the squares; `torch.dot` would use several threads for any size."""
    length = float(torch.linalg.vector_norm(x))
    return length * length
