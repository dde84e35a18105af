"""Which models are wrapped: what may be, what was left as it is and why."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from ortlab.engines import base
from ortlab.engines.base import wrapped_model
from ortlab.engines.registry import engine as engine_called
from ortlab.settings import EngineSettings, unknown_name
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from torch import nn

    from ortlab.engines.base import Engine

Namespace = MutableMapping[str, Any]

_HISTORY = re.compile(r"_{1,3}|_\d+|_ih|_oh|_dh|_i{1,3}|_i\d+")
"""The names under which IPython keeps what cells gave; a wrapper's own names are not among them."""

_LOSS = re.compile(r"(?<!With)(?<!And)Loss$")
"""The name of a loss, not of a model that gives its own loss."""

_DEEPEST = 8
_MOST_ITEMS = 100_000
"""How far containers are searched for models."""

_MOST_REMARKS = 5
"""That the table shows of a model."""


@dataclass(frozen=True)
class WrappedEntry:
    """A wrapped model. It keeps neither wrapper nor model alive."""

    names: tuple[str, ...]
    settings: EngineSettings
    engine: Engine
    reference: weakref.ref[nn.Module]

    @property
    def wrapper(self) -> nn.Module | None:
        """What the engine made of the model; None when nobody holds it any more."""
        return self.reference()

    @property
    def original(self) -> nn.Module | None:
        """The user's own module."""
        wrapper = self.reference()
        return None if wrapper is None else self.engine.unwrap(wrapper)


@dataclass(frozen=True)
class NotWrapped:
    """A name that a cell bound to something that was left as it is, and why."""

    name: str
    reason: str
    is_value: Callable[[object], bool]


@dataclass(frozen=True)
class CellReport:
    """What became of the modules that a cell bound."""

    wrapped: tuple[WrappedEntry, ...]
    left: tuple[NotWrapped, ...]


@dataclass(frozen=True)
class ModelRow:
    """A wrapped model as the table shows it; `parameters` is how many numbers it has.

    `remarks` say where the engine does not do what eager torch does.
    """

    name: str
    engine_asked: str
    engine_used: str
    device: str
    precision: str
    parameters: int
    export_s: float
    check_s: float
    fallback_reason: str | None
    remarks: tuple[str, ...]


def _seconds(value: float) -> str:
    if not value:
        return "-"
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.0f} ms"


_COLUMNS: Final[tuple[Column[ModelRow], ...]] = (
    Column("model", lambda row: row.name),
    Column("engine asked", lambda row: row.engine_asked),
    Column("engine used", lambda row: row.engine_used),
    Column("device", lambda row: row.device),
    Column("precision", lambda row: row.precision),
    Column("parameters", lambda row: f"{row.parameters:,}", number=True),
    Column("export", lambda row: _seconds(row.export_s), number=True),
    Column("self-check", lambda row: _seconds(row.check_s), number=True),
    Column("fallback", lambda row: row.fallback_reason or "-"),
)


@dataclass
class _Group:
    """One module and the names that it is to be wrapped under."""

    module: nn.Module
    names: list[str]


class WrappedModels:
    """The wrapped models of a session.

    ``namespace`` is where the user's names live: the notebook's once the extension is loaded, None
    in a script.
    """

    def __init__(self) -> None:
        self.namespace: Namespace | None = None
        self._entries: list[WrappedEntry] = []
        self._left: dict[str, NotWrapped] = {}

    def __repr__(self) -> str:
        return f"<WrappedModels: {len(self.entries)} wrapped, {len(self.left)} not wrapped>"

    @property
    def entries(self) -> list[WrappedEntry]:
        """The wrapped models that somebody still holds, in the order of wrapping."""
        self._entries = [entry for entry in self._entries if entry.wrapper is not None]
        return list(self._entries)

    @property
    def left(self) -> list[NotWrapped]:
        """What cells bound and was left as it is, while the name still holds the same value."""
        held = self.namespace
        if held is not None:
            self._left = {
                name: one
                for name, one in self._left.items()
                if name in held and one.is_value(held[name])
            }
        return list(self._left.values())

    def entry(self, model: object) -> WrappedEntry | None:
        """The entry whose wrapper is `model`.

        An ORT wrapper that came to be without the session, a copy or one that was unpickled, gets
        its entry now.
        """
        if not is_model(model):
            return None
        known = next((entry for entry in self.entries if entry.wrapper is model), None)
        return known or self._adopt(model)

    def _adopt(self, model: nn.Module) -> WrappedEntry | None:
        wrapped = wrapped_model(model)
        if wrapped is None:
            return None
        # After a run those are the run's own settings.
        settings = wrapped.settings.as_dict()
        settings = {name: settings[name] for name in EngineSettings.declarations()}
        entry = WrappedEntry(
            (),
            EngineSettings.of({**settings, "engine": "ort"}),
            engine_called("ort"),
            weakref.ref(model),
        )
        self._entries.append(entry)
        return entry

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """`model` in its wrapper. ValueError says why a value cannot be wrapped."""
        reason = self.unfit(check_model("the argument", model))
        if reason is not None:
            raise ValueError(f"cannot wrap this {type(model).__name__}: it {reason}")
        ((_, wrapper),) = self._wrap([_Group(model, [])], settings)
        return wrapper

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside `model`; every name that held the wrapper gets it back."""
        entry = self.entry(model)
        if entry is None:
            raise ValueError(
                f"this {type(model).__name__} is not wrapped; ortlab.models() lists what is"
            )
        original = entry.engine.unwrap(model)
        self._entries.remove(entry)
        for name in self._names_of(model):
            assert self.namespace is not None
            self.namespace[name] = original
        return original

    def configure(self, model: nn.Module, changes: Mapping[str, Any]) -> None:
        """Changes settings of the wrapped `model`, from its next call on.

        ValueError for one that is not on engine ort, or for what `EngineSettings` refuse.
        """

        entry = self.entry(model)
        wrapped = wrapped_model(model)
        if entry is None or wrapped is None:
            raise ValueError(f"this {type(model).__name__} is not wrapped by engine 'ort'")
        settings = entry.settings.replace(**changes)
        wrapped.configure(settings)
        self._entries[self._entries.index(entry)] = replace(entry, settings=settings)

    def bind_cell(
        self,
        namespace: Namespace,
        bound: Iterable[str],
        names: Sequence[str],
        settings: EngineSettings,
    ) -> CellReport:
        """See `Session.bind_cell`."""
        if names:
            groups = self._named(namespace, names)
            left: list[NotWrapped] = []
        else:
            groups, left = self._found(namespace, bound)
        wrapped = self._wrap(groups, settings)
        for entry, wrapper in wrapped:
            for name in entry.names:
                namespace[name] = wrapper
                self._left.pop(name, None)
        self._left |= {one.name: one for one in left}
        # The models of the cell's last run, should it run again; memory that is not left to chance.
        self._forget_unreachable()
        return CellReport(tuple(entry for entry, _ in wrapped), tuple(left))

    def table(self) -> Table[ModelRow]:
        """The wrapped models; below them what is to be known of each, and what was left and why."""
        for name, value in list((self.namespace or {}).items()):
            if is_own_name(name):
                self.entry(value)
        self._forget_unreachable()
        rows = [row for entry in self.entries if (row := self._row(entry)) is not None]
        return Table(
            rows,
            _COLUMNS,
            notes=[
                *(f"{row.name}: {note}" for row in rows for note in row.remarks),
                *(f"left as it is: {one.name} {one.reason}" for one in self.left),
            ],
            empty="no model is wrapped",
        )

    def _row(self, entry: WrappedEntry) -> ModelRow | None:
        wrapper, original = entry.wrapper, entry.original
        if wrapper is None or original is None:
            return None
        report = entry.engine.report(wrapper)
        parameters = list(original.parameters())
        return ModelRow(
            name=", ".join(self._names_of(wrapper)) or f"a {type(original).__name__}",
            engine_asked=entry.settings.engine,
            engine_used=report.engine_used,
            device=", ".join(sorted({str(p.device) for p in parameters})),
            precision=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            parameters=sum(p.numel() for p in parameters),
            export_s=report.export_s,
            check_s=report.check_s,
            fallback_reason=report.fallback_reason,
            remarks=report.remarks[:_MOST_REMARKS],
        )

    def _forget_unreachable(self) -> None:
        """Wrappers hold themselves in cycles: one that has lost its names may be gone in truth."""
        if not all(
            entry.wrapper is None or self._names_of(entry.wrapper) for entry in self.entries
        ):
            gc.collect()

    def _names_of(self, model: nn.Module) -> list[str]:
        if self.namespace is None:
            return []
        return [
            name for name, value in self.namespace.items() if value is model and is_own_name(name)
        ]

    def _found(
        self, namespace: Namespace, bound: Iterable[str]
    ) -> tuple[list[_Group], list[NotWrapped]]:
        """What is to be wrapped among the values of `bound`, and what is not."""
        groups: dict[int, _Group] = {}
        left: list[NotWrapped] = []
        for name in dict.fromkeys(bound):
            value = namespace.get(name)
            if not is_model(value):
                count = _models_inside(value)
                if count:
                    left.append(_left(name, value, f"holds {count} and is not a model itself"))
                continue
            reason = self.unfit(value, rebound=True) or _role(value)
            if reason is not None:
                left.append(_left(name, value, reason))
            else:
                groups.setdefault(id(value), _Group(value, [])).names.append(name)
        owners = self._owners(groups.values())
        for key in [key for key in groups if key in owners]:
            inner = groups.pop(key)
            left += [
                _left(name, inner.module, f"is a part of {owners[key]}") for name in inner.names
            ]
        return list(groups.values()), left

    def _named(self, namespace: Namespace, names: Sequence[str]) -> list[_Group]:
        """What `names` name; ValueError for the first that cannot be wrapped."""
        groups: dict[int, _Group] = {}
        for name in dict.fromkeys(names):
            model = model_called(name, namespace)
            reason = self.unfit(model)
            if reason is not None:
                raise ValueError(f"cannot wrap {name}: it {reason}")
            groups.setdefault(id(model), _Group(model, [])).names.append(name)
        owners = self._owners(groups.values())
        for key, group in groups.items():
            if key in owners:
                raise ValueError(
                    f"cannot wrap {group.names[0]}: it is a part of {owners[key]}; wrap one of them"
                )
        return list(groups.values())

    def _owners(self, groups: Iterable[_Group]) -> dict[int, str]:
        """Of every inner module of `groups` and of the wrapped models: its id, its owner's name."""
        owners = [(group.names[0], group.module) for group in groups]
        for entry in self.entries:
            original = entry.original
            if original is not None:
                held_by = entry.names[0] if entry.names else f"a wrapped {type(original).__name__}"
                owners.append((held_by, original))
        return {
            id(part): name
            for name, owner in owners
            for part in owner.modules()
            if part is not owner
        }

    def unfit(self, model: nn.Module, *, rebound: bool = False) -> str | None:
        """Why no engine may wrap `model`; None when one may. Goes on from 'it'.

        The eager engine's wrapper is the model itself. A cell that binds such a model again
        (`rebound`) may give it another engine, and another model may contain it.
        """
        entry = self.entry(model)
        if entry is not None and not (rebound and entry.original is model):
            return f"is already wrapped (engine {entry.settings.engine!r})"
        wrappers = [entry.wrapper for entry in self.entries if entry.wrapper is not entry.original]
        for part in base.parts(model):
            if any(part is wrapper for wrapper in wrappers):
                return "contains a wrapped model; unwrap that first"
        return base.unfit(model)

    def _wrap(
        self, groups: Sequence[_Group], settings: EngineSettings
    ) -> list[tuple[WrappedEntry, nn.Module]]:
        """Wraps all of `groups`; nothing is recorded when one of them fails."""
        if not groups:
            return []
        engine = engine_called(settings.engine)
        made = []
        for group in groups:
            wrapper = self._wrapper_of(group.module, settings)
            if wrapper is None:
                wrapper = engine.wrap(group.module, settings)
            entry = WrappedEntry(tuple(group.names), settings, engine, weakref.ref(wrapper))
            made.append((entry, wrapper, group.module))
        for entry, wrapper, module in made:
            # The entry of the same wrapper, or of the model itself on the eager engine.
            self._entries = [old for old in self.entries if old.wrapper not in (wrapper, module)]
            self._entries.append(entry)
        return [(entry, wrapper) for entry, wrapper, _ in made]

    def _wrapper_of(self, model: nn.Module, settings: EngineSettings) -> nn.Module | None:
        """The wrapper that `model` has already, with the same settings: a cell that runs again."""
        for entry in self.entries:
            if entry.original is model and entry.settings == settings:
                return entry.wrapper
        return None


def is_model(value: object) -> TypeGuard[nn.Module]:
    """Whether `value` is a torch.nn.Module; does not import torch for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_own_name(name: str) -> bool:
    """Whether `name` is one that a user gave, not one under which IPython keeps results."""
    return _HISTORY.fullmatch(name) is None


def model_called(name: str, namespace: Mapping[str, Any]) -> nn.Module:
    """The module called `name` in `namespace`; ValueError says what there is instead."""
    if name not in namespace:
        known = [
            other for other, value in namespace.items() if is_model(value) and is_own_name(other)
        ]
        raise ValueError(f"no model is called {name!r}: {unknown_name(name, known)}")
    return check_model(name, namespace[name])


def check_model(name: str, value: object) -> nn.Module:
    """`value` where it is a module; else ValueError says what `name` is."""
    if is_model(value):
        return value
    if isinstance(value, type):
        raise ValueError(f"{name} is the class {value.__name__}; make an instance of it")
    advice = "; bind one of its models to a name" if _models_inside(value) else ""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    raise ValueError(f"{name} is {article} {kind}, not a torch.nn.Module{advice}")


def _models_inside(value: object) -> str:
    """How many trainable models a plain container holds, in words; empty for none.

    Containers in it are searched, too, the outer ones first.
    """
    if not _is_container(value):
        return ""
    found: set[int] = set()
    met = {id(value)}
    left = _MOST_ITEMS
    waiting = deque([(value, 1)])
    while waiting:
        container, depth = waiting.popleft()
        items = container.values() if isinstance(container, Mapping) else container
        for item in list(itertools.islice(items, left)):
            left -= 1
            if is_model(item):
                if any(p.requires_grad for p in item.parameters()):
                    found.add(id(item))
            elif depth < _DEEPEST and id(item) not in met and _is_container(item):
                met.add(id(item))
                waiting.append((item, depth + 1))
    return f"{len(found)} model{'s' * (len(found) > 1)}" if found else ""


def _is_container(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Mapping | list | tuple | set | frozenset | deque)


def _role(model: nn.Module) -> str | None:
    """What else than the model to train `model` is; such modules are wrapped only when named."""
    from torch.nn.modules.loss import _Loss  # heavy: torch

    kind = type(model)
    if isinstance(model, _Loss) or _LOSS.search(kind.__name__):
        return f"is a loss ({kind.__name__})"
    if any(each.__module__.partition(".")[0] == "torchmetrics" for each in kind.__mro__):
        return f"is a metric ({kind.__name__})"
    return None


def _left(name: str, value: object, reason: str) -> NotWrapped:
    if is_model(value):
        reference = weakref.ref(value)
        return NotWrapped(name, reason, lambda other: other is reference())
    address = id(value)  # a list takes no weak reference, and must not be kept alive either
    return NotWrapped(name, reason, lambda other: id(other) == address)
