"""The torch names that ortlab and ORT use, looked up in the wheels of every supported torch.

``python -m tests.support.torch_range`` reads the sources of each wheel of the registry, a few files
at a time and without installing it, and rewrites `TABLE`. ``--compile`` compiles the extensions,
ORT's and ours, against each wheel's headers, and writes nothing.
"""

from __future__ import annotations

import ast
import datetime
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from ortlab.engines.ortmodule.compat import extensions, patches
from ortlab.engines.ortmodule.compat.requirements import TORCH_RANGE

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("torch_range.json")
_ORT = Path(onnxruntime.__file__).parent
TAKERS = (
    *sorted((ROOT / "ortlab").rglob("*.py")),
    *sorted((_ORT / "training/ortmodule").glob("*.py")),
    *sorted((_ORT / "training/utils").glob("*.py")),
    _ORT / "tools/pytorch_export_contrib_ops.py",
)
"""The files whose torch names are collected. ORT's Triton code is for CUDA devices and left out."""
_LEFT_OUT = ("_zero_stage3_compatibility.py",)  # needs a DeepSpeed of 2023

EXPORT_ARGUMENTS = {
    "args", "autograd_inlining", "do_constant_folding", "dynamic_axes", "dynamo", "export_params",
    "input_names", "keep_initializers_as_inputs", "model", "opset_version", "output_names",
    "training", "verbose",
}  # fmt: skip
"""The arguments that ORT and `compat.exporting` pass to torch.onnx.export; `f` is positional."""

_OF_OLDER_TORCH = (
    "torch.onnx.SymbolicContext",
    "torch.onnx.symbolic_helper._onnx_stable_opsets",
    "torch.onnx.symbolic_helper._training_mode",
    "torch.onnx.symbolic_registry",
)
"""Names that ORT looks up in older versions of torch and can do without."""
Source = Callable[[str], str | None]
"""Reads a file of a wheel as text by its path; returns None if it does not exist."""


# ---- names in use --------------------------------------------------------------------------------


def names_taken() -> dict[str, str]:
    """Return every dotted torch name in use and the first file that uses it."""
    taken: dict[str, str] = {}
    for path in TAKERS:
        if path.name in _LEFT_OUT:
            continue
        for name in names_in(path.read_text(encoding="utf-8")):
            if not name.startswith(_OF_OLDER_TORCH):
                taken.setdefault(_moved(name), path.name)
    for _old, new in patches._exporter_modules():
        taken.setdefault(new, "patches.py")
    return {name: taken[name] for name in sorted(taken)}


def _moved(name: str) -> str:
    """Return the new place of an exporter's name, according to the first row of the patch table."""
    for old, new in patches._exporter_modules():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def names_in(text: str) -> Iterator[str]:
    """Yield the dotted names below ``torch.``, resolved through the imports of `text`."""
    tree = ast.parse(text)
    called: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    called[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if alias.name != "torch":
                        yield alias.name
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for alias in node.names:
                called[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    guarded = _guarded(tree)
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is not None and dotted not in guarded:
            root, _, rest = dotted.partition(".")
            if root in called and rest:
                yield f"{called[root]}.{rest}"


def _dotted(node: ast.AST) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if parts and isinstance(node, ast.Name) else None


def _guarded(tree: ast.AST) -> set[str]:
    """Return the names that the file checks with hasattr before it uses them."""
    return {
        f"{ast.unparse(node.args[0])}.{node.args[1].value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hasattr"
        and isinstance(node.args[1], ast.Constant)
    }


# ---- names defined by torch ----------------------------------------------------------------------


class Sources:
    """The names that a torch's own sources define; for its C++ parts, those of the stubs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._trees: dict[str, dict[str, ast.AST] | None] = {}

    def has(self, dotted: str) -> bool:
        """Return whether `dotted` is a module or a name that one defines, imports or declares.

        One more name is looked up in a class that inherits from nothing. Attributes of instances
        are unknown here and count as present.
        """
        return self._has(dotted, set())

    def _has(self, dotted: str, met: set[str]) -> bool:
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self._names(module) is not None:
                return cut == len(parts) or self._defines(module, parts[cut:], met)
        return False

    def parameters(self, dotted: str) -> dict[str, str] | None:
        """Return a function's parameters and their defaults; None for other objects and for C++."""
        module, _, name = dotted.rpartition(".")
        node = (self._names(module) or {}).get(name)
        if isinstance(node, ast.ImportFrom):
            origin = f"{self._absolute(module, node)}.{name}"
            return self.parameters(origin) if origin != dotted else None
        if not isinstance(node, ast.FunctionDef):
            return None
        plain, named = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
        defaults = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults]
        every = zip([*plain, *named], [*defaults, *node.args.kw_defaults], strict=True)
        return {argument.arg: ast.unparse(value) if value else "" for argument, value in every}

    def _defines(self, module: str, rest: Sequence[str], met: set[str]) -> bool:
        # A package and its module may import names from each other.
        if (dotted := ".".join([module, *rest])) in met:
            return False
        met.add(dotted)
        names = self._names(module)
        if names is None:
            return False
        node = names.get(rest[0])
        if node is None:
            stars = [star for name, star in names.items() if name.startswith("* ")]
            assert all(isinstance(star, ast.ImportFrom) for star in stars)
            return any(self._defines(self._absolute(module, s), rest, met) for s in stars)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if rest[0] in (a.asname, a.name))
            origin = f"{self._absolute(module, node)}.{alias.name}"
            return len(rest) == 1 or self._has(".".join([origin, *rest[1:]]), met)
        if isinstance(node, ast.ClassDef) and len(rest) > 1 and _inherits_nothing(node):
            return rest[1] in _bound(node.body)
        return True

    def _names(self, module: str) -> dict[str, ast.AST] | None:
        """Return the names that a module binds; None if there is no such module."""
        if module not in self._trees:
            self._trees[module] = self._read(module)
        return self._trees[module]

    def _read(self, module: str) -> dict[str, ast.AST] | None:
        base = module.replace(".", "/")
        if module == "torch":
            # torch/__init__.py imports these names from C++ dynamically.
            stubs = "torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi"
            texts = [*stubs, "torch/__init__.py"]
        else:
            texts = [f"{base}/__init__.pyi", f"{base}.pyi", f"{base}/__init__.py", f"{base}.py"]
        found = [text for path in texts if (text := self._source(path)) is not None]
        if not found:
            return None
        names: dict[str, ast.AST] = {}
        for text in found:
            names |= _bound(ast.parse(text).body)
        return names

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        is_package = self._source(f"{'/'.join(package)}/__init__.py") is not None
        package = package[: len(package) - node.level + is_package]
        return ".".join([*package, *([node.module] if node.module else [])])


def _inherits_nothing(node: ast.ClassDef) -> bool:
    return not node.keywords and {ast.unparse(base) for base in node.bases} <= {"Enum", "IntEnum"}


def _bound(body: Sequence[ast.AST]) -> dict[str, ast.AST]:
    """Return the names that statements bind, including those under if, try and with."""
    names: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.name == "*" and isinstance(node, ast.ImportFrom):
                    names[f"* {node.level} {node.module}"] = node
                else:
                    names[alias.asname or alias.name.partition(".")[0]] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        names[name.id] = node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            names |= _bound(inner)
    return names


def installed() -> Sources:
    """Return the sources of the installed torch."""
    site = extensions._torch_folder().parent

    def read(path: str) -> str | None:
        file = site / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return Sources(read)


# ---- wheels of the registry ----------------------------------------------------------------------


class _Remote(io.RawIOBase):
    """A file behind a URL, read by ranges."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        asked = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{last}"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 206, f"{self._url} does not serve ranges"
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wheel(version: str) -> zipfile.ZipFile:
    """Open torch's wheel for this Python where pip finds it, fetching only the parts read."""
    report = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-",
        "--only-binary", ":all:", f"torch=={version}",
    )  # fmt: skip
    url = json.loads(report)["install"][0]["download_info"]["url"]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return zipfile.ZipFile(urllib.request.url2pathname(parts.path))
    return zipfile.ZipFile(io.BufferedReader(_Remote(url), 1 << 18))


def sources_in(archive: zipfile.ZipFile) -> Sources:
    """Return the sources in a wheel of torch."""
    known = set(archive.namelist())

    @functools.cache
    def read(path: str) -> str | None:
        return archive.read(path).decode() if path in known else None

    return Sources(read)


def versions_offered() -> list[str]:
    """Return the torch releases in the registry for this Python, from the oldest supported on."""
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", "torch"))
    assert listed
    numbers = {text.strip().partition("+")[0] for text in listed.group(1).split(",")}
    supported = [number for number in numbers if minor(number) >= TORCH_RANGE[0]]
    return sorted(supported, key=lambda number: tuple(map(int, number.split("."))))


def minor(version: str) -> tuple[int, ...]:
    """Return the minor version as numbers, such as (2, 13) for 2.13.0."""
    return tuple(int(part) for part in version.split(".")[:2])


# ---- the table -----------------------------------------------------------------------------------


def looked_up(sources: Sources) -> dict[str, Any]:
    """Return a row of the table: the names a torch lacks, and the signatures of private ones."""
    arguments = sources.parameters("torch.onnx.export") or {}
    olds = [old for old, _new in patches._exporter_modules()]
    return {
        "missing": [name for name in names_taken() if not sources.has(name)],
        "export lacks": sorted(EXPORT_ARGUMENTS - set(arguments)),
        "dynamo by default": arguments.get("dynamo") == "True",
        "old names gone": [name for name in olds if not sources.has(name)],
        "signatures": {
            name: parameters
            for name in names_taken()
            if "._" in name and (parameters := sources.parameters(name)) is not None
        },
    }


def stored() -> dict[str, Any]:
    """Return the table as it is checked in."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def renewed() -> dict[str, Any]:
    """Return the table, looked up again in every wheel."""
    torches, signatures = {}, {}
    for version in versions_offered():
        with wheel(version) as archive:
            row = looked_up(sources_in(archive))
        # A signature is stored only if it differs from that in the previous torch.
        news = {n: p for n, p in row["signatures"].items() if signatures.get(n) != p}
        signatures |= news
        torches[version] = {**row, "signatures": news}
        print(version, "lacks", row["missing"] + row["export lacks"], "- new", sorted(news))
    return {
        "date": datetime.date.today().isoformat(),
        "names": list(names_taken()),
        "torches": torches,
    }


# ---- the extension -------------------------------------------------------------------------------


_ON_CPU = (extensions.ATEN, extensions.INTEROP, extensions.NATIVE, extensions.KERNELS)


def compiled(archive: zipfile.ZipFile) -> str:
    """Compile the CPU extensions against the headers in a wheel; return the compiler's errors.

    The result is "" on success.
    """
    with tempfile.TemporaryDirectory() as folder:
        headers = (each for each in archive.infolist() if "torch/include/" in each.filename)
        for each in sorted(headers, key=lambda each: each.header_offset):
            archive.extract(each, folder)
        include = Path(folder, "torch/include")
        return "".join(_compiled(each, include) for each in _ON_CPU)


def _compiled(extension: extensions.Extension, include: Path) -> str:
    command = extensions.compiler()
    assert command is not None, extensions.COMPILER_FIX
    with tempfile.TemporaryDirectory() as folder:
        stand_ins = Path(folder, "torch")
        stand_ins.mkdir()
        for umbrella in ("torch.h", "extension.h"):
            (stand_ins / umbrella).write_text(extension.stand_in(), encoding="utf-8")
        source = Path(folder, "source.cc")
        source.write_text(extension.code(), encoding="utf-8")
        places = [folder, include, include / "torch/csrc/api/include"]
        if extension.python:
            places.append(extensions.python_header().parent)
        done = subprocess.run(
            [*command, "-std=c++20", "-w", "-fsyntax-only", *extension.flags,
             *(f"-I{place}" for place in places), str(source)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stderr if done.returncode else ""


def main() -> None:
    """Write the table, or with ``--compile`` compile the extensions for each torch."""
    if sys.argv[1:] == ["--compile"]:
        for version in versions_offered():
            with wheel(version) as archive:
                print(version, compiled(archive) or "compiles", flush=True)
    else:
        TABLE.write_text(json.dumps(renewed(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
