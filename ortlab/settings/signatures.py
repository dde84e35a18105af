"""Signatures of public functions that take settings as keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from ortlab.settings.declaration import Declaration

P = ParamSpec("P")
T = TypeVar("T")


class _Plain(str):
    """Annotation of a module with postponed evaluation, which a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def takes(
    declared: Iterable[Declaration],
    *,
    renamed: Mapping[str, str] | None = None,
    changes: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that shows settings in a signature in place of ``**settings``.

    Shift+Tab, ``?`` and `inspect.signature` then list each setting with its default. Aliases are
    accepted and not shown.

    Args:
        declared: Settings that the function takes.
        renamed: Accepted name of another argument -> its name.
        changes: True if a setting that is not given stays as it is; its default is shown as "...".
    """
    others = dict(renamed or {})

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {parameter.name for parameter in named}
        shown = [_parameter(each) for each in declared if each.name not in taken]
        if changes:
            shown = [parameter.replace(default=...) for parameter in shown]

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> T:
            for name in others.keys() & options.keys():
                if others[name] in options:
                    raise ValueError(
                        f"{others[name]} is given twice, also as {name}, its former name; give it "
                        "once"
                    )
                options[others[name]] = options.pop(name)
            return function(*arguments, **options)

        plain = [p.replace(annotation=_Plain(p.annotation)) for p in (*named, *shown)]
        signature = own.replace(parameters=plain, return_annotation=_Plain(own.return_annotation))
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter(declaration: Declaration) -> inspect.Parameter:
    return inspect.Parameter(
        declaration.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declaration.default,
        annotation=declaration.type.__name__ + (" | None" if declaration.optional else ""),
    )
