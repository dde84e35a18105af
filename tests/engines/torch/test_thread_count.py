"""Small work runs on one thread, in torch and in ORT's sessions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortlab.engines.ortmodule import compat
from ortlab.engines.registry import engine
from ortlab.engines.single_process import OneProcess
from ortlab.engines.torch.stepper import TorchStepper
from ortlab.engines.torch.thread_count import SMALL, products, suited_threads
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    """Compute with a number of threads that no machine has by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3, "a step left another number of threads behind"
    torch.set_num_threads(before)


class Counts(nn.Module):
    """A linear layer that notes the number of threads of each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 4)
        self.threads: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return self.layer(inputs)


def batch(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.zeros(rows, dtype=torch.long)


def stepper(name: str, model: nn.Module) -> Any:
    settings = FinetuneSettings.of({"engine": name, "device": "cpu", "cache": False})
    return engine(name).prepare(model, nn.functional.cross_entropy, settings)


@pytest.mark.parametrize(
    ("inputs", "positions"),
    [
        (torch.zeros(8, 30), 8),  # rows of features
        (torch.zeros(8, 30, dtype=torch.long), 240),  # tokens
        (torch.zeros(8, 3, 5, 5), 600),  # pixels
        (torch.zeros(0, 30), 0),
        (torch.tensor(1.0), 1),
    ],
)
def test_a_forward_pass_has_a_product_for_each_parameter_and_position(
    inputs: torch.Tensor, positions: int
) -> None:
    assert products(100, inputs) == 100 * positions
    assert products(100, {"input": inputs, "label": torch.zeros(0)}) == 100 * positions


def test_a_batch_without_tensors_is_small() -> None:
    assert products(100, {"text": "none"}) == 0


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    def fails(inputs: torch.Tensor) -> None:
        assert torch.get_num_threads() == 1
        raise ValueError("in the step")

    inputs = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="in the step"), suited_threads(10, [inputs]):
        fails(inputs)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (32, 1), (SMALL // 404, 1), (SMALL, 3)])
def test_a_step_uses_one_thread_for_small_batches_only(rows: int, threads: int) -> None:
    model = Counts(100)
    assert sum(p.numel() for p in model.parameters()) == 404
    trains = stepper("eager", model)
    rows = min(rows, SMALL // 404 + 1)
    trains.step([batch(rows, 100)], lr=0.1)
    trains.evaluate(batch(rows, 100))
    assert model.threads == [threads, threads]
    trains.close()


def test_one_large_micro_batch_makes_the_step_large() -> None:
    model = Counts(100)
    trains = stepper("eager", model)
    trains.step([batch(1, 100), batch(SMALL // 404 + 1, 100)], lr=0.1)
    assert model.threads == [3, 3]
    trains.close()


class Partitioned(OneProcess):
    """A process whose parameters have elements only in a step, as in DeepSpeed's stage 3."""

    def __init__(self, module: nn.Module, loss: Any, owner: nn.Module, device: Any) -> None:
        super().__init__(module, loss, owner, device)
        self._whole = [(parameter, parameter.data) for parameter in owner.parameters()]
        for parameter in owner.parameters():
            parameter.data = torch.empty(0)

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:  # type: ignore[override]
        for parameter, whole in self._whole:
            parameter.data = whole
        with super().together(training=training):
            yield


def test_partitioned_parameters_count_whole() -> None:
    model = Counts(100)
    trains = TorchStepper(
        model,
        nn.functional.cross_entropy,
        FinetuneSettings.of({"engine": "eager", "device": "cpu", "optimizer": "sgd"}),
        owner=model,
        device=torch.device("cpu"),
        report=lambda: pytest.fail("nobody asks"),
        processes=Partitioned,
    )
    trains.step([batch(SMALL // 404 + 1, 100)], lr=0.1)
    assert model.threads == [3]
    trains.close()


@needs_ort
@pytest.mark.parametrize(("rows", "workers"), [(4, 0), (SMALL // 404 + 1, 2)])
def test_a_session_has_as_many_threads_as_torch(rows: int, workers: int) -> None:
    torch.randn(300, 300) @ torch.randn(300, 300)  # torch's own threads start here
    trains = stepper("ortmodule", Counts(100))
    before = set(os.listdir("/proc/self/task"))
    trains.step([batch(rows, 100)], lr=0.1)
    started = len(set(os.listdir("/proc/self/task")) - before)
    # A session for training, and perhaps one for its check: each has its own pool.
    assert started % 2 == 0
    assert (started > 0) == (workers > 0)
    trains.close()


_MODEL = """
import sys, psutil, torch
import ortlab

torch.set_num_threads(2)
width = int(sys.argv[1])
model = ortlab.wrap(torch.nn.Linear(width, width), engine="ort")
given, large = torch.rand(width, width), torch.rand(1 << 20)
model(given)  # ORT's own threads are created
for _ in range(2):
    large * 2
    print(psutil.Process().num_threads())
    model(given)
    print(psutil.Process().num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch computes with libgomp on Linux")
@pytest.mark.parametrize(
    ("policy", "width", "ended"), [("active", 3000, 1), ("passive", 3000, 0), ("active", 64, 0)]
)
def test_threads_of_torch_that_spin_end_before_ort_computes_for_long(
    policy: str, width: int, ended: int
) -> None:
    needs("ort")
    told = subprocess.run(
        [sys.executable, "-c", _MODEL, str(width)],
        env={**os.environ, "OMP_WAIT_POLICY": policy},
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANGS_S,
        check=True,
    )
    before, after, before_again, after_again = map(int, told.stdout.split()[-4:])
    assert before - after == before_again - after_again == ended
