"""Pool of the exports of a model: the calls that each export has served and can serve."""

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
"""Maximum number of exports for one kind of call, by shape or by decisions of forward."""


class ExportFailed(Concise, RuntimeError):
    """Raised when ORT cannot export or build the model; the message names operator and line."""


Shapes = tuple[torch.Size, ...]
"""Shapes of the tensors in a call's arguments, in order."""


@dataclasses.dataclass
class CachedExport:
    """An export with the input shapes that it has served, and a variant without dropout.

    Attributes:
        export: The export.
        made_of: Input shapes of the export.
        counters: Batch counters of the BatchNorm modules, which a graph does not update.
        buffers: Buffers of the module, restored if the graph took a wrong decision.
        made_with: Description of the settings of the graph.
        checked: True once a self-check has passed.
        again: True if the next call is also checked: only a second batch shows whether the graph
            contains data of the batch that it was exported with.
        shapes: Input shapes that were served.
        sizes: Sizes of each dimension of each tensor in the checks that passed.
        shapes_met: Number of different input shapes so far.
        buckets: Buckets of sizes that were served; see `bucket`.
        without_dropout: The same export with all dropout ratios 0; None until needed.
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
        """Run the export, and update the counters that forward updates in Python.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            dropout: False to run without dropout.

        Returns:
            The module's outputs.

        Raises:
            OtherDecision: If forward would take another branch than the graph.
        """
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
        """Release the memory of its sessions."""
        self.export.close()
        self.without_dropout = None

    def recompute(self, plans: tuple[str, ...]) -> None:
        """See `Export.recompute`."""
        if plans != self.export.plans and self.export.gradient:
            self.export.recompute(plans)
            self.without_dropout = None

    @contextlib.contextmanager
    def _speculating(self) -> Iterator[None]:
        """Restore buffers if the graph took another branch than forward would.

        On the wrong branch the graph can also fail before the decision is compared.
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
        """Record that the self-check has passed for given input shapes.

        Args:
            shapes: Input shapes of the check.
        """
        self.checked = True
        for dimension, size in _sizes(shapes):
            self.sizes.setdefault(dimension, set()).add(size)

    def has_new_dimension(self, shapes: Shapes) -> bool:
        """Return True if a dimension differs from the only size that was checked so far.

        Args:
            shapes: Input shapes of a call.
        """
        return any(
            len(known := self.sizes.get(dimension, set())) < 2 and size not in known
            for dimension, size in _sizes(shapes)
        )


@dataclasses.dataclass
class Kind:
    """Exports for calls of one kind.

    One export serves every shape, unless the graph contains fixed sizes or decisions of forward.

    Attributes:
        served: The exports, most recently used first.
        per_shape: True if the graph contains fixed sizes, so that each shape needs its own export.
    """

    served: list[CachedExport] = dataclasses.field(default_factory=list)
    per_shape: bool = False

    @property
    def is_open(self) -> bool:
        """True if one of the exports has a session."""
        return any(served.export.is_open for served in self.served)

    def fitting(self, shapes: Shapes) -> list[CachedExport]:
        """Return the exports that can serve a call.

        Args:
            shapes: Input shapes of the call.
        """
        if not self.per_shape:
            return self.served
        return [served for served in self.served if served.made_of == shapes]

    def redefined(self) -> str | None:
        """Drop the exports that call a torch.autograd.Function that has been redefined.

        Returns:
            The name of such a function, or None if there is none.
        """
        found = None
        for served in self.served[:]:
            for function, before in served.definitions.items():
                if interop.definition(function) is not before:
                    found = f"{function.__module__}.{function.__qualname__}"
                    self.served.remove(served)
                    break
        return found

    def use(self, served: CachedExport) -> None:
        """Move an export to the front, so that it is tried first.

        Args:
            served: One of the exports.
        """
        if self.served[0] is not served:
            self.served.remove(served)
            self.served.insert(0, served)

    def refuse_more(self) -> None:
        """Check that another export is allowed.

        Raises:
            ExportFailed: If the maximum number of exports is reached.
        """
        if len(self.served) < OF_A_KIND:
            return
        if self.per_shape:
            raise ExportFailed(
                f"the model's graph contains fixed input sizes, and {OF_A_KIND} shapes already "
                "have an export each; pad batches to fewer sizes, or use engine='eager'"
            )
        decision = self.served[0].export.decisions[0]
        raise ExportFailed(
            f"forward decides by a tensor's value at {place(*decision.place)}, and {OF_A_KIND} "
            "branches already have an export each; use torch.where there, or engine='eager'"
        )


def _sizes(shapes: Shapes) -> Iterator[tuple[tuple[int, int], int]]:
    """Iterate over every dimension of every tensor, with its size."""
    for i, shape in enumerate(shapes):
        for j, size in enumerate(shape):
            yield (i, j), size


def bucket(shapes: Shapes) -> Hashable:
    """Return shapes with every size rounded up to a power of two, as a key.

    Args:
        shapes: Input shapes of a call.
    """
    return tuple(tuple(_power_of_two(size) for size in shape) for shape in shapes)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
