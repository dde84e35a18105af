"""The exports of a model: which calls each has served, and which it may serve."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ortlab.engines.ortmodule.compat import interop
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.torchscript.decisions import OtherDecision
from ortlab.utils.errors import Concise, place

OF_A_KIND = 16
"""The most exports of one kind, for shapes or for decisions of forward."""


class ExportFailed(Concise, RuntimeError):
    """ORT cannot export or build the model; the message names the operator and the line."""


Shapes = tuple[torch.Size, ...]
"""Of the tensors among a call's arguments, in order."""


@dataclasses.dataclass
class CachedExport:
    """An export, the input shapes that it has served, and its twin without dropout.

    `made_of` are the shapes that it was exported with, `sizes` those that each dimension of each
    tensor had in the checks that it passed, and `made_with` are the settings that its graph is for.
    `again` says that its next call is checked, too: what a graph keeps of the batch that it was
    exported with, only another batch tells.
    """

    export: Export
    made_of: Shapes
    counters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    made_with: str
    checked: bool = False
    again: bool = False
    shapes: set[Shapes] = dataclasses.field(default_factory=set)
    sizes: dict[tuple[int, int], set[int]] = dataclasses.field(default_factory=dict)
    shapes_met: int = 0
    buckets: set[Hashable] = dataclasses.field(default_factory=set)
    without_dropout: Export | None = None

    def __post_init__(self) -> None:
        self.definitions = {each: interop.definition(each) for each in self.export.functions}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, dropout: bool = True) -> Any:
        """The module's outputs. What forward counts in Python, no graph does: that is done here."""
        if not dropout and self.without_dropout is None:
            self.without_dropout = self.export.without_dropout()
        export = self.export if dropout else self.without_dropout
        assert export is not None
        with self._speculating() if export.decisions else contextlib.nullcontext():
            outputs = export.run(args, kwargs)
        for counter in self.counters:
            counter.add_(1)
        return outputs

    def rest(self) -> None:
        """Gives back what its sessions keep from step to step."""
        self.export.close()
        self.without_dropout = None

    def recompute(self, plans: tuple[str, ...]) -> None:
        """See `Export.recompute`."""
        if plans != self.export.plans and self.export.gradient:
            self.export.recompute(plans)
            self.without_dropout = None

    @contextlib.contextmanager
    def _speculating(self) -> Iterator[None]:
        """Gives buffers back as they were where the graph took another way than forward would.

        On such a way it may also fail, before the decision can be compared.
        """
        before = [(buffer, buffer.clone()) for buffer in self.buffers]
        try:
            yield
        except Exception as error:
            for buffer, value in before:
                buffer.copy_(value)
            if isinstance(error, OtherDecision):
                raise
            raise OtherDecision(self.export.decisions[0].place) from error

    def passed(self, shapes: Shapes) -> None:
        """Notes that its results were eager torch's for `shapes`."""
        self.checked = True
        for dimension, size in _sizes(shapes):
            self.sizes.setdefault(dimension, set()).add(size)

    def has_new_dimension(self, shapes: Shapes) -> bool:
        """Whether a dimension has another size than the only one that was checked so far."""
        return any(
            len(known := self.sizes.get(dimension, set())) < 2 and size not in known
            for dimension, size in _sizes(shapes)
        )


@dataclasses.dataclass
class Kind:
    """The exports for calls of one kind, the one that was used last first.

    One serves every shape, unless the graph holds sizes (`per_shape`) or what forward decides.
    """

    served: list[CachedExport] = dataclasses.field(default_factory=list)
    per_shape: bool = False

    @property
    def is_open(self) -> bool:
        """Whether one of them has a session."""
        return any(served.export.is_open for served in self.served)

    def fitting(self, shapes: Shapes) -> list[CachedExport]:
        """Those that may serve a call with these shapes."""
        if not self.per_shape:
            return self.served
        return [served for served in self.served if served.made_of == shapes]

    def redefined(self) -> str | None:
        """A torch.autograd.Function that was defined again; drops the exports that call it."""
        found = None
        for served in self.served[:]:
            for function, before in served.definitions.items():
                if interop.definition(function) is not before:
                    found = f"{function.__module__}.{function.__qualname__}"
                    self.served.remove(served)
                    break
        return found

    def use(self, served: CachedExport) -> None:
        """Tries `served` first from now on."""
        if self.served[0] is not served:
            self.served.remove(served)
            self.served.insert(0, served)

    def refuse_more(self) -> None:
        """Raises where there are as many as there may be."""
        if len(self.served) < OF_A_KIND:
            return
        if self.per_shape:
            raise ExportFailed(
                f"the model's graph holds the sizes of its input, and {OF_A_KIND} shapes have an "
                "export each: pad batches to fewer sizes, or use engine='eager'"
            )
        decision = self.served[0].export.decisions[0]
        raise ExportFailed(
            f"forward decides by a tensor's value at {place(*decision.place)}, and {OF_A_KIND} "
            "ways have an export each: compute with tensors there, or use engine='eager'"
        )


def _sizes(shapes: Shapes) -> Iterator[tuple[tuple[int, int], int]]:
    """Every dimension of every tensor, and its size."""
    for i, shape in enumerate(shapes):
        for j, size in enumerate(shape):
            yield (i, j), size


def bucket(shapes: Shapes) -> Hashable:
    return tuple(tuple(_power_of_two(size) for size in shape) for shape in shapes)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
