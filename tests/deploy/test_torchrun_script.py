"""A run written as a plain script: its results under torchrun, and the code copied from cells."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ortlab
from ortlab.metrics.recorder import INDEX
from ortlab.settings import FinetuneSettings
from ortlab.training.data_loading import batches
from tests.support import tiny

TOLERANCE = 1e-5
SETTINGS = {"lr": 1e-2, "warmup_steps": 3, "max_grad_norm": 0.5, "max_steps": 50, "seed": 4}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Sequential(nn.Tanh(), nn.LayerNorm(32)), nn.Linear(32, 4)
    )


def samples(count: int = 101) -> TensorDataset:
    """Return as many samples as make batches of eight end with an uneven one."""
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 6, generator=drawn)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def text_batches() -> list[dict[str, torch.Tensor]]:
    """Return token batches with some ignored labels, in different numbers in each half."""
    drawn = torch.Generator().manual_seed(5)
    found = []
    for _ in range(5):
        ids = torch.randint(0, 50, (6, 12), generator=drawn)
        labels = ids.clone()
        for row, length in enumerate((12, 9, 4, 11, 7, 2)):
            labels[row, length:] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def of_one_process(model: nn.Module, data: Any, **settings: Any) -> list[float]:
    run = ortlab.finetune(model, data, engine="eager", device="cpu", **settings)
    run.result()
    losses: list[float] = run.recorder.rows()[:, INDEX["loss"]].tolist()
    return losses


def torchrun(path: Path, processes: int = 2, *more: str) -> subprocess.Popen[str]:
    """Start a script in several processes; ortlab is not on their path.

    DeepSpeed's extensions, which take a minute to compile at its first start, stay in the
    user's cache.
    """
    ours = ("PYTHONPATH", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(processes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "127.0.0.1:0", *more, str(path)),
        ],
        cwd=path.parent,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def of_torchrun(path: Path, processes: int = 2, *, first: int = 1) -> list[float]:
    """Return the losses that the processes print, from step `first` on."""
    out, err = (run := torchrun(path, processes)).communicate(timeout=300)
    assert run.returncode == 0, out + err
    told = re.findall(r"^step (\d+) loss (\S+)$", out, re.MULTILINE)
    assert [int(step) for step, _ in told] == list(range(first, first + len(told)))
    return [float(loss) for _, loss in told]


def check(model: nn.Module, data: Any, folder: Path, **settings: Any) -> None:
    """Assert that the script's losses and weights match those of a run in one process."""
    stage = settings.pop("zero_stage")
    if stage > 1 and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    written = ortlab.script(model, data, to=folder, workers=2, zero_stage=stage, **settings)
    assert not written.open
    assert "ortlab" not in re.sub(r'^""".*?"""', "", written.path.read_text(), flags=re.DOTALL)
    expected = of_one_process(model, data, **settings)
    assert len(expected) == 50
    assert of_torchrun(written.path) == pytest.approx(expected, rel=TOLERANCE)
    trained = load_file(folder / "trained.safetensors")
    for name, value in model.state_dict().items():
        error = float((trained[name] - value).norm() / (value.norm() or 1))
        assert error < TOLERANCE, name


LONG = {"loss": "cross_entropy", "lr": 1e-2, "batch_size": 12, "max_steps": 400, "seed": 4}


def with_dropout() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.1), nn.Linear(32, 4))


def until_step(run: subprocess.Popen[str], step: int) -> list[str]:
    """Return what a script has printed up to a step."""
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith(f"step {step} loss"):
            return lines
    raise AssertionError(f"{lines}")


def trained(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "trained.safetensors")


@pytest.mark.parametrize("stage", [0, 1])
def test_sigterm_writes_a_checkpoint_from_which_it_continues(tmp_path: Path, stage: int) -> None:
    """With as many processes to the bit, dropout included."""
    written = [
        ortlab.script(
            with_dropout(), samples(), to=tmp_path / name, zero_stage=stage, workers=2, **LONG
        )
        for name in ("whole", "stopped")
    ]
    expected = of_torchrun(written[0].path)
    run = torchrun(written[1].path)
    lines = until_step(run, 20)
    run.terminate()
    rest, err = run.communicate(timeout=300)
    assert run.returncode != 0
    (at,) = set(re.findall(r"process [01] stopped after step (\d+); start again", rest))
    assert (tmp_path / "stopped" / "checkpoint.pt").exists(), err
    told = [
        float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", "".join(lines) + rest, re.M)
    ]
    assert len(told) == int(at) < len(expected)
    assert told + of_torchrun(written[1].path, first=int(at) + 1) == expected
    for name, value in trained(written[0].path).items():
        assert torch.equal(value, trained(written[1].path)[name]), name
    assert not (tmp_path / "stopped" / "checkpoint.pt").exists()


def test_it_continues_with_another_number_of_processes(tmp_path: Path) -> None:
    """The batch stays the whole one: losses are equal to rounding."""
    model = network()
    written = ortlab.script(
        model, samples(), to=tmp_path / "it", zero_stage=1, workers=3, save_steps=10, **LONG
    )
    run = torchrun(written.path, 3, "--max-restarts", "0")
    until_step(run, 25)
    (agent,) = [psutil.Process(run.pid)]
    victim = next(each for each in agent.children() if str(written.path) in each.cmdline())
    victim.kill()
    run.communicate(timeout=300)
    assert run.returncode != 0
    saved = torch.load(tmp_path / "it" / "checkpoint.pt", weights_only=True)["step"]
    assert saved % 10 == 0
    assert saved >= 20
    expected = of_one_process(model, samples(), **LONG)
    rest = of_torchrun(written.path, 2, first=saved + 1)
    assert rest == pytest.approx(expected[saved:], rel=1e-4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "start several processes: torchrun --standalone --nproc-per-node 2 train.py"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "srun python train.py in a job of Slurm"),
        (
            {
                **{f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")},
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "name the first host: mpirun -x MASTER_ADDR=HOST",
        ),
    ],
)
def test_a_start_that_is_none_is_refused(
    tmp_path: Path, changed: dict[str, str], reason: str
) -> None:
    written = ortlab.script(network(), samples(), to=tmp_path / "it", workers=2, **LONG)
    theirs = ("SLURM_", "OMPI_", "RANK", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    done = subprocess.run(
        [sys.executable, written.path], env={**kept, **changed}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("stage", "optimizer", "schedule"),
    [
        (0, "adamw", "linear"),
        (1, "lamb", "cosine"),
        pytest.param(2, "sgd", "constant", marks=pytest.mark.nightly),
        pytest.param(3, "adamw", "constant", marks=pytest.mark.nightly),
    ],
)
def test_fifty_steps_are_those_of_a_run(
    tmp_path: Path, stage: int, optimizer: str, schedule: str
) -> None:
    """Fifty steps match a run: two micro-batches a step, epochs with a shorter and uneven end."""
    more = {
        "loss": "cross_entropy",
        "num_train_epochs": 9,
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
    }
    chosen = {**SETTINGS, **more, "optimizer": optimizer, "lr_scheduler_type": schedule}
    check(network(), samples(), tmp_path / "made here", zero_stage=stage, **chosen)


def test_a_transformer_with_its_own_loss(tmp_path: Path) -> None:
    """Lists as batches, ignored targets, frozen weights and no clipping give the same losses.

    The optimizer is SGD: the gradient of attention's key bias is only rounding error, which
    AdamW would turn into full steps.
    """
    torch.manual_seed(2)
    model = tiny.gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    chosen = {**SETTINGS, "num_train_epochs": 10, "max_grad_norm": None, "optimizer": "sgd"}
    check(model, text_batches(), tmp_path, zero_stage=1, **chosen)


# --- the written text, without processes


def parts(path: Path) -> dict[str, Any]:
    """Return the definitions of a script, without training."""
    return runpy.run_path(str(path))


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


def test_the_order_of_samples_is_the_run_s(tmp_path: Path) -> None:
    data = samples()
    written = ortlab.script(network(), data, to=tmp_path, loss="cross_entropy", seed=7)
    read = parts(written.path)["micro_batches"]
    theirs = batches(data, FinetuneSettings.of(seed=7))
    for epoch in (0, 1):
        found = list(read(epoch))
        for mine, its in zip(found, theirs.epoch(epoch), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    assert "--nproc-per-node 1 " in written.command


CELLS = """
import math
from torch.nn import functional as F
import torch.nn as layers
WIDTH, never = 32, 1
def scaled(x):
    return x / math.sqrt(WIDTH)
---
class Base(layers.Module):
    def count(self):
        return sum(p.numel() for p in self.parameters())
class Empty:
    pass
---
class Net(Base):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.inner = layers.Linear(inputs, WIDTH)
        self.outer = layers.Linear(WIDTH, outputs)
    def forward(self, x):
        return self.outer(F.relu(scaled(self.inner(x))))
class Bare(Net):
    def __init__(self):
        super().__init__(6, 4)
def missed(output, target):
    return F.cross_entropy(output, target)
def loader():
    return [(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))] * 3
net, bare = Net(6, 4), Bare()
train = DataLoader(samples(), batch_size=8)
"""


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """Return a shell in an empty folder in which the cells have run."""
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    shell.user_ns.update(torch=torch, DataLoader=DataLoader, samples=samples)
    ortlab.load_ipython_extension(shell)
    for cell in CELLS.split("---\n"):
        shell.run_cell(cell).raise_error()
    yield shell
    ortlab.unload_ipython_extension(shell)


def typed(shell: InteractiveShell, line: str) -> Any:
    result = shell.run_cell(line)
    result.raise_error()
    return result.result


def test_classes_of_cells_go_along(cells: InteractiveShell) -> None:
    line = "%ort script bare train --workers 16 --loss missed --to out --make-data 'loader()'"
    written = typed(cells, line)
    assert written.path == Path("out/train.py")
    assert not written.open
    assert "--nproc-per-node 16 out/train.py" in repr(written)
    text = written.path.read_text()
    assert "never" not in text
    found = parts(written.path)
    assert same(found["make_model"](), cells.user_ns["bare"])
    batch = next(found["micro_batches"](0))
    loss = found["objective"](found["make_model"](), [*batch])
    expected = cells.user_ns["missed"](cells.user_ns["bare"](batch[0]), batch[1])
    assert float(loss.detach()) == float(expected.detach())


def test_what_cannot_be_known_is_said(cells: InteractiveShell) -> None:
    written = typed(cells, "%ort script net train --loss cross_entropy")
    assert [each.partition(",")[0] for each in written.open] == [
        "the arguments of Net in make_model",
        "the batches of the DataLoader in micro_batches",
    ]
    assert "STEPS = 13 " in written.path.read_text()
    found = parts(written.path)
    with pytest.raises(NotImplementedError, match="fill in the batches of the DataLoader"):
        next(found["micro_batches"](0))
    made = typed(cells, "%ort script net --loss mse --make-model 'Net(6, 4)' --to other")
    assert same(parts(made.path)["make_model"](), cells.user_ns["net"])
    assert made.open == ("the data in micro_batches, or give make_data=",)
    assert "the learning rate is constant: the linear schedule needs the number" in repr(made)
    gone = typed(cells, "%ort script net --loss mse --make-model 'Net(six, 4)' --to more")
    assert "fill in six, which the code uses" in repr(gone)
    empty = typed(cells, "%ort script bare --loss mse --make-data 'Empty()' --to empty")
    assert "fill in Empty, which the code uses" in repr(empty)  # its cell is not known


def test_weights_of_another_form_are_refused_by_the_script(cells: InteractiveShell) -> None:
    written = typed(cells, "%ort script net --loss mse --make-model 'Net(6, 5)'")
    with pytest.raises(RuntimeError, match="size mismatch"):
        parts(written.path)["make_model"]()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "adasum"}, "choose reduction='mean'"),
        ({"precision": "fp16"}, "choose 'bf16'"),
        ({"precision": "bf16", "zero_stage": 2}, "choose engine='eager' and precision='fp32'"),
        ({"engine": "compile", "zero_stage": 3}, "choose engine='eager' and precision='fp32'"),
        ({"optimizer": "lamb", "zero_stage": 2}, "whole tensors"),
        ({"recompute": "layers"}, "choose recompute='off'"),
        ({"param_dtype": "bf16", "zero_stage": 1}, "choose param_dtype='fp32'"),
        ({"offload_optimizer": True, "zero_stage": 1}, "choose offload_optimizer=False"),
        ({"loss": lambda a, b: a}, "define a function with def"),
        ({"make_model": "Net("}, "is not valid Python"),
        ({"zero_stages": 2}, "did you mean 'zero_stage'"),
    ],
)
def test_what_a_script_has_no_lines_for(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "none"
    with pytest.raises(ValueError, match=re.escape(message)):
        ortlab.script(network(), samples(), to=folder, **{"loss": "mse", **settings})
    assert not folder.exists()


def test_another_script_is_not_written_over(tmp_path: Path) -> None:
    ortlab.script(network(), samples(), to=tmp_path, loss="mse")
    with pytest.raises(ValueError, match="already exists; name another folder"):
        ortlab.script(network(), samples(), to=tmp_path, loss="mse")


def test_an_iterator_of_samples_of_several_shapes_is_for_the_user(tmp_path: Path) -> None:
    ragged: Any = [({"x": torch.ones(3)}, "text")]
    written = ortlab.script(network(), ragged, to=tmp_path, loss="mse")
    assert "the batches of the list" in written.open[0]


def test_precision_and_engine(tmp_path: Path) -> None:
    text = {}
    for name, chosen in {
        "bf16": {"precision": "bf16", "engine": "eager"},
        "compile": {"engine": "compile"},
        "ortmodule": {},
    }.items():
        written = ortlab.script(network(), samples(), to=tmp_path / name, loss="mse", **chosen)
        parts(written.path)
        text[name] = written.path.read_text()
        assert ("without ONNX Runtime" in repr(written)) == (name == "ortmodule")
        assert "pip install deepspeed" not in repr(written)
    sharded = ortlab.script(network(), samples(), to=tmp_path / "2", loss="mse", zero_stage=2)
    assert "pip install deepspeed" in repr(sharded)
    assert "with torch.autocast(device.type, torch.bfloat16):" in text["bf16"]
    assert "DistributedDataParallel(torch.compile(model)" in text["compile"]
    assert "autocast" not in text["ortmodule"]
