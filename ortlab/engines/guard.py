"""Notices what an exported graph would miss: edits of the module it was made from.

An exported graph is a photograph. `Guard.key` tells which photograph fits the module as it is now:
attributes, submodules, parameters and buffers (which, their type, device, shape, requires_grad),
hooks, train or eval, and configuration objects that hang off a module, two levels deep. It does
not see what forward reads elsewhere: globals, closures, files.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS = ("_parameters", "_buffers", "_modules")
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 2
_REMEMBERED = 8

_hook_count = operator.attrgetter("next_id")
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class _Place:
    """A dictionary that is watched, where it hangs, and what it held."""

    path: str
    values: dict[Any, Any]
    held: list[Any]


@dataclass(frozen=True)
class _Photo:
    """The module as it was when it was last looked at."""

    plain: list[_Place]
    by_identity: list[_Place]
    tensors: list[torch.Tensor]
    pointers: list[int]
    requires_grad: list[bool]
    hooks: list[dict[int, Any]]
    hook_lengths: list[int]
    hook_count: int
    forwards: list[tuple[type[nn.Module], Any]]
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
        except (RuntimeError, ValueError):
            return False  # an array came in: its == gives no truth value
        for place in photo.by_identity:
            values = place.values
            if len(values) != len(place.held) or not all(
                map(operator.is_, values.values(), place.held)
            ):
                return False
        return (
            list(map(torch.Tensor.data_ptr, photo.tensors)) == photo.pointers
            and list(map(_requires_grad, photo.tensors)) == photo.requires_grad
            and _hook_count(RemovableHandle) == photo.hook_count
            and list(map(len, photo.hooks)) == photo.hook_lengths
            and all(cls.forward is forward for cls, forward in photo.forwards)
        )

    def _look(self) -> _Photo:
        facts: dict[str, Hashable] = {}
        kept: list[Any] = []
        atom = _atom_into(kept)
        plain: list[_Place] = []
        by_identity: list[_Place] = []
        hooks: list[dict[int, Any]] = []
        tensors: dict[int, torch.Tensor] = {}
        forwards: dict[type[nn.Module], Any] = {}
        seen: set[int] = set()
        for name, module in self._module.named_modules():
            path = name or type(module).__name__
            forwards[type(module)] = type(module).forward
            for values_name in _MEMBERS:
                values = module.__dict__[values_name]
                if values:
                    by_identity.append(_Place(path, values, list(values.values())))
            for member in (*module._parameters.values(), *module._buffers.values()):
                if member is not None:
                    tensors[id(member)] = member
            for hook_name in _HOOKS:
                found = getattr(module, hook_name)
                hooks.append(found)
                if found:
                    facts[f"{path}.{hook_name[1:]}"] = tuple(map(atom, found.values()))
            for where, values in _dictionaries(path, module.__dict__, seen):
                has_array = any(hasattr(value, "shape") for value in values.values())
                (by_identity if has_array else plain).append(
                    _Place(where, values, list(values.values()))
                )
                for entry, value in values.items():
                    if where != path or entry not in (*_HOOKS, *_MEMBERS):
                        facts[f"{where}.{entry}"] = atom(value)
            for member_name, member in (*module._parameters.items(), *module._buffers.items()):
                facts[f"{path}.{member_name}"] = _tensor(member, atom)
            for child_name, child in module._modules.items():
                facts[f"{path}.{child_name}"] = atom(child)
        for cls, forward in forwards.items():
            facts[f"class {cls.__name__}.forward"] = atom(forward)
        watched = list(tensors.values())
        return _Photo(
            plain=plain,
            by_identity=by_identity,
            tensors=watched,
            pointers=[tensor.data_ptr() for tensor in watched],
            requires_grad=[tensor.requires_grad for tensor in watched],
            hooks=hooks,
            hook_lengths=list(map(len, hooks)),
            hook_count=_hook_count(RemovableHandle),
            forwards=list(forwards.items()),
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


def _dictionaries(
    path: str, values: dict[Any, Any], seen: set[int], depth: int = _DEPTH
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """`values`, and the dictionaries of the plain containers and objects that hang off it."""
    if id(values) in seen:
        return
    seen.add(id(values))
    yield path, values
    if depth == 0:
        return
    for name, value in values.items():
        if name in _MEMBERS or name in _HOOKS or isinstance(value, (*_ATOMS, type)):
            continue
        if isinstance(value, nn.Module | torch.Tensor) or callable(value):
            continue
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(inner, dict):
            yield from _dictionaries(f"{path}.{name}", inner, seen, depth - 1)


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
