"""Tests of the bad inputs in `bad_inputs.tsv`: each ends in its error and has no other effect.

They are typed into one real kernel, one after the other, as a user types them.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from ortlab.engines.ortmodule import compat
from ortlab.settings import FinetuneSettings
from tests.support.jupyter_kernel import Cell, Kernel

with Path(__file__).with_name("bad_inputs.tsv").open(encoding="utf-8", newline="") as file:
    TABLE = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
"""The typed text, the class of its error, and a part of its message."""

SETUP = r"""
%load_ext ortlab
import math, os, pathlib, tempfile
import numpy as np, torch, ortlab
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
folder = pathlib.Path(tempfile.mkdtemp())
os.chdir(folder)
net = nn.Linear(4, 2)
frozen = nn.Linear(4, 2).requires_grad_(False)
data = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
number = 3
text = "text"
wrapped = nn.Linear(4, 2)
for name, content in {
    "junk": b"\x08\x00\x00\x00\x00\x00\x00\x00junkjunk",
    "huge": (2**62).to_bytes(8, "little") + b"{}",
    "empty": b"",
}.items():
    (folder / f"{name}.safetensors").write_bytes(content)
torch.save({"a": 1}, folder / "pickle.pt")
"""
STATE = r"""
_ipythons = ("In", "Out", "get_ipython", "exit", "quit", "open")
_bound = {n: id(v) for n, v in get_ipython().user_ns.items()
          if not n.startswith("_") and n not in _ipythons}
print(sorted(_bound.items()), sorted(os.listdir(folder)), ortlab.models(),
      [(k, hash(tuple(v.flatten().tolist()))) for k, v in net.state_dict().items()])
"""
USERS_OWN = "mat1 and mat2 shapes cannot be multiplied"
"""Raised in a model's forward while ortlab.export traces it; the user needs this traceback."""

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = str(tmp_path_factory.mktemp("home"))
    environment = {**os.environ, "ORTLAB_HOME": home}
    manager, client = start_new_kernel(kernel_name="python3", env=environment)
    try:
        kernel = Kernel(client)
        kernel(SETUP)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(process: Kernel) -> Iterator[Kernel]:
    """Return the kernel; check afterwards that it is alive and the user's objects are unchanged."""
    before = process(STATE).text
    yield process
    assert process(STATE).text == before


def lines(cell: Cell) -> list[str]:
    """Return the error that the cell shows: IPython prints a UsageError and displays others."""
    shown = [content["traceback"] for kind, content in cell.outputs if kind == "error"]
    return shown[0] if shown else cell.text.splitlines()


def test_there_are_a_hundred() -> None:
    assert len(TABLE) >= 100
    assert len({typed for typed, _, _ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("typed", "error", "message"), TABLE, ids=[each[0] for each in TABLE])
def test_it_ends_in_its_error(kernel: Kernel, typed: str, error: str, message: str) -> None:
    cell = kernel.run(typed + "\nfresh = 1" if typed.startswith("%%") else typed)
    assert cell.reply["status"] == "error"
    assert cell.reply["ename"] == error
    assert message in cell.reply["evalue"]
    if USERS_OWN not in message:
        assert len(lines(cell)) <= 3, "in a line or two"


FREE = {"recompute", "save_onnx", "cast_ops"}
"""Settings whose values are free text: modules, a file, operators."""


@pytest.mark.parametrize("name", sorted({*FinetuneSettings.declarations()} - FREE))
def test_a_setting_that_is_none_of_its_values(kernel: Kernel, name: str) -> None:
    """An invalid value of any setting, including future settings, ends in a short error."""
    option = "--" + name.replace("_", "-")
    cell = kernel.run(f"%ort finetune net data --loss cross_entropy {option} ?!")
    assert cell.reply["status"] == "error"
    assert cell.reply["ename"] == "UsageError"
    assert name in cell.reply["evalue"].replace("-", "_")
    assert len(lines(cell)) <= 2
