"""Memory of this process and its device, read twice a second while somebody measures."""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from ortlab.utils.threads import Thread

NAN = float("nan")
_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this process and its device, in bytes; NaN is unknown.

    ``peak_bytes`` is the highest resident size since the meter's last reading.
    """

    rss_bytes: float = NAN
    peak_bytes: float = NAN
    cuda_allocated_bytes: float = NAN
    cuda_reserved_bytes: float = NAN
    cuda_peak_bytes: float = NAN
    device_used_bytes: float = NAN

    @classmethod
    def of_all(cls, each: Sequence[Memory]) -> Memory:
        """That of several processes together; their peaks need not have been at one time."""
        return cls(*map(sum, zip(*map(_values, each), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Name to bytes, under the names of `telemetry.Sample`; cheap enough for every step."""
        return dict(zip(_FIELDS, _values(self), strict=True))


_FIELDS = tuple(field.name for field in fields(Memory))
_values = operator.attrgetter(*_FIELDS)


class Meter:
    """One run's view of the `DeviceSampler`: the peak since this run looked last."""

    def __init__(self, now: Memory) -> None:
        # No lock: gc may end a dropped loop, and with it read every meter, wherever one allocates.
        # Readings are numbered instead, so that one that comes during a `take` is not lost.
        self._latest = 0, replace(now, peak_bytes=now.rss_bytes)
        self._taken = -1
        self._highest = now.rss_bytes

    def take(self) -> Memory:
        """The latest reading, its peak that of all readings since the last `take`."""
        self._taken, memory = self._latest
        return memory

    def highest_peak_bytes(self) -> float:
        """The highest peak since the meter began: of the resident size, or what CUDA allocated."""
        on_cuda = self._latest[1].cuda_peak_bytes
        return self._highest if math.isnan(on_cuda) else on_cuda

    def tick(self, now: Memory) -> None:
        """Takes a reading of the sampler, which makes one at a time."""
        number, before = self._latest
        peak = now.peak_bytes
        if self._taken != number:
            peak = max(before.peak_bytes, peak)
        self._latest = number + 1, replace(now, peak_bytes=peak)
        self._highest = max(self._highest, now.peak_bytes)


class DeviceSampler:
    """Reads this process's memory twice a second, while somebody measures.

    Linux: resident size from /proc/self/statm; the true peak of each interval is VmHWM, which
    writing 5 to /proc/self/clear_refs restarts (proc(5)); ``resource``'s ru_maxrss is restarted
    with it. Elsewhere psutil's resident size stands for the peak too, so peaks between readings
    are missed. CUDA, where torch has initialized it: the caching allocator's statistics, whose peak
    is restarted when the first of them begins to measure, and the device's figure through NVML.
    """

    PERIOD_S = 0.5

    def __init__(self) -> None:
        # Taken again by the thread that has it, where gc ends a dropped loop inside.
        self._lock = threading.RLock()
        self._meters: list[Meter] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Meter:
        """A meter that is kept up to date until it is given to `end`."""
        with self._lock:
            # Who measures already keeps the peak of the interval that ends here.
            self._tick()
            if not self._meters:
                _restart_cuda_peak()
            meter = Meter(self._read())
            self._meters.append(meter)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = Thread(self._sample, self._stop, name="ortlab-memory")
                self._thread.start()
            return meter

    def end(self, meter: Meter) -> None:
        """Takes a last reading; the thread ends with the last meter. Twice is fine."""
        thread = None
        with self._lock:
            if meter not in self._meters:
                return
            self._tick()
            self._meters.remove(meter)
            if not self._meters:
                thread, self._thread = self._thread, None
                self._stop.set()
        # gc may have brought us here on that thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(self.PERIOD_S):
            # Who waits for this thread's end may have the lock, where gc ended a loop inside it.
            while not self._lock.acquire(timeout=0.05):
                if stop.is_set():
                    return
            try:
                if not stop.is_set():
                    self._tick()
            finally:
                self._lock.release()

    def _tick(self) -> None:
        now = self._read()
        for meter in list(self._meters):
            meter.tick(now)

    def _read(self) -> Memory:
        rss, peak = _host_memory()
        return Memory(rss, peak, *self._cuda_memory())

    def _cuda_memory(self) -> tuple[float, float, float, float]:
        import torch

        # Asking the allocator would otherwise create a context of some hundred megabytes.
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return NAN, NAN, NAN, NAN
        stats = torch.cuda.memory_stats()
        return (
            stats.get("allocated_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            device_used_bytes(),
        )


def device_used_bytes(index: int | None = None) -> float:
    """What all processes use of a CUDA device, torch's current one without `index`; or NaN."""
    import pynvml
    import torch

    try:
        # NVML numbers all devices, torch the visible ones: only the UUID means the same.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return float(pynvml.nvmlDeviceGetMemoryInfo(_nvml_device(uuid)).used)
    except pynvml.NVMLError:
        return NAN  # a MIG slice, or a container without the driver's library


@functools.cache
def _nvml_device(uuid: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


SAMPLER = DeviceSampler()
"""The one sampler of this process; it has no thread until somebody measures."""


def _restart_cuda_peak() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def memory(size_bytes: float) -> str:
    """Bytes in GiB, MiB or KiB."""
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.2f} GiB"
    unit, power = ("MiB", 20) if size_bytes >= 2**20 else ("KiB", 10)
    return f"{size_bytes / 2**power:.1f} {unit}"


def parse_bytes(size: int | str) -> int:
    """Bytes of a number, or of text with a unit: "16GiB", "500 MB"; ValueError shows the form."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ValueError(f"{size!r} is no size of memory; give bytes or such as 16GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


_SCARCE = 0.05
"""Of all memory: with less left over, what can be made again is let go."""


def is_scarce(device: str) -> bool:
    """Whether little memory of the `device` ("cpu" or "cuda") is left."""
    import psutil
    import torch

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        now = psutil.virtual_memory()
        free, total = now.available, now.total
    return bool(free < _SCARCE * total)


def free_bytes(device: str) -> int:
    """Memory of the `device` ("cpu" or "cuda") that nobody uses now."""
    import psutil
    import torch

    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _host_memory() -> tuple[float, float]:
    """Resident size, and its peak since the last call where Linux tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            rss = int(file.read().split()[1]) * _PAGE
        with open("/proc/self/status", "rb") as file:
            status = file.read()
        with open("/proc/self/clear_refs", "wb") as file:
            file.write(b"5")
    except OSError:
        import psutil

        rss = psutil.Process().memory_info().rss
        return rss, rss
    start = status.index(b"VmHWM:") + 6
    return rss, int(status[start : status.index(b"kB", start)]) * 1024
