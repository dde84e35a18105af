"""Metrics of the user's own in runs: charts, best checkpoint, history, resume, workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history import saved_run
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S
from tests.support.worker_runs import Network, data, losses, train

HELD_OUT = data(41)


def macro(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    assert len(predictions) == len(targets) == len(HELD_OUT)
    return float(f1_score(targets, predictions.argmax(1), average="macro"))


def worse(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    """Return a score that falls with every call."""
    worse.calls -= 1
    return float(worse.calls)


def evaluated(run: Run, name: str) -> list[float]:
    return [event.values[name] for event in run.recorder.events("eval")]


CHOSEN: dict[str, Any] = {"eval_dataset": HELD_OUT, "eval_steps": 10, "max_steps": 30}


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_they_are_those_of_the_trained_model(engine: str) -> None:
    needs(engine)
    model = Network()
    run = train(model, engine=engine, metrics={"f1": macro}, **CHOSEN)
    inputs, targets = HELD_OUT.tensors
    values = evaluated(run, "f1")
    assert len(values) == 4
    assert values[-1] == pytest.approx(macro(model.eval()(inputs).detach(), targets))
    result = run.result()
    assert result.after.metrics == {"f1": values[-1]}
    assert f"f1 {values[-1]:.4g}" in str(result)
    assert losses(run).tolist() == losses(train(Network(), engine=engine, **CHOSEN)).tolist()


@pytest.mark.parametrize(("way", "step"), [("max", 10), ("min", 30)])
def test_the_best_checkpoint_is_that_of_the_metric(way: str, step: int) -> None:
    worse.calls = 0
    run = train(Network(), metrics=worse, keep_best="worse", keep_best_mode=way, **CHOSEN)
    (kept,) = [each for each in run.checkpoints if each.name == "best"]
    taken = Checkpoint.load(kept.path)
    assert taken.position.step == step
    assert run.result().best.step == step
    weights = ortlab.open_run(run.name).weights()
    assert weights.keys() == taken.model.keys()
    assert all(torch.equal(value, taken.model[name]) for name, value in weights.items())
    model = Network()
    model.load_state_dict(weights)
    with pytest.raises(ValueError, match=f"{run.name} has no checkpoint 'bset': choose from best"):
        run.weights("bset")
    without = train(Network(), **CHOSEN)
    with pytest.raises(ValueError, match=r"'best': choose from final; keep_best='loss' .* keeps"):
        without.weights()
    never = train(Network(), metrics={"f1": lambda p, t: math.nan}, keep_best="f1", **CHOSEN)
    with pytest.raises(ValueError, match="no evaluation after the first step had a value of f1"):
        never.weights("best")


def test_what_is_better_must_be_known() -> None:
    with pytest.raises(ValueError, match="keep_best='worse': say whether more or less"):
        train(Network(), metrics=worse, keep_best="worse", **CHOSEN)
    with pytest.raises(ValueError, match="keep_best='f1': choose from loss, accuracy"):
        train(Network(), metrics=macro, keep_best="f1", **CHOSEN)
    with pytest.raises(ValueError, match="metrics are computed in evaluations: pass eval_dataset"):
        train(Network(), metrics=macro)


def test_a_name_of_no_metric_is_refused_before_there_is_a_run() -> None:
    told = r"keep_best='Macro': choose from loss, accuracy, macro; did you mean 'macro'\?"
    chosen = {"metrics": macro, "eval_dataset": HELD_OUT, "early_stopping_patience": 1}
    with pytest.raises(ValueError, match=told):
        ortlab.finetune(Network(), data(), loss="cross_entropy", keep_best="Macro", **chosen)
    told = r"keep_best='Loss': choose from loss, accuracy; did you mean 'loss'\?; for a metric of"
    with pytest.raises(ValueError, match=told):
        train(Network(), keep_best="Loss", **CHOSEN)


def test_one_that_fails_is_told_once_and_the_run_goes_on() -> None:
    def fails(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        raise KeyError("positives")

    run = train(Network(), metrics=[fails, macro], **CHOSEN)
    (told,) = (event.text for event in run.recorder.events("metric_failed"))
    assert told.startswith("metric fails raised KeyError: 'positives', at ")
    assert told.endswith(" (evaluation at step 0)")
    assert run.status().badges == (told,)
    assert ortlab.open_run(run.name).status().badges == (told,)
    assert run.state == "finished"
    assert run.result().after.metrics["macro"] > 0


def test_the_history_has_them() -> None:
    run = train(Network(), metrics={"f1 <b>": macro}, keep_best="f1 <b>", **CHOSEN)
    entry = saved_run.find(run.name)
    best = run.result().best
    assert entry.scores == {"f1 <b>": pytest.approx(best.metrics["f1 <b>"])}
    assert "f1 <b>" in str(ortlab.list_runs())
    assert "f1 &lt;b&gt;" in ortlab.list_runs()._repr_html_()
    other = train(Network(), metrics={"f1 <b>": macro}, **CHOSEN)
    differences = ortlab.compare_runs(run.name, other.name).differences
    rows = {each.name: each.values for each in differences}
    assert len(rows["evaluation f1 <b> (best)"]) == 2


def test_a_resumed_run_finds_them_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    model, samples = Network(), data()
    names = {"model": model, "samples": samples, "held_out": HELD_OUT, "scores": [macro]}
    for name, value in names.items():
        monkeypatch.setattr(__main__, name, value, raising=False)
    chosen: dict[str, Any] = {"engine": "eager", "loss": "cross_entropy", "batch_size": 13}
    run = ortlab.finetune(model, samples, eval_dataset=HELD_OUT, metrics=names["scores"], **chosen)
    run.stop()
    run.result(HANGS_S)
    again = ortlab.resume(run.name)
    again.result(HANGS_S)
    assert "macro" in again.result().after.metrics
    monkeypatch.delattr(__main__, "scores")
    again.stop()


def test_events_are_exported(tmp_path: Path) -> None:
    run = train(Network(), metrics={"f1": macro}, **CHOSEN)
    run.to_tensorboard(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in tmp_path.rglob("events.*")}
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [each.value for each in read.Scalars("f1/evaluation")] == pytest.approx(
        evaluated(run, "f1"), rel=1e-6
    )
