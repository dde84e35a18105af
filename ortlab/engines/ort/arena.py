"""Memory that the sessions of a process share, and keep from one step to the next.

The C library returns large blocks to the system when they are freed: those of more than 32 MiB,
and smaller ones in other threads than the main one. The next step then waits for each page that it
touches, which is 7% of the CPU time of a step of BERT 4 x 768. ORT's arena keeps its blocks. It has
the large results of operators in torch, too.

What the arena does not use is released when larger tensors come than before, since they would not
fit in it, where ORT runs out of memory, and after the last model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import fx

from ortlab.engines.ort.lowering.graph import IR_VERSION, OPSET, Size, hint, product, shape_of
from ortlab.engines.ort.onnx_model import bytes_of, elements_of
from ortlab.engines.ort.session import (
    Options,
    Session,
    SessionFailed,
    inference_session,
    runtime,
)
from ortlab.utils import threads
from ortlab.utils.errors import short_of_memory

aten = torch.ops.aten

_LARGE: Final = 16 << 20
"""Bytes from which a result of torch is in the arena.

To get memory from it takes 0.1 ms, and to clear it a tenth of the time to touch new memory.
"""

_ROWS_PER_TOKEN: Final = 4
"""Rows of a table for each token from which its gradient is written to the arena.

The rows of the tokens are added one after the other there, which takes longer than the rest if
there are many.
"""


def _model() -> onnx.ModelProto:
    """Return a model that makes a number of bytes, all of them 0."""
    value = helper.make_tensor("value", TensorProto.UINT8, [1], [0])
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["size"], ["bytes"], value=value)],
        "arena",
        [helper.make_tensor_value_info("size", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("bytes", TensorProto.UINT8, [None])],
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)


@functools.cache
def _maker() -> Session:
    prepare()
    return Session(_model(), ["size"], ["bytes"], options=Options(threads=1))


@functools.cache
def prepare() -> Callable[[], object]:
    """Create the session that `release` runs, and let `threads.trim` call that.

    Returns:
        Function that runs the session. It calls nothing of torch, for garbage collection may call
        it during a capture.
    """
    session = inference_session(_model(), Options(threads=1))
    options = runtime()[1].RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    threads.before_trim(release)
    return functools.partial(session.run, None, {"size": np.zeros(1, np.int64)}, options)


def release() -> None:
    """Return what the arena does not use to the system, if ORT can.

    It cannot if the user has registered an allocator with ORT that is none of its arenas.
    """
    with contextlib.suppress(Exception):  # ORT's exceptions have no common base class
        prepare()()


_users: Final[list[None]] = []  # append and pop are atomic


def release_after(user: object) -> None:
    """Release the arena when a user is gone, if it was the last one.

    Args:
        user: Object that runs sessions.
    """
    _users.append(None)
    weakref.finalize(user, _leave).atexit = False


def _leave() -> None:
    _users.pop()
    if not _users and prepare.cache_info().currsize:
        release()


def run(session: Session, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a session; if memory runs out, again without what the arena does not use.

    Args:
        session: Session to run.
        tensors: Its inputs.

    Raises:
        MemoryError: If there is not enough memory.
        SessionFailed: As a call of the session does.
    """
    try:
        return session(tensors)
    except SessionFailed as error:
        if not short_of_memory(str(error)):
            raise
    release()
    try:
        return session(tensors)
    except SessionFailed as error:
        if not short_of_memory(str(error)):
            raise
        raise MemoryError(f"ONNX Runtime: {error}") from error


def zeros(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in the arena.

    Args:
        sizes: Its sizes.
        dtype: Type of its elements.

    Raises:
        MemoryError: If there is not enough memory.
    """
    size = torch.tensor([math.prod(sizes) * dtype.itemsize], device="cpu")
    (made,) = run(_maker(), [size])
    # A view of the bytes would be one for autograd, too, which refuses to change it in place.
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(made.untyped_storage(), 0, tuple(sizes), ())


def _embedding_gradient(
    made: torch.Tensor,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    _rows: int,
    padding: int,
    _by_frequency: bool,
) -> torch.Tensor:
    """Add the rows of a gradient to a table of zeros, in the order of torch's operator."""
    made.index_add_(0, indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    if 0 <= padding < len(made):
        made[padding] = 0
    return made


def _sizes_of_table(gradient: torch.Tensor, _: torch.Tensor, rows: int, *__: Any) -> list[int]:
    return [rows, gradient.shape[-1]]


@functools.cache
def _out_of(operator: Any) -> tuple[Any, str] | None:
    """Return the overload that writes to a given tensor and the name of that argument, or None.

    Overloads that would copy a result to it do not count: they have no kernel for the CPU.
    """
    given = [(each.name, str(each.type)) for each in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        overload = getattr(operator.overloadpacket, name)
        arguments = overload._schema.arguments
        out = [each.name for each in arguments if each.is_out]
        if (
            len(out) == 1
            and [(each.name, str(each.type)) for each in arguments if not each.is_out] == given
            and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU")
        ):
            return overload, out[0]
    return None


@dataclass(frozen=True, eq=False)
class InArena:
    """Operator of torch whose result is in the arena.

    Attributes:
        operator: The operator.
        dtype: Type of the result.
        sizes: Function of the arguments that returns the sizes of the result.
        write: Operator that takes the result's memory first, and the arguments.
        options: Options of the model's sessions.
    """

    __name__ = __qualname__ = "in_arena"

    operator: Any
    dtype: torch.dtype
    sizes: Callable[..., Sequence[int]]
    write: Callable[..., torch.Tensor]
    options: Options

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the operator."""
        if not self.options.arena:
            found: torch.Tensor = self.operator(*args, **kwargs)
            return found
        return self.write(zeros(self.sizes(*args), self.dtype), *args, **kwargs)


def placed(node: fx.Node, options: Options) -> Any:
    """Return what runs an operator in torch: the operator, or `InArena` if its result is large.

    Args:
        node: Call of the operator.
        options: Options of the model's sessions.
    """
    operator, value = node.target, node.meta.get("val")
    if (
        not isinstance(operator, torch._ops.OpOverload)
        or not isinstance(value, torch.Tensor)
        or value.device.type != "cpu"
        or bytes_of(node) < _LARGE
    ):
        return operator
    if operator is aten.embedding_dense_backward.default:
        indices: Any = node.args[1]
        tokens, by_frequency = elements_of(indices.meta["val"]), node.args[4]
        if by_frequency or tokens * _ROWS_PER_TOKEN > hint(value.shape[0]):
            return operator
        return InArena(operator, value.dtype, _sizes_of_table, _embedding_gradient, options)
    out = _out_of(operator)
    # Expressions are compared: torch would guard a comparison of sizes.
    shape = shape_of(value.shape)
    alike = (
        i
        for i, each in enumerate(node.args)
        if isinstance(each, fx.Node)
        and isinstance(tensor := each.meta.get("val"), torch.Tensor)
        and shape_of(tensor.shape) == shape
    )
    i = next(alike, None)
    if out is None or i is None or shape_of(value.stride()) != _strides(shape):
        return operator
    overload, name = out

    def sizes(*args: Any) -> Sequence[int]:
        found: Sequence[int] = args[i].shape
        return found

    def write(made: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = overload(*args, **kwargs, **{name: made})
        return found

    return InArena(operator, value.dtype, sizes, write, options)


def _strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))
