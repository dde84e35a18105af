from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ort import arena
from ortlab.utils.threads import trim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's counters")

MIB = 1 << 20


class Table(nn.Module):
    """A model with large results of ORT and of operators that torch runs."""

    def __init__(self, rows: int = 20_000, width: int = 512, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width, padding_idx=padding)
        self.linear = nn.Linear(width, rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.linear(self.embedding(ids))
        return nn.functional.cross_entropy(scores.flatten(0, -2), ids.flatten().long())


def step(model: nn.Module, ids: torch.Tensor) -> None:
    model.zero_grad()
    model(ids).backward()


def touched(model: nn.Module, ids: torch.Tensor) -> int:
    """Return the bytes that the process touches for the first time in a step."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(model, ids)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults * resource.getpagesize()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def in_own_process() -> dict[str, Any]:
    """Return what this process touches and holds in training. No other model lives in it."""
    found: dict[str, Any] = {}
    module, ids = Table(), torch.randint(20_000, (4, 200))
    model = ortlab.wrap(module, engine="ort")
    settings = wrapped_model(model).settings
    for _ in range(3):
        step(model, ids)
    found["touched"] = touched(model, ids)
    wrapped_model(model).configure(settings.replace(arena=False))
    for _ in range(2):
        step(model, ids)
    found["touched without"] = touched(model, ids)
    found["without"] = resident()
    wrapped_model(model).configure(settings)
    for _ in range(2):
        step(model, ids)
    found["touched again"] = touched(model, ids)
    model.zero_grad()
    found["between steps"] = resident()
    trim()
    found["trimmed"] = resident()
    step(model, ids)
    model.zero_grad()
    before = resident()
    del model
    gc.collect()
    found["gone"] = before - resident()

    model = ortlab.wrap(module, engine="ort")
    for tokens in (100, 105):  # a graph of one size, then one of any size
        step(model, torch.randint(20_000, (4, tokens)))
    sizes = []
    for tokens in range(120, 240, 20):  # nothing that is kept of one step fits in the next
        step(model, torch.randint(20_000, (4, tokens)))
        model.zero_grad()
        sizes.append(resident())
    found["growing"] = sizes

    status = Path("/proc/self/status").read_text(encoding="ascii")
    data = int(status.split("VmData:")[1].split()[0]) * 1024
    trim()
    resource.setrlimit(resource.RLIMIT_DATA, (data + 200 * MIB, resource.RLIM_INFINITY))
    for size in (150, 180, 400):
        try:
            arena.zeros([size * MIB], torch.uint8)
            found[f"{size} MiB"] = "fits"
        except MemoryError as error:
            found[f"{size} MiB"] = str(error)
    return found


@pytest.fixture(scope="module")
def process() -> dict[str, Any]:
    made = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def test_a_step_touches_no_new_memory(process: dict[str, Any]) -> None:
    """The gradient of the table alone has 39 MiB, and the scores and their gradients 61 each."""
    assert process["touched"] < 2 * MIB
    assert process["touched without"] > 100 * MIB
    assert process["touched again"] < 2 * MIB


def test_without_the_arena_nothing_is_kept(process: dict[str, Any]) -> None:
    """The gradients are there in both, and the arena has the activations as well."""
    assert process["between steps"] - process["without"] > 20 * MIB


def test_trim_and_the_end_of_the_last_model_release_the_arena(process: dict[str, Any]) -> None:
    assert process["between steps"] - process["trimmed"] > 100 * MIB
    assert process["gone"] > 100 * MIB


def test_steps_of_growing_sizes_do_not_pile_up(process: dict[str, Any]) -> None:
    """Each step has some 100 MiB that none of the smaller blocks before could hold."""
    sizes = process["growing"]
    assert max(sizes) - sizes[0] < 200 * MIB


def test_what_is_not_used_is_released_where_memory_runs_out(process: dict[str, Any]) -> None:
    assert process["150 MiB"] == process["180 MiB"] == "fits"
    assert "failed to allocate memory" in process["400 MiB"].lower()


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_large_results_of_torch_are_those_of_eager_torch(
    padding: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = Table(padding=padding)
    ids = torch.randint(20_000, (4, 240), dtype=dtype)
    ids[0, :50], ids[1, :9] = 7, 3
    model = ortlab.wrap(module, engine="ort", fallback=False, self_check=False)
    gradients = []
    for each in (module, model):
        step(each, ids)
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    (backward,) = wrapped_model(model).last_graphs()["backward"]
    operators = {
        str(node.target.operator)
        for node in backward.division.module.graph.nodes
        if isinstance(node.target, arena.InArena)
    }
    assert "aten.embedding_dense_backward.default" in operators
    assert "aten._log_softmax_backward_data.default" in operators


class Convolved(nn.Module):
    """A model whose activations have as many channels as one of the batches has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu().sum()


def test_large_results_guard_no_sizes() -> None:
    torch._dynamo.reset()
    model = ortlab.wrap(Convolved(), engine="ort", fallback=False, self_check=False)
    for rows in (70, 72, 64, 80):
        model(torch.randn(rows, 3, 32, 32)).backward()
    phases = [graph.phase for graph in wrapped_model(model)._backend.graphs]
    assert phases == ["forward", "backward"] * 2, "for the first size, and for all"


def test_memory_of_the_arena_can_be_changed_in_place() -> None:
    """Autograd refuses to change a view that was made without gradients."""
    made = arena.zeros([2, 3], torch.float32)
    assert not made._is_view()
    assert made.shape == (2, 3)
    assert made.is_contiguous()
    assert torch.equal(made, torch.zeros(2, 3))


if __name__ == "__main__":
    print(json.dumps(in_own_process()))
