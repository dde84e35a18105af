"""A small run with real behavior for the views to show: gradient descent on a line, in a thread."""

from __future__ import annotations

import contextvars
import threading
import time
from pathlib import Path

import numpy as np

from ortlab.metrics.recorder import Event, Recorder, Sample, State, Status
from ortlab.utils.process_memory import SAMPLER, Memory


class Practice:
    """Fits a line by gradient descent, one step every `step_s`; can pause and stop like a run."""

    def __init__(
        self,
        *,
        title: str = "practice",
        steps: int | None = 200,
        step_s: float = 0.02,
        interactive: bool = True,
        badges: tuple[str, ...] = (),
        fail_at: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.title = title
        self.recorder = Recorder()
        self.interactive = interactive
        self.folder = folder
        self._steps = steps
        self._step_s = step_s
        self._badges = badges
        self._fail_at = fail_at
        self._began = time.monotonic()
        self._ended: float | None = None
        self._state: State = "starting"
        self._step = 0
        self._error: str | None = None
        self._go = threading.Event()
        self._go.set()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._train,), daemon=True
        )

    def start(self) -> Practice:
        self._thread.start()
        return self

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def stop(self) -> None:
        self._stop.set()
        self._go.set()

    def over(self) -> bool:
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def status(self) -> Status:
        elapsed = (self._ended or time.monotonic()) - self._began
        left = None
        if self._steps and self._step and not self.over():
            left = elapsed / self._step * (self._steps - self._step)
        lines = tuple(event.text for event in self.recorder.events("eval"))[-1:]
        return Status(
            self._state, self._step, self._steps, elapsed, left, self._badges, lines, self._error
        )

    def _train(self) -> None:
        random = np.random.default_rng(0)
        weight, bias = 0.0, 0.0
        meter = SAMPLER.start()
        self._state = "running"
        try:
            while not self._stop.is_set() and self._step != self._steps:
                if not self._go.is_set():
                    self._state = "paused"
                    self._tell("pause", "paused")
                    self._go.wait()
                    self._tell("pause", "resumed")
                    self._state = "running"
                    continue
                began = time.perf_counter()
                lr = 0.05 * (1 - self._step / (self._steps or 10_000))
                x = random.normal(size=16)
                error = weight * x + bias - (3 * x + 2 + 0.3 * random.normal(size=16))
                weight -= lr * 2 * float((error * x).mean())
                bias -= lr * 2 * float(error.mean())
                self._stop.wait(self._step_s)  # stands for the duration of a real step
                self._step += 1
                self._record(
                    float((error**2).mean()), lr, time.perf_counter() - began, meter.take()
                )
                if self._step == self._fail_at:
                    raise ValueError(f"<b>step {self._step}</b>: the loss is not a number")
            self._state = "stopped" if self._stop.is_set() else "finished"
        except ValueError as error_:
            self._state, self._error = "failed", f"ValueError: {error_}"
        finally:
            SAMPLER.end(meter)
            self._ended = time.monotonic()
            self.recorder.close()
            self._over.set()

    def _tell(self, kind: str, text: str) -> None:
        time_s = time.monotonic() - self._began
        self.recorder.event(Event(kind, self._step, time_s, text))

    def _record(self, loss: float, lr: float, took_s: float, memory: Memory) -> None:
        time_s = time.monotonic() - self._began
        self.recorder.add(
            Sample(
                step=self._step,
                time_s=time_s,
                loss=loss,
                lr=lr,
                samples=16,
                tokens=16 * 64,
                samples_per_s=16 / took_s,
                tokens_per_s=16 * 64 / took_s,
                step_ms=1e3 * took_s,
                data_ms=40 * took_s,
                forward_ms=320 * took_s,
                backward_ms=510 * took_s,
                optimizer_ms=100 * took_s,
                rss_bytes=memory.rss_bytes,
                peak_bytes=memory.peak_bytes,
            )
        )
        if self._step % 50 == 1:
            values = {"loss": loss * 1.1, "accuracy": 1 - 0.5**self._step}
            self.recorder.event(
                Event("eval", self._step, time_s, f"evaluation at step {self._step}", values)
            )
        if self._step % 80 == 0:
            self._tell("checkpoint", f"checkpoint last-{self._step} saved")
