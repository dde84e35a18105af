"""Tests of cells that start a run and are run again, typed as a user types them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ortlab.metrics.recorder import INDEX
from ortlab.session import session
from tests.support.typed_magics import Typist

TRAIN = "run = %ort finetune net data --loss cross_entropy --engine eager --lr 0.01"
GATED = """
import threading
gate = threading.Event()
class Gated:
    def __len__(self): return 1000
    def __iter__(self):
        for batch in batches(1000):
            gate.wait(5)
            yield batch
data = Gated()
"""


def lines(ip: Typist, name: str = "run") -> tuple[str, ...]:
    found: tuple[str, ...] = ip[name].status().lines
    return found


def losses(ip: Typist) -> list[float]:
    found: list[float] = ip["run"].metrics.rows[:, INDEX["loss"]].tolist()
    return found


def test_a_rerun_says_that_it_trains_on_and_offers_the_fresh_start(ip: Typist) -> None:
    ip("net = nn.Sequential(Net(), nn.BatchNorm1d(2), nn.Dropout()); data = batches()")
    ip(f"{TRAIN}\nawait run")
    first, began = ip["run"].name, losses(ip)
    assert not lines(ip)
    out = ip(f"{TRAIN}\nawait run")
    told = (
        f"continues from weights that {first} trained (4 steps); fresh=True (--fresh) starts from "
        f"the weights before {first}"
    )
    assert lines(ip) == (told,)
    assert told in out, "the text of the run shows it"
    assert told in {event.text for event in ip["run"].recorder.events("note")}
    assert losses(ip) != began
    ip(f"{TRAIN} --fresh\nawait run")
    assert lines(ip) == (f"starts from the weights before {first}",)
    assert losses(ip) == began, "weights, buffers and random numbers are those of the first run"
    ip(
        "import ortlab\nrun = ortlab.finetune(net, data, loss='cross_entropy', engine='eager', "
        "learning_rate=0.01, fresh=True)\nawait run"
    )
    assert losses(ip) == began


def test_a_cell_that_makes_the_model_again_starts_anew_and_says_nothing(ip: Typist) -> None:
    ip("data = batches()")
    cell = f"torch.manual_seed(1)\nnet = Net()\n{TRAIN}\nawait run"
    ip(cell)
    began = losses(ip)
    ip(cell)
    assert not lines(ip)
    assert losses(ip) == began


def test_fresh_in_the_first_run_of_a_cell_changes_nothing(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN} --fresh\nawait run")
    assert not lines(ip)


def test_weights_that_the_user_restored_are_not_called_trained(ip: Typist) -> None:
    ip("import copy\nnet = Net(); data = batches()\nbefore = copy.deepcopy(net.state_dict())")
    ip(f"{TRAIN}\nawait run\nnet.load_state_dict(before)")
    ip(f"{TRAIN}\nawait run")
    assert not lines(ip)


def test_initial_weights_that_are_gone(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN}\nawait run")
    shutil.rmtree(ip["run"].folder)
    ip("trained = net.head.weight.detach().clone()")
    assert "create the model again" in ip.refused(f"{TRAIN} --fresh")
    assert ip["torch"].equal(ip["trained"], ip["net"].head.weight)
    ip(f"{TRAIN}\nawait run")
    (line,) = lines(ip)
    assert line.endswith("trained; create the model again for a fresh start")


def test_the_initial_weights_are_private_and_removed_with_the_model(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN}\nawait run")
    (file,) = ip["run"].folder.glob("initial-*.safetensors")
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in ip["run"].checkpoints] == ["final"]
    ip("import gc\ndel net\ngc.collect()")
    assert not file.exists()


def test_fresh_and_a_checkpoint_exclude_each_other(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip(f"{TRAIN}\nawait run")
    told = ip.refused(f"{TRAIN} --fresh --resume-from {ip['run'].name}")
    assert "fresh and resume_from exclude each other" in told


@pytest.mark.parametrize(
    "train",
    [
        "run = %ort finetune net data --loss cross_entropy --engine eager",
        "import ortlab\nrun = ortlab.finetune(net, data, loss='cross_entropy', engine='eager')",
    ],
)
def test_the_cell_of_a_live_run_shows_it_again(ip: Typist, train: str) -> None:
    shown: list[Any] = []
    session.viewers.append(shown.append)
    ip(f"{GATED}net = Net()")
    try:
        ip(train)
        run = ip["run"]
        ip("run = None")
        out = ip(train)
        assert ip["run"] is run
        assert shown == [run, run]
        assert f"{run.name} trains this model already (" in out
        assert f"is shown again; %ort stop {run.name} ends it" in out
        assert not run.over()
        other = train.replace("'eager'", "'eager', epochs=2").replace("engine eager", "epochs 2")
        told = ip.run(other)[2] + ip.run(other)[1]
        assert f"{run.name} is training this model; await it or stop it (%ort stop" in told
        assert f"%ort apply {run.name}, run.apply" in told
    finally:
        session.viewers.remove(shown.append)
        ip("gate.set()\nrun.stop()")
    assert run.wait_over(60)
    ip(f"{train} --max-steps 2" if "%" in train else train.replace(")", ", max_steps=2)"))
    assert ip["run"] is not run


def test_a_live_run_and_a_new_model(ip: Typist) -> None:
    ip(GATED)
    cell = "net = Net()\nrun = %ort finetune net data --loss cross_entropy --engine eager"
    ip(cell)
    first = ip["run"]
    ip(cell)
    assert ip["run"] is not first
    ip("gate.set()")


def test_a_run_may_be_stopped_where_the_next_one_begins(ip: Typist) -> None:
    ip(f"import threading\n{GATED}net = Net()")
    ip("run = %ort finetune net data --loss cross_entropy --engine eager")
    first = ip["run"]
    ip(
        "threading.Timer(1, gate.set).start()\nrun.stop()\n"
        "run = %ort finetune net data --loss cross_entropy --engine eager --max-steps 2"
    )
    assert ip["run"] is not first
    assert first.state == "stopped"


def test_what_a_run_refuses_is_told_without_a_traceback(ip: Typist) -> None:
    ip(f"{GATED}net = Net()\ngate.set()\nimport ortlab")
    ip("run = %ort finetune net data --loss cross_entropy --engine eager --max-steps 2\nawait run")
    ip("with ortlab.track(net) as loop: pass")
    for call, told in {
        "run.weights()": "has no checkpoint 'best'",
        "run.tag('no tag')": "is not a tag",
        "run.apply(learning_rate=1)": "its settings cannot be changed",
        "run.undo()": "nothing to undo",
        "loop.log(f1='good')": "cannot log f1='good'",
        "loop.checkpoint()": "a checkpoint needs the loop's optimizer",
        "ortlab.finetune(net, data, max_grad_norm=0)": "max_grad_norm=0.0 must be above 0, or None",
    }.items():
        result, out, err = ip.run(call)
        assert not result.success
        assert told in out + err
        assert "Traceback" not in out + err
        assert "<string>" not in out + err


def test_two_runs_of_a_model_in_one_cell_are_a_mistake(ip: Typist) -> None:
    ip(f"{GATED}net = Net()")
    once = "run = %ort finetune net data --loss cross_entropy --engine eager"
    assert "is training this model" in ip.run(f"{once}\n{once}")[2]
    ip("gate.set()")
