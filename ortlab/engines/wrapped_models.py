"""Registry of the wrapped models: what may be wrapped, and what was not wrapped and why."""

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
from ortlab.engines.base import EngineUnavailable, GraphCount, Report, wrapped_model
from ortlab.engines.holders import holders
from ortlab.engines.registry import engine as engine_called
from ortlab.engines.registry import resolved, succeed
from ortlab.settings import AUTO, EngineSettings, unknown_name
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from torch import nn

    from ortlab.engines.base import Engine

Namespace = MutableMapping[str, Any]

_HISTORY = re.compile(r"_{1,3}|_\d+|_ih|_oh|_dh|_i{1,3}|_i\d+")
"""Names under which IPython keeps results of cells; they are not names of a wrapper."""

_LOSS = re.compile(r"(?<!With)(?<!And)Loss$")
"""Class name of a loss, as opposed to a model that returns its own loss."""

_DEEPEST = 8
_MOST_ITEMS = 100_000
"""Depth and number of items up to which containers are searched for models."""

_MOST_PLACES = 5
"""Places that still refer to a wrapper, of which a message names so many."""

_MOST_REMARKS = 5
"""Remarks on a model that the table shows."""

_KERAS = ("keras", "tensorflow", "tf_keras")
"""Packages whose models are torch modules on Keras's torch backend alone."""


@dataclass(frozen=True)
class WrappedEntry:
    """A wrapped model; the entry keeps neither the wrapper nor the model alive.

    Attributes:
        names: Names that the model was wrapped under.
        settings: Settings that it was wrapped with.
        engine: Engine that made the wrapper.
        choice: Reason for this engine if "auto" was asked for; "" if it was named.
        reference: Weak reference to the wrapper.
    """

    names: tuple[str, ...]
    settings: EngineSettings
    engine: Engine
    reference: weakref.ref[nn.Module]
    choice: str = ""

    @property
    def wrapper(self) -> nn.Module | None:
        """Wrapper that the engine made; None once nothing refers to it."""
        return self.reference()

    @property
    def original(self) -> nn.Module | None:
        """The user's own module; None once nothing refers to the wrapper."""
        wrapper = self.reference()
        return None if wrapper is None else self.engine.unwrap(wrapper)


@dataclass(frozen=True)
class NotWrapped:
    """A name that a cell bound to a value that was not wrapped, and the reason.

    Attributes:
        name: The name.
        reason: Why it was not wrapped, to follow "it".
        is_value: Return whether an object is the value that the name had.
    """

    name: str
    reason: str
    is_value: Callable[[object], bool]


@dataclass(frozen=True)
class CellReport:
    """Result of wrapping the modules that a cell bound.

    Attributes:
        wrapped: The wrapped models.
        left: Names that were not wrapped.
    """

    wrapped: tuple[WrappedEntry, ...]
    left: tuple[NotWrapped, ...]


@dataclass(frozen=True)
class ModelRow:
    """Row of a wrapped model in the table.

    Attributes:
        name: Names of the wrapper, joined by commas.
        kind: Class of the model.
        engine_asked: Engine that was asked for.
        engine_used: Engine in use.
        device: Devices of the parameters.
        precision: Types of the parameters.
        parameters: Number of parameters, counted as single values.
        export_s: Time of the exports, in seconds.
        check_s: Time of the self-checks, in seconds.
        fallback_reason: Why another engine is in use; None without a fallback.
        remarks: Reason for the engine "auto", and differences from eager torch.
        graphs: Number of its graphs; None for an engine that makes none.
    """

    name: str
    kind: str
    engine_asked: str
    engine_used: str
    device: str
    precision: str
    parameters: int
    export_s: float
    check_s: float
    fallback_reason: str | None
    remarks: tuple[str, ...]
    graphs: GraphCount | None


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
    """A module and the names that it is wrapped under."""

    module: nn.Module
    names: list[str]


class WrappedModels:
    """The wrapped models of a session.

    Attributes:
        namespace: The user's variables; None outside a notebook.
    """

    def __init__(self) -> None:
        self.namespace: Namespace | None = None
        self._entries: list[WrappedEntry] = []
        self._left: dict[str, NotWrapped] = {}

    def __repr__(self) -> str:
        return f"<WrappedModels: {len(self.entries)} wrapped, {len(self.left)} not wrapped>"

    @property
    def entries(self) -> list[WrappedEntry]:
        """Wrapped models that still exist, in the order of wrapping."""
        self._entries = [entry for entry in self._entries if entry.wrapper is not None]
        return list(self._entries)

    @property
    def left(self) -> list[NotWrapped]:
        """Values of cells that are not wrapped, as long as their names are bound to them."""
        held = self.namespace
        if held is not None:
            self._left = {
                name: one
                for name, one in self._left.items()
                if name in held and one.is_value(held[name]) and self.entry(held[name]) is None
            }
        return list(self._left.values())

    def entry(self, model: object) -> WrappedEntry | None:
        """Return the entry of a wrapper.

        An ORT wrapper that was created without the session, such as a copy or an unpickled one,
        gets its entry now.

        Args:
            model: Any object.

        Returns:
            The entry; None if `model` is not a wrapper.
        """
        if not is_model(model):
            return None
        known = next((entry for entry in self.entries if entry.wrapper is model), None)
        return known or self._adopt(model)

    def _adopt(self, model: nn.Module) -> WrappedEntry | None:
        wrapped = wrapped_model(model)
        if wrapped is None:
            return None
        settings = wrapped.settings.replace(engine=wrapped.engine)
        entry = WrappedEntry((), settings, engine_called(wrapped.engine), weakref.ref(model))
        self._entries.append(entry)
        return entry

    def wrap(
        self, model: nn.Module, settings: EngineSettings, *, in_torch: str | None = None
    ) -> nn.Module:
        """Wrap a model.

        Args:
            model: The model.
            settings: Engine and its options.
            in_torch: Why "auto" may not be an engine of ORT.

        Returns:
            The wrapper.

        Raises:
            ValueError: If the model cannot be wrapped; the message gives the reason.
        """
        reason = self.unfit(check_model("the argument", model))
        if reason is not None:
            raise ValueError(f"cannot wrap this {type(model).__name__}: it {reason}")
        ((_, wrapper),) = self._wrap([_Group(model, [])], settings, in_torch)
        return wrapper

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside a wrapper and bind the wrapper's names to it again.

        Args:
            model: A wrapper.

        Raises:
            ValueError: If `model` is not wrapped.
        """
        entry = self.entry(model)
        if entry is None:
            raise ValueError(
                f"this {type(model).__name__} is not wrapped; ortlab.models() lists the wrapped "
                "models"
            )
        original = entry.engine.unwrap(model)
        self._entries.remove(entry)
        for name in self._names_of(model):
            assert self.namespace is not None
            self.namespace[name] = original
        return original

    def still_wrapped(self, wrapper: nn.Module, original: nn.Module) -> str:
        """Return a line about the user's objects that refer to a wrapper after `unwrap`.

        An optimizer of the wrapper's parameters is not among them: they are the model's own.

        Args:
            wrapper: Argument of `unwrap`.
            original: Result of `unwrap`; on the eager engine it is the wrapper.

        Returns:
            The places in the user's variables, and what to do; "" if there are none.
        """
        if self.namespace is None or wrapper is original:
            return ""
        own = {name: value for name, value in self.namespace.items() if is_own_name(name)}
        # IPython's dictionary of results is the variable `Out`, too.
        found = holders(wrapper, own, besides=(self.namespace, self.namespace.get("_oh")))
        if not found:
            return ""
        more = f" and {len(found) - _MOST_PLACES} more" if len(found) > _MOST_PLACES else ""
        return (
            f"still wrapped: {', '.join(found[:_MOST_PLACES])}{more}; assign the unwrapped model "
            "there, or create these objects again"
        )

    def configure(self, model: nn.Module, changes: Mapping[str, Any]) -> None:
        """Change settings of a wrapped model from its next call on.

        Args:
            model: A model wrapped in engine ``"ortmodule"``.
            changes: New values by setting.

        Raises:
            ValueError: If the model is not wrapped in that engine, or a setting is wrong.
        """
        entry = self.entry(model)
        wrapped = wrapped_model(model)
        if entry is None or wrapped is None:
            raise ValueError(f"this {type(model).__name__} is not wrapped by engine 'ortmodule'")
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
            groups = self._named(namespace, names, settings)
            left: list[NotWrapped] = []
        else:
            groups, left = self._found(namespace, bound)
        wrapped = self._wrap(groups, settings)
        for entry, wrapper in wrapped:
            for name in entry.names:
                namespace[name] = wrapper
                self._left.pop(name, None)
        self._left |= {one.name: one for one in left}
        # Release the models of the cell's previous execution now, not at some later collection.
        self._forget_unreachable()
        return CellReport(tuple(entry for entry, _ in wrapped), tuple(left))

    def leave_cell(
        self, namespace: Namespace, bound: Iterable[str], names: Sequence[str]
    ) -> list[NotWrapped]:
        """See `Session.leave_cell`."""
        if names:
            named = {name: namespace.get(name) for name in names}
            groups = [_Group(value, [name]) for name, value in named.items() if is_model(value)]
        else:
            groups, _ = self._found(namespace, bound)
        left = [
            _left(name, group.module, "belongs to a cell that did not finish")
            for group in groups
            if self.unfit(group.module) is None
            for name in group.names
        ]
        self._left |= {one.name: one for one in left}
        return left

    def table(self) -> Table[ModelRow]:
        """Return a table of the wrapped models.

        Notes below it give remarks on each model, and the values that were not wrapped.
        """
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
                *(f"not wrapped: {one.name} ({one.reason})" for one in self.left),
            ],
            empty="no model is wrapped",
        )

    def _row(self, entry: WrappedEntry) -> ModelRow | None:
        wrapper, original = entry.wrapper, entry.original
        if wrapper is None or original is None:
            return None
        try:
            report = entry.engine.report(wrapper)
        # A run may change anything meanwhile. The other rows are right, and so is the next table.
        except Exception as error:  # noqa: BLE001
            told = f"its report cannot be read now: {type(error).__name__}: {error}"
            report = Report(entry.settings.engine, remarks=(told,))
        parameters = list(original.parameters())
        return ModelRow(
            name=", ".join(self._names_of(wrapper)) or f"a {type(original).__name__}",
            kind=type(original).__name__,
            engine_asked=AUTO if entry.choice else entry.settings.engine,
            engine_used=report.engine_used,
            device=", ".join(sorted({str(p.device) for p in parameters})),
            precision=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            parameters=sum(p.numel() for p in parameters),
            export_s=report.export_s,
            check_s=report.check_s,
            fallback_reason=report.fallback_reason,
            remarks=tuple(filter(None, (entry.choice, *report.remarks[:_MOST_REMARKS]))),
            graphs=report.graphs,
        )

    def _forget_unreachable(self) -> None:
        """Collect garbage if a wrapper has no name; only reference cycles may keep it alive."""
        if not all(
            entry.wrapper is None or self._names_of(entry.wrapper) for entry in self.entries
        ):
            gc.collect()

    def _names_of(self, model: nn.Module) -> list[str]:
        if self.namespace is None:
            return []
        variables = list(self.namespace.items())  # other threads may add some
        return [name for name, value in variables if value is model and is_own_name(name)]

    def _found(
        self, namespace: Namespace, bound: Iterable[str]
    ) -> tuple[list[_Group], list[NotWrapped]]:
        """Return the models to wrap among the values of `bound`, and those not to wrap."""
        groups: dict[int, _Group] = {}
        left: list[NotWrapped] = []
        for name in dict.fromkeys(bound):
            value = namespace.get(name)
            if not is_model(value):
                count = _models_inside(value)
                if count:
                    left.append(_left(name, value, f"contains {count} and is not a model itself"))
                continue
            reason = self.unfit(value, rebound=True) or _role(value)
            if reason is not None:
                left.append(_left(name, value, reason))
            else:
                groups.setdefault(id(value), _Group(value, [])).names.append(name)
        owners = self._owners(groups.values())
        for key in [key for key in groups if key in owners]:
            inner = groups.pop(key)
            left += [_left(name, inner.module, f"is part of {owners[key]}") for name in inner.names]
        return list(groups.values()), left

    def _named(
        self, namespace: Namespace, names: Sequence[str], settings: EngineSettings
    ) -> list[_Group]:
        """Return the models that `names` refer to; those with these settings keep their wrapper."""
        groups: dict[int, _Group] = {}
        for name in dict.fromkeys(names):
            model = model_called(name, namespace)
            entry = self.entry(model)
            if entry is not None and entry.settings == resolved(settings)[0]:
                model = entry.engine.unwrap(model)
            elif (reason := self.unfit(model)) is not None:
                raise ValueError(f"cannot wrap {name}: it {reason}")
            groups.setdefault(id(model), _Group(model, [])).names.append(name)
        owners = self._owners(groups.values())
        for key, group in groups.items():
            if key in owners:
                raise ValueError(
                    f"cannot wrap {group.names[0]}: it is part of {owners[key]}; wrap one of them"
                )
        return list(groups.values())

    def _owners(self, groups: Iterable[_Group]) -> dict[int, str]:
        """Return the name of the owner of each inner module, by the id of the module."""
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
        """Return why no engine may wrap a model.

        The wrapper of the eager engine is the model itself. Another model may contain it, and a
        cell that binds it again may give it another engine.

        Args:
            model: The model.
            rebound: Whether a cell has bound the model again.

        Returns:
            The reason, to follow "it"; None if the model may be wrapped.
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
        self, groups: Sequence[_Group], settings: EngineSettings, in_torch: str | None = None
    ) -> list[tuple[WrappedEntry, nn.Module]]:
        """Wrap all of `groups`; if one of them fails, nothing is recorded."""
        if not groups:
            return []
        chosen, choice = resolved(settings, in_torch=in_torch)
        try:
            return self._wrap_in(groups, chosen, choice)
        except EngineUnavailable as error:  # only its import shows that an installed ORT is broken
            other, choice = resolved(settings, missing=str(error))
            if other == chosen:
                raise
            return self._wrap_in(groups, other, choice)

    def _wrap_in(
        self, groups: Sequence[_Group], settings: EngineSettings, choice: str
    ) -> list[tuple[WrappedEntry, nn.Module]]:
        engine = engine_called(settings.engine)
        made = []
        for group in groups:
            wrapper = self._wrapper_of(group.module, settings)
            if wrapper is None:
                try:
                    wrapper = engine.wrap(group.module, settings)
                except Exception as error:
                    if group.names:
                        error.add_note(f"raised while wrapping {', '.join(group.names)}")
                    raise
            succeed(wrapper, chosen=bool(choice))
            entry = WrappedEntry(tuple(group.names), settings, engine, weakref.ref(wrapper), choice)
            made.append((entry, wrapper, group.module))
        for entry, wrapper, module in made:
            # Replaces the entry of the same wrapper, or of the model itself on the eager engine.
            self._entries = [old for old in self.entries if old.wrapper not in (wrapper, module)]
            self._entries.append(entry)
        return [(entry, wrapper) for entry, wrapper, _ in made]

    def _wrapper_of(self, model: nn.Module, settings: EngineSettings) -> nn.Module | None:
        """Return the wrapper of `model` with the same settings, if a cell runs again."""
        for entry in self.entries:
            if entry.original is model and entry.settings == settings:
                return entry.wrapper
        return None


def is_model(value: object) -> TypeGuard[nn.Module]:
    """Return whether a value is a `torch.nn.Module`, without importing torch.

    Args:
        value: Any object.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_own_name(name: str) -> bool:
    """Return whether a name is the user's, not one under which IPython keeps results.

    Args:
        name: Name of a variable.
    """
    return _HISTORY.fullmatch(name) is None


def model_called(name: str, namespace: Mapping[str, Any]) -> nn.Module:
    """Return the model called `name`.

    Args:
        name: Name of a variable.
        namespace: The user's variables.

    Raises:
        ValueError: If there is none; the message lists the models.
    """
    if name not in namespace:
        known = [
            other for other, value in namespace.items() if is_model(value) and is_own_name(other)
        ]
        raise ValueError(f"no model is called {name!r}: {unknown_name(name, known)}")
    return check_model(name, namespace[name])


def check_model(name: str, value: object) -> nn.Module:
    """Return a value that must be a model.

    Args:
        name: What to call the value in the error.
        value: The value.

    Raises:
        ValueError: If it is not a `torch.nn.Module`.
    """
    if is_model(value):
        return value
    if isinstance(value, type):
        raise ValueError(f"{name} is the class {value.__name__}; create an instance of it")
    advice = "; bind one of its models to a name" if _models_inside(value) else ""
    if any(base.__module__.partition(".")[0] in _KERAS for base in type(value).__mro__):
        advice = '; set os.environ["KERAS_BACKEND"] = "torch" before keras is imported'
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    raise ValueError(f"{name} is {article} {kind}, not a torch.nn.Module{advice}")


def _models_inside(value: object) -> str:
    """Return how many trainable models a container holds, in words; empty for none.

    Nested containers are searched after the outer ones.
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
    """Return what `model` is if not a model to train; such modules are wrapped only by name."""
    from torch.nn.modules.loss import _Loss  # heavy: torch

    kind = type(model)
    if isinstance(model, _Loss) or _LOSS.search(kind.__name__):
        return f"is a loss ({kind.__name__})"
    if any(each.__module__.partition(".")[0] == "torchmetrics" for each in kind.__mro__):
        return f"is a metric ({kind.__name__})"
    return None


def _left(name: str, value: object, reason: str) -> NotWrapped:
    """Return the record of a value that was not wrapped."""
    if is_model(value):
        reference = weakref.ref(value)
        return NotWrapped(name, reason, lambda other: other is reference())
    address = id(value)  # lists allow no weak reference, and must not be kept alive either
    return NotWrapped(name, reason, lambda other: id(other) == address)
