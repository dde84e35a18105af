"""Fingerprint of everything that an exported graph of a module depends on.

It is the same in every process. It covers the code that forward runs and the data that this code
reads: configuration, attributes, buffers, closures, defaults and globals by content; parameters by
shape and type, never by value. Code is followed by its names: the user's code together with the
globals that it reads, code of installed packages without their data. Torch, ORT, numpy and
Python's standard library are covered by their version. Not covered are attributes whose name is
computed (``getattr(self, f"p{i}")``) and imports within a function.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import logging
import operator
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_BY_VERSION = {"torch", "onnx", "onnxruntime", "numpy"} | sys.stdlib_module_names
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_NO_STATE = (
    logging.Logger,
    random.Random,
    np.random.Generator,
    torch.Generator,
    type(threading.Lock()),
    type(threading.RLock()),
)
"""Types that no graph depends on. The self-check finds out whether forward draws random numbers."""
_WHERE_FROM = {"_name_or_path", "name_or_path", "_commit_hash"}
"""Attributes where transformers stores the origin of a model; its graph does not depend on it."""
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
"""Buffers of torch's norms: they change with every step, and the graph reads them as inputs."""
_OPERATORS = {name for name in dir(operator) if name.startswith("__")} | {
    "__call__",
    "__enter__",
    "__exit__",
    "__getattr__",
    "__iter__",
    "__len__",
    "__post_init__",
}
"""Methods that code calls implicitly, without their name."""
_MOST_VALUES = 200_000
_MOST_BYTES = 1 << 28


class Unknowable(Exception):
    """Raised when forward can read an object whose content cannot be fingerprinted."""


def fingerprint(module: nn.Module, facts: Mapping[str, Any]) -> str:
    """Return the fingerprint of a module.

    Args:
        module: Module whose graph is to be identified.
        facts: Further values that the graph depends on: plain values and containers of them.

    Returns:
        64 hexadecimal digits.

    Raises:
        Unknowable: If forward can read an object whose content cannot be fingerprinted; the message
            names the object.
    """
    reader = _Reader(module)
    reader.value("facts", facts)
    reader.modules()
    return reader.digest()


class _Reader:
    """Reader of all code and data, in an order that is the same in every process."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._paths = {id(child): name for name, child in root.named_modules()}
        self._hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}
        self._functions: list[types.FunctionType] = []
        self._classes: dict[type, set[str]] = {}
        """Names of the members that were read, by class."""
        self._names = {"forward"}
        self._packages: set[str] = set()
        self._parameters: dict[int, int] = {}
        self._bytes = 0

    def modules(self) -> None:
        """Read the modules of the root, the global module hooks, and all code that they use."""
        for name, hooks in vars(module_hooks).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                self.value(name, list(hooks.values()))
        for path, child in self._root.named_modules():
            self._module(path, child)
        at = 0
        while at < len(self._functions) or self._members():
            for function in self._functions[at:]:
                self._body(function)
                at += 1

    def digest(self) -> str:
        """Return the fingerprint of everything that was read."""
        for package in sorted(self._packages):
            self._say("package", package, getattr(sys.modules.get(package), "__version__", ""))
        return self._hash.hexdigest()

    def value(self, where: str, value: Any) -> None:
        """Read any value.

        Args:
            where: Name of the value in the user's code.
            value: The value.

        Raises:
            Unknowable: If the content cannot be fingerprinted.
        """
        if isinstance(value, _ATOMS):
            self._say(type(value).__name__, repr(value))
        elif id(value) in self._met:
            self._say("met", self._met[id(value)][0])
        elif len(self._met) == _MOST_VALUES:
            raise Unknowable(f"{where} and everything else that forward reads are too many values")
        else:
            # Keep a reference: no other object can then get the same id.
            self._met[id(value)] = len(self._met), value
            self._new(where, value)

    def _say(self, *words: object) -> None:
        self._hash.update(("\0".join(map(str, words)) + "\1").encode("utf-8", "surrogatepass"))

    def _new(self, where: str, value: Any) -> None:
        if isinstance(value, _NO_STATE):
            self._say("of no effect", _name(type(value)))
        elif isinstance(value, torch.Tensor):
            self._tensor(where, value)
        elif isinstance(value, np.ndarray):
            self._array(where, value)
        elif isinstance(value, nn.Module):
            self._elsewhere(where, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._import(where, value)
        elif isinstance(value, enum.Enum):
            self._say("enum", _name(type(value)), value.name)
        elif isinstance(value, types.FunctionType):
            self._say("function", value.__module__, value.__qualname__)
            self._functions.append(value)
        else:
            parts = _parts(value)
            if parts is None:
                self._opaque(where, value)
            else:
                self._class(type(value))
                self._say("parts", len(parts))
                for name, part in parts:
                    if name not in _WHERE_FROM:
                        self.value(where, name)
                        self.value(f"{where}.{name}", part)

    def _opaque(self, where: str, value: Any) -> None:
        """Read an object without parts by its name, or by its repr."""
        kind = type(value)
        if callable(value) and hasattr(value, "__qualname__"):
            self._say("builtin", getattr(value, "__module__", ""), value.__qualname__)
        elif " at 0x" in repr(value):  # the repr contains only an address
            raise Unknowable(f"{where} is a {kind.__name__}")
        else:
            self._say("prints", _name(kind), repr(value))

    # --- Tensors and arrays, by content

    def _tensor(self, where: str, value: torch.Tensor) -> None:
        self._metadata(value)
        try:
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise Unknowable(f"{where} is a {value.layout} tensor") from error
        self._content(where, content)

    def _array(self, where: str, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.hasobject:
            raise Unknowable(f"{where} is an array of objects")
        self._say("array", value.dtype.str, value.shape)
        self._content(where, np.ascontiguousarray(value))

    def _content(self, where: str, content: np.ndarray[Any, Any]) -> None:
        self._bytes += content.nbytes
        if self._bytes > _MOST_BYTES:
            raise Unknowable(f"{where} and everything else that forward reads are too much data")
        self._hash.update(content.data)

    def _metadata(self, value: torch.Tensor) -> None:
        kind = (value.dtype, tuple(value.shape), value.device.type, value.layout)
        self._say(_name(type(value)), *kind, value.requires_grad)

    # --- Modules

    def _module(self, path: str, module: nn.Module) -> None:
        """Read a module of the tree: its parameters by shape, the rest by content."""
        self._say("module", path)
        self._class(type(module))
        for name, parameter in module._parameters.items():
            self._say("parameter", name)
            if parameter is not None:
                self._metadata(parameter)
                # Equal numbers mean the same tensor: tied weights.
                self._say(self._parameters.setdefault(id(parameter), len(self._parameters)))
        for name, buffer in module._buffers.items():
            self._say("buffer", name)
            if buffer is not None and name in _STATISTICS and _package(type(module)) == "torch":
                self._metadata(buffer)
            else:
                self.value(f"{path}.{name}", buffer)
        for name, child in module._modules.items():
            self._say("child", name, None if child is None else self._paths[id(child)])
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules", *_WHERE_FROM):
                self._attribute(f"{path or type(module).__name__}.{name}", name, value)

    def _elsewhere(self, where: str, module: nn.Module) -> None:
        """Read a module found as a value: one of the tree by its path, others with weights."""
        module = getattr(module.__dict__.get("_ortlab"), "module", module)  # unwrap it
        if id(module) in self._paths:
            self._say("of the tree", self._paths[id(module)])
            return
        self._class(type(module))
        for name, value in module.__dict__.items():
            self._attribute(f"{where}.{name}", name, value)

    def _attribute(self, where: str, name: str, value: Any) -> None:
        self._say(name)
        if "_hooks" in name and isinstance(value, dict):
            value = list(value.values())  # the keys are numbered throughout the process
        self.value(where, value)

    # --- Code

    def _import(self, where: str, module: types.ModuleType) -> None:
        """Read a Python module: the user's by its definitions, others by their version."""
        self._say("import", module.__name__)
        if not is_users(module.__name__):
            self._packages.add(module.__name__.partition(".")[0])
            return
        for name, value in sorted(vars(module).items()):
            defined_here = getattr(value, "__module__", None) == module.__name__
            if not name.startswith("__") and (defined_here or isinstance(value, _ATOMS)):
                self._say(name)
                self.value(f"{where}.{name}", value)

    def _class(self, cls: type) -> None:
        self._say("class", _name(cls))
        for base in cls.__mro__:
            self._classes.setdefault(base, set())

    def _members(self) -> bool:
        """Read class members whose names occur in the code so far; return False if none is new."""
        found = False
        for cls, read in list(self._classes.items()):
            foreign = _package(cls) in _BY_VERSION
            for name, member in list(vars(cls).items()):
                if name in read or not (name in self._names or _is_implied(name, cls)):
                    continue
                read.add(name)
                if foreign and (not isinstance(member, types.FunctionType) or _is_own(member)):
                    continue
                found = True
                self._say("member", name, "of", _name(cls))
                where = f"{cls.__qualname__}.{name}"
                self._leniently(where, member, strict=is_users(cls.__module__))
        return found

    def _leniently(self, where: str, value: Any, *, strict: bool) -> None:
        """Read a value; with `strict` False, ignore it if its content cannot be fingerprinted.

        Data of installed packages is covered by their version.
        """
        try:
            self.value(where, value)
        except Unknowable:
            if strict:
                raise

    def _body(self, function: types.FunctionType) -> None:
        where = f"{function.__module__}.{function.__qualname__}"
        origin = home(function)
        users = is_users(origin)
        self._say("body", where)
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._say("cell", name)
            if cell != types.CellType():  # bound
                self._leniently(f"{where}'s {name}", cell.cell_contents, strict=users)
        if not users:
            self._packages.add(origin.partition(".")[0])
        if _is_own(function):
            return
        self._code(code)
        defaults = (function.__defaults__, function.__kwdefaults__)
        self._leniently(f"a default of {where}", defaults, strict=users)
        for name in global_names(code):
            value = function.__globals__.get(name)
            self._say("global", name)
            if users or isinstance(value, types.FunctionType):
                self.value(name, value)

    def _code(self, code: types.CodeType) -> None:
        """Read a code object, independent of its line numbers."""
        self._names.update(code.co_names)
        self._say(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
        self._say(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._hash.update(code.co_code + code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif isinstance(constant, frozenset):
                self._say(sorted(map(repr, constant)))
            else:
                self._say(repr(constant))
                if isinstance(constant, str):
                    self._names.add(constant)  # getattr(config, "dropout", 0.1)


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of `value` by name; None if it has no parts."""
    parts: list[tuple[Any, Any]] = []
    known = True
    if isinstance(value, Mapping):
        parts += value.items()
    elif isinstance(value, set | frozenset):
        parts += enumerate(sorted(value, key=repr))
    elif isinstance(value, list | tuple):
        parts += enumerate(value)
    elif isinstance(value, functools.partial):
        parts += [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, types.MethodType):
        return [("method", value.__func__), ("of", value.__self__)]
    elif isinstance(value, staticmethod | classmethod):
        return [("function", value.__func__)]
    elif isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    elif isinstance(value, weakref.ref):
        return [("refers to", value())]
    else:
        known = False
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                parts.append((name, getattr(value, name)))
                known = True
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts += attributes.items()
        known = known or not callable(value) or bool(attributes)
    return parts if known else None


def _is_implied(name: str, cls: type) -> bool:
    """Return True if code calls this method implicitly; a model's __init__ ran before."""
    return name in _OPERATORS or (name == "__init__" and not issubclass(cls, nn.Module))


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a code object, including nested code, looks up as globals.

    Args:
        code: Code object of a function.
    """
    names = [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += global_names(constant)
    return tuple(dict.fromkeys(names))


def is_users(module: str) -> bool:
    """Return True if a Python module is the user's: neither installed nor a part of Python.

    Args:
        module: Name of the module.
    """
    if module.partition(".")[0] in _BY_VERSION:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return True
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _is_own(function: types.FunctionType) -> bool:
    """Return True if a function is covered by the version of torch or Python."""
    return home(function).partition(".")[0] in _BY_VERSION


def home(function: types.FunctionType) -> str:
    """Return the Python module that defines a function, even if a decorator set ``__module__``.

    Args:
        function: Any Python function.
    """
    return str(function.__globals__.get("__name__", ""))


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
