"""Memory that the sessions of a process share, and keep from one step to the next.

The C library returns large blocks to the system when they are freed: those of more than 32 MiB,
and smaller ones in other threads than the main one. The next step then waits for each page that it
touches, with BERT 4 x 768 on two cores for a fifth of its time. ORT's arena keeps its blocks. It
has the large results of operators in torch, too.

The arena is emptied when larger tensors come than before, since they would not fit in what it
keeps, and when no model needs it any more.
"""

from __future__ import annotations

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

from ortlab.engines.ort.lowering.graph import IR_VERSION, OPSET
from ortlab.engines.ort.onnx_model import bytes_of
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
"""Bytes from which a result of torch is in the arena, where it takes 0.1 ms to get."""


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
    return Session(_model(), ["size"], ["bytes"])


@functools.cache
def prepare() -> Callable[[], object]:
    """Create the session that `release` runs, and let `threads.trim` call that.

    Returns:
        Function that runs the session. It calls nothing of torch, for garbage collection may call
        it during a capture.
    """
    session = inference_session(_model(), arena=True)
    options = runtime()[1].RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    threads.before_trim(release)
    return functools.partial(session.run, None, {"size": np.zeros(1, np.int64)}, options)


def release() -> None:
    """Return what the arena does not use to the system."""
    prepare()()


_users: Final[list[None]] = []


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
        raise MemoryError(f"ONNX Runtime: {error}") from error


def _zeros(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in the arena."""
    (made,) = run(_maker(), [torch.tensor([math.prod(sizes) * dtype.itemsize])])
    # A view of the bytes would be a view for autograd, too.
    return torch.empty(0, dtype=dtype).set_(made.untyped_storage()).view(*sizes)


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
        return self.write(_zeros(self.sizes(*args), self.dtype), *args, **kwargs)


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
        or not value.is_contiguous()
    ):
        return operator
    if operator is aten.embedding_dense_backward.default:
        if node.args[4]:  # divided by how often each row is read
            return operator
        return InArena(operator, value.dtype, _sizes_of_table, _embedding_gradient, options)
    alike = (
        i
        for i, each in enumerate(node.args)
        if isinstance(each, fx.Node) and _shape(each) == value.shape
    )
    i, out = next(alike, None), _out_of(operator)
    if i is None or out is None:
        return operator
    overload, name = out

    def sizes(*args: Any) -> Sequence[int]:
        found: Sequence[int] = args[i].shape
        return found

    def write(made: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = overload(*args, **kwargs, **{name: made})
        return found

    return InArena(operator, value.dtype, sizes, write, options)


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)
