"""Tests of runs on workers: the losses of one process, moves, checkpoints, and ranks that die."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.cluster import facts
from ortlab.cluster.call import RankError
from ortlab.engines import compatibility
from ortlab.engines.base import StepperLost
from ortlab.history.run_folder import RunFolder, in_checkpoints
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import picture
from ortlab.session import session
from ortlab.training.run import Run
from ortlab.utils.errors import out_of_memory
from ortlab.utils.process_memory import memory
from tests.support.killing import fill, small_disk
from tests.support.needed_engines import needs
from tests.support.typed_magics import Typist
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import (
    TOLERANCE,
    Network,
    begin,
    column,
    data,
    difference,
    losses,
    train,
)

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals, and gloo over loopback"),
    pytest.mark.usefixtures("one_thread", "own_workers"),
]


class _Large(torch.autograd.Function):
    """A function whose backward requests more memory than exists."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**60)


class Wide(Network):
    """Requests more memory than exists, on some `ranks`, for more than three rows.

    ``where`` is "forward" or "backward" of a step, or an "evaluation" after one.
    """

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.where, self.ranks, self.trained = where, ranks, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        self.trained |= self.training
        if len(x) <= 3 or int(os.environ["RANK"]) not in self.ranks or not self.trained:
            return scores
        if self.training == (self.where == "evaluation"):
            return scores
        return _Large.apply(scores) if self.where == "backward" else torch.empty(2**60)


def at(run: Run, step: int) -> Run:
    """Wait until `run` has made this many steps."""
    until = time.monotonic() + HANGS_S
    while run.step < step:
        assert time.monotonic() < until, run
        assert not run.over(), run
        time.sleep(0.001)
    return run


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def pids() -> list[int]:
    assert session.workers is not None
    return session.workers.pids


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Train the run of one process that others are compared with."""
    model = Network()
    run = train(model, eval_dataset=data(50))
    return {"losses": losses(run), "weights": weights(model), "run": run}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fifty_steps_are_those_of_one_process(alone: dict[str, Any], stage: int) -> None:
    model = Network()
    run = train(model, workers=2, zero_stage=stage, eval_dataset=data(50))
    assert difference(alone["losses"], losses(run)) < TOLERANCE
    assert torch.allclose(weights(model), alone["weights"], atol=1e-6), "the user's model trains"
    assert model.first.weight is model.again.weight
    for one, other in zip(
        alone["run"].recorder.events("eval"), run.recorder.events("eval"), strict=True
    ):
        assert other.values == pytest.approx(one.values, rel=TOLERANCE)
        assert one.step == other.step
    notes = "".join(e.text for e in run.recorder.events("note"))
    assert f"ZeRO stage {stage}" in notes
    assert "batch_size=13 is split unevenly: 7 samples for 1 and 6 for 1 of 2 workers" in notes
    assert run.recorder.last is not None
    assert run.recorder.last.communication_ms > 0


def test_every_rank_tells_of_itself() -> None:
    run = train(Network(), workers=2, zero_stage=1)
    ranks = run.recorder.ranks
    assert [each.count for each in ranks] == [50, 50]
    own = [column(each, "loss") for each in ranks]
    assert not np.allclose(*own), "each has the loss of its own rows"
    assert np.allclose(sum(own) / 2, losses(run), rtol=0.1)
    samples = sum(column(each, "samples") for each in ranks)
    assert list(samples) == list(column(run.recorder, "samples"))
    parameters = sum(p.nbytes for p in Network().parameters())
    for each in ranks:
        assert each.last is not None
        assert each.last.parameter_bytes == each.last.gradient_bytes == parameters
        assert 0 < each.last.optimizer_bytes < 2 * parameters
        assert each.last.rss_bytes >= each.last.base_bytes > 0
        assert 0 < each.last.communication_ms < each.last.step_ms
    kept = [RunFolder(run.folder).path / f"rank-{rank}.jsonl" for rank in (0, 1)]
    assert all(len(path.read_text().splitlines()) == 51 for path in kept)
    assert len(run.ranks) == 2
    assert "optimizer state" in repr(run.ranks)
    peaks = max(float(column(each, "peak_bytes").max()) for each in ranks)
    assert run.result().peak_bytes == peaks
    told = f"peak memory {memory(peaks)}"  # not the sum over the ranks, as in the chart
    assert told in str(run.result())
    assert told in picture.summary(run, run.recorder.rows())
    last = run.recorder.last
    assert last is not None
    assert last.rss_bytes > max(each.last.rss_bytes for each in ranks if each.last)


@pytest.mark.parametrize("engine", ["ort", "ortmodule"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fifty_steps_in_ort(alone: dict[str, Any], stage: int, engine: str) -> None:
    needs(engine)
    run = train(Network(), engine=engine, workers=2, zero_stage=stage)
    assert run.engine_used == engine
    assert difference(alone["losses"], losses(run)) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1])
def test_fifty_steps_compiled(alone: dict[str, Any], stage: int) -> None:
    needs("compile")
    run = train(Network(), engine="compile", workers=2, zero_stage=stage)
    assert difference(alone["losses"], losses(run)) < TOLERANCE


@pytest.mark.parametrize("engine", ["ort", "ortmodule"])
def test_a_run_moves_to_workers_and_back(alone: dict[str, Any], engine: str) -> None:
    """Weights, moments, data order and step are kept; the global batch is unchanged."""
    needs(engine)
    model = Network()
    run = begin(model)
    moves: list[dict[str, Any]] = [
        {"workers": 2, "zero_stage": 1},
        {"zero_stage": 3},
        {"zero_stage": 0, "engine": engine},
        {"workers": 1},
    ]
    for step, changes in zip((5, 12, 20, 30), moves, strict=True):
        at(run, step).pause()
        run.apply(**changes)
        run.resume()
    run.result(HANGS_S)
    assert difference(alone["losses"], losses(run)) < TOLERANCE
    assert torch.allclose(weights(model), alone["weights"], atol=1e-6)
    told = [event.text for event in run.recorder.events("change")]
    assert told[0] == "workers=2 (was 1), zero_stage=1 (was 0)"
    assert told[-1] == "workers=1 (was 2)"
    assert not run.recorder.events("warning")
    assert list(column(run.recorder, "samples")) == list(column(alone["run"].recorder, "samples"))


def test_a_run_takes_16_bit_weights_and_gives_them_up(alone: dict[str, Any]) -> None:
    """The run changes while it trains, also to the host's optimizer; losses track fp32's."""
    if (reason := compatibility.deepspeed_missing()) is not None:
        pytest.skip(reason)
    model = Network()
    run = begin(model)
    moves: list[dict[str, Any]] = [
        {"workers": 2, "zero_stage": 2, "precision": "bf16", "param_dtype": "bf16"},
        {"zero_stage": 3, "offload_optimizer": True},
        {"precision": "fp32", "param_dtype": "fp32", "offload_optimizer": False},
        {"workers": 1, "zero_stage": 0},
    ]
    for step, changes in zip((5, 15, 25, 35), moves, strict=True):
        at(run, step).pause()
        run.apply(**changes)
        run.resume()
    run.result(HANGS_S)
    assert not run.recorder.events("warning")
    assert difference(alone["losses"][:5], losses(run)[:5]) < TOLERANCE
    assert TOLERANCE < difference(alone["losses"], losses(run)) < 0.02
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model.first.weight is model.again.weight
    count = sum(each.numel() for each in model.parameters())
    rows = run.recorder.ranks[0].rows()
    held = {name: rows[:, INDEX[f"{name}_bytes"]] / count for name in ("parameter", "host")}
    assert np.unique(held["parameter"].round()).tolist() == [1, 2]
    assert held["host"].max() == pytest.approx(6 + 4, rel=0.1)  # its share of 12, and of gradients
    told = [event.text for event in run.recorder.events("change")]
    assert "param_dtype=bf16 (was fp32)" in told[0]
    assert "offload_optimizer=True (was False)" in told[1]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint in the middle of a run, to which every rank wrote its shard."""
    path = tmp_path_factory.mktemp("kept") / "middle"
    run = at(begin(Network(), workers=2, zero_stage=1), 10)
    run.pause()
    assert run.checkpoint(path) == path
    run.resume()
    run.result(HANGS_S)
    return path


def test_every_rank_writes_its_shard(shards: Path) -> None:
    names = sorted(path.name for path in shards.iterdir())
    assert len(names) == 3
    assert names[-1] == "state.safetensors"
    sizes = [(shards / name).stat().st_size for name in names[:2]]
    assert max(sizes) < 1.5 * min(sizes)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in shards.iterdir())
    assert shards.stat().st_mode & 0o777 == 0o700


def taking_turns(workers: int) -> contextlib.AbstractContextManager[Any]:
    """Expect the warning that there are more workers than cores, where there are."""
    there_are = facts.cores()
    if workers <= there_are:
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match=f"{workers} workers share {there_are} core")


def check_that_shards_load(alone: dict[str, Any], shards: Path, workers: int) -> None:
    # With one worker, settings that need two are left out.
    stage = {"zero_stage": 0} if workers == 1 else {}
    with taking_turns(workers):
        run = begin(Network(), resume_from=shards, workers=workers, **stage)
        run.result(HANGS_S)
    step = Checkpoint.load(shards).position.step
    assert difference(alone["losses"][step:], losses(run)) < TOLERANCE


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_load_on_one_worker_and_on_as_many(
    alone: dict[str, Any], shards: Path, workers: int
) -> None:
    check_that_shards_load(alone, shards, workers)


@pytest.mark.parametrize("harm", ["bytes", "missing", "link", "more", "outside", "part"])
def test_damaged_shards_are_named(shards: Path, tmp_path: Path, harm: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    shard = sorted(copy.glob("shard-*"))[0]
    expected = shard.name
    if harm == "bytes":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif harm == "missing":
        shard.unlink()
    elif harm == "link":  # to the same bytes, but nobody knows where a link leads
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
        expected = f"{shard.name} is missing, or not a file"
    elif harm == "more":
        shutil.copy(shard, copy / "stranger.safetensors")
        expected = "stranger"
    elif harm == "outside":  # a forged list of files names one outside the folder
        loaded = Checkpoint.load(shards)
        parts = {"outline": {}, "digests": {"../middle/state.safetensors": "0"}}
        bare = dataclasses.replace(loaded, model={}, optimizer={}, shards=None)
        bare._save_file(copy / "state.safetensors", parts)
        expected = "state.safetensors is missing"
    else:
        with pytest.raises(ValueError, match=r"is part of a checkpoint; use its folder"):
            Checkpoint.load(copy / "state.safetensors")
        return
    with pytest.raises(ValueError, match=expected):
        Checkpoint.load(copy)


def test_one_file_where_a_file_was_asked_for(tmp_path: Path) -> None:
    run = at(begin(Network(), workers=2), 3)
    path = run.checkpoint(tmp_path / "one.safetensors")
    run.stop()
    run.result(HANGS_S)
    assert path.is_file()
    assert set(Checkpoint.load(path).model) == set(Network().state_dict())


class Unlucky(Network):
    """Raises on every rank, at the same batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(self.last.bias.detach().abs().sum()) > 0 and self.count > 2:
            raise ArithmeticError("no luck")
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)

    count = 0


def test_what_all_ranks_fail_in_fails_the_run_and_keeps_its_state() -> None:
    model = Unlucky()
    run = begin(model, workers=2, zero_stage=1, gradient_accumulation_steps=1)
    with pytest.raises(RankError, match=r"rank \d of 2: ArithmeticError: no luck"):
        run.result(HANGS_S)
    assert run.state == "failed"
    assert run.step == 3
    final = Checkpoint.load(run.folder / "checkpoints" / "final.safetensors")
    assert final.position.step == 3
    assert torch.equal(final.model["last.bias"], model.state_dict()["last.bias"])
    train(Network(), workers=2, max_steps=2)  # the workers are still usable


class OnlyHere:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a lock")


@pytest.mark.parametrize(
    ("where", "ranks"), [("forward", (0, 1)), ("forward", (1,)), ("backward", (1,))]
)
def test_memory_that_does_not_suffice_holds_the_run(where: str, ranks: tuple[int, ...]) -> None:
    """It resumes with smaller micro-batches; peers left waiting in a last backward are lost."""
    chosen = {"batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 30}
    expected = train(Network(), **chosen)
    run = begin(Wide(where, ranks), workers=2, hold=True, **chosen)
    with pytest.raises(RankError if where == "forward" else StepperLost) as raised:
        run.result(HANGS_S)
    assert out_of_memory(raised.value)
    assert run.state == "paused"
    assert run.advice == {"batch_size": 6, "gradient_accumulation_steps": 2}
    run.resume(**run.advice)
    assert run.result(HANGS_S).state == "finished"
    assert difference(losses(expected), losses(run)) < TOLERANCE


def test_an_evaluation_that_does_not_fit_takes_fewer_samples_at_a_time() -> None:
    chosen = {
        "batch_size": 12,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "eval_dataset": data(24),
    }
    expected = train(Network(), **chosen).result(HANGS_S)
    run = train(Wide("evaluation", (1,)), workers=2, hold=True, **chosen)
    told = "not enough memory to evaluate 12 samples at a time: using 6"
    assert [event.text for event in run.recorder.events("warning")] == [f"{told} from now on"]
    found = run.result(HANGS_S)
    assert found.after is not None
    assert expected.after is not None
    assert found.after.loss == pytest.approx(expected.after.loss, rel=TOLERANCE)


def test_what_cannot_be_is_said_before_anything_starts() -> None:
    model = Network()
    runs = len(session.runs)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"zero_stage": 1}, r"zero_stage=1 needs at least 2 workers \(workers=1\)"),
        (
            {"workers": 2, "zero_stage": 3, "engine": "ortmodule"},
            "engine 'ortmodule' supports 0, 1, 2",
        ),
        ({"workers": 2, "tensor_parallel": 2}, "no layer of Network is known to be shardable"),
        ({"workers": 2, "pipeline_stages": 2}, "pipeline of 2 stages needs an nn.Sequential"),
        ({"workers": 2, "zero_stage": 3, "engine": "ort"}, "and Network has none"),
        ({"workers": 3, "tensor_parallel": 2}, "does not divide workers=3"),
        ({"tensor_parallel": 2}, "tensor_parallel=2"),
        ({"param_dtype": "bf16"}, r"param_dtype='bf16' needs at least 2 workers \(workers=1\)"),
        ({"workers": 2, "offload_optimizer": True}, "choose zero_stage=1"),
        ({"workers": 20}, "batch_size=13 cannot be split across 20 workers"),
        ({"workers": 3, "reduction": "adasum"}, r"needs a power of two of workers \(workers=3\)"),
        ({"workers": 2, "reduction": "adasum"}, "choose max_grad_norm=None"),
        ({"workers": 0}, "workers=0"),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            begin(model, **changes)
    model.strange = OnlyHere()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the model cannot be sent to workers: it has a lock"):
        begin(model, workers=2)
    assert len(session.runs) == runs


def test_workers_train_one_run_at_a_time() -> None:
    run = at(begin(Network(), workers=2, max_steps=5000, num_train_epochs=500), 3)
    assert session.workers is not None
    with pytest.raises(ValueError, match=f"busy with {run.name}"):
        begin(Network(), workers=2)
    with pytest.raises(ValueError, match=f"busy with {run.name}"):
        session.workers.run(len, ())
    run.stop()
    run.result(HANGS_S)
    assert session.workers.busy is None


@pytest.mark.parametrize("setting", ["tensor_parallel", "pipeline_stages"])
def test_a_model_in_parts(setting: str) -> None:
    """With layers or stages partitioned, losses are the same and the model is whole at the end."""

    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

    one, two = model(), model()
    expected = losses(train(one, max_steps=20))
    run = at(begin(two, workers=2, max_steps=20, **{setting: 2}), 8)
    run.apply(workers=1, **{setting: 1})
    run.result(HANGS_S)
    assert not run.recorder.events("warning")
    assert difference(expected, losses(run)) < TOLERANCE
    assert torch.allclose(weights(one), weights(two), atol=1e-6)


def test_adasum_trains_on_workers() -> None:
    run = train(Network(), workers=2, reduction="adasum", optimizer="sgd", max_steps=10)
    assert "reduction adasum" in "".join(e.text for e in run.recorder.events("note"))
    assert losses(run)[-1] < losses(run)[0]


def test_python_ends_the_run_before_its_workers(tmp_path: Path) -> None:
    """A script that ends in the middle of a run leaves the checkpoint and no process."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            import ortlab
            from tests.support.worker_runs import CHOSEN, Network, data

            chosen = dict(CHOSEN, num_train_epochs=900, max_steps=9000)
            run = ortlab.finetune(Network(), data(), **chosen)
            while run.step < 3:
                time.sleep(0.01)
            run.apply(workers=2)
            while run.current_settings.parallel.workers == 1:
                time.sleep(0.01)
            moved = run.step
            while run.step < moved + 5:
                time.sleep(0.01)
            print(*ortlab.workers().pids, run.step, run.folder)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=HANGS_S, check=True
    )
    first, second, step, folder = done.stdout.split()[-4:]
    final = Checkpoint.load(Path(folder) / "checkpoints" / "final.safetensors")
    about = RunFolder(Path(folder)).read_json("run")
    assert about["state"] == "stopped"
    assert final.position.step == about["steps"] >= int(step), "not that of the last checkpoint"
    assert not any(psutil.pid_exists(int(pid)) for pid in (first, second))
    assert "Error" not in done.stderr


@pytest.mark.parametrize("said", ["starting 2 workers", "2 workers up after"])
def test_a_signal_while_workers_start_stops_the_run(said: str, tmp_path: Path) -> None:
    """The run ends as stopped, and no process or temporary folder is left."""
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import ortlab
from tests.support.worker_runs import CHOSEN, Network, data

run = ortlab.finetune(Network(), data(), **CHOSEN | dict(workers=2, max_steps=9000))
while not any({said!r} in event.text for event in run.recorder.events("note")):
    time.sleep(0.001)
print(run.folder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.terminate()
        _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert RunFolder(folder).read_json("run")["state"] == "stopped"
    assert list(tmp_path.glob("ortlab-*")) == []


def test_a_class_of_a_cell_and_the_options_as_they_are_typed(ip: Typist) -> None:
    """Nothing of the notebook can be imported on a rank."""
    ip(
        """
import torch, ortlab
from torch import nn
from torch.utils.data import TensorDataset

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return shifted(self.layer(x))

def shifted(x):
    return x + 1

def mine_loss(output, target):
    return nn.functional.cross_entropy(output, target)

model = Mine()
some = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
"""
    )
    ip(
        "run = %ort finetune model some --engine eager --loss mine_loss --workers 2 "
        "--zero-stage 1 --max-steps 3"
    )
    run = ip["run"]
    assert run.result(HANGS_S).steps == 3
    assert len(run.recorder.ranks) == 2


def test_no_thread_is_left(threads_end: None) -> None:
    """The recorders of the ranks end with the run's."""
    train(Network(), workers=2, max_steps=2)


# --- last, the tests that leave no workers to the next: starting them takes 10 s of CPU time


def test_a_rank_that_dies_holds_the_run_and_fresh_ones_go_on() -> None:
    """Including dropout, losses are bitwise the same from the last checkpoint on."""
    chosen = {"workers": 2, "zero_stage": 1, "save_steps": 10}
    undisturbed = Network(0.3)
    expected = losses(train(undisturbed, **chosen))
    model = Network(0.3)
    run = at(begin(model, **chosen), 27)
    before = pids()
    os.kill(before[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(StepperLost, match=r"rank 1 of 2 died: SIGKILL") as raised:
        run.result(HANGS_S)
    assert time.monotonic() - began < 5
    assert not any(map(psutil.pid_exists, before)), "the other ranks have ended, too"
    kept = run.step
    assert kept % 10 == 0
    assert kept >= 20
    note = "".join(raised.value.__notes__)
    assert f"is paused at step {kept}" in note
    assert "run.resume()" in note
    assert run.state == "paused"
    assert "rank 1 of 2 died" in run.status().badges[0]
    assert run.checkpoint().is_dir()
    run.resume()
    assert run.result(HANGS_S).state == "finished"
    assert list(losses(run)) == list(expected)
    assert list(column(run.recorder, "step")) == [*range(1, 51)], "no step is told twice"
    assert torch.equal(weights(model), weights(undisturbed))
    assert run.status().badges == ()
    left = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert left == {"final.safetensors", "last-40", f"step-{kept}"}


@pytest.mark.nightly
def test_ten_deaths_at_random_points() -> None:
    """Any rank dies, in a collective or between steps: ten stops, ten resumes, the same losses."""
    chosen = {
        "workers": 2,
        "zero_stage": 1,
        "save_steps": 5,
        "max_steps": 300,
        "num_train_epochs": 90,
    }
    expected = losses(train(Network(0.3), **chosen))
    drawn = random.Random(5)
    model = Network(0.3)
    run = begin(model, **chosen)
    stops = []
    for step in sorted(drawn.sample(range(10, 290), 10)):
        if run.step < step:
            at(run, step)
        time.sleep(drawn.random() * 0.05)
        assert session.workers is not None
        before = session.workers.pids
        os.kill(drawn.choice(before), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(StepperLost, match="SIGKILL"):
            run.result(HANGS_S)
        stops.append(time.monotonic() - began)
        assert not any(map(psutil.pid_exists, before))
        run.resume()
    run.result(HANGS_S)
    print("stops:", ", ".join(f"{each:.2f} s" for each in stops))
    assert len(stops) == 10
    assert max(stops) < 5
    assert list(losses(run)) == list(expected)


def test_a_held_run_that_is_stopped_has_its_last_checkpoint() -> None:
    model = Network()
    run = at(begin(model, workers=2, save_steps=5, max_steps=5000, num_train_epochs=500), 12)
    os.kill(pids()[0], signal.SIGKILL)
    with pytest.raises(StepperLost):
        run.result(HANGS_S)
    kept = run.step
    run.stop()
    assert run.result(HANGS_S).state == "stopped"
    assert run.step == kept
    final = Checkpoint.load(run.folder / "checkpoints" / "final.safetensors")
    assert final.position.step == kept
    assert torch.equal(final.model["last.bias"], model.state_dict()["last.bias"])


def test_a_full_folder_for_temporary_files_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks then write the state of a checkpoint and of the end to ORTLAB_HOME."""
    with small_disk(tmp_path / "temporary", 2**20) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        run = at(begin(Network(), workers=2, max_steps=5000, num_train_epochs=500), 12)
        run.pause()
        until(lambda: run.state == "paused")
        fill(disk, 0)
        kept = Checkpoint.load(run.checkpoint()).position.step
        run.stop()
        assert run.result(HANGS_S).state == "stopped"
        assert Checkpoint.load(in_checkpoints(run.folder)[0]).position.step == kept


def test_shards_load_on_more_workers(alone: dict[str, Any], shards: Path) -> None:
    check_that_shards_load(alone, shards, 3)


def test_shards_of_zero_3_load_under_tensor_parallelism(tmp_path: Path) -> None:
    """Four ranks save in the middle; two that split the layers go on, and one process does."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))

    expected = losses(train(layers()))
    path = tmp_path / "middle"
    with taking_turns(4):
        run = at(begin(layers(), workers=4, zero_stage=3), 10)
    run.pause()
    assert len(list(run.checkpoint(path).glob("shard-*"))) == 4
    run.stop()
    run.result(HANGS_S)
    step = Checkpoint.load(path).position.step
    for chosen in ({"workers": 2, "tensor_parallel": 2}, {"workers": 1}):
        run = begin(layers(), resume_from=path, zero_stage=0, **chosen)
        run.result(HANGS_S)
        assert difference(expected[step:], losses(run)) < TOLERANCE, chosen


def macro(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    assert len(predictions) == len(targets) == 41
    return float(f1_score(targets, predictions.argmax(1), average="macro"))


@pytest.mark.parametrize("shared", [{"workers": 2}, {"workers": 1, "isolated": True}])
def test_own_metrics_get_the_predictions_of_all_rows(shared: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"eval_dataset": data(41), "eval_steps": 10, "max_steps": 20}
    found = []
    for more in ({}, shared):
        run = train(Network(), metrics={"f1": macro}, **chosen, **more)
        found.append([event.values["f1"] for event in run.recorder.events("eval")])
    assert found[1] == pytest.approx(found[0])
