"""Metrics of the user's own, computed from the predictions of an evaluation."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.nn import functional

from ortlab.metrics.recorder import NAN
from ortlab.settings import unknown_name
from ortlab.utils.errors import users_line
from ortlab.utils.wording import few

MOST = 100
"""Number of values of one evaluation that are kept."""

_PADDING = -100
_TARGET_NAMES = ("y_true", "target", "targets", "labels", "references")
_WORDS = re.compile(r"[A-Z]*[a-z]+\d*|[A-Z]+\d*")
"""A word of a name such as "f1_macro" or "MulticlassF1Score"."""
_UP = {
    *("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "jaccard", "kappa", "map"),
    *("matthews", "mcc", "precision", "r2", "recall", "rouge", "score", "specificity"),
}
_DOWN = {"cer", "distance", "error", "loss", "mae", "mape", "mse", "perplexity", "rmse", "wer"}

_NUMBERS = {"float", "int", "bool", "Tensor", "ndarray", "floating", "float32", "float64"}
"""Return types, by their last name, of a metric that has one value."""


class StreamingMetric(Protocol):
    """A metric that is given one batch at a time, such as an object of torchmetrics."""

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> Any:
        """Add a batch.

        Args:
            predictions: Predictions of the batch.
            targets: Its targets.
        """
        ...

    def compute(self) -> Any:
        """Return the value, or several by name, for all batches since the last reset."""
        ...

    def reset(self) -> Any:
        """Forget all batches."""
        ...


MetricFunction: TypeAlias = Callable[..., Any]
Metrics: TypeAlias = (
    MetricFunction
    | StreamingMetric
    | Iterable[MetricFunction | StreamingMetric]
    | Mapping[str, MetricFunction | StreamingMetric]
)
"""Type of the argument ``metrics`` of `ortlab.api.finetune`."""


@dataclass(frozen=True)
class _Metric:
    """One metric: `compute` returns its value from all predictions and targets."""

    name: str
    of: Any
    streams: bool

    def compute(self, predictions: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.of.compute() if self.streams else _call(self.of, predictions, targets)

    def one_value(self) -> bool | None:
        """Return whether it has one value, named as the metric is; None if that is not known."""
        function = self.of.compute if self.streams else self.of
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function of C
            return None
        returns = signature.return_annotation
        if returns not in (inspect.Signature.empty, Any, "Any"):
            # The annotation is text under `from __future__ import annotations`.
            named = getattr(returns, "__name__", str(returns)).partition("[")[0]
            return named.rpartition(".")[2] in _NUMBERS
        inner = getattr(function, "func", function)
        if str(getattr(inner, "__module__", "")).startswith("sklearn."):
            return "output_dict" not in signature.parameters  # classification_report
        return False if not self.streams and len(_positional(function)) == 1 else None


class UserMetrics:
    """The metrics of a run.

    Args:
        given: Metrics, as in `ortlab.api.finetune`.

    Raises:
        ValueError: If one is neither a function nor a torchmetrics object, or has no name.
    """

    def __init__(self, given: Metrics) -> None:
        self._metrics = _named(given)
        self._failed: dict[str, str] = {}
        self._predictions: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._collects = any(not each.streams for each in self._metrics)

    def begin(self) -> None:
        """Begin an evaluation."""
        self._failed, self._predictions, self._targets = {}, [], []
        for each in self._metrics:
            if each.streams:
                self._guarded(each, each.of.reset)

    def add(self, predictions: torch.Tensor | None, targets: torch.Tensor | None) -> None:
        """Add a batch.

        Args:
            predictions: What the model predicts, such as logits; None if its output has nothing
                that could be.
            targets: Targets; None if the batch has none.

        Raises:
            ValueError: If either is None.
        """
        if predictions is None or targets is None:
            lacking = "the batch has no targets"
            if predictions is None:
                lacking = "the model's output has no predictions"
            raise ValueError(
                f"metrics need predictions and targets, but {lacking}: return logits from forward, "
                "and name the targets labels in the batch"
            )
        for each in self._metrics:
            if each.streams and each.name not in self._failed:
                self._guarded(each, functools.partial(each.of.update, predictions, targets))
        if self._collects:
            self._predictions.append(predictions)
            self._targets.append(targets)

    def end(self) -> tuple[dict[str, float], list[str]]:
        """Compute the metrics of this evaluation.

        Returns:
            The values by name; NaN for a metric that failed. Lines that say what failed.
        """
        values: dict[str, float] = {}
        predictions, targets = map(joined, (self._predictions, self._targets))
        self._predictions, self._targets = [], []
        told, bad = [], []
        for each in self._metrics:
            found = None
            if each.name not in self._failed:
                compute = functools.partial(each.compute, predictions, targets)
                found = self._guarded(each, compute)
            if each.name in self._failed:
                told.append(self._failed[each.name])
                values[each.name] = NAN
                continue
            for name, value in _by_name(each.name, found).items():
                number = _number(value)
                values[name] = NAN if number is None else number
                if number is None:
                    told.append(f"metric {name} is {type(value).__name__}, not a number")
                elif not math.isfinite(number):
                    bad.append(name)
        if len(bad) == 1:
            told.append(f"metric {bad[0]} is {values[bad[0]]}")
        elif bad:
            told.append(f"metrics {few(bad)} are not finite")
        if values.pop("loss", None) is not None:
            told.append("a metric called loss is left out: that is the name of the mean loss")
        if len(values) > MOST:
            told.append(f"only the first {MOST} of {len(values):,} metrics are kept")
            values = dict(list(values.items())[:MOST])
        return values, told

    def unknown(self, name: str) -> str:
        """Return what is wrong with the name of a value, as far as that is known before any exists.

        A dict that a metric returns names its values. A function that may return one is checked
        only for names that differ from its own in upper and lower case.

        Args:
            name: Name of a value.

        Returns:
            The names to choose from; "" if the name may be right.
        """
        own = [each.name for each in self._metrics]
        known, kinds = ["loss", "accuracy", *own], {each.one_value() for each in self._metrics}
        sure = kinds <= {True} or name.lower() in map(str.lower, own)
        if name in known or False in kinds or not sure:
            return ""
        return unknown_name(name, known)

    def direction(self, name: str) -> Literal["max", "min"] | None:
        """Return whether more or less of a metric is better; None if that is not known.

        Args:
            name: Name of a value.
        """
        for each in self._metrics:
            if each.name == name and isinstance(
                up := getattr(each.of, "higher_is_better", None), bool
            ):
                return "max" if up else "min"
        return direction(name)

    def _guarded(self, metric: _Metric, call: Callable[[], Any]) -> Any:
        """Return the result of a call of the user's code; record what it raises."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a metric may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            told = f"metric {metric.name} raised {type(error).__name__}: {first}".rstrip(": ")
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            line = users_line(reversed(frames))
            # Without the code, which may be longer than what a view has room for.
            at = "" if line is None else f", at {line.partition(': ')[0]}"
            self._failed[metric.name] = told + at
            return None


def direction(name: str) -> Literal["max", "min"] | None:
    """Return whether more or less of a metric is usually better; None if that is not known.

    Args:
        name: Name of the metric, such as "f1_macro" or "MulticlassF1Score".
    """
    words = {each.lower() for each in _WORDS.findall(name)}
    words |= {each.rstrip("0123456789") for each in words}  # rouge2
    if words & _DOWN:
        return "min"
    return "max" if words & _UP else None


def _named(given: Metrics) -> list[_Metric]:
    if isinstance(given, Mapping):
        items = [(str(name), each) for name, each in given.items()]
    elif callable(given) or _streams(given):
        items = [("", given)]
    elif isinstance(given, Iterable) and not isinstance(given, str):
        items = [("", each) for each in given]
    else:
        items = [("", given)]
    found: dict[str, _Metric] = {}
    for name, each in items:
        if not (_streams(each) or callable(each)):
            raise ValueError(
                f"metrics take functions (predictions, targets) and torchmetrics objects, not "
                f"{each!r}"
            )
        name = name or _name_of(each)
        if name in found:
            raise ValueError(f"two metrics are called {name}: pass a dict, metrics={{'name': ...}}")
        found[name] = _Metric(name, each, _streams(each))
    return list(found.values())


def _streams(metric: object) -> bool:
    return not inspect.isclass(metric) and all(
        callable(getattr(metric, each, None)) for each in ("update", "compute", "reset")
    )


def _name_of(metric: Any) -> str:
    inner = metric.func if isinstance(metric, functools.partial) else metric
    name = str(getattr(inner, "__name__", type(inner).__name__))
    if name == "<lambda>":
        raise ValueError(
            "a lambda has no name: pass a dict, as in metrics={'f1': lambda p, t: ...}"
        )
    return name


def _call(function: MetricFunction, predictions: torch.Tensor, targets: torch.Tensor) -> Any:
    """Call a function in one of three forms, which its parameters tell apart.

    ``f(predictions, targets)``; ``f(y_true, y_pred)`` as in scikit-learn, with the class of the
    highest score where the targets are classes; ``f(eval_prediction)`` as ``compute_metrics`` of
    Hugging Face's Trainer.
    """
    needed = _positional(function)
    if len(needed) == 1:
        from transformers import EvalPrediction  # heavy

        return function(EvalPrediction(predictions.numpy(), targets.numpy()))
    if len(needed) >= 2 and needed[0] in _TARGET_NAMES:
        classes = not targets.is_floating_point() and predictions.is_floating_point()
        if classes and "pred" in needed[1] and predictions.dim() == targets.dim() + 1:
            predictions = predictions.argmax(1)
        return function(targets.numpy(), predictions.numpy())
    return function(predictions, targets)


def _positional(function: MetricFunction) -> list[str]:
    """Return the names of the positional parameters that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate batches; shorter ones are padded with -100, as Hugging Face's Trainer does.

    Args:
        parts: Tensors of shape [samples, ...]; the other sizes may differ.
    """
    if not parts:
        return torch.empty(0)
    parts = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    if len({part.dim() for part in parts}) == 1:
        sizes = [max(part.shape[i] for part in parts) for i in range(1, parts[0].dim())]
        parts = [
            functional.pad(
                part,
                [
                    n
                    for size, own in zip(sizes[::-1], part.shape[:0:-1], strict=True)
                    for n in (0, size - own)
                ],
                value=_PADDING,
            )
            for part in parts
        ]
    return torch.cat(parts)


def _by_name(name: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        return {name: found}
    return {str(each).removeprefix("eval_"): value for each, value in found.items()}


def _number(value: Any) -> float | None:
    """Return the value as a number; None if it is none, such as text or several numbers."""
    one = isinstance(value, numbers.Real) or getattr(value, "numel", lambda: 0)() == 1
    return float(value) if one or getattr(value, "size", 0) == 1 else None
