"""Notices what an exported graph would miss: edits of the module it was made from.

An exported graph is a photograph. `Guard.key` tells which photograph fits the module as it is now:
attributes, submodules, parameters and buffers (which, their type, device, size, requires_grad),
hooks, train or eval, the classes and what stands in them, and the lists, dictionaries, partials
and configuration objects that hang off a module, two levels deep. It does not see what is deeper,
the contents of numpy arrays and of objects with slots, 1 becoming 1.0 or True, nor what forward
reads elsewhere: globals, closures, files.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS = ("_parameters", "_buffers", "_modules")
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 2
_REMEMBERED = 8

_NOT_ENTERED = (nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType)
_GLOBAL_HOOKS = tuple(
    value
    for name, value in vars(nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)

_hook_count = operator.attrgetter("next_id")
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class _Place:
    """A container that is watched, where it hangs, and what it held."""

    path: str
    values: Any
    held: Any


@dataclass(frozen=True)
class _Photo:
    """The module as it was when it was last looked at."""

    modules: list[nn.Module]
    types: list[type]
    plain: list[_Place]
    inner: list[_Place]
    by_identity: list[_Place]
    tensors: list[torch.Tensor]
    pointers: list[int]
    sizes: list[int]
    requires_grad: list[bool]
    constants: list[torch.Tensor]
    versions: list[int]
    hooks: list[dict[int, Any]]
    hook_lengths: list[int]
    hook_count: int
    key: Hashable = field(repr=False)
    facts: Mapping[str, Hashable] = field(repr=False)
    kept: list[Any] = field(repr=False)


class Guard:
    """Watches one module.

    `key` is cheap while nothing changed: about half a microsecond for every submodule, and a
    quarter for every parameter and buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._remembered: dict[Hashable, _Photo] = {}
        self._photo = self._remember(self._look())
        self.change = ""

    def key(self) -> Hashable:
        """Equal keys mean that the same exported graph fits; `change` says what last differed."""
        if self._untouched():
            return self._photo.key
        before = self._photo
        self._photo = self._remember(self._look())
        if self._photo.key != before.key:
            self.change = _difference(before.facts, self._photo.facts)
        return self._photo.key

    def _remember(self, photo: _Photo) -> _Photo:
        """`photo`, with the very key object of an equal one: then a look-up compares identities."""
        known = self._remembered.pop(photo.key, None)
        if known is not None:
            photo = dataclasses.replace(photo, key=known.key)
        self._remembered[photo.key] = photo
        while len(self._remembered) > _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return photo

    def _untouched(self) -> bool:
        photo = self._photo
        try:
            for place in photo.plain:
                if list(place.values.values()) != place.held:
                    return False
            for place in photo.inner:
                if place.values != place.held:
                    return False
        except Exception:  # noqa: BLE001 - the == of a value of the user's; then a look decides
            return False
        for place in photo.by_identity:
            values = place.values
            if len(values) != len(place.held) or not all(
                map(operator.is_, values.values(), place.held)
            ):
                return False
        return (
            list(map(type, photo.modules)) == photo.types
            and list(map(torch.Tensor.data_ptr, photo.tensors)) == photo.pointers
            and list(map(torch.Tensor.numel, photo.tensors)) == photo.sizes
            and list(map(_requires_grad, photo.tensors)) == photo.requires_grad
            and list(map(_version, photo.constants)) == photo.versions
            and _hook_count(RemovableHandle) == photo.hook_count
            and list(map(len, photo.hooks)) == photo.hook_lengths
        )

    def _look(self) -> _Photo:
        facts: dict[str, Hashable] = {}
        kept: list[Any] = []
        atom = _atom_into(kept)
        plain: list[_Place] = []
        inner: list[_Place] = []
        by_identity: list[_Place] = []
        hooks: list[dict[int, Any]] = list(_GLOBAL_HOOKS)
        facts["hooks of all modules"] = tuple(atom(h) for kind in hooks for h in kind.values())
        tensors: dict[int, torch.Tensor] = {}
        constants: dict[int, torch.Tensor] = {}
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
                    by_identity.append(_Place(path, values, list(values.values())))
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
            own = {k: v for k, v in module.__dict__.items() if k not in (*_HOOKS, *_MEMBERS)}
            _record(path, own, facts, constants, atom)
            places = by_identity if any(map(_is_array, own.values())) else plain
            places.append(_Place(path, module.__dict__, list(module.__dict__.values())))
            for where, container in _containers(path, own, seen):
                _record(where, container, facts, constants, atom)
                if not any(map(_is_array, _items(container).values())):
                    inner.append(_Place(where, container, copy.copy(container)))
        for cls in classes:
            if cls not in (nn.Module, object, Generic):
                entries = vars(cls)
                facts[f"class {cls.__qualname__}"] = tuple(map(atom, entries.values()))
                places = by_identity if any(map(_is_array, entries.values())) else plain
                places.append(_Place(cls.__qualname__, entries, list(entries.values())))
        watched = list(tensors.values())
        return _Photo(
            modules=[module for _, module in modules],
            types=[type(module) for _, module in modules],
            plain=plain,
            inner=inner,
            by_identity=by_identity,
            tensors=watched,
            pointers=[tensor.data_ptr() for tensor in watched],
            sizes=[tensor.numel() for tensor in watched],
            requires_grad=[tensor.requires_grad for tensor in watched],
            constants=list(constants.values()),
            versions=list(map(_version, constants.values())),
            hooks=hooks,
            hook_lengths=list(map(len, hooks)),
            hook_count=_hook_count(RemovableHandle),
            key=frozenset(facts.items()),
            facts=facts,
            kept=kept,
        )


def _atom_into(kept: list[Any]) -> Callable[[Any], Hashable]:
    """Names a value by itself where it is a plain one, else by its identity.

    What is named by its identity goes into `kept`: while that lives, no other object can have it.
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
    constants: dict[int, torch.Tensor],
    atom: Callable[[Any], Hashable],
) -> None:
    """Adds what `container` holds to `facts`, and the tensors in it to `constants`."""
    for name, value in _items(container).items():
        fact = atom(value)
        if isinstance(value, torch.Tensor):
            fact = (_tensor(value, atom), _version(value))
            constants[id(value)] = value
        facts[f"{path}.{name}"] = fact


def _items(container: Any) -> Mapping[Any, Any]:
    """The entries of a dictionary, a list, or a set by name."""
    if isinstance(container, dict):
        return container
    if isinstance(container, set):
        return {f"has {value!r}": True for value in container}
    return dict(enumerate(container))


def _containers(
    path: str, values: Mapping[Any, Any], seen: set[int], depth: int = _DEPTH
) -> Iterator[tuple[str, Any]]:
    """The lists, sets and dictionaries, and those of objects, that hang off `values`."""
    for name, value in values.items():
        for inner in _inside(value):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            where = f"{path}.{name}"
            yield where, inner
            if depth > 1:
                yield from _containers(where, _items(inner), seen, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """What of `value` can be edited in place."""
    if isinstance(value, dict | list | set):
        yield value
    elif isinstance(value, functools.partial):
        yield value.keywords
        yield from _inside(value.func)
    elif not isinstance(value, (*_ATOMS, *_NOT_ENTERED)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes


def _is_array(value: object) -> bool:
    """Whether == gives no truth value."""
    return hasattr(value, "shape")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _difference(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> str:
    """The first thing that changed, in the user's words: ``0.p: 0.1 -> 0.5``."""
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
