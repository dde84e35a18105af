"""Guard that detects edits of a module after its export, which the exported graph does not follow.

`Guard.key` identifies the state of the module. It covers attributes, submodules, parameters and
buffers (identity, type, device, size, requires_grad), hooks, training or evaluation mode, the
classes and their members, and the lists, dictionaries, deques, partials and configuration objects
in attributes, two levels deep. It also covers what the user's code reads elsewhere, found by the
names in forward and the code that it uses: globals, closures, defaults, environment variables, and
members of other Python modules, classes and objects; and the functions of torch.nn.functional.

It does not cover deeper levels, the contents of numpy arrays and of objects with slots, the
contents of lists and dictionaries with more than a thousand entries (only their number), the change
from 1 to 1.0 or True, what an installed package reads elsewhere, and files.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import os
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ortlab.engines.ortmodule.compat import native
from ortlab.engines.ortmodule.fingerprint import global_names, home, is_users

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset(
    {"_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"}
    | {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {f"{name}_with_kwargs" for name in _HOOKS[:2]}
    | {"_forward_hooks_always_called"}
)
"""Attributes of every module that do not affect forward, or only duplicate its hooks."""
_APART = _OF_TORCH.union(_HOOKS, _MEMBERS)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, collections.deque)
_DEPTH = 2
_REMEMBERED = 8
_LONG = 1000
"""Number of entries above which only the size of a container is watched, as of a vocabulary."""

_NOT_ENTERED = (nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType)
_GLOBAL_HOOKS = tuple(
    value
    for name, value in vars(nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)

_hook_count = operator.attrgetter("next_id")


@dataclass(frozen=True)
class _Place:
    """A watched container.

    Attributes:
        path: Path of the container, for the user.
        values: The container itself.
        held: Copy of its contents.
        inside: Containers in it by key. If one was replaced by an equal one, edits of the new one
            would not be noticed.
    """

    path: str
    values: Any
    held: Any
    inside: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def of(cls, path: str, values: Any, held: Any) -> _Place:
        """Return the record of a container, with the containers inside of it.

        Args:
            path: Path of the container, for the user.
            values: The container.
            held: Copy of its contents.
        """
        items = () if isinstance(values, set) else _items(values).items()
        inside = [(key, one) for key, one in items if isinstance(one, _CONTAINERS)]
        return cls(path, values, held, tuple(inside))


@dataclass(frozen=True)
class _Places:
    """Watched containers by the kind of comparison.

    Attributes:
        plain: Mappings whose values are compared.
        inner: Containers that are compared as a whole.
        by_identity: Mappings whose values are compared by identity.
    """

    plain: list[_Place] = field(default_factory=list)
    inner: list[_Place] = field(default_factory=list)
    by_identity: list[_Place] = field(default_factory=list)

    def unchanged(self) -> bool:
        """Return True if no container has changed."""
        try:
            for place in self.plain:
                if list(place.values.values()) != place.held:
                    return False
                for key, one in place.inside:
                    if place.values[key] is not one:
                        return False
            for place in self.inner:
                if place.values != place.held:
                    return False
                for key, one in place.inside:
                    if place.values[key] is not one:
                        return False
        except Exception:  # noqa: BLE001 - raised by a user's ==; a full comparison then decides
            return False
        for place in self.by_identity:
            values = place.values
            if len(values) != len(place.held) or not all(
                map(operator.is_, values.values(), place.held)
            ):
                return False
        return True

    def all(self) -> Iterator[_Place]:
        """Iterate over all containers."""
        yield from (*self.plain, *self.inner, *self.by_identity)

    def those(self, wanted: Callable[[_Place], bool]) -> _Places:
        """Return the containers that fulfill a condition.

        Args:
            wanted: Condition.
        """
        parts = (self.plain, self.inner, self.by_identity)
        return _Places(*(list(filter(wanted, part)) for part in parts))


def _is_dictionary(place: _Place) -> bool:
    return isinstance(place.values, dict)


@dataclass(frozen=True)
class _Photo:
    """Snapshot of the module."""

    modules: list[nn.Module]
    types: list[type]
    places: _Places
    no_dictionaries: _Places
    dictionaries: tuple[dict[Any, Any], ...]
    tensors: tuple[torch.Tensor, ...]
    layout: Hashable
    constants: dict[str, torch.Tensor]
    versions: list[int]
    reads: list[Callable[[], Any]]
    read: list[Any]
    counted: list[Any]
    counts: list[int]
    hook_count: int
    key: Hashable = field(repr=False)
    facts: Mapping[str, Hashable] = field(repr=False)
    kept: list[Any] = field(repr=False)


class Guard:
    """Guard of one module.

    `key` is cheap if nothing has changed: with versions of dictionaries (Python up to 3.11), about
    0.1 microseconds for every submodule, parameter and buffer.

    Args:
        module: Module to watch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._remembered: dict[Hashable, _Photo] = {}
        self._versions: bytes | None = None
        """Versions of the snapshot's dictionaries when last found unchanged; they are unique."""
        self._photo = self._remember(self._look())
        self.change = ""

    def key(self) -> Hashable:
        """Return the key of the module's current state.

        Equal keys mean that the same exported graph fits. After a change, the attribute `change`
        describes it.
        """
        if self._untouched():
            return self._photo.key
        before = self._photo
        self._photo = self._remember(self._look())
        if self._photo.key != before.key:
            self.change = _difference(before.facts, self._photo.facts)
        return self._photo.key

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors that forward can read besides parameters and buffers.

        A graph contains their values. They are those of the last snapshot.

        Returns:
            Tensors by their name in the user's code.
        """
        return {name.removeprefix("."): each for name, each in self._photo.constants.items()}

    def _remember(self, photo: _Photo) -> _Photo:
        """Return `photo`, with the key object of an earlier equal one: lookups are then faster."""
        known = self._remembered.pop(photo.key, None)
        if known is not None:
            photo = dataclasses.replace(photo, key=known.key)
        self._remembered[photo.key] = photo
        while len(self._remembered) > _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return photo

    def _untouched(self) -> bool:
        photo = self._photo
        versions = native.versions(photo.dictionaries)
        if versions is not None and versions == self._versions:
            places = photo.no_dictionaries
        else:
            places = photo.places
        if not places.unchanged():
            return False
        self._versions = versions
        return (
            list(map(type, photo.modules)) == photo.types
            and native.layout(photo.tensors) == photo.layout
            and list(map(_version, photo.constants.values())) == photo.versions
            and all(get() is value for get, value in zip(photo.reads, photo.read, strict=True))
            and _hook_count(RemovableHandle) == photo.hook_count
            and list(map(len, photo.counted)) == photo.counts
        )

    def _look(self) -> _Photo:
        facts: dict[str, Hashable] = {}
        kept: list[Any] = []
        atom = _atom_into(kept)
        places = _Places()
        hooks: list[dict[int, Any]] = list(_GLOBAL_HOOKS)
        long: list[Any] = []

        def look_inside(path: str, values: Mapping[Any, Any]) -> None:
            for where, container in _containers(path, values, seen):
                if len(container) > _LONG:
                    facts[f"the length of {where}"] = len(container)
                    long.append(container)
                    continue
                _record(where, container, facts, constants, atom)
                if not any(map(_is_array, _items(container).values())):
                    places.inner.append(_Place.of(where, container, copy.copy(container)))

        facts["hooks of all modules"] = tuple(atom(h) for kind in hooks for h in kind.values())
        tensors: dict[int, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        classes: dict[type, None] = {}
        seen: set[int] = set()
        modules = list(self._module.named_modules())
        for name, module in modules:
            path = name or type(module).__name__
            facts[f"type of {path}"] = atom(type(module))
            classes.update(dict.fromkeys(type(module).__mro__))
            for values_name in _MEMBERS:
                values = module.__dict__[values_name]
                if values:
                    place = _Place(path, values, list(values.values()))
                    places.by_identity.append(place)
            for member_name, member in (*module._parameters.items(), *module._buffers.items()):
                facts[f"{path}.{member_name}"] = _tensor(member, atom)
                if member is not None:
                    tensors[id(member)] = member
            for child_name, child in module._modules.items():
                facts[f"{path}.{child_name}"] = atom(child)
            for hook_name in _HOOKS:
                found = getattr(module, hook_name)
                hooks.append(found)
                if found:
                    facts[f"{path}.{hook_name[1:]}"] = tuple(map(atom, found.values()))
            own = {k: v for k, v in module.__dict__.items() if k not in _APART}
            _record(path, own, facts, constants, atom)
            compared = places.by_identity if any(map(_is_array, own.values())) else places.plain
            held = list(module.__dict__.values())
            inside = tuple((k, v) for k, v in own.items() if isinstance(v, _CONTAINERS))
            compared.append(_Place(path, module.__dict__, held, inside))
            look_inside(path, own)
        for cls in classes:
            if cls not in (nn.Module, object, Generic):
                entries = vars(cls)
                facts[f"class {cls.__qualname__}"] = tuple(map(atom, entries.values()))
                arrays = any(map(_is_array, entries.values()))
                compared = places.by_identity if arrays else places.plain
                compared.append(_Place(cls.__qualname__, entries, list(entries.values())))
        functions = vars(nn.functional)  # which torch's own modules look up at each call
        facts["torch.nn.functional"] = tuple(map(atom, functions.values()))
        place = _Place("torch.nn.functional", functions, list(functions.values()))
        places.by_identity.append(place)
        elsewhere = _Elsewhere(modules, classes, hooks)
        if elsewhere.reads_environment:
            facts |= {f"os.environ[{key!r}]": value for key, value in os.environ.items()}
            places.inner.append(_Place("os.environ", os.environ, dict(os.environ)))
        reads = elsewhere.reads
        read = [get() for get in reads.values()]
        for where, value in zip(reads, read, strict=True):
            facts[where] = _fact(where, value, constants, atom)
            if isinstance(value, _CONTAINERS):
                look_inside("", {where: value})
        watched = tuple(tensors.values())
        return _Photo(
            modules=[module for _, module in modules],
            types=[type(module) for _, module in modules],
            places=places,
            no_dictionaries=places.those(lambda place: not _is_dictionary(place)),
            dictionaries=tuple(place.values for place in places.all() if _is_dictionary(place)),
            tensors=watched,
            layout=native.layout(watched),
            constants=constants,
            versions=list(map(_version, constants.values())),
            reads=list(reads.values()),
            read=read,
            counted=[*hooks, *long],
            counts=list(map(len, [*hooks, *long])),
            hook_count=_hook_count(RemovableHandle),
            key=frozenset(facts.items()),
            facts=facts,
            kept=kept,
        )


class _Elsewhere:
    """Objects outside of the modules that the user's code reads, found by names from forward on.

    Installed packages are not followed: what they read elsewhere is covered by their version.

    Attributes:
        reads: Functions that return the current value, by its name in the user's code.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        classes: Mapping[type, None],
        hooks: list[dict[int, Any]],
    ) -> None:
        self.reads: dict[str, Callable[[], Any]] = {}
        self._names = {"forward"}
        self._followed: set[int] = set()
        self._owners: dict[int, tuple[str, Mapping[str, Any], bool]] = {}
        for cls in classes:
            if is_users(cls.__module__):
                self._owners[id(cls)] = (cls.__qualname__, vars(cls), False)
        for _, module in modules:
            for value in module.__dict__.values():
                self._meet("", value)
        for registered in hooks:
            for hook in registered.values():
                self._meet("", hook)
        while self._named():
            pass

    @property
    def reads_environment(self) -> bool:
        """True if the code may read environment variables."""
        return not self._names.isdisjoint({"environ", "getenv"})

    def _named(self) -> bool:
        """Visit members of the owners whose names the code contains; False if none is new."""
        before = self._known()
        for path, values, is_read in list(self._owners.values()):
            for name in list(self._names):
                if name not in values:
                    continue
                if is_read:
                    self.reads.setdefault(f"{path}.{name}", functools.partial(values.get, name))
                self._meet(f"{path}.{name}", values[name])
        return before != self._known()

    def _known(self) -> list[int]:
        return list(map(len, (self.reads, self._names, self._owners, self._followed)))

    def _meet(self, where: str, value: Any) -> None:
        """Follow a function; record an object with members, by its name in the user's code."""
        if isinstance(value, types.FunctionType):
            self._follow(value)
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            self._meet(where, value.__func__)
        elif isinstance(value, property):
            self._meet(where, value.fget)
        elif isinstance(value, functools.partial):
            self._meet(where, value.func)
        elif isinstance(value, types.ModuleType):
            self._owners.setdefault(id(value), (value.__name__, vars(value), True))
        elif isinstance(value, type):
            if is_users(value.__module__):
                self._owners.setdefault(id(value), (value.__qualname__, vars(value), True))
        elif where and not isinstance(value, (*_ATOMS, *_NOT_ENTERED)):
            self._meet(where, type(value))
            if isinstance(attributes := getattr(value, "__dict__", None), dict):
                self._owners.setdefault(id(value), (where, attributes, True))

    def _follow(self, function: types.FunctionType) -> None:
        if id(function) in self._followed or not is_users(home(function)):
            return
        self._followed.add(id(function))
        code, where = function.__code__, function.__qualname__
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self.reads[f"{where}'s {part}"] = functools.partial(getattr, function, part)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents", None)
            self.reads[f"{where}'s {name}"] = read
            self._meet(name, read())
        self._names.update(_names_in(code))
        for name in global_names(code):
            # A missing name can be defined later, or be a builtin.
            path = f"{home(function)}.{name}"
            read = functools.partial(function.__globals__.get, name)
            self.reads[path] = read
            self._meet(path, read())


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Iterate over the names of globals and attributes in `code`, including nested code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _atom_into(kept: list[Any]) -> Callable[[Any], Hashable]:
    """Return a function that identifies a plain value by itself and any other object by its id.

    These objects are appended to `kept`, so that no other object can get the same id.
    """

    def atom(value: Any) -> Hashable:
        if isinstance(value, _ATOMS):
            return (type(value), value)
        if isinstance(value, tuple):
            return tuple(atom(item) for item in value)
        kept.append(value)
        return (type(value), id(value))

    return atom


def _tensor(value: torch.Tensor | None, atom: Callable[[Any], Hashable]) -> Hashable:
    if value is None:
        return None
    return (atom(value), value.dtype, value.device, tuple(value.shape), value.requires_grad)


def _record(
    path: str,
    container: Any,
    facts: dict[str, Hashable],
    constants: dict[str, torch.Tensor],
    atom: Callable[[Any], Hashable],
) -> None:
    """Add the contents of `container` to `facts`, and its tensors to `constants`."""
    for name, value in _items(container).items():
        where = f"{path}.{name}"
        facts[where] = _fact(where, value, constants, atom)


def _fact(
    where: str,
    value: Any,
    constants: dict[str, torch.Tensor],
    atom: Callable[[Any], Hashable],
) -> Hashable:
    if type(value) is list and len(value) <= _LONG and all(isinstance(v, _ATOMS) for v in value):
        # By content: save_pretrained replaces a list of the configuration by an equal one.
        return (list, atom(tuple(value)))
    if not isinstance(value, torch.Tensor):
        return atom(value)
    constants[where] = value
    return (_tensor(value, atom), _version(value))


def _items(container: Any) -> Mapping[Any, Any]:
    """Return the entries of a dictionary, a list or a set by name."""
    if isinstance(container, dict):
        return container
    if isinstance(container, set):
        return {f"has {value!r}": True for value in container}
    return dict(enumerate(container))


def _containers(
    path: str, values: Mapping[Any, Any], seen: set[int], depth: int = _DEPTH
) -> Iterator[tuple[str, Any]]:
    """Iterate over the containers in `values`, including the attributes of objects."""
    for name, value in values.items():
        for inner in _inside(value):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            where = f"{path}.{name}"
            yield where, inner
            if depth > 1 and len(inner) <= _LONG:
                yield from _containers(where, _items(inner), seen, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """Iterate over the parts of `value` that can be edited in place."""
    if isinstance(value, _CONTAINERS):
        yield value
    elif isinstance(value, functools.partial):
        yield value.keywords
        yield from _inside(value.func)
    elif not isinstance(value, (*_ATOMS, *_NOT_ENTERED)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes


def _is_array(value: object) -> bool:
    """Return True for arrays, whose == does not return a truth value."""
    return hasattr(value, "shape")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _difference(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> str:
    """Describe the first change, in the user's terms: ``0.p: 0.1 -> 0.5``."""
    for name in (*after, *before):
        old, new = before.get(name), after.get(name)
        if old != new:
            return f"{name}: {_say(old)} -> {_say(new)}"
    return ""


def _say(fact: Hashable) -> str:
    if fact is None:
        return "absent"
    if isinstance(fact, tuple) and len(fact) == 2 and isinstance(fact[0], type):
        kind, value = fact
        return repr(value) if issubclass(kind, _ATOMS) else kind.__name__
    if isinstance(fact, tuple) and len(fact) == 5:
        _, dtype, device, shape, requires_grad = fact
        frozen = "" if requires_grad else " frozen"
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{frozen}"
    return "changed"
