"""A graph file beside eager torch: run in onnxruntime on each trial, every output compared."""

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
"""Of an output's largest difference, relative to its largest value, or to 1 where that is less."""
HALF_TOLERANCE = 1e-2
"""The same for models with parameters of 16 bits."""
_ORT_ERRORS = "onnxruntime.capi"


class CheckFailed(Concise, RuntimeError):
    """The exported graph does not compute what eager torch does; the message says where."""


@dataclass(frozen=True)
class Difference:
    """One output in one trial: the largest difference, and the largest value that torch gave."""

    trial: str
    sizes: str
    output: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """What the tolerance is for."""
        return self.largest / max(1.0, self.scale)


class NotRun(Exception):
    """What onnxruntime says of a graph that it cannot load or run, in a line."""


class SizeFailed(Exception):
    """The graph is wrong at another size than the example's, along ``axis``; ``why`` in a line."""

    def __init__(self, axis: Axis, why: str) -> None:
        super().__init__(why)
        self.axis, self.why = axis, why


def session(file: Path) -> Any:
    """An onnxruntime session of `file` on the CPU, whose external data lies in its own folder."""
    try:
        onnxruntime: Any = plain_onnxruntime.plain_onnxruntime()
    except ImportError as error:
        raise RuntimeError(
            f"an export is checked in onnxruntime, which is not here ({error}): "
            "pip install onnxruntime"
        ) from error
    weights.check_places(file)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it raises says it all
    with _said():
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def run(session: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The outputs of a `session` by name; inputs that the graph does not read are left out."""
    taken = {each.name for each in session.get_inputs()}
    feeds = {name: each.cpu().numpy() for name, each in tensors.items() if name in taken}
    names = [each.name for each in session.get_outputs()]
    with _said():
        return dict(zip(names, session.run(names, feeds), strict=True))


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """NotRun where onnxruntime raises; its exceptions have no class of their own but this."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_ORT_ERRORS):
            raise
        raise NotRun(_first_line(error)) from error


@dataclass(frozen=True)
class Expected:
    """A trial with what eager torch gives."""

    trial: Trial
    tensors: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def expected(call: ModelCall, trials: Iterable[Trial]) -> Iterator[Expected]:
    """What eager torch gives in each of `trials`; those that it refuses are left out.

    ValueError where it gives other outputs than for the example.
    """
    for trial in trials:
        for tensors in (trial.tensors, trial.known):
            if tensors is None:
                continue
            try:
                outputs = call(tensors)
            # Forward is the user's, and may refuse made-up values with whatever it likes.
            except Exception:
                if trial.name == "the example":
                    raise
                continue
            yield Expected(trial, tensors, {name: each.cpu() for name, each in outputs.items()})
            break


def compare(session: Any, references: Sequence[Expected], tolerance: float) -> list[Difference]:
    """Every output of every trial beside torch's.

    SizeFailed where one is wrong at another size than the example's; CheckFailed names the first
    output that is wrong at the example's sizes.
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
                raise CheckFailed(f"the graph is not exported: on {trial.name} {why}")
            found.append(difference)
    return found


def differences(session: Any, references: Sequence[Expected]) -> list[Difference]:
    """The same for a graph that is expected to differ: nothing is refused."""
    return [
        _difference(reference.trial.name, "", name, given[name], wanted)
        for reference in references
        for given in [run(session, reference.tensors)]
        for name, wanted in reference.outputs.items()
    ]


def _difference(
    trial: str, sizes: str, name: str, given: np.ndarray, wanted: torch.Tensor
) -> Difference:
    """Infinite for another shape, or where one side alone is no finite number."""
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
    """Which output differs, and by how much."""
    name = difference.output
    if given.shape != tuple(wanted.shape):
        return f"output {name!r} has the shape {list(given.shape)}, in torch {list(wanted.shape)}"
    if math.isinf(difference.largest):
        return f"output {name!r} is not finite where torch's is, or the other way round"
    return (
        f"output {name!r} is off by {difference.largest:.1e}, {difference.relative:.1e} of its "
        f"size; {tolerance:.0e} is allowed ({difference.sizes})"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line), type(error).__name__)
    said = said.split(" : ", 3)[-1].partition(" Status Message:")[0]
    return said if len(said) <= 200 else said[:197] + "..."
