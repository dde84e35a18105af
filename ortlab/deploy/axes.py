"""Which sizes of a call's inputs may vary: told by a second batch, or tried in eager torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ortlab.deploy.call import ModelCall

Place = tuple[str, int]
"""An input and a dimension of it."""
BATCH = "batch"


@dataclass(frozen=True)
class Axis:
    """A size that varies: what it is called, where it is, and others than the example's that fit.

    Tensors at all its places change together.
    """

    name: str
    size: int
    places: tuple[Place, ...]
    others: tuple[int, ...]


@dataclass
class Axes:
    """The sizes that vary, and why others do not: ``notes`` are lines for the user."""

    found: list[Axis]
    notes: list[str] = field(default_factory=list)

    def by_input(self) -> dict[str, dict[int, str]]:
        """The names of the sizes that vary, by input and dimension."""
        made: dict[str, dict[int, str]] = {}
        for axis in self.found:
            for name, dim in axis.places:
                made.setdefault(name, {})[dim] = axis.name
        return made

    def without_or_joined(self, axis: Axis, why: str) -> Axes:
        """The same, where the graph is wrong along `axis`.

        It becomes one with others of its size, where there are any, else it keeps the example's.
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
        """The same, where those of `names` keep the example's size."""
        kept = [axis for axis in self.found if axis.name not in names]
        gone = [f"{axis.name} is {axis.size}" for axis in self.found if axis.name in names]
        return Axes(kept, [*self.notes, f"{', '.join(gone)} in the graph, and no other: {why}"])


def resized(tensors: Mapping[str, torch.Tensor], axis: Axis, size: int) -> dict[str, torch.Tensor]:
    """`tensors` with another `size` along `axis`: their own values, repeated or cut."""
    changed = dict(tensors)
    for name, dim in axis.places:
        held = changed[name]
        order = torch.arange(size, device=held.device) % held.shape[dim]
        changed[name] = held.index_select(dim, order)
    return changed


def of_two(call: ModelCall, other: Mapping[str, torch.Tensor]) -> Axes:
    """The sizes in which the example and the `other` batch differ.

    ValueError where they differ in more than sizes.
    """
    for name, tensor in call.tensors.items():
        second = other.get(name)
        if second is None or second.dim() != tensor.dim() or second.dtype != tensor.dtype:
            found = "nothing" if second is None else f"{second.dtype} {list(second.shape)}"
            raise ValueError(
                f"the second batch has {found} for {name}, the first {tensor.dtype} "
                f"{list(tensor.shape)}: give two that differ in sizes alone"
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
    """The sizes that eager torch takes otherwise than the example has them.

    A size varies where forward runs with another one. Equal sizes of several inputs are one, but
    for those, masks excepted, that forward runs with changed alone: an encoder's and a decoder's.
    Dimensions of size 1 stay, but for the batch's.
    """
    made: list[Axis] = []
    # A mask that hides nothing is left aside by some models, whatever its size.
    tensors = call.padded(left=False)
    for places in _groups(tensors):
        for group, sizes in _apart(call, tensors, places):
            made.append(Axis(_name(call, group, made), _size(tensors, group), group, sizes))
    return Axes(made)


def _apart(
    call: ModelCall, tensors: Mapping[str, torch.Tensor], places: tuple[Place, ...]
) -> list[tuple[tuple[Place, ...], tuple[int, ...]]]:
    """What of `places`, of one size, changes together, with the sizes that fit; none where none."""
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
    """Places of one size: first dimensions by themselves, and all others."""
    groups: dict[tuple[bool, int], list[Place]] = {}
    for name, tensor in tensors.items():
        for dim, size in enumerate(tensor.shape):
            if dim == 0 or size > 1:
                groups.setdefault((dim == 0, size), []).append((name, dim))
    yield from map(tuple, groups.values())


def _fits(
    call: ModelCall, tensors: Mapping[str, torch.Tensor], places: tuple[Place, ...]
) -> tuple[int, ...]:
    """The other sizes at `places` that forward runs with, at most two."""
    n, is_first = _size(tensors, places), places[0][1] == 0
    wanted = (n + 1, 1, 2 * n) if is_first else (n + 1, n - 1, 2 * n, n // 2)
    found: list[int] = []
    for size in dict.fromkeys(wanted):
        if size == n or size < (1 if is_first else 2) or len(found) == 2:
            continue
        try:
            call(resized(tensors, Axis("", n, places, ()), size))
        # Forward is the user's, and refuses a size with whatever it likes.
        except Exception:  # noqa: BLE001
            continue
        found.append(size)
    return tuple(found)


def _name(call: ModelCall, places: Sequence[Place], before: Sequence[Axis]) -> str:
    """What a size is called: batch, sequence, height and width, or by its input and dimension."""
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
