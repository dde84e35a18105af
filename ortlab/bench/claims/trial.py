"""Process that trains one set-up, under a memory limit if there is one.

`children` starts it as ``python -m ortlab.bench.claims.trial REQUEST``, and reads a line of JSON
for the start and one for each turn that a line on standard input asks for.

The limit is RLIMIT_DATA, memory that a process may write to for itself (getrlimit(2)). RLIMIT_AS
would also count libraries that are mapped from files and addresses that are only reserved, several
hundred MiB that differ between engines. A control group counts what was touched and kills without
an error, and is another user's to set up. As on a GPU, memory that an engine reserves counts here
whether it is used or not; of the stacks of threads, which are mostly unused, 1 MiB counts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import nn

from ortlab.bench import models
from ortlab.bench.claims.children import Request
from ortlab.bench.interleaved import TimedTrial
from ortlab.bench.papers import PAPERS
from ortlab.bench.papers import models as paper_models
from ortlab.cluster import rank as ranks
from ortlab.engines.base import LossFunction, ShardedStepper, wrapped_model
from ortlab.engines.distributed import steppers
from ortlab.engines.registry import engine
from ortlab.engines.torch.thread_count import threads
from ortlab.settings import FinetuneSettings
from ortlab.utils.errors import out_of_memory

if TYPE_CHECKING:
    from ortlab.engines.ort.model import OrtModel
    from ortlab.graph.memory import MemoryPlan

    Batch = dict[str, torch.Tensor]

_PLANNED_ROWS = 512
"""Largest batch that is predicted."""
_CAPTURES = 3
"""Most graphs that a prediction captures to find that of the largest batch."""
_STACK_BYTES = 1 << 20
_SIZE_OF_ATTRIBUTES = 64
"""Bytes for a ``pthread_attr_t``, which has 56 in glibc and musl on 64-bit systems."""
_STEPS = 3
"""Steps that must fit; from the second on there is the optimizer's state, too."""
_WAIT_S = 300.0
"""Seconds that a rank waits for another one."""


class Trial:
    """A set-up in training.

    Args:
        request: The set-up, its batch and its limit.

    Raises:
        Exception: Any error that the engine raises, `MemoryError` and the like if it does not fit.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._settings = FinetuneSettings.of(
            {"engine": request.engine, "cache": False, "device": "cpu", **request.options}
        )
        self._load()
        gc.collect()
        self._before = _memory()
        if request.limit_bytes is not None:
            import resource  # optional: not on Windows

            most = self._before["VmData"] + request.limit_bytes
            _, highest = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (most, highest))
        model, batch = build(request.model, quick=request.quick)
        self._batch = of_rows(batch, request.rows * request.workers)
        if request.checkpointing:
            cast("Any", model).gradient_checkpointing_enable()
        self.wrapped = engine(request.engine).wrap(model, self._settings.model)
        self._trial: TimedTrial | None = None
        self._turns = 0

    def _load(self) -> None:
        """Load the libraries of the engine and the model, whose memory does not count."""
        build(self._request.model, quick=True)
        model = nn.Linear(2, 2)
        # The first session of a process decides for all later ones whether ORT's provider has an
        # arena: onnxruntime-training 1.19.2 caches the provider by its options alone.
        kept = ("arena", "workers", "zero_stage")
        options = {name: v for name, v in self._request.options.items() if name in kept}
        plain = FinetuneSettings.of(
            {"engine": self._request.engine, "cache": False, "device": "cpu", **options}
        )
        if self._request.store:
            self._join()
        stepper = self._prepared(model, nn.functional.mse_loss, plain)
        rows = torch.ones(self._request.workers, 2)
        stepper.step([(rows, rows)], lr=0.0)
        stepper.close()

    def _join(self) -> None:
        """Join the processes that train together."""
        number, count = self._request.rank, self._request.workers
        ranks.take_place(ranks.Place(number, count, number, count, torch.get_num_threads()))
        ranks.join_group(self._request.store, "gloo", "lo", _WAIT_S)

    def _prepared(
        self, model: nn.Module, loss: LossFunction | None, settings: FinetuneSettings
    ) -> ShardedStepper:
        chosen = engine(settings.model.engine)
        if self._request.store:
            return steppers.prepare(chosen, model, loss, settings)
        return cast("ShardedStepper", chosen.prepare(model, loss, settings))

    def begin(self) -> dict[str, Any]:
        """Make the first steps and return the memory that they took, in bytes."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM, proc(5)
        for _ in range(_STEPS):
            self.turn()
        before, now = self._before, _memory()
        # Memory that was taken and not touched counts, too. Its peak is unknown, so it is today's.
        untouched = (now["VmData"] - now["RssAnon"]) - (before["VmData"] - before["RssAnon"])
        touched = now["VmHWM"] - now["RssFile"] - before["RssAnon"]
        return {
            "library_bytes": before["VmData"],
            "peak_bytes": touched + max(0, untouched),
            "idle_bytes": now["VmData"] - before["VmData"] - self._gradient_bytes(),
            "state_bytes": dataclasses.asdict(self._stepper.bytes()),
        }

    def _gradient_bytes(self) -> int:
        """Return the gradients of the last step, which the next one releases before it begins."""
        gradients = (parameter.grad for parameter in self.wrapped.parameters())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def turn(self) -> float:
        """Make a step and return its milliseconds."""
        self._turns += 1
        batch = self._batch
        if self._trial is None:
            self._trial = TimedTrial(
                lambda: self._prepared(self.wrapped, None, self._settings),
                [batch],
                lr=0.0,
                seed=self._turns,
            )
            report = self._trial.stepper.report()
            if report.engine_used != self._request.engine:
                raise RuntimeError(f"{report.engine_used} ran instead: {report.fallback_reason}")
            return self._trial.first_step_s * 1e3
        return self._trial.turn([[batch]], seed=self._turns)

    @property
    def _stepper(self) -> ShardedStepper:
        assert self._trial is not None
        return cast("ShardedStepper", self._trial.stepper)

    def predicted(self, taken: Mapping[str, Any], limit_bytes: int) -> list[int]:
        """Return the predicted peak in bytes for batches from one sample on.

        The plan knows the tensors of a step. What Python and ORT keep besides is what was measured
        between steps, and no batch takes less than a small one, whose graph was made, too.

        Args:
            taken: Result of `begin`.
            limit_bytes: Memory near which the prediction matters.
        """

        def peaks(plan: MemoryPlan) -> list[int]:
            sizes = range(1, _PLANNED_ROWS + 1)
            return [max(taken["peak_bytes"], besides + plan.peak_bytes(batch=n)) for n in sizes]

        plan = self._plan(self._batch)
        besides = taken["idle_bytes"] - plan.idle_bytes(batch=self._request.rows)
        found, at = peaks(plan), self._request.rows
        for _ in range(_CAPTURES):
            rows = sum(size <= limit_bytes for size in found)
            if self._request.engine != "ort" or not rows or abs(rows - at) <= at // 10:
                break
            # Engine ort leaves large operators to torch: the graph of a large batch is another one.
            found, at = peaks(self._plan(of_rows(self._batch, rows))), rows
        return found

    def _plan(self, batch: Batch) -> MemoryPlan:
        if self._request.engine == "ort":
            from ortlab.graph import captured, planned_capture  # heavy: torch's compiler

            record = cast("OrtModel", wrapped_model(self.wrapped))
            record.twin = None  # its graph was made for the sizes of another batch
            captured.for_any_size(record, batch)
            return planned_capture.plan_for(record, self._settings, trains=False)[0]
        from ortlab.graph.recompute_plans import plan_for  # heavy: torch's compiler

        return plan_for(self.wrapped, self._settings, choose=lambda _: None)[0]


def build(name: str, *, quick: bool) -> tuple[nn.Module, Batch]:
    """Return a model of `ortlab bench engines` or `papers`, and its batch.

    Args:
        name: Name of the model.
        quick: True for a tiny model.
    """
    ours = {**models.MODELS, **models.HEAVY}
    if name in ours:
        return models.build(name, quick=quick, known=ours)
    known = paper_models({name: PAPERS[name].shape("cpu", quick=quick)})
    return models.build(name, quick=quick, known=known)


def of_rows(batch: Mapping[str, torch.Tensor], rows: int) -> Batch:
    """Return a batch with another number of samples, which repeat.

    Args:
        batch: Batch with the samples along the first dimension of every tensor.
        rows: Samples of the result.
    """
    return {
        name: tensor.repeat(-(-rows // len(tensor)), *[1] * (tensor.dim() - 1))[:rows]
        for name, tensor in batch.items()
    }


def _memory() -> dict[str, int]:
    """Return the sizes of this process in bytes, by their names in proc(5)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("Vm", "Rss")))
    return {name: int(size.split()[0]) * 1024 for name, size in pairs}


def answers(request: Request, asked: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the answer to the request, then one to each line that asks for a turn.

    Args:
        request: The request.
        asked: Lines, one for each turn.
    """
    try:
        with threads(request.threads):
            trial = Trial(request)
            taken = trial.begin()
            near, predicted, unplanned = request.predict_bytes, list[int](), ""
            try:
                predicted = trial.predicted(taken, near) if near else []
            except ValueError as error:  # this graph has no plan; its batch can be measured
                unplanned = str(error)
            yield {"fits": True, **taken, "predicted": predicted, "unplanned": unplanned}
            for _ in asked:
                yield {"ms": trial.turn()}
    except Exception as error:  # noqa: BLE001 - engines raise anything; the parent shows it
        first = next(iter(str(error).strip().splitlines()), "")
        told = f"{type(error).__name__}: {first}"
        yield {"fits": False, "why": told} if out_of_memory(error) else {"error": told}


def _shorten_stacks() -> None:
    """Give the threads that this process starts from now on stacks of `_STACK_BYTES`.

    The limit counts the whole of a stack, 8 MiB by default, of which a thread touches a few KiB.
    Each of ORT's sessions has threads of its own.
    """
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_SIZE_OF_ATTRIBUTES)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    libc.pthread_setattr_default_np(attributes)


def main() -> None:
    """Answer on the standard output that this process was started with."""
    if sys.platform == "linux":
        _shorten_stacks()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what engines print is not an answer
        request = Request(**json.loads(sys.argv[1]))
        for answer in answers(request, sys.stdin):
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
