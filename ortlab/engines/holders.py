"""Search of the user's variables for the places that still refer to a wrapper."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple

_DEEPEST: Final = 5
"""Steps from a variable to the wrapper; ``trainer.accelerator._models[0]`` has three."""

_MOST_OF_ONE: Final = 1_000
"""Parts of one container that are searched, so that a dataset does not use up `_MOST`."""

_MOST: Final = 50_000
"""Parts that are searched in all, which takes about 40 ms."""

_CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)

_CLOSED: Final = (type, ModuleType, FunctionType)
"""Classes whose instances are not searched, although they have attributes."""

_SHELLS: Final = {"IPython", "ipykernel"}
"""Packages whose objects are not searched: a shell refers to all variables and results."""

_SUBMODULE: Final = re.compile(r"\._modules\['(\w+)'\]")
"""Path to a submodule of a `torch.nn.Module`."""


def holders(
    held: object, variables: Mapping[str, Any], *, besides: Iterable[object] = ()
) -> list[str]:
    """Return the places inside the values of `variables` that refer to an object.

    Containers and the attributes of instances are searched, up to a limit. No code of the user's
    classes runs: a property may compute anything, and an iterator may never end.

    Args:
        held: The object.
        variables: Values by name. A variable that is the object itself is not returned.
        besides: Objects that are not searched.

    Returns:
        Expressions such as ``models[0]`` and ``trainer.model``, those with fewer steps first.
    """
    found = []
    met = {id(held), *map(id, besides)}
    shapes = _Shapes()
    left = _MOST
    level = list(variables.items())
    for _ in range(_DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            shape = shapes[type(value)]
            if shape is None or id(value) in met or left <= 0:
                continue
            met.add(id(value))
            for step, part in shape.parts(value):
                if part is held:
                    found.append(path + step)
                elif shapes[type(part)] is not None:
                    below.append((path + step, part))
                    left -= 1
        level = below
    return [_SUBMODULE.sub(_submodule, place) for place in found]


class _Shape(NamedTuple):
    """Parts of a class's instances: those of a builtin container, and the attributes."""

    container: Any
    attributes: GetSetDescriptorType | MemberDescriptorType | None

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """Return the parts of an instance, each with the code that reads it."""
        found: list[tuple[str, Any]] = []
        if self.container is dict:
            found = [(_index(key), part) for key, part in _first(dict.items(value))]
        elif self.container in (set, frozenset):
            found = [("", part) for part in _first(self.container.__iter__(value))]
        elif self.container is not None:
            items = _first(self.container.__iter__(value))
            found = [(f"[{place}]", part) for place, part in enumerate(items)]
        if self.attributes is not None:
            own = _first(self.attributes.__get__(value).items())
            found += [(f".{name}", part) for name, part in own]
        return found


class _Shapes(dict[type, _Shape | None]):
    """Shapes by class; None for classes whose instances are not searched."""

    def __missing__(self, kind: type) -> _Shape | None:
        packages = {str(k.__module__).partition(".")[0] for k in kind.__mro__} - {"builtins"}
        # Of ortlab's objects only the Trainer is searched, whose base is transformers' Trainer.
        closed = packages & _SHELLS or packages == {"ortlab"} or issubclass(kind, _CLOSED)
        container = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        found = next((vars(k)["__dict__"] for k in kind.__mro__ if "__dict__" in vars(k)), None)
        # Anything else is a property of the user's class.
        is_plain = type(found) in (GetSetDescriptorType, MemberDescriptorType)
        shape = _Shape(container, found if is_plain else None)
        self[kind] = None if closed or shape == (None, None) else shape
        return self[kind]


def _first(parts: Iterable[Any]) -> list[Any]:
    """Return a copy of the first parts; a thread of the user's may change the container."""
    return list(islice(parts, _MOST_OF_ONE))


def _index(key: object) -> str:
    return f"[{key!r}]" if type(key) in (str, int) else "[...]"


def _submodule(found: re.Match[str]) -> str:
    return f"[{found[1]}]" if found[1].isdigit() else f".{found[1]}"
