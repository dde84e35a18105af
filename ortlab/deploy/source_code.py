"""Source of objects that a notebook's cells or a script define, with everything they depend on."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import linecache
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PLAIN = (int, float, bool, str, bytes, complex, type(None))


class Sources:
    """Collector of the imports and definitions that a piece of code needs.

    An object that is defined in the namespace is written out with its dependencies, an object of a
    module is imported, and a plain value is written as a literal.

    Attributes:
        missing: Names that are none of these; the user must fill them in.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._imports: dict[str, str] = {}
        self._definitions: dict[str, str] = {}
        self.missing: list[str] = []

    @property
    def imports(self) -> list[str]:
        """Import lines, sorted."""
        return sorted(self._imports.values())

    @property
    def definitions(self) -> list[str]:
        """Sources of classes, functions and values, each after its dependencies."""
        return list(self._definitions.values())

    def add_code(self, code: str) -> None:
        """Add everything that a piece of code needs.

        Args:
            code: An expression or statements.

        Raises:
            ValueError: If the code is not valid Python.
        """
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            raise ValueError(f"{code!r} is not valid Python: {error.msg}; correct it") from None
        for name in _free_names(tree):
            if name in self._namespace:
                self.add(name, self._namespace[name])
            elif name not in self.missing:
                self.missing.append(name)

    def add(self, name: str, value: Any) -> None:
        """Add the import or the definition of an object.

        Args:
            name: Name under which the code uses it.
            value: The object.
        """
        known = (*self._imports, *self._definitions, *self.missing)
        if name in known:
            return
        if isinstance(value, types.ModuleType):
            self._imports[name] = _import_of(name, value)
        elif isinstance(value, _PLAIN):
            self._definitions[name] = f"{name} = {value!r}"
        elif (place := _importable(value)) is not None:
            module, its_name = place
            renamed = "" if its_name == name else f" as {name}"
            self._imports[name] = f"from {module} import {its_name}{renamed}"
        else:
            self._define(name, value)

    def _define(self, name: str, value: Any) -> None:
        source = source_of(value)
        if source is None or value.__name__ != name:
            self.missing.append(name)
            return
        self._definitions[name] = ""  # already known below, because it may refer to itself
        tree = ast.parse(source)
        for needed in _free_names(tree):
            if needed in self._namespace:
                self.add(needed, self._namespace[needed])
            elif needed not in self.missing and not hasattr(builtins, needed):
                self.missing.append(needed)
        del self._definitions[name]
        self._definitions[name] = source


def source_of(value: Any) -> str | None:
    """Return the source of a class or a function, with its decorators.

    Python's own ``inspect.getsource`` looks for a class in its module's file, which does not exist
    for a cell. There, the class is found by the code of its methods, so a class without methods is
    not found.

    Args:
        value: The class or function.

    Returns:
        The source, or None if it cannot be found.
    """
    found = next((text for code in _codes(value) if (text := _around(code, value.__name__))), None)
    if found is None and isinstance(value, type):
        with contextlib.suppress(OSError, TypeError):  # a class of a script, without methods
            return inspect.getsource(value).rstrip()
    return found


def _around(code: types.CodeType, name: str) -> str | None:
    """Return the source of the definition called `name` that contains `code`."""
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != name:
            continue
        begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        assert node.end_lineno is not None
        if begin <= code.co_firstlineno <= node.end_lineno:
            return textwrap.dedent("".join(lines[begin - 1 : node.end_lineno])).rstrip()
    return None


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code objects of a function, or of a class's own methods."""
    found: Iterable[Any] = vars(value).values() if isinstance(value, type) else (value,)
    for each in found:
        function = inspect.unwrap(each) if callable(each) else each
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code


def _importable(value: Any) -> tuple[str, str] | None:
    """Return the module that has the object at its top level, and its name; None if none has."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return (module, name) if found is value else None


def _import_of(name: str, module: types.ModuleType) -> str:
    full = module.__name__
    parent, _, last = full.rpartition(".")
    if full == name:
        return f"import {full}"
    return f"from {parent} import {last}" if parent and last == name else f"import {full} as {name}"


def _free_names(tree: ast.AST) -> list[str]:
    """Return the names that the code reads and does not bind, in order of appearance."""
    bound = {
        *(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)),
        *(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)),
        *(
            n.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        *(
            (alias.asname or alias.name).partition(".")[0]
            for n in ast.walk(tree)
            if isinstance(n, ast.Import | ast.ImportFrom)
            for alias in n.names
        ),
    }
    read = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return [n for n in dict.fromkeys(read) if n not in bound and not hasattr(builtins, n)]
