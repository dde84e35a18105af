"""The pages of the API, notebooks/reference/api/: signatures and docstrings, as griffe reads them.

``python -m tests.support.readme`` writes them. Public are the names that `ortlab` and the modules
of `MODULES` list in ``__all__`` or, without one, define; and the classes of `RESULTS`, which
functions return.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import griffe

import ortlab

ROOT = Path(__file__).parents[2]
MODULES = {
    "hf": "Hugging Face's Trainer in ortlab's engines",
    "keras": "Keras's fit, with live charts",
    "lightning": "Lightning's fit, with live charts",
    "data": "data that is on every machine",
    "squad": "questions and answers in SQuAD's form",
    "optim": "the optimizers, schedules and loss scaler of ORT's first training API",
    "optim.lr_scheduler": "its schedules",
    "torch_ort": "the names of the package torch_ort",
}
"""The public modules below `ortlab`."""
ELSEWHERE = {"squad": "data.squad"}
"""Locations of public modules that are defined elsewhere."""
RESULTS = [
    "training.run.Run",
    "history.run_result.RunResult",
    "history.saved_run.SavedRun",
    "history.run_files.StoredRun",
    "history.entry.RunEntry",
    "history.listing.History",
    "history.comparison.RunComparison",
    "history.prune.Pruning",
    "checkpoint.checkpoint.Checkpoint",
    "metrics.recorder.Recorder",
    "metrics.recorder.Sample",
    "metrics.recorder.Event",
    "training.tracker.Tracker",
    "graph.capture.Graphs",
    "graph.capture.Stage",
    "graph.memory.MemoryPlan",
    "graph.recompute_plans.RecomputePlans",
    "graph.subgraphs.Subgraphs",
    "graph.subgraphs.Subgraph",
    "graph.profile.Profile",
    "search.race.Race",
    "search.tune.Tune",
    "search.result.RaceResult",
    "search.result.TuneResult",
    "cluster.workers.Workers",
    "deploy.exported.Exported",
    "plan.zero_memory.ZeroPlan",
    "plan.result.TrainingPlan",
    "deploy.torchrun_script.Script",
    "utils.tables.Table",
    "engines.base.EngineUnavailable",
]
"""The classes that the functions return and raise."""
NOT_DOCUMENTED = {"__version__", *MODULES}
"""Names of ``ortlab.__all__`` without an entry: a string, and modules with their own pages."""


def pages() -> dict[str, str]:
    """Return the pages by name; the first is their index."""
    package = griffe.load("ortlab", search_paths=[ROOT], resolve_aliases=False)
    made = {"ortlab.md": _page("ortlab", "", _functions(package))}
    for name, about in MODULES.items():
        made[f"ortlab.{name}.md"] = _page(f"ortlab.{name}", about, _public(package, name))
    returned = ((f"ortlab.{path}", _find(package, path)) for path in RESULTS)
    made["results.md"] = _page("What they return", "the classes of results", returned, made=False)
    lines = [
        "# The Python API",
        "",
        "Written by `python -m tests.support.readme`, from the docstrings.",
        "",
    ]
    lines += [
        f"- [{text.splitlines()[0].removeprefix('# ')}]({page})" for page, text in made.items()
    ]
    return {"README.md": "\n".join([*lines, ""]), **made}


def without_docstring() -> list[str]:
    """Return the names on the pages without a docstring; that of a base class counts."""
    package = griffe.load("ortlab", search_paths=[ROOT])
    named = [*_functions(package), *((path, _find(package, path)) for path in RESULTS)]
    for name in MODULES:
        named += _public(package, name)
    silent = []
    for title, found in named:
        silent += [title] if found.docstring is None else []
        for member in _members(found):
            if member.docstring is None:
                silent.append(f"{title}.{member.name}")
    return silent


Documented = griffe.Class | griffe.Function | griffe.Attribute


def _find(package: griffe.Object | griffe.Alias, path: str) -> Documented:
    """Return the object that the dotted `path` names, wherever it is defined."""
    found: griffe.Object | griffe.Alias = package[path]
    while isinstance(found, griffe.Alias):
        found = package[found.target_path.removeprefix("ortlab.")]
    assert isinstance(found, Documented), path
    return found


def _functions(package: griffe.Object | griffe.Alias) -> Iterator[tuple[str, Documented]]:
    """Yield the contents of ``ortlab.__all__``, each with the path it is lazily imported from."""
    for name in ortlab.__all__:
        if name in NOT_DOCUMENTED:
            continue
        if name == "last_run":
            yield "ortlab.last_run", _find(package, "session.Session.last_run")
            continue
        module = getattr(ortlab, name).__module__.removeprefix("ortlab").removeprefix(".")
        yield f"ortlab.{name}", _find(package, f"{module}.{name}".removeprefix("."))


def _public(package: griffe.Object | griffe.Alias, name: str) -> Iterator[tuple[str, Documented]]:
    place = ELSEWHERE.get(name, name)
    module = package[place]
    exported = module.exports
    members = [str(each) for each in exported] if exported else list(module.members)
    for member in members:
        found = module.members[member]
        if not exported and (found.is_alias or not found.is_public):
            continue
        if not found.is_module:
            yield f"ortlab.{name}.{member}", _find(package, f"{place}.{member}")


def _page(
    title: str, about: str, documented: Iterator[tuple[str, Documented]], *, made: bool = True
) -> str:
    """Return the page of the `documented` objects; `made` adds how its classes are called."""
    blocks = [f"# {title}{': ' if about else ''}{about}"]
    for name, found in documented:
        blocks += [f"## {name}", *_described(found, _made(found) if made else "")]
        for member in _members(found):
            blocks += [f"### {found.name}.{member.name}", *_described(member)]
    return "\n\n".join(blocks) + "\n"


def _made(found: Documented) -> str:
    """Return how a class is called, if its own or an inherited ``__init__`` of ours defines it."""
    if not isinstance(found, griffe.Class) or "dataclass" in found.labels:
        return ""
    begin = found.all_members.get("__init__")
    begin = begin.final_target if isinstance(begin, griffe.Alias) else begin
    if not isinstance(begin, griffe.Function) or not begin.path.startswith("ortlab."):
        return ""
    given = begin.signature(name=found.name).removesuffix(" -> None")
    return f"\n\n{given}" if given != f"{found.name}()" else ""


def _described(found: Documented, made: str = "") -> list[str]:
    """Return signature, constructor call and docstring."""
    said = [] if found.docstring is None else [inspect.cleandoc(found.docstring.value)]
    return [f"```python\n{_signature(found)}{made}\n```", *said]


def _signature(found: Documented) -> str:
    if isinstance(found, griffe.Attribute):
        kind = "" if found.annotation is None else f": {found.annotation}"
        return f"{found.name}{kind}"
    if isinstance(found, griffe.Class):
        fields = found.parameters if "dataclass" in found.labels else ()
        told = [f"{each.name}: {each.annotation}" for each in fields if each.name != "self"]
        inside = "\n".join(f"    {each}" for each in told)
        head = f"class {found.name}({', '.join(_bases(found))})".replace("()", "")
        return f"{head}:\n{inside}" if told else head
    awaited = "async " if "async" in found.labels else ""
    return f"{awaited}def {found.signature()}"


def _bases(found: griffe.Class) -> list[str]:
    return [str(base) for base in found.bases if not str(base).startswith("_")]


def _members(found: Documented) -> list[Documented]:
    """Return the public fields, properties and methods of a class, in source order.

    ``__init__`` is included if it says more than the class; attributes without a docstring are
    omitted.
    """
    if not isinstance(found, griffe.Class):
        return []
    members = [each for each in found.members.values() if isinstance(each, Documented)]
    shown = [each for each in members if each.is_public and not each.name.startswith("__")]
    return [
        *([found.members["__init__"]] if _says_how(found) else []),  # type: ignore[list-item]
        *(each for each in shown if each.docstring is not None or not _is_plain(each)),
    ]


def _is_plain(member: Documented) -> bool:
    """Return whether the member is an attribute defined only by an assignment."""
    return isinstance(member, griffe.Attribute) and "property" not in member.labels


def _says_how(found: griffe.Class) -> bool:
    made = found.members.get("__init__")
    return isinstance(made, griffe.Function) and made.docstring is not None
