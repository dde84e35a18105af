"""Tests of the house rules: README.md and the package, checked from the sources."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from PIL import Image

import ortlab
from tests.browser import pictures
from tests.support import reference
from tests.support.chosen_tests import LONG
from tests.support.readme import (
    DOCS,
    INDEX,
    README,
    ROOT,
    code_map,
    documents,
    index,
    pages,
    stored_pages,
    stored_tables,
    tables,
)

PACKAGE = ROOT / "ortlab"
BUILD_HOOK = PACKAGE / "notebook" / "build.py"  # runs in hatch's environment, not in the user's
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def tracked(*under: str) -> list[str]:
    """Return the files that git tracks below the given folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *under], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


def statements(body: Iterable[ast.AST], *, deferred: bool) -> Iterator[ast.AST]:
    """Yield executed statements, with `deferred` also function bodies; skip TYPE_CHECKING code."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from statements(node.orelse, deferred=deferred)
            continue
        yield node
        if deferred or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(ast.iter_child_nodes(node), deferred=deferred)


@functools.cache
def imports(path: Path, *, deferred: bool = True) -> frozenset[str]:
    """Return the absolute names a file imports; without `deferred`, only those at import time."""
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text()).body, deferred=deferred):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def private_torch(name: str) -> bool:
    """Return whether a name includes a private torch module.

    Only modules count: a class such as ``torch.nn.modules.loss._Loss`` lies in a public one.
    """
    first, *rest = name.split(".")
    return first == "torch" and any(re.match("_[a-zC]", part) for part in rest)


def imported_outside(folder: str, wrong: Callable[[str], bool]) -> set[str]:
    """Return the imports outside the package's `folder` for which `wrong` is true."""
    return {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if folder not in path.relative_to(PACKAGE).parts
        for name in imports(path)
        if wrong(name)
    }


def test_only_engines_touch_private_torch() -> None:
    assert not imported_outside("engines", private_torch)


@pytest.mark.parametrize(
    ("folder", "roots"),
    [
        ("ortmodule", ("onnxruntime.training",)),
        ("notebook", ("IPython", "ipywidgets", "anywidget", "ipykernel")),
        ("cluster", ("ipyparallel", "cloudpickle")),
        ("deepspeed_library.py", ("deepspeed",)),
    ],
)
def test_only_one_folder_imports(folder: str, roots: tuple[str, ...]) -> None:
    assert not imported_outside(folder, lambda name: within(name, *roots))


def modules() -> list[str]:
    """Return the dotted names of all importable modules of the package."""
    dotted = []
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path != BUILD_HOOK and parts[-1] != "__main__":
            dotted.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return dotted


def python(script: str, *args: str) -> str:
    """Run `script` in a separate Python process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_EVERYTHING = """
import importlib, json, logging, os, signal, sys, threading, warnings
ours, theirs = json.loads(sys.argv[1])

def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            parent, _, attribute = name.rpartition(".")
            getattr(importlib.import_module(parent), attribute)

# What the libraries do when they are imported is not ours: they are imported first.
load(theirs)
import torch, torch.onnx
random = torch.random.get_rng_state().tolist()

def state():
    return {
        "environment": dict(os.environ),
        "warning filters": [str(row) for row in warnings.filters],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "log handlers": [str(row) for row in logging.getLogger().handlers],
        "log level": logging.getLogger().level,
        "signals": {str(s): str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)},
        "hooks": [str(hook) for hook in (sys.excepthook, sys.displayhook, sys.settrace)],
        "import path": list(sys.path),
        "importers": [str(finder) for finder in sys.meta_path],
        "torch threads": torch.get_num_threads(),
        "torch determinism": torch.are_deterministic_algorithms_enabled(),
        "torch random state": torch.random.get_rng_state().tolist() == random,
        "torch functions": [id(f) for f in (
            torch.manual_seed, torch.onnx.export, torch.Tensor.backward, torch.autograd.backward,
            torch.nn.Module.__call__, torch.nn.Module.__setattr__, torch.optim.Optimizer.__init__,
        )],
    }

before = state()
load(ours)
after = state()
assert "onnxruntime.training" not in sys.modules, "something imported onnxruntime.training"
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


WITHOUT_TRAINING = """
import importlib, json, sys, tempfile
from pathlib import Path
sys.modules["onnxruntime.training"] = None  # Python's way to say that it is not there
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import ortlab, torch
from ortlab import torch_ort
from torch import nn

def refusal(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]

model, batch = nn.Linear(2, 2), (torch.randn(4, 2), torch.randn(4, 2))
folder = Path(tempfile.mkdtemp())
description = {"inputs": [("x", ["batch", 2])], "outputs": [("loss", [], True)]}
print(json.dumps([
    refusal(lambda: ortlab.wrap(model, engine="ortmodule")),
    refusal(lambda: ortlab.ORTTrainer(model, description, ortlab.optim.AdamConfig())),
    refusal(lambda: torch_ort.ORTModule(model)),
    refusal(lambda: ortlab.export(model, folder / "t", batch, trainable="*", loss="mse")),
    refusal(lambda: ortlab.export(model, folder / "x", batch[0])),
    refusal(lambda: ortlab.finetune(model, [batch], loss="mse", engine="eager").result()),
]))
"""


@pytest.mark.usefixtures("home")
def test_only_the_frozen_runtimes_part_needs_it() -> None:
    """Everything imports without it; what needs it says so in a line, and the rest works."""
    answers = json.loads(python(WITHOUT_TRAINING, json.dumps(modules())).splitlines()[-1])
    *refused, exported, trained = answers
    assert (exported, trained) == (None, None)
    for kind, text in refused:
        assert kind in ("EngineUnavailable", "OrtUnavailable", "RuntimeError"), text
        assert "onnxruntime-training" in text
        assert len(text.splitlines()) == 1


def test_importing_every_module_changes_nothing() -> None:
    theirs = {
        name
        for path in SOURCES
        if path != BUILD_HOOK
        for name in imports(path, deferred=False)
        if not within(name, "ortlab", "__future__")
    }
    printed = python(IMPORT_EVERYTHING, json.dumps([modules(), sorted(theirs)]))
    assert json.loads(printed) == []


def test_import_is_light() -> None:
    """Importing ortlab takes less than 0.3 s.

    The best of three counts, as the machine may be busy.
    """
    script = (
        "import sys, time; start = time.perf_counter(); import ortlab; "
        "took = time.perf_counter() - start; "
        "heavy = {'torch', 'onnxruntime', 'IPython', 'matplotlib', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; print(took)"
    )
    assert min(float(python(script)) for _ in range(3)) < 0.3


def test_no_public_name_is_lost_to_a_submodule() -> None:
    """No public function has the name of a submodule: importing ortlab.x would replace it."""
    script = (
        "import importlib, json, sys, types\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "import ortlab\n"
        "print(json.dumps({name: isinstance(getattr(ortlab, name), types.ModuleType)"
        " for name in ortlab.__all__}))"
    )
    is_module = json.loads(python(script, json.dumps(modules())))
    assert {"wrap", "unwrap", "finetune", "track"} <= set(is_module)
    found = [name for name, module in is_module.items() if module]
    assert found == ["data", "hf", "optim", "squad"]


def test_map_is_true() -> None:
    missing = [path for path in code_map() if not (ROOT / path).exists()]
    assert missing == []


def test_map_is_complete() -> None:
    """Every folder of the package and every file of its root has a line in the map."""
    paths = code_map()
    for file in tracked("ortlab"):
        folder, _, name = file.rpartition("/")
        within_room = any(file.startswith(path) for path in paths if path.endswith("/js/"))
        if folder == "ortlab":
            assert file in paths, f"CONTRIBUTING.md's map lacks {file}"
        elif not within_room and name.endswith(".py"):
            assert f"{folder}/" in paths, f"CONTRIBUTING.md's map lacks {folder}/"


def test_generated_tables_are_current() -> None:
    assert stored_tables() == tables(), "run: python -m tests.support.readme"
    assert INDEX.read_text() == index(), "run: python -m tests.support.readme"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words help as Python 3.11's")
def test_the_pages_of_commands_are_current() -> None:
    assert stored_pages() == pages(), "run: python -m tests.support.readme"


def test_what_is_public_says_what_it_is() -> None:
    """Everything on the pages of the API has a docstring."""
    assert reference.without_docstring() == []
    text = "".join(reference.pages().values())
    assert "### Run.apply" in text, "methods of results"
    assert "RunResult:\n    state: State\n    steps: int" in text, "fields of dataclasses"
    assert set(reference.MODULES) < reference.NOT_DOCUMENTED
    named = [name for name in ortlab.__all__ if name not in reference.NOT_DOCUMENTED]
    assert [name for name in named if f"## ortlab.{name}\n" not in text] == []


def test_documented_commands_exist() -> None:
    readme = "".join(path.read_text() for path in documents())
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", readme)) <= targets
    for command in sorted(set(re.findall(r"\bortlab (doctor|[a-z]+)(?=`| --|$)", readme))):
        helped = subprocess.run(
            [sys.executable, "-m", "ortlab.cli", command, "--help"], capture_output=True, text=True
        )
        assert helped.returncode == 0, f"ortlab {command}: {helped.stderr}"


MEASUREMENTS = sorted(
    path for path in (ROOT / "tests/bench").glob("*.py") if not path.stem.startswith("test_")
)


@pytest.mark.parametrize("path", MEASUREMENTS, ids=lambda path: path.stem)
def test_a_measurement_is_importable(path: Path) -> None:
    """Each benchmark can be imported; nothing else runs them between two releases."""
    importlib.import_module(f"tests.bench.{path.stem}")


def test_readme_pictures_are_those_that_are_taken() -> None:
    """Each picture is stored, small, at most one page wide, and one of `pictures.PICTURES`."""
    text = "".join(path.read_text() for path in documents())
    shown = re.findall(r"!\[[^\]]{30,}\]\((?:\.\./)?([^)]+)\)", text)
    assert text.count("![") == len(shown), "each says what is to be seen"
    taken = [f"notebooks/images/{name}.png" for name in pictures.PICTURES]
    assert sorted(shown) == sorted(taken), "run: python -m tests.browser.pictures"
    assert tracked("notebooks/images") == sorted(taken)
    for name in taken:
        file = ROOT / name
        assert file.stat().st_size < pictures.MOST_BYTES, name
        with Image.open(file) as picture:
            assert picture.format == "PNG"
            assert pictures.WIDTH // 2 < picture.width <= pictures.WIDTH, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_files_of_tests_that_begin_are_there() -> None:
    assert [name for name in LONG if not (ROOT / "tests" / name).is_file()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_of_documents_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    pages = [path.name for path in DOCS.glob("*.md") if path.name != "index.md"]
    assert [name for name in pages if f"]({name})" not in index] == []


def test_the_documents_quote_what_errors_say() -> None:
    """Each message of the table is part of a string in the package."""
    quoted = re.findall(r"^\| `(.+?)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert len(quoted) > 9
    said = "\n".join(
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert [each for each in quoted if each not in said] == []
