"""Breakdown of a training step, run on a tiny model; the times themselves are not tested."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlab import bench
from ortlab.bench import parts
from ortlab.bench.interleaved import Spread
from ortlab.bench.report import MOST_OPERATORS, Operator, StepBench, StepParts
from ortlab.bench.settings import StepSettings
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.kernels.kernel_choice import Timing
from ortlab.graph.profile_ort import NodeTime
from ortlab.settings import FinetuneSettings
from tests.support.waiting import HANGS_S

MODEL = "bert-256/2x128"
# One thread: two would wait for each other whenever another process computes.
TINY: dict[str, Any] = {"model": MODEL, "steps": 3, "threads": 1, "quick": True}

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


def command(*options: str) -> list[str]:
    given = ["--quick", "--threads", "1", "--model", MODEL, *options]
    return [sys.executable, "-m", "ortlab.cli", "bench", "step", *given]


@pytest.fixture(scope="module")
def answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Return the command's output from a single run, and the file of its figures."""
    file = tmp_path_factory.mktemp("step") / "step.json"
    options = command("--steps", "3", "--json", str(file))
    return subprocess.run(options, capture_output=True, text=True), file


@pytest.fixture(scope="module")
def measured(answer: tuple[subprocess.CompletedProcess[str], Path]) -> StepBench:
    done, file = answer
    assert done.returncode == 0, done.stderr
    return StepBench.from_dict(json.loads(file.read_text()))


@pytest.fixture
def trial() -> Iterator[parts.Trial]:
    with parts.Trial(StepSettings(**TINY), chosen()) as trial:
        yield trial


def chosen(**options: Any) -> FinetuneSettings:
    return FinetuneSettings.of(engine="ortmodule", cache=False, device="cpu", **options)


# ---- what is measured ----------------------------------------------------------------------------


def test_the_command_prints_what_its_file_holds(
    answer: tuple[subprocess.CompletedProcess[str], Path], measured: StepBench
) -> None:
    done, file = answer
    assert done.stdout == measured.markdown() + "\n"
    assert json.loads(json.dumps(measured.as_dict())) == json.loads(file.read_text())
    assert "**Not a benchmark**" in done.stdout
    profiling = "profiling 3 steps with ORT's profiler"
    for line in ("first step of eager", "round 3 of 3, about ", profiling):
        assert f"{MODEL}: {line}" in done.stderr


def test_parts_add_up_to_the_step(measured: StepBench) -> None:
    assert [len(arm) for arm in (measured.eager, measured.ort, measured.spinning)] == [3, 3, 3]
    for found in measured.eager:
        assert found.session_ms == found.execution_ms == found.export_ms == 0
        assert 0 < found.rest_ms < found.step_ms
    for found in (*measured.ort, *measured.spinning):
        forward = found.caller_ms + found.look_up_ms + found.passing_ms + found.session_forward_ms
        backward = found.around_backward_ms + found.session_backward_ms
        assert forward == pytest.approx(found.forward_ms)
        assert backward == pytest.approx(found.backward_ms)
        whole = forward + backward + found.optimizer_ms + found.rest_ms
        assert whole == pytest.approx(found.step_ms)
        assert found.session_ms + found.around_ms == pytest.approx(forward + backward)
        # Each part lies within the next: nothing is counted twice, and each part took some time.
        within = (0.0, found.session_forward_ms, found.export_ms, found.execution_ms)
        assert list(within) == sorted({*within})
        assert found.execution_ms < found.forward_ms
        assert 0 < found.session_backward_ms < found.backward_ms
        assert found.rest_ms > 0


def test_what_is_called_by_itself_has_a_figure_for_each_step(measured: StepBench) -> None:
    for us in (measured.guard_us, measured.guard_again_us, measured.form_us, measured.dlpack_us):
        assert len(us) == 3
        assert min(us) > 0


def test_operators_add_up_to_the_kernels(measured: StepBench) -> None:
    assert set(measured.phases) == {"forward", "backward"}
    forward = sum(each.forward_us for each in measured.operators)
    assert forward == pytest.approx(measured.phases["forward"].kernels_us)
    whole = sum(each.us for each in measured.operators)
    kernels = sum(phase.kernels_us for phase in measured.phases.values())
    assert whole == pytest.approx(kernels)
    assert any(each.copies for each in measured.operators)
    assert not any(each.copies for each in measured.operators if "Gemm" in each.op)


def test_kernels_are_compared_by_what_was_measured(measured: StepBench) -> None:
    """Kernels are compared by measured pairs: this export timed the chosen and the rejected."""
    compared = [each for each in measured.operators if each.compared]
    assert sum(each.compared for each in compared) > 10
    for each in compared:
        assert each.compared <= each.nodes
        assert min(each.ort_us, each.ours_us) > 0


@pytest.mark.parametrize("kernels", ["ort", "torch"])
def test_other_kernels(kernels: str) -> None:
    """ORT's workers sleep, whoever computes; "ort" leaves only dropout to ortlab's kernels."""
    result = bench.step(**TINY | {"steps": 1, "kernels": kernels})
    ours = {each.op.rpartition(".")[2] for each in result.operators if "ortlab_kernels" in each.op}
    assert (ours == {"dropout", "dropout_backward"}) == (kernels == "ort")
    assert "| sleep, as configured |" in result.markdown()
    assert "| spin |" in result.markdown()


def test_bf16(measured: StepBench) -> None:
    """In bf16 no cached choice applies: the stored measurements of products are for fp32."""
    assert sum(each.compared for each in measured.operators if "MatMul" in each.op) > 0
    result = bench.step(**TINY | {"steps": 1, "precision": "bf16"})
    products = [
        each for each in result.operators if each.name.endswith((".linear", ".matmul", "MatMul"))
    ]
    assert products
    assert [each.compared for each in products] == [0] * len(products)
    assert "in bf16" in result.markdown()


# ---- side effects --------------------------------------------------------------------------------


def test_the_session_is_put_back(trial: parts.Trial) -> None:
    manager = trial.export.manager
    agent = manager._execution_agent
    trial.race()
    assert manager._execution_agent is agent
    assert "run" not in vars(trial.export)
    assert "forward" not in vars(trial._execution)


def test_the_session_is_put_back_where_a_step_fails(
    trial: parts.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = trial.export.manager
    agent = manager._execution_agent

    def fail(*_: Any, **__: Any) -> None:
        assert manager._execution_agent is not agent
        raise KeyError("no step")

    monkeypatch.setattr(trial.steppers[parts.ORT], "step", fail)
    with pytest.raises(KeyError, match="no step"):
        trial.race()
    assert manager._execution_agent is agent
    assert "run" not in vars(trial.export)


def test_both_sessions_run_and_are_told_apart(
    trial: parts.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn runs the session it is named for: one is slow in forward, the other in backward."""
    for export, name in ((trial.export, "run_forward"), (trial._twin, "run_backward")):
        agent = export.manager._execution_agent
        run = getattr(agent, name)

        def slow(*args: Any, run: Any = run) -> Any:
            time.sleep(0.2)
            return run(*args)

        monkeypatch.setattr(agent, name, slow)
    found = trial._round([parts.ORT, parts.EAGER, parts.SPINNING])
    assert found[parts.ORT].session_forward_ms >= 200
    assert found[parts.SPINNING].session_backward_ms >= 200


@pytest.mark.parametrize("kernels", ["ort", "torch"])
def test_only_the_workers_of_the_twin_spin(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session options of every session show it."""
    import onnxruntime

    key = "session.intra_op.allow_spinning"
    made: list[bool] = []
    session = onnxruntime.InferenceSession

    def noted(model: Any, options: Any, *rest: Any) -> Any:
        made.append(_spins(options, key))
        return session(model, options, *rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    with parts.Trial(StepSettings(**TINY), chosen(kernels=kernels)):
        *_, own, twin = made
        assert not own
        assert twin


def _spins(options: Any, key: str) -> bool:
    try:
        return bool(options.get_session_config_entry(key) != "0")
    except RuntimeError:  # ORT's default, which is to spin
        return True


def test_no_weight_changes(trial: parts.Trial) -> None:
    before = [weight.detach().clone() for weight in trial.trained]
    trial.race()
    trial.alone_us()
    trial.profile()
    assert all(map(torch.equal, before, trial.trained))


def test_it_leaves_the_process_as_it_was() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    bench.step(**TINY | {"steps": 1})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


# ---- configurations that cannot run --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--model", "bert-786"], "did you mean 'bert-768'?"),
        (["--precision", "bf17"], "did you mean 'bf16'?"),
        (["--precision", "bf16", "--kernels", "ort"], "needs torch's kernels"),
        (["--steps", "0"], "must be at least 1"),
        (["--steps", "many"], "takes a whole number"),
        (["--json", "no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_refusals(options: list[str], refused: str) -> None:
    answer = subprocess.run(command(*options), capture_output=True, text=True)
    assert answer.returncode == 2
    assert refused in answer.stderr.splitlines()[-1]
    assert "first step" not in answer.stderr


def test_without_ort(tmp_path: Path) -> None:
    """Without a compiler, and with nothing built yet, the command says so."""
    nothing = {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    answer = subprocess.run(command(), env=os.environ | nothing, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert "apt-get install" in line


def test_interrupted() -> None:
    with subprocess.Popen(
        command("--steps", "100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "round 3 of" in line:
                running.send_signal(signal.SIGINT)
                break
        printed, complaints = running.communicate(timeout=HANGS_S)
    assert running.returncode == 130
    assert printed == ""
    assert "Traceback" not in complaints
    assert complaints.splitlines()[-1] == "interrupted before the measurement was complete"


# ---- output --------------------------------------------------------------------------------------


def test_json_gives_back_the_same() -> None:
    result = bench.step(**TINY | {"steps": 1})
    stored = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert StepBench.from_dict(stored) == result
    assert stored["benchmark"] is False
    with pytest.raises(ValueError, match="format version 99"):
        StepBench.from_dict(stored | {"form": 99})


def test_figures_by_hand(measured: StepBench) -> None:
    """Figures match a hand count: a session of 3 and 5 ms in a forward of 6 and a backward of 7."""
    one = StepParts(
        step_ms=20.0,
        forward_ms=6.0,
        backward_ms=7.0,
        optimizer_ms=4.0,
        session_forward_ms=3.0,
        session_backward_ms=5.0,
        execution_ms=5.5,
        export_ms=4.0,
    )
    assert (one.rest_ms, one.session_ms, one.around_ms) == (3, 8, 5)
    assert (one.caller_ms, one.look_up_ms, one.passing_ms) == (0.5, 1.5, 1)
    assert one.around_backward_ms == 2
    eager = StepParts(30.0, 10.0, 10.0, 4.0)
    slow = dataclasses.replace(one, step_ms=25.0)
    result = dataclasses.replace(
        measured, eager=(eager,), ort=(one,), spinning=(slow,), parameters=7
    )
    assert result.speed == Spread(1.5, 1.5, 1.5)
    assert result.cost_of_spinning == Spread(1.25, 1.25, 1.25)
    shown = result.markdown()
    assert "session: 5 ms (5 to 5) for 7 parameter tensors" in shown
    assert "| rest: release of old gradients | 6 ms (6 to 6) | 3 ms (3 to 3) |" in shown


def test_nodes_by_operator() -> None:
    nodes = [
        NodeTime("a", "com.microsoft.FusedMatMul", "forward", "", 5.0),
        NodeTime("b", "com.microsoft.FusedMatMul", "backward", "", 7.0),
        NodeTime("c", "org.pytorch.aten.ortlab_kernels.permute", "backward", "", 1.0),
    ]
    product, permute = parts.operators(nodes, {"b": Timing(8.0, 6.0), "gone": Timing(1.0, 1.0)})
    assert product == Operator("com.microsoft.FusedMatMul", 2, 5.0, 7.0, 1, 8.0, 6.0)
    assert (product.name, product.copies) == ("FusedMatMul", False)
    assert (permute.name, permute.copies) == ("ortlab_kernels.permute", True)


def test_operators_beyond_the_longest_are_summed(measured: StepBench) -> None:
    shown = measured.markdown()
    others = len(measured.operators) - MOST_OPERATORS
    assert f"| {others} more operators |" in shown
    longest = max(measured.operators, key=lambda each: each.us)
    assert f"| {longest.name} | {longest.nodes} |" in shown


def test_a_busy_machine_is_told(measured: StepBench) -> None:
    busy = dataclasses.replace(measured.machine, load=3.0)
    assert "**Busy machine**" in dataclasses.replace(measured, machine=busy).markdown()
    idle = dataclasses.replace(measured.machine, load=0.0)
    assert "**Busy machine**" not in dataclasses.replace(measured, machine=idle).markdown()
