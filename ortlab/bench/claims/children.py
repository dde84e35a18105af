"""Set-ups that train in processes of their own, which `trial` runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortlab.utils import scratch

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MKL_DISABLE_FAST_MM": "1"}
"""Settings with which freed memory is returned at once, the same for every engine.

Otherwise glibc (mallopt(3)) keeps freed memory that it cannot use again, up to half of a step's,
and MKL, which torch uses on Intel's CPUs, 4 MiB of buffers after small products and none after
large ones. Torch's allocator on a GPU returns such memory before it gives up.
"""
_LAST_LINES = 3
_OF_OTHERS = ("RankFailed", "Connection closed", "reset by peer")
"""Parts of the messages of ranks that lost another one."""


@dataclass(frozen=True)
class SetUp:
    """A way to train a model.

    Attributes:
        label: Name in tables.
        engine: Name of the engine.
        options: Its settings.
        checkpointing: True to turn on torch's checkpointing of the model.
    """

    label: str
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False

    @classmethod
    def of(cls, engine: str, **options: Any) -> SetUp:
        """Return an engine with settings, which are its label, too.

        Args:
            engine: Name of the engine.
            **options: Its settings.
        """
        told = [engine, *(f"{name}={value}" for name, value in options.items())]
        return cls(", ".join(told), engine, options)


@dataclass(frozen=True)
class Request:
    """Set-up, batch and limit of one process.

    Attributes:
        model: Name of a model of `ortlab bench engines` or `papers`.
        engine: Name of the engine.
        rows: Samples of the batch; of each rank's part of it where several train together.
        options: Settings of the engine, with ``workers`` where several processes train together.
        checkpointing: True to turn on torch's checkpointing.
        limit_bytes: Memory beyond that of the libraries; None for no limit.
        predict_bytes: Memory for which the largest batch is to be predicted; 0 for no prediction.
        threads: Threads that torch and ORT compute with, torch's default if None.
        quick: True for a tiny model.
        rank: Rank of the process among those that train together.
        store: File through which they find each other; "" for a process that trains alone.
    """

    model: str
    engine: str
    rows: int
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    limit_bytes: int | None = None
    predict_bytes: int = 0
    threads: int | None = None
    quick: bool = False
    rank: int = 0
    store: str = ""

    @property
    def workers(self) -> int:
        """Number of processes that train together."""
        return int(self.options.get("workers", 1))


def _counts_memory(request: Request) -> bool:
    """Return True if all memory that the process holds matters; steps take longer then."""
    return request.limit_bytes is not None or request.predict_bytes > 0


class TrialFailed(RuntimeError):
    """Raised if a process ended for another reason than memory; the message names it."""


class Child:
    """A process that trains a set-up.

    Args:
        request: What it is asked to do.
    """

    def __init__(self, request: Request) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.trial", json.dumps(dataclasses.asdict(request))],
            env={**os.environ, **(_MALLOC if _counts_memory(request) else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends it
        )

    def answer(self) -> dict[str, Any]:
        """Return the next answer; ``fits`` is False if the process ran out of memory.

        Raises:
            TrialFailed: If the process ended for another reason.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else self._died()
        if "error" in found:
            raise TrialFailed(found["error"])
        return found

    def turn(self) -> float:
        """Return the milliseconds of a step.

        Raises:
            MemoryError: If the step does not fit.
            TrialFailed: If it failed for another reason.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells why
            print(file=self._process.stdin, flush=True)
        found = self.answer()
        if "ms" not in found:
            raise MemoryError(found["why"])
        return float(found["ms"])

    def _died(self) -> dict[str, Any]:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        last = " / ".join(said.strip().splitlines()[-_LAST_LINES:])
        # C++ code that cannot raise ends the process where it finds no memory.
        if status < 0 and ("bad_alloc" in said or "memory" in last.lower()):
            return {"fits": False, "why": last}
        return {"error": f"the process ended with status {status}: {last or 'no message'}"}

    def kill(self) -> None:
        """End the process, so that no thread waits for its answer anymore."""
        self._process.kill()

    def close(self) -> None:
        """End the process and close its streams."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Children:
    """Processes that train a set-up together, over loopback.

    Args:
        request: What they are asked to do.
    """

    def __init__(self, request: Request) -> None:
        self._folder = scratch.folder("claim")
        store = str(self._folder / "store")
        self._ranks = [
            Child(dataclasses.replace(request, rank=rank, store=store))
            for rank in range(request.workers)
        ]

    def answer(self) -> dict[str, Any]:
        """Return the answer of the rank with the highest peak; ``fits`` is False if one ran out.

        Raises:
            TrialFailed: If a rank failed for another reason than memory.
        """
        answers, errors = [], []
        with concurrent.futures.ThreadPoolExecutor(len(self._ranks)) as pool:
            pending = [pool.submit(rank.answer) for rank in self._ranks]
            try:
                for done in concurrent.futures.as_completed(pending):
                    try:
                        answers.append(done.result())
                    except TrialFailed as error:
                        errors.append(error)
                        continue
                    if not answers[-1]["fits"]:
                        return answers[-1]
            finally:
                for rank in self._ranks:  # those that wait for another one would not answer
                    rank.kill()
        if errors:  # that of another rank's failure says nothing
            raise min(errors, key=lambda error: any(word in str(error) for word in _OF_OTHERS))
        return max(answers, key=lambda answer: int(answer["peak_bytes"]))

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.close()
        scratch.remove(self._folder)


@contextlib.contextmanager
def child(request: Request) -> Iterator[Child]:
    """Run a process until the block ends.

    Args:
        request: What it is asked to do.
    """
    with contextlib.closing(Child(request)) as found:
        yield found


@contextlib.contextmanager
def children(request: Request) -> Iterator[Child | Children]:
    """Run the processes that a set-up trains in until the block ends.

    Args:
        request: What they are asked to do.
    """
    with contextlib.closing(Children(request) if request.workers > 1 else Child(request)) as found:
        yield found
