"""The user's own metrics by themselves: their forms, what fails, which way is better."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import classification_report, f1_score, r2_score, roc_auc_score

from ortlab.metrics.user_metrics import MOST, UserMetrics, joined

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(40, 3, generator=GENERATOR)
CLASSES = torch.randint(3, (40,), generator=GENERATOR)
MACRO = f1_score(CLASSES, SCORES.argmax(1), average="macro")


def found(given: Any, scores: Any = SCORES, targets: Any = CLASSES) -> tuple[Any, list[str]]:
    """Return the values of batches of 16, 16 and 8, after an evaluation that was broken off."""
    metrics = UserMetrics(given)
    metrics.begin()
    metrics.add(scores[:16].flip(0), targets[:16])
    metrics.begin()
    for part in zip(scores.split(16), targets.split(16), strict=True):
        metrics.add(*part)
    return metrics.end()


def hits(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(1) == targets).float().mean()


def compute_metrics(evaluated: Any) -> dict[str, float]:
    logits, labels = evaluated
    assert isinstance(logits, np.ndarray)
    assert logits is evaluated.predictions
    return {"eval_f1": f1_score(labels, logits.argmax(-1), average="macro"), "rows": len(labels)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (hits, {"hits": float(hits(SCORES, CLASSES))}),
        ([hits, compute_metrics], {"hits": float(hits(SCORES, CLASSES)), "f1": MACRO, "rows": 40}),
        ({"f1": lambda p, t: f1_score(t, p.argmax(1), average="macro")}, {"f1": MACRO}),
        (functools.partial(f1_score, average="macro"), {"f1_score": MACRO}),
        (
            torchmetrics.F1Score("multiclass", num_classes=3, average="macro"),
            {"MulticlassF1Score": MACRO},
        ),
        (
            torchmetrics.MetricCollection(
                {"f1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro")}
            ),
            {"f1": MACRO},
        ),
        ({"n": lambda p, t: np.int64(len(p))}, {"n": 40}),
        ({"all": lambda p, t: bool(len(p))}, {"all": 1}),
    ],
)
def test_each_form_has_all_samples_of_one_evaluation(given: Any, expected: Any) -> None:
    values, told = found(given)
    assert values == pytest.approx(expected)
    assert told == []


def test_scikit_learn_gets_targets_first_and_classes_only_where_it_wants_them() -> None:
    scores = torch.randn(40)
    targets = scores + 0.3 * torch.randn(40)
    values, _ = found(r2_score, scores, targets)
    assert values == {"r2_score": pytest.approx(r2_score(targets, scores))}
    labels = (targets > 0).long()
    values, _ = found(roc_auc_score, scores, labels)  # y_score
    assert values == {"roc_auc_score": pytest.approx(roc_auc_score(labels, scores))}


def test_rows_of_other_lengths_are_padded() -> None:
    whole = joined([torch.ones(2, 3, 4), torch.ones(1, 5, 4)])
    assert whole.shape == (3, 5, 4)
    assert (whole[:2, 3:] == -100).all()
    assert (whole[2] == 1).all()
    assert joined([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]


def raises(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    raise ZeroDivisionError("no positives\nin this batch")


class FailsLate(torchmetrics.Metric):
    """A metric whose second batch raises."""

    seen = 0

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.seen += 1
        if self.seen == 3:
            raise RuntimeError("the second batch")

    def compute(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (raises, r"metric own raised ZeroDivisionError: no positives, at .*metrics\.py:\d+"),
        (FailsLate(), r"metric own raised RuntimeError: the second batch, at .*metrics\.py:\d+"),
        (lambda p, t: "good", "metric own is str, not a number"),
        (lambda p, t: None, "metric own is NoneType, not a number"),
        (lambda p, t: p, "metric own is Tensor, not a number"),
    ],
)
def test_one_that_fails_is_named_and_the_others_are_kept(metric: Any, told: str) -> None:
    values, lines = found({"own": metric, "hits": hits})
    assert math.isnan(values["own"])
    assert values["hits"] == pytest.approx(float(hits(SCORES, CLASSES)))
    (line,) = lines
    assert re.fullmatch(told, line)


def test_a_value_that_is_not_finite_is_told() -> None:
    values, told = found({"own": lambda p, t: math.nan, "text": lambda p, t: "good"})
    assert math.isnan(values["own"])
    assert told == ["metric text is str, not a number", "metric own is nan"]
    assert found({"own": lambda p, t: math.inf})[1] == ["metric own is inf"]
    many = lambda_of({str(i): math.nan for i in range(5)})
    assert found(many)[1] == ["metrics 0, 1, 2 and 2 more are not finite"]


def test_too_many_and_the_name_of_the_loss_are_left_out() -> None:
    values, told = found(lambda_of({str(i): i for i in range(10_000)} | {"loss": 1.0}))
    assert len(values) == MOST
    assert told == [
        "a metric called loss is left out: that is the name of the mean loss",
        "only the first 100 of 10,000 metrics are kept",
    ]


def lambda_of(values: dict[str, float]) -> dict[str, Callable[..., Any]]:
    return {"own": lambda p, t: values}


F1_OF_EACH = torchmetrics.F1Score("multiclass", num_classes=3, average=None)


@pytest.mark.parametrize(
    ("given", "name", "told"),
    [
        (hits, "Hits", "choose from loss, accuracy, hits; did you mean 'hits'?"),
        (hits, "f1", "choose from loss, accuracy, hits"),
        (hits, "hits", ""),
        (hits, "accuracy", ""),
        (
            [hits, torchmetrics.MeanSquaredError(), functools.partial(f1_score, average="macro")],
            "f1",
            "choose from loss, accuracy, hits, MeanSquaredError, f1_score",
        ),
        # A function without an annotation may return a dict.
        ({"f1": lambda p, t: 0.0}, "F1", "choose from loss, accuracy, f1; did you mean 'f1'?"),
        ({"f1": lambda p, t: 0.0}, "f2", ""),
        # These do, with names of their own.
        ([hits, compute_metrics], "Hits", ""),
        (lambda_of({"F1": 1.0}), "F1", ""),
        ([hits, torchmetrics.MetricCollection({"f1": F1_OF_EACH})], "Hits", ""),
        ([hits, torchmetrics.wrappers.ClasswiseWrapper(F1_OF_EACH)], "Hits", ""),
        ([hits, classification_report], "Hits", ""),
        (
            {f"score_{i}": hits for i in range(8)},
            "Score_2",
            "did you mean 'score_2'? also near: score_7, score_6",
        ),
    ],
)
def test_a_name_is_unknown_before_an_evaluation_where_no_dict_may_have_it(
    given: Any, name: str, told: str
) -> None:
    assert UserMetrics(given).unknown(name) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("f1", "metrics take functions .* not 'f1'"),
        ([hits, 3], "metrics take functions .* not 3"),
        ([hits, hits], "two metrics are called hits"),
        (lambda p, t: 0, "a lambda has no name"),
    ],
)
def test_what_is_no_metric_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        UserMetrics(given)


def test_a_model_without_predictions_is_told_what_to_do() -> None:
    metrics = UserMetrics(hits)
    metrics.begin()
    with pytest.raises(ValueError, match="the model's output has no predictions: return logits"):
        metrics.add(None, CLASSES)
    with pytest.raises(ValueError, match="the batch has no targets"):
        metrics.add(SCORES, None)


def test_which_way_is_better() -> None:
    metrics = UserMetrics(
        {
            "own": torchmetrics.MeanSquaredError(),
            "other": torchmetrics.F1Score("multiclass", num_classes=3),
        }
    )
    names = ("own", "other", "f1_macro", "val_loss", "rmse", "wer", "R2", "mystery")
    ways = ("min", "max", "max", "min", "min", "min", "max", None)
    assert tuple(map(metrics.direction, names)) == ways
    names = ("answer_f1", "power", "MulticlassF1Score", "MeanSquaredError", "rouge2", "rougeL")
    assert tuple(map(metrics.direction, names)) == ("max", None, "max", "min", "max", "max")
    assert metrics.direction("MulticlassAUROC") == "max"
    assert metrics.direction("brier_score_loss") == "min"
