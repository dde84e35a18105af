"""Results of the tutorials with other seeds.

Run ``python -m tests.bench.seeds [SEED ...] [--only NAME]``. It executes the tutorials' own code
once for each seed (default: 0, 1 and 2), with the line ``seed = 0`` changed, and prints the mean
and spread of the held-out figures that they print.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

import nbformat

from tests.support.headless import NOTEBOOKS, execute

FIGURES = {
    "02_finetune_bert": {"accuracy, %": r"after: (\S+)%"},
    "07_gpt2_code_completion": {
        "loss": r"before, (\S+) after",
        "next token, %": r"after: next token (\S+)%",
        "whole name, %": r"after: .*whole name (\S+)%",
    },
    "08_question_answering": {
        f"{name}, {figure}": rf"{name} +{pattern}"
        for name in ("fp32", "bf16")
        for figure, pattern in (("exact match", r"(\S+) "), ("F1", r"\S+ +(\S+) "))
    },
    "09_bert_pretraining": {
        "short texts, %": r"after phase 2: (\S+)% in short",
        "long texts, %": r"after phase 2: .* (\S+)% in long",
        "loss on long texts": r"before phase 2, (\S+) after",
        "loss before the jump": r"the jump: (\S+) ->",
        "loss after the jump": r"the jump: .* -> (\S+),",
    },
}
"""The tutorials, and the patterns of the figures in their output."""
LINE = "seed = 0\n"


def with_seed(path: Path, seed: int, folder: Path) -> Path:
    """Write the tutorial with another seed to `folder`; raise ValueError where it sets no seed."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.source.count(LINE) == 1]
    if len(cells) != 1:
        raise ValueError(f"{path.name} has {len(cells)} cells with the line {LINE!r}, not one")
    cells[0].source = cells[0].source.replace(LINE, f"seed = {seed}\n")
    changed = folder / path.name
    nbformat.write(notebook, changed)  # type: ignore[no-untyped-call]
    (folder / "data").symlink_to(path.parent / "data")
    return changed


def figures(path: Path, seed: int) -> dict[str, float]:
    """Return the tutorial's figures for this seed; RuntimeError where it fails or prints none."""
    with tempfile.TemporaryDirectory() as folder:
        executed = execute(with_seed(path, seed, Path(folder)))
    if executed.failed:
        raise RuntimeError(f"{path.name} failed with seed {seed}: {executed.error}")
    found = {}
    for name, pattern in FIGURES[path.stem].items():
        printed = re.search(pattern, executed.printed())
        if printed is None:
            raise RuntimeError(f"{path.name} prints nothing that matches {pattern!r}")
        found[name] = float(printed.group(1))
    return found


def summary(values: list[float]) -> str:
    """Return the mean, the standard deviation over seeds, the minimum and the maximum."""
    spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    return f"{spread} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--only", choices=FIGURES)
    given = parser.parse_args()
    if len(given.seeds) < 2:
        parser.error("a spread takes at least two seeds")
    os.environ.setdefault("ORTLAB_HOME", tempfile.mkdtemp(prefix="ortlab-seeds-"))
    for path in NOTEBOOKS:
        if path.stem not in FIGURES or given.only not in (None, path.stem):
            continue
        rows = []
        for seed in given.seeds:
            rows.append(figures(path, seed))
            print(f"{path.stem}, seed {seed}: {rows[-1]}", flush=True)
        for name in FIGURES[path.stem]:
            print(f"{path.stem}, {name}: {summary([row[name] for row in rows])}", flush=True)


if __name__ == "__main__":
    main()
