"""Comparison of an exported graph, run in onnxruntime, with eager torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlab.deploy import weights
from ortlab.deploy.axes import Axis
from ortlab.deploy.call import ModelCall
from ortlab.deploy.inputs import Trial
from ortlab.utils import plain_onnxruntime
from ortlab.utils.errors import Concise

TOLERANCE = 1e-4
"""Maximum difference of an output, relative to its largest value or to 1 if that is less."""
HALF_TOLERANCE = 1e-2
"""Maximum relative difference for models with 16-bit parameters."""
_ORT_ERRORS = "onnxruntime.capi"


class CheckFailed(Concise, RuntimeError):
    """Raised when the exported graph and eager torch disagree; the message names the output."""


@dataclass(frozen=True)
class Difference:
    """Largest difference of one output in one trial, and the largest absolute value in torch."""

    trial: str
    sizes: str
    output: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """Largest difference relative to the largest value, or to 1 if that is less."""
        return self.largest / max(1.0, self.scale)


class NotRun(Exception):
    """Raised with the first line of onnxruntime's error when it cannot load or run a graph."""


class SizeFailed(Exception):
    """Raised when the graph is wrong at a size other than the example's.

    Attributes:
        axis: The axis whose size differs from the example's.
        why: The reason, in one line.
    """

    def __init__(self, axis: Axis, why: str) -> None:
        super().__init__(why)
        self.axis, self.why = axis, why


def session(file: Path) -> Any:
    """Return an onnxruntime session on the CPU.

    Args:
        file: The graph; its external data must be in the same folder.

    Raises:
        RuntimeError: If onnxruntime is not installed.
        ValueError: If the file refers to data outside its folder.
        NotRun: If onnxruntime cannot load the graph.
    """
    try:
        onnxruntime: Any = plain_onnxruntime.plain_onnxruntime()
    except ImportError as error:
        raise RuntimeError(
            f"onnxruntime, which checks an export, cannot be imported ({error}); "
            "pip install onnxruntime"
        ) from error
    weights.check_places(file)
    options = onnxruntime.SessionOptions()
    plain_onnxruntime.let_threads_sleep(options)
    options.log_severity_level = 4  # exceptions carry the same messages
    with _said():
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def run(session: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the outputs of a session by name.

    Args:
        session: An onnxruntime session.
        tensors: Inputs by name; those that the graph does not read are ignored.

    Raises:
        NotRun: If onnxruntime cannot run the graph.
    """
    taken = {each.name for each in session.get_inputs()}
    feeds = {name: each.cpu().numpy() for name, each in tensors.items() if name in taken}
    names = [each.name for each in session.get_outputs()]
    with _said():
        return dict(zip(names, session.run(names, feeds), strict=True))


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Turn onnxruntime's exceptions, which have no common base class, into NotRun."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_ORT_ERRORS):
            raise
        raise NotRun(_first_line(error)) from error


@dataclass(frozen=True)
class Expected:
    """A trial with its inputs and the outputs of eager torch."""

    trial: Trial
    tensors: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def expected(call: ModelCall, trials: Iterable[Trial]) -> Iterator[Expected]:
    """Yield the outputs of eager torch for each trial.

    A trial that the model rejects is tried with its known inputs, then skipped.

    Args:
        call: The call of the model.
        trials: Trials, the example among them.

    Raises:
        Exception: Whatever `forward` raises for the example.
    """
    for trial in trials:
        for tensors in (trial.tensors, trial.known):
            if tensors is None:
                continue
            try:
                outputs = call(tensors)
            # User code: forward may reject generated values with any exception.
            except Exception:
                if trial.name == "the example":
                    raise
                continue
            yield Expected(trial, tensors, {name: each.cpu() for name, each in outputs.items()})
            break


def compare(session: Any, references: Sequence[Expected], tolerance: float) -> list[Difference]:
    """Compare every output of every trial with eager torch.

    Args:
        session: An onnxruntime session of the graph.
        references: Trials with the outputs of eager torch.
        tolerance: Maximum relative difference.

    Returns:
        The differences, one per trial and output.

    Raises:
        SizeFailed: If an output is wrong at a size other than the example's.
        CheckFailed: If an output is wrong at the example's sizes.
    """
    found: list[Difference] = []
    for reference in references:
        trial = reference.trial
        sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in reference.tensors.items())
        try:
            given = run(session, reference.tensors)
        except NotRun as error:
            if trial.axis is not None:
                raise SizeFailed(trial.axis, str(error)) from error
            raise CheckFailed(
                f"onnxruntime cannot run the graph on {trial.name}: {error}"
            ) from error
        for name, wanted in reference.outputs.items():
            difference = _difference(trial.name, sizes, name, given[name], wanted)
            if not difference.relative <= tolerance:
                why = _told(difference, given[name], wanted, tolerance)
                if trial.axis is not None:
                    raise SizeFailed(trial.axis, why)
                raise CheckFailed(f"the graph differs from eager torch on {trial.name}: {why}")
            found.append(difference)
    return found


def differences(session: Any, references: Sequence[Expected]) -> list[Difference]:
    """Return the differences of a graph that is expected to differ, without a tolerance.

    Args:
        session: An onnxruntime session of the graph.
        references: Trials with the outputs of eager torch.
    """
    return [
        _difference(reference.trial.name, "", name, given[name], wanted)
        for reference in references
        for given in [run(session, reference.tensors)]
        for name, wanted in reference.outputs.items()
    ]


def _difference(
    trial: str, sizes: str, name: str, given: np.ndarray, wanted: torch.Tensor
) -> Difference:
    """Return the difference: infinite if the shapes or the non-finite values do not match."""
    theirs = wanted.double().numpy()
    if given.shape != theirs.shape:
        return Difference(trial, sizes, name, math.inf, 0.0)
    ours = given.astype(np.float64)
    finite = np.isfinite(theirs)
    scale = float(np.abs(theirs[finite]).max(initial=0.0))
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return Difference(trial, sizes, name, math.inf, scale)
    apart = np.abs(ours[finite] - theirs[finite])
    largest = float(apart.max(initial=0.0))
    return Difference(trial, sizes, name, math.inf if math.isnan(largest) else largest, scale)


def _told(difference: Difference, given: np.ndarray, wanted: torch.Tensor, tolerance: float) -> str:
    """Describe which output differs and by how much."""
    name = difference.output
    if given.shape != tuple(wanted.shape):
        return f"output {name!r} has shape {list(given.shape)}, but {list(wanted.shape)} in torch"
    if math.isinf(difference.largest):
        return f"output {name!r} is not finite where torch's is finite, or vice versa"
    return (
        f"output {name!r} is off by {difference.largest:.1e}, a relative difference of "
        f"{difference.relative:.1e}; {tolerance:.0e} is allowed ({difference.sizes})"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line), type(error).__name__)
    said = said.split(" : ", 3)[-1].partition(" Status Message:")[0]
    return said if len(said) <= 200 else said[:197] + "..."
