"""Print how far exports differ from torch: the table of docs/export.md.

With ``--all``, the table has all architectures of the sweep, each with its first head and as a
decoder: 57 models.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ortlab.api import export
from ortlab.deploy.exported import Exported
from tests.zoo import specs

CELLS = {
    "BERT": "bert/sequence/sdpa/0.1",
    "GPT-2": "gpt2/causal/sdpa/0.1",
    "T5, encoder and decoder": "t5/seq2seq/sdpa/0.1",
    "ViT": "vit/image/sdpa/0.1",
    "Llama": "llama/causal/sdpa/0.1",
    "LSTM, two layers both ways": "torch/lstm/0.1",
}


def everything() -> dict[str, str]:
    """Return the cells of ``--all``, by name."""
    found: dict[str, str] = {}
    for cell in specs.cells():
        own = specs.FAMILIES.get(cell.family)
        heads = {*list(own.heads)[:1], "causal"} if own else set(specs.TORCH)
        if cell.head in heads and cell.attention != "eager" and cell.dropout != 0.0:
            found[cell.name] = cell.name
    return found


def exported(name: str, folder: Path) -> Exported:
    """Export a tiny random model of the architecture `name` with dropout, in training mode."""
    cell = next(each for each in specs.cells() if each.name == CELLS.get(name, name))
    model, (batch, _) = specs.model(cell), specs.batches(cell)
    if cell.family == "torch":  # the net itself, without the loss around it
        inputs = tuple(value for key, value in batch.items() if key != "labels")
        found = export(model.body, folder, inputs)  # type: ignore[arg-type]
    else:
        found = export(model, folder, batch)
    assert model.training
    return found


def main() -> None:
    """Print the table."""
    print("| model | inputs | largest difference | of an output's size | at |")
    print("| --- | --- | --- | --- | --- |")
    for name in everything() if "--all" in sys.argv else CELLS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = exported(name, Path(folder) / "out")
            except (ValueError, RuntimeError) as error:
                print(f"| {name} | {type(error).__name__}: {error} | | | |")
                continue
        form = found.forms[0]
        inputs = ", ".join(f"`{p.name}` {' x '.join(map(str, p.shape))}" for p in found.inputs)
        figures = f"{form.difference:.1e} | {form.relative:.1e}"
        print(f"| {name} | {inputs} | {figures} | {form.worst.replace('_', ' ')} |")


if __name__ == "__main__":
    main()
