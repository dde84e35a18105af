"""Memory of a training step, computed from its graph before it runs.

It is the sum of the tensors that are in memory at the same time, see `lifetimes`. Freed
memory that allocators keep is estimated, see `GROWTH`.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from torch import nn

from ortlab.graph import timeline
from ortlab.graph.capture import Graphs, Node, Overlay, Stage
from ortlab.graph.lifetimes import HOLD_SIZES, KINDS, SCOPE, STATE, Tensor, lifetimes
from ortlab.settings import unknown_name
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory, parse_bytes
from ortlab.utils.tables import Column, Table

LARGEST = 10
_IDLE = ("parameter", "optimizer state", "batch")
GROWTH: Final = 1.75
"""Upper limit of the growth of a process in a step, relative to the step's tensors.

malloc keeps what was freed, and neither malloc nor ORTModule's arena, which grows by powers of two,
can use every gap between tensors again. Measured on glibc: up to 1.56, see tests/bench/memory.py.
"""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
_DIM = re.compile(r"(.+)_dim(\d+)")


@dataclass(frozen=True)
class Held:
    """A tensor and its size in bytes, for given sizes of the batch."""

    tensor: Tensor
    size_bytes: int


class MemoryPlan:
    """Memory of one training step of a model: forward, backward and the optimizer's step.

    Sizes are given as keywords, by the names in `dims`. A size that is left out has its value of
    the last call. All results are in bytes and exclude Python, libraries and memory that an arena
    reserves. The model's outputs count as in memory until the step ends, as in
    ``outputs = model(**batch)``.

    Args:
        stage: Graph of the step.
        sizes: Sizes of the last call, by ORT's names.
        optimizer: Optimizer whose state is counted.
        encoder_decoder: True if the model has a source length and a target length.

    Raises:
        ValueError: If the optimizer is unknown.
    """

    def __init__(
        self,
        stage: Stage,
        sizes: Mapping[str, int],
        *,
        optimizer: str = "adamw",
        encoder_decoder: bool = False,
    ) -> None:
        if optimizer not in STATE:
            raise ValueError(f"optimizer={optimizer!r}: {unknown_name(optimizer, STATE)}")
        self.stage = stage
        self.optimizer = optimizer
        self._names = _dims(stage, encoder_decoder=encoder_decoder)
        self._last = dict(sizes)
        self.tensors = tuple(lifetimes(stage, optimizer))
        self._born = np.array([tensor.born for tensor in self.tensors])
        self._dies = np.array([tensor.dies for tensor in self.tensors])

    @property
    def dims(self) -> dict[str, int | None]:
        """Names of the sizes that depend on the batch, with their values in the last call."""
        return {
            name: next((self._last[dim] for dim in dims if dim in self._last), None)
            for name, dims in self._names.items()
        }

    @property
    def ort_sizes(self) -> dict[str, tuple[str, int | None]]:
        """ORT's names of the sizes in `dims`, each with its name there and its value."""
        return {
            dim: (name, self._last.get(dim)) for name, dims in self._names.items() for dim in dims
        }

    @property
    def unsized(self) -> tuple[str, ...]:
        """Tensors of unknown size, which count as 0 bytes.

        Tensors that hold sizes are not included: they are only a few numbers each.
        """
        sizes = dict.fromkeys(self.stage.dims, 2)
        hold_sizes = {n.outputs[-1] for n in self.stage.nodes if n.op in HOLD_SIZES}
        return tuple(
            tensor.name
            for tensor in self.tensors
            if tensor.name not in hold_sizes and self.stage.bytes_of(tensor.size_of, sizes) is None
        )

    def at(self, **sizes: int) -> MemoryPlan:
        """Return the same plan with these sizes as defaults.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a name or a value is not valid.
        """
        found = copy.copy(self)
        found._last = self._known(sizes)
        return found

    def peak_bytes(self, **sizes: int) -> int:
        """Return the step memory: parameters, gradients, optimizer state, batch and activations.

        It is the highest sum over the nodes of the step, without Python and libraries.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        return int(self._curve(self._bytes(sizes)).max())

    def peak_bytes_of_rank(self, ranks: int, *, zero_stage: int = 0, **sizes: int) -> int:
        """Return the step memory of each rank in a distributed run.

        From ZeRO stage 1 on, the optimizer state is sharded across ranks. The gradients that
        DeepSpeed releases during the backward pass at stage 2 are not subtracted.

        Args:
            ranks: Number of ranks.
            zero_stage: ZeRO stage.
            **sizes: Sizes of one rank's part of a batch, by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        found = self._bytes(sizes)
        if zero_stage:
            shared = np.array([tensor.kind == "optimizer state" for tensor in self.tensors])
            found = np.where(shared, -(-found // ranks), found)
        return int(self._curve(found).max())

    def idle_bytes(self, **sizes: int) -> int:
        """Return the memory between steps: parameters, buffers, optimizer state and the batch.

        ORTModule keeps a reference to the batch between steps.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        found = zip(self.tensors, self._bytes(sizes), strict=True)
        return int(sum(size for tensor, size in found if tensor.kind in _IDLE))

    def step_bytes(self, **sizes: int) -> int:
        """Return the step memory minus `idle_bytes`.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        return self.peak_bytes(**sizes) - self.idle_bytes(**sizes)

    def process_bytes(self, **sizes: int) -> int:
        """Return the upper limit of the growth of the process, with freed memory; see `GROWTH`.

        The first step with a new shape takes more while the self-check is on: it also runs in eager
        torch.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        idle = self.idle_bytes(**sizes)
        return idle + int((self.peak_bytes(**sizes) - idle) * GROWTH)

    def activation_bytes(self, **sizes: int) -> int:
        """Return the step memory without parameters, their gradients and the optimizer state.

        The batch and the gradients of activations are included.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        of_weights = set(self.stage.parameter_gradients.values())
        beside = np.array(
            [
                tensor.kind not in ("parameter", "optimizer state")
                and tensor.name not in of_weights
                for tensor in self.tensors
            ]
        )
        return int(self._curve(self._bytes(sizes) * beside).max())

    def curve(self, **sizes: int) -> np.ndarray:
        """Return the memory while each node runs, in execution order, then of the optimizer's step.

        Args:
            **sizes: Values by the names in `dims`.

        Returns:
            Bytes, of shape [nodes + 1].

        Raises:
            ValueError: If a size is missing or unknown.
        """
        return self._curve(self._bytes(sizes))

    def peak_node(self, **sizes: int) -> Node | None:
        """Return the node that runs at the peak, or None if the peak is in the optimizer's step.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        at = int(self.curve(**sizes).argmax())
        return self.stage.nodes[at] if at < len(self.stage.nodes) else None

    def at_peak(self, **sizes: int) -> list[Held]:
        """Return the tensors in memory at the peak, largest first.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        found = self._bytes(sizes)
        return self._held(found, int(self._curve(found).argmax()))

    def saved(self, **sizes: int) -> list[Held]:
        """Return the activations that the forward pass leaves in memory, largest first.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        begin = self.stage.backward
        held = self._held(self._bytes(sizes), begin)
        return [
            each for each in held if each.tensor.kind == "activation" and each.tensor.born < begin
        ]

    def _held(self, found: np.ndarray, at: int) -> list[Held]:
        held = [
            Held(tensor, int(size))
            for tensor, size in zip(self.tensors, found, strict=True)
            if tensor.born <= at <= tensor.dies and size
        ]
        return sorted(held, key=lambda each: -each.size_bytes)

    def max_batch(self, budget: int | str, *, dim: str = "batch", **sizes: int) -> int:
        """Return the largest batch with which the process grows by no more than `budget`.

        See `process_bytes`.

        Args:
            budget: Bytes, or text such as "16GiB".
            dim: Size to maximize, by its name in `dims`.
            **sizes: Values of the other sizes.

        Raises:
            ValueError: If even a size of 1 exceeds the budget (the message says how much it takes),
                if `dim` does not change the memory, or if a size is missing or unknown.
        """
        limit = parse_bytes(budget)
        if dim not in self._names:
            raise ValueError(f"dim={dim!r}: {unknown_name(dim, self._names)}")

        def fits(size: int) -> bool:
            return self.process_bytes(**{**sizes, dim: size}) <= limit

        if not fits(1):
            least = self.process_bytes(**{**sizes, dim: 1})
            raise ValueError(
                f"{dim} 1 takes {memory(least)}, more than {memory(limit)}; "
                f"{memory(self.idle_bytes(**{**sizes, dim: 1}))} of it stays allocated between "
                "steps"
            )
        most = 1
        while fits(2 * most):
            most *= 2
            if most > 2**40:
                raise ValueError(f"{dim} does not change the memory of a step")
        step = most // 2
        while step:
            most += step if fits(most + step) else 0
            step //= 2
        return most

    def overlay(self, stage: Stage) -> Overlay:
        """Return the bytes of each node's outputs, for the sizes of the last call.

        Outputs that are views count as 0 bytes.

        Args:
            stage: Stage whose nodes are annotated. Nodes it does not have are left out.
        """
        names = {node.name for node in stage.nodes}
        figures: dict[str, float] = defaultdict(float)
        for tensor, size in zip(self.tensors, self._bytes({}), strict=True):
            if tensor.node in names:
                figures[tensor.node] += float(size)
        return Overlay("memory", "bytes", dict(figures))

    def table(self, **sizes: int) -> Table[Held]:
        """Return a table of the ten largest tensors at the peak, with notes on the peak.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        held = self.at_peak(**sizes)
        return Table(held[:LARGEST], _COLUMNS, notes=self._notes(held, sizes))

    def picture(self, **sizes: int) -> str:
        """Return the step as an SVG: stacked tensors over the nodes, with tensor names on hover.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a size is missing or unknown.
        """
        found, end = self._bytes(sizes), len(self.stage.nodes)
        return timeline.svg(
            [
                timeline.Area(t.label, t.kind, t.module, t.born, t.dies, int(size))
                for t, size in zip(self.tensors, found, strict=True)
                if size
            ],
            length=end + 1,
            phases=(("forward", 0), ("backward", self.stage.backward), ("", end)),
            kinds=KINDS,
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        alt = f"Memory over the nodes of a step, step memory {memory(self.peak_bytes())}"
        return f"{svg_bars.hoverable(self.picture(), alt)}{self.table()._repr_html_()}"

    def _notes(self, held: Sequence[Held], sizes: Mapping[str, int]) -> list[str]:
        known = {**self.dims, **sizes}
        at = ", ".join(f"{name} {size}" for name, size in known.items())
        node = self.peak_node(**sizes)
        where = "in the optimizer's step" if node is None else f"at {node.op} of {_place(node)}"
        kinds = {
            kind: sum(each.size_bytes for each in held if each.tensor.kind == kind)
            for kind in KINDS
        }
        parts = ", ".join(f"{kind} {memory(size)}" for kind, size in kinds.items() if size)
        whole = memory(sum(each.size_bytes for each in held))
        notes = [
            f"step memory {whole} for {at}, reached {where}",
            f"of it: {parts}",
            f"the process grows by up to {memory(self.process_bytes(**sizes))}, because allocators "
            "keep freed memory; Python and libraries are not included",
            f"between steps {memory(self.idle_bytes(**sizes))} with {self.optimizer}",
        ]
        if unsized := self.unsized:
            some = ", ".join(unsized[:3])
            notes.append(f"not counted: {len(unsized)} tensors of unknown size ({some})")
        return notes

    def _bytes(self, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the size of each tensor."""
        given = self._sizes(sizes)
        known: dict[tuple[int, tuple[int | str, ...]], int] = {}
        return np.array([self._size(tensor, given, known) for tensor in self.tensors])

    def _size(
        self,
        tensor: Tensor,
        sizes: Mapping[str, int],
        known: dict[tuple[int, tuple[int | str, ...]], int],
    ) -> int:
        shape = self.stage.tensors.get(tensor.size_of)
        if shape is None:
            return 0
        if shape not in known:
            known[shape] = self.stage.bytes_of(tensor.size_of, sizes) or 0
        return tensor.times * known[shape]

    def _sizes(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return all sizes by ORT's names, or raise ValueError if one is missing."""
        found = self._known(given)
        missing = [
            name for name, dims in self._names.items() if any(dim not in found for dim in dims)
        ]
        if missing:
            raise ValueError(f"missing sizes: {', '.join(missing)}; pass them as keyword arguments")
        return found

    def _known(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return the known sizes by ORT's names."""
        found = dict(self._last)
        for name, size in given.items():
            if name not in self._names:
                raise ValueError(f"unknown size {name!r}: {unknown_name(name, self._names)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} is not a size; pass a positive integer")
            found |= dict.fromkeys(self._names[name], size)
        return found

    def _curve(self, found: np.ndarray) -> np.ndarray:
        change = np.zeros(len(self.stage.nodes) + 2, dtype=np.int64)
        np.add.at(change, self._born, found)
        np.subtract.at(change, self._dies + 1, found)
        return change.cumsum()[:-1]


def plan(graphs: Graphs, model: nn.Module, *, optimizer: str = "adamw") -> MemoryPlan:
    """Return the memory plan of the graph that ORT's session executes.

    If ORT did not export that graph, use the gradient graph, which is slightly larger.

    Args:
        graphs: Graphs of the model.
        model: Original model.
        optimizer: Optimizer whose state is counted.

    Raises:
        ValueError: If there is no graph of a training step, or the optimizer is unknown.
    """
    stage = graphs.stages.get("execution") or graphs.gradient
    return plan_of(stage, graphs.sizes, model, optimizer)


def plan_of(stage: Stage, sizes: Mapping[str, int], model: nn.Module, optimizer: str) -> MemoryPlan:
    """Return the memory plan of one graph of a model.

    Args:
        stage: Graph of the step.
        sizes: Sizes of the last call, by ORT's names.
        model: Original model.
        optimizer: Optimizer whose state is counted.

    Raises:
        ValueError: If the optimizer is unknown.
    """
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return MemoryPlan(stage, sizes, optimizer=optimizer, encoder_decoder=both)


def _place(node: Node) -> str:
    return node.module or SCOPE.sub("", node.name)


# ---- names of sizes ------------------------------------------------------------------------------


def _dims(stage: Stage, *, encoder_decoder: bool) -> dict[str, tuple[str, ...]]:
    """Return the users' names of the sizes, with ORT's names for each.

    The first dimension of every input is the batch. The second dimension of text is its length: of
    the source or the target if the model has both. Other dimensions of integer inputs keep ORT's
    name. Other dimensions of floating-point inputs are features, which the weights determine.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for dim in stage.dims:
        match = _DIM.fullmatch(dim)
        name, place = (match[1], int(match[2])) if match else (dim, -1)
        if place == 0:
            found["batch"].append(dim)
        elif place == 1 and name in (*_TEXT, *_TARGETS):
            length = "target" if name in _TARGETS else "source"
            found[length if encoder_decoder else "seq"].append(dim)
        elif not _is_fraction(stage, name):
            found[dim].append(dim)
    return {name: tuple(dims) for name, dims in found.items()}


def _is_fraction(stage: Stage, name: str) -> bool:
    kind = stage.tensors.get(name, (onnx.TensorProto.INT64, ()))[0]
    return kind not in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)


_COLUMNS: Final[tuple[Column[Held], ...]] = (
    Column("tensor", lambda held: held.tensor.label),
    Column("kind", lambda held: held.tensor.kind),
    Column("module", lambda held: held.tensor.module),
    Column("size", lambda held: memory(held.size_bytes), number=True),
)
