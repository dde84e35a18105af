"""Benchmark of one update of the charts: ``python -m tests.browser.bench_update``.

A real kernel shows a run; a separate subscriber on the kernel's iopub channel counts every byte of
every frame of each update. The kernel times its updates: the updating thread alone, and the whole
process minus the same loop without a view. Exits with 1 if an update takes more than 2 ms of kernel
CPU time (all its threads) or 1 KB on the wire.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

import zmq
from jupyter_client.manager import start_new_kernel

# (first step, number of updates, steps per update)
CASES = ((100, 60, 3), (100_000, 200, 12))
LIMIT_MS, LIMIT_BYTES = 2.0, 1024

SETUP = """
import json, time
import numpy as np
from ortlab.notebook.views import charts
from ortlab.metrics.recorder import NAN, Recorder, Sample, Status

CUDA = {cuda}
PER_UPDATE = {per_update}    # steps between two updates

class Still:
    title, interactive = "bench", True
    def __init__(self):
        self.recorder, self.step = Recorder(), 0
    def status(self):
        return Status("running", self.step, 1_000_000, 0.02 * self.step, 3600.0 + self.step)
    def pause(self): ...
    resume = stop = pause
    def over(self): return False
    def wait_over(self, timeout=None): return False
    def advance(self, steps):
        for _ in range(steps):
            self.step += 1
            x = 1.0 + 1 / self.step
            cuda = dict(cuda_allocated_bytes=x * 1e9, cuda_reserved_bytes=x * 2e9,
                        cuda_peak_bytes=x * 3e9, device_used_bytes=x * 4e9) if CUDA else {{}}
            self.recorder.add(Sample(
                step=self.step, time_s=0.02 * self.step, epoch=0.1, loss=x, lr=1e-4, grad_norm=x,
                samples=16, tokens=1024, samples_per_s=800 * x, tokens_per_s=51_200 * x,
                step_ms=20 * x, data_ms=x, forward_ms=7 * x, backward_ms=10 * x, optimizer_ms=2 * x,
                rss_bytes=x * 1e9, peak_bytes=x * 1.1e9, **cuda))

still = Still()
still.advance({step} - PER_UPDATE * {updates} // 2)
view = charts.RunView(still)
view.pump.close()    # this loop sends in its place, at the same pace for every measurement
view._receive(view, {{"do": "hello"}}, [])    # as a browser does
view._send_fresh()    # the whole
"""

LOOP = """
def loop(update):
    own = []
    whole = time.process_time()
    for _ in range({updates}):
        still.advance(PER_UPDATE)
        began = time.thread_time()
        if update:
            view._send_fresh()
        own.append(time.thread_time() - began)
        time.sleep(0.01)
    return own, time.process_time() - whole
print("BEGIN", flush=True)
own, whole = loop(True)
_, without = loop(False)
print("RESULT " + json.dumps([own, (whole - without) / {updates}]), flush=True)
"""

# Counted, not timed, so that it is the same on a busy machine.
WORK = """
import sys, tracemalloc
still.advance(PER_UPDATE)
view._send_fresh()    # what is made once
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
still.advance(PER_UPDATE)
sys.setprofile(count)
view._send_fresh()
sys.setprofile(None)
still.advance(PER_UPDATE)
tracemalloc.start()
view._send_fresh()
print("RESULT " + json.dumps([calls, tracemalloc.get_traced_memory()[1]]), flush=True)
"""


def measure(step: int, updates: int, per_update: int, *, cuda: bool) -> dict[str, float]:
    """Return an update's milliseconds, bytes, calls and allocated bytes around `step`."""
    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(f"tcp://127.0.0.1:{manager.get_connection_info()['iopub_port']}")
    subscriber.subscribe(b"")
    try:
        run_code(client, SETUP.format(step=step, updates=updates, per_update=per_update, cuda=cuda))
        printed = run_code(client, LOOP.format(updates=updates))
        own, whole_s = json.loads(printed.split("RESULT ", 1)[1])
        sizes = _update_sizes(subscriber)
        calls, allocated = json.loads(run_code(client, WORK).split("RESULT ", 1)[1])
    finally:
        subscriber.close(0)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert len(sizes) == updates, f"{len(sizes)} of {updates} updates arrived"
    return {
        "own_ms": 1e3 * statistics.mean(own),
        "own_max_ms": 1e3 * max(own),
        "kernel_ms": 1e3 * whole_s,
        "bytes": statistics.mean(sizes),
        "bytes_max": max(sizes),
        "calls": calls,
        "allocated_bytes": allocated,
    }


def run_code(client: Any, code: str) -> str:
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            printed.append(content["text"])
        if message["msg_type"] == "error":
            raise RuntimeError("\n".join(content["traceback"]))

    client.execute_interactive(code, timeout=300, output_hook=output)
    return "".join(printed)


def _update_sizes(subscriber: zmq.Socket[bytes]) -> list[int]:
    """Return the bytes of all frames of each update after the mark BEGIN."""
    sizes: list[int] = []
    while subscriber.poll(500):
        frames = subscriber.recv_multipart()
        at = frames.index(b"<IDS|MSG>")
        kind = json.loads(frames[at + 2])["msg_type"]
        if kind == "stream" and b"BEGIN" in frames[at + 5]:
            sizes.clear()
        if kind == "comm_msg" and b'"custom"' in frames[at + 5]:
            sizes.append(sum(map(len, frames)))
    return sizes


def main() -> int:
    worst = {"kernel_ms": 0.0, "bytes_max": 0.0}
    print("step      device   thread ms  max     kernel ms  bytes   max")
    for cuda in (False, True):
        for step, updates, per_update in CASES:
            got = measure(step, updates, per_update, cuda=cuda)
            worst = {name: max(value, got[name]) for name, value in worst.items()}
            print(
                f"{step:<9} {'cuda' if cuda else 'cpu':<8} {got['own_ms']:<10.2f} "
                f"{got['own_max_ms']:<7.2f} {got['kernel_ms']:<10.2f} {got['bytes']:<7.0f} "
                f"{got['bytes_max']:.0f}"
            )
    fits = worst["kernel_ms"] <= LIMIT_MS and worst["bytes_max"] <= LIMIT_BYTES
    print(f"{'within' if fits else 'OVER'} {LIMIT_MS:g} ms of kernel CPU and {LIMIT_BYTES} bytes")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
