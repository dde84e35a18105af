"""What a training step takes of memory, read from its graph before it is run.

It is the sum of the tensors that are there at a time, see `lifetimes`. What an arena keeps beyond
that is not in it.
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
_MARGIN = 0.01
"""What `max_batch` leaves free: predictions are 0.2% below what was measured at most times."""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
_DIM = re.compile(r"(.+)_dim(\d+)")


@dataclass(frozen=True)
class Held:
    """A tensor and its bytes, for given sizes."""

    tensor: Tensor
    size_bytes: int


class MemoryPlan:
    """Memory of one training step of a model: forward, backward and the optimizer's step.

    Sizes are given by keyword under the names in `dims`; those that are left out are the last
    call's. All figures are bytes, and leave out Python, the libraries and the memory that an arena
    keeps. The outputs of the model count as held until the step ends, as in
    ``outputs = model(**batch)``.
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
        """The sizes that a batch decides, by name, and what they were in the last call."""
        return {
            name: next((self._last[dim] for dim in dims if dim in self._last), None)
            for name, dims in self._names.items()
        }

    @property
    def unsized(self) -> tuple[str, ...]:
        """Tensors whose size the graph does not tell; they count as nothing.

        Those that hold sizes themselves are not among them: they are a few numbers each.
        """
        sizes = dict.fromkeys(self.stage.dims, 2)
        hold_sizes = {n.outputs[-1] for n in self.stage.nodes if n.op in HOLD_SIZES}
        return tuple(
            tensor.name
            for tensor in self.tensors
            if tensor.name not in hold_sizes and self.stage.bytes_of(tensor.size_of, sizes) is None
        )

    def at(self, **sizes: int) -> MemoryPlan:
        """The plan for these sizes: what it shows, and what is taken where a size is left out."""
        found = copy.copy(self)
        found._last = self._known(sizes)
        return found

    def peak_bytes(self, **sizes: int) -> int:
        """The most that is there at once, with parameters, optimizer state and the batch.

        ValueError names a size that is missing or unknown.
        """
        return int(self._curve(self._bytes(sizes)).max())

    def peak_bytes_of_rank(self, ranks: int, *, zero_stage: int = 0, **sizes: int) -> int:
        """As `peak_bytes`, of each of `ranks`, with `sizes` those of its share of a batch.

        From ZeRO's stage 1 on it has its share of the optimizer's state; that of gradients, which
        DeepSpeed gives back in the middle of the backward pass at stage 2, is not taken off.
        """
        found = self._bytes(sizes)
        if zero_stage:
            shared = np.array([tensor.kind == "optimizer state" for tensor in self.tensors])
            found = np.where(shared, -(-found // ranks), found)
        return int(self._curve(found).max())

    def idle_bytes(self, **sizes: int) -> int:
        """Between steps: parameters, buffers, optimizer state, the batch that ORTModule keeps."""
        found = zip(self.tensors, self._bytes(sizes), strict=True)
        return int(sum(size for tensor, size in found if tensor.kind in _IDLE))

    def step_bytes(self, **sizes: int) -> int:
        """What a step takes at its peak beyond `idle_bytes`."""
        return self.peak_bytes(**sizes) - self.idle_bytes(**sizes)

    def activation_bytes(self, **sizes: int) -> int:
        """The most that is there at once beside the state: parameters, their gradients, moments.

        So with the batch, and with gradients of activations.
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
        """Bytes while each node runs, in their order, and in the end while the optimizer steps."""
        return self._curve(self._bytes(sizes))

    def peak_node(self, **sizes: int) -> Node | None:
        """The node that runs when most is there; None for the optimizer's step."""
        at = int(self.curve(**sizes).argmax())
        return self.stage.nodes[at] if at < len(self.stage.nodes) else None

    def at_peak(self, **sizes: int) -> list[Held]:
        """What is there at the peak, the largest first."""
        found = self._bytes(sizes)
        at = self._curve(found).argmax()
        held = [
            Held(tensor, int(size))
            for tensor, size in zip(self.tensors, found, strict=True)
            if tensor.born <= at <= tensor.dies and size
        ]
        return sorted(held, key=lambda each: -each.size_bytes)

    def max_batch(self, budget: int | str, *, dim: str = "batch", **sizes: int) -> int:
        """The largest batch whose peak is within `budget`: bytes, or text such as "16GiB".

        A hundredth of the budget is left free. `dim` is the size that is looked for. ValueError
        says what the smallest takes where not even that fits.
        """
        limit = parse_bytes(budget)
        if dim not in self._names:
            raise ValueError(f"dim={dim!r}: {unknown_name(dim, self._names)}")

        def fits(size: int) -> bool:
            return self.peak_bytes(**{**sizes, dim: size}) <= limit * (1 - _MARGIN)

        if not fits(1):
            least = self.peak_bytes(**{**sizes, dim: 1})
            raise ValueError(
                f"{dim} 1 takes {memory(least)}, more than {memory(limit)}; between steps "
                f"{memory(self.idle_bytes(**{**sizes, dim: 1}))} of it is there"
            )
        most = 1
        while fits(2 * most):
            most *= 2
            if most > 2**40:
                raise ValueError(f"{dim} does not change what the step takes")
        step = most // 2
        while step:
            most += step if fits(most + step) else 0
            step //= 2
        return most

    def overlay(self, stage: Stage) -> Overlay:
        """Bytes that each node's results take, as far as a stage has the node, for the last sizes.

        Results that are views take none.
        """
        names = {node.name for node in stage.nodes}
        figures: dict[str, float] = defaultdict(float)
        for tensor, size in zip(self.tensors, self._bytes({}), strict=True):
            if tensor.node in names:
                figures[tensor.node] += float(size)
        return Overlay("memory", "bytes", dict(figures))

    def table(self, **sizes: int) -> Table[Held]:
        """The ten largest tensors at the peak; the notes tell the peak, where it is and of what."""
        held = self.at_peak(**sizes)
        return Table(held[:LARGEST], _COLUMNS, notes=self._notes(held, sizes))

    def picture(self, **sizes: int) -> str:
        """The step as an SVG: tensors stacked, over the nodes in their order; hover names one."""
        found = self._bytes(sizes)
        nodes = self.stage.nodes
        split = next((i for i, n in enumerate(nodes) if n.phase == "backward"), len(nodes))
        return timeline.svg(
            [
                timeline.Area(t.label, t.kind, t.module, t.born, t.dies, int(size))
                for t, size in zip(self.tensors, found, strict=True)
                if size
            ],
            length=len(nodes) + 1,
            phases=(("forward", 0), ("backward", split), ("", len(nodes))),
            kinds=KINDS,
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        alt = f"Memory over the nodes of a step, peak {memory(self.peak_bytes())}"
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
        notes = [
            f"peak {memory(sum(each.size_bytes for each in held))} for {at}, {where}",
            f"at the peak: {parts}",
            f"between steps {memory(self.idle_bytes(**sizes))} with {self.optimizer}; Python, "
            "libraries and what ORT's arena keeps (--arena off: nothing) come on top",
        ]
        if unsized := self.unsized:
            some = ", ".join(unsized[:3])
            notes.append(f"{len(unsized)} tensors of unknown size are left out: {some}")
        return notes

    def _bytes(self, sizes: Mapping[str, int]) -> np.ndarray:
        """Of each tensor."""
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
        """By ORT's names, all of them; ValueError names one that is missing."""
        found = self._known(given)
        missing = [
            name for name, dims in self._names.items() if any(dim not in found for dim in dims)
        ]
        if missing:
            raise ValueError(f"give the sizes {', '.join(missing)}")
        return found

    def _known(self, given: Mapping[str, int]) -> dict[str, int]:
        """By ORT's names, as far as they are known."""
        found = dict(self._last)
        for name, size in given.items():
            if name not in self._names:
                raise ValueError(f"no size {name!r}: {unknown_name(name, self._names)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} is no size; give a whole number above 0")
            found |= dict.fromkeys(self._names[name], size)
        return found

    def _curve(self, found: np.ndarray) -> np.ndarray:
        change = np.zeros(len(self.stage.nodes) + 2, dtype=np.int64)
        np.add.at(change, self._born, found)
        np.subtract.at(change, self._dies + 1, found)
        return change.cumsum()[:-1]


def plan(graphs: Graphs, model: nn.Module, *, optimizer: str = "adamw") -> MemoryPlan:
    """The plan of `model`, whose `graphs` these are, for the session's graph.

    Where ORT did not tell that, for the one with the gradient, which is a little larger.
    """
    stage = graphs.stages.get("execution") or graphs.gradient
    return plan_of(stage, graphs.sizes, model, optimizer)


def plan_of(stage: Stage, sizes: Mapping[str, int], model: nn.Module, optimizer: str) -> MemoryPlan:
    """The plan of a graph of `model`; `sizes` are those of the last call, by ORT's names."""
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return MemoryPlan(stage, sizes, optimizer=optimizer, encoder_decoder=both)


def _place(node: Node) -> str:
    return node.module or SCOPE.sub("", node.name)


# ---- names of sizes ------------------------------------------------------------------------------


def _dims(stage: Stage, *, encoder_decoder: bool) -> dict[str, tuple[str, ...]]:
    """What users call the sizes, and ORT's names for each.

    The first of every input is the batch. The second of text is its length, the source's or the
    target's where a model has both. Others of whole numbers keep ORT's name; those of fractions
    are features, which the weights decide.
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
