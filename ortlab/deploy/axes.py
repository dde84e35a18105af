"""Sizes of a call's inputs that may vary: taken from a second batch, or tested in eager torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ortlab.deploy.call import ModelCall

Place = tuple[str, int]
"""An input and one of its dimensions."""
BATCH = "batch"


@dataclass(frozen=True)
class Axis:
    """A size that varies.

    Attributes:
        name: Its name.
        size: Its value in the example.
        places: Inputs and dimensions that have it; all of them change together.
        others: Other values that forward accepts.
    """

    name: str
    size: int
    places: tuple[Place, ...]
    others: tuple[int, ...]


@dataclass
class Axes:
    """Sizes that vary.

    Attributes:
        found: The sizes.
        notes: Lines for the user that explain why other sizes are fixed.
    """

    found: list[Axis]
    notes: list[str] = field(default_factory=list)

    def by_input(self) -> dict[str, dict[int, str]]:
        """Return the names of the sizes that vary, by input and dimension."""
        made: dict[str, dict[int, str]] = {}
        for axis in self.found:
            for name, dim in axis.places:
                made.setdefault(name, {})[dim] = axis.name
        return made

    def without_or_joined(self, axis: Axis, why: str) -> Axes:
        """Return the axes after the graph was wrong along one of them.

        The axis is merged with the others of the same size; if there are none, it is fixed to the
        example's size.

        Args:
            axis: The axis.
            why: The reason, for the notes.
        """
        is_first = axis.places[0][1] == 0
        same = [a for a in self.found if (a.places[0][1] == 0, a.size) == (is_first, axis.size)]
        if len(same) < 2:
            return self.without([axis.name], why)
        places = tuple(place for each in same for place in each.places)
        others = set.intersection(*(set(each.others) for each in same))
        joined = Axis(same[0].name, axis.size, places, tuple(sorted(others, reverse=True)))
        kept = [joined if each is same[0] else each for each in self.found]
        return Axes([each for each in kept if each not in same[1:]], self.notes)

    def without(self, names: Sequence[str], why: str) -> Axes:
        """Return the axes with some of them fixed to the example's size.

        Args:
            names: Names of the axes to fix.
            why: The reason, for the notes.
        """
        kept = [axis for axis in self.found if axis.name not in names]
        gone = [f"{axis.name} is {axis.size}" for axis in self.found if axis.name in names]
        return Axes(kept, [*self.notes, f"{', '.join(gone)} in the graph (fixed): {why}"])


def resized(tensors: Mapping[str, torch.Tensor], axis: Axis, size: int) -> dict[str, torch.Tensor]:
    """Return tensors with another size along an axis, their values repeated or cut off.

    Args:
        tensors: Tensors by name.
        axis: The axis to change.
        size: Its new size.
    """
    changed = dict(tensors)
    for name, dim in axis.places:
        held = changed[name]
        order = torch.arange(size, device=held.device) % held.shape[dim]
        changed[name] = held.index_select(dim, order)
    return changed


def of_two(call: ModelCall, other: Mapping[str, torch.Tensor]) -> Axes:
    """Return the sizes in which the example and a second batch differ.

    Args:
        call: The call of the model with the example.
        other: Tensors of the second batch by name.

    Raises:
        ValueError: If the batches differ in more than sizes.
    """
    for name, tensor in call.tensors.items():
        second = other.get(name)
        if second is None or second.dim() != tensor.dim() or second.dtype != tensor.dtype:
            found = "nothing" if second is None else f"{second.dtype} {list(second.shape)}"
            raise ValueError(
                f"the second batch has {found} for {name}, and the first has {tensor.dtype} "
                f"{list(tensor.shape)}; give two batches that differ only in sizes"
            )
    groups: dict[tuple[int, int, int], list[Place]] = {}
    for name, tensor in call.tensors.items():
        for dim, (size, second_size) in enumerate(
            zip(tensor.shape, other[name].shape, strict=True)
        ):
            if size != second_size:
                groups.setdefault((0 if dim == 0 else 1, size, second_size), []).append((name, dim))
    made: list[Axis] = []
    for (_, size, second_size), places in groups.items():
        made.append(Axis(_name(call, places, made), size, tuple(places), (second_size,)))
    return Axes(made)


def tried(call: ModelCall) -> Axes:
    """Return the sizes that vary, found by running forward in eager torch with other sizes.

    A size varies if forward runs with another value. Equal sizes of several inputs are one axis,
    unless forward also runs when only one of them changes, as with the sequences of an encoder and
    a decoder; masks always share the axis of the input they mask. Dimensions of size 1 are fixed,
    except the batch dimension.

    Args:
        call: The call of the model with the example.
    """
    made: list[Axis] = []
    # Some models ignore a mask that hides nothing, whatever its size.
    tensors = call.padded(left=False)
    for places in _groups(tensors):
        for group, sizes in _apart(call, tensors, places):
            made.append(Axis(_name(call, group, made), _size(tensors, group), group, sizes))
    return Axes(made)


def _apart(
    call: ModelCall, tensors: Mapping[str, torch.Tensor], places: tuple[Place, ...]
) -> list[tuple[tuple[Place, ...], tuple[int, ...]]]:
    """Return the places of equal size that change together, with the sizes that forward accepts."""
    whole = _fits(call, tensors, places)
    if len(places) == 1 or places[0][1] == 0:
        return [(places, whole)] if whole else []
    alone: list[tuple[tuple[Place, ...], tuple[int, ...]]] = []
    for place in places:
        if place[0] not in call.masks():
            sizes = _fits(call, tensors, (place,))
            if len(sizes) > 1 and set(sizes) >= set(whole):
                alone.append(((place,), sizes))
    rest = tuple(place for place in places if (place,) not in [each for each, _ in alone])
    if not alone or not rest:
        return alone or ([(places, whole)] if whole else [])
    others = _fits(call, tensors, rest)
    if others or not whole:
        return [*([(rest, others)] if others else []), *alone]
    return [(places, whole)]


def _size(tensors: Mapping[str, torch.Tensor], places: Sequence[Place]) -> int:
    name, dim = places[0]
    return tensors[name].shape[dim]


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Place, ...]]:
    """Yield the places of equal size, first dimensions separate from the others."""
    groups: dict[tuple[bool, int], list[Place]] = {}
    for name, tensor in tensors.items():
        for dim, size in enumerate(tensor.shape):
            if dim == 0 or size > 1:
                groups.setdefault((dim == 0, size), []).append((name, dim))
    yield from map(tuple, groups.values())


def _fits(
    call: ModelCall, tensors: Mapping[str, torch.Tensor], places: tuple[Place, ...]
) -> tuple[int, ...]:
    """Return up to two other sizes at `places` with which forward runs."""
    n, is_first = _size(tensors, places), places[0][1] == 0
    wanted = (n + 1, 1, 2 * n) if is_first else (n + 1, n - 1, 2 * n, n // 2)
    found: list[int] = []
    for size in dict.fromkeys(wanted):
        if size == n or size < (1 if is_first else 2) or len(found) == 2:
            continue
        try:
            call(resized(tensors, Axis("", n, places, ()), size))
        # User code: forward may reject a size with any exception.
        except Exception:  # noqa: BLE001
            continue
        found.append(size)
    return tuple(found)


def _name(call: ModelCall, places: Sequence[Place], before: Sequence[Axis]) -> str:
    """Return the name of a size: batch, sequence, height, width, or its input and dimension."""
    name, dim = places[0]
    rank = call.tensors[name].dim()
    if dim == 0:
        found = BATCH
    elif dim == 1 and rank in (2, 3):
        found = "sequence"
    elif rank == 4 and dim in (2, 3):
        found = ("height", "width")[dim - 2]
    else:
        found = f"{name}_{dim}"
    taken = {axis.name for axis in before}
    return found if found not in taken else f"{name.removesuffix('_input_ids')}_{found}"
