"""Memory usage of this process and its device, sampled twice a second during a measurement."""

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
    """Memory usage of this process and its device, in bytes; NaN is unknown.

    Attributes:
        rss_bytes: Resident size of the process.
        peak_bytes: Highest resident size since the meter's previous reading.
        cuda_allocated_bytes: Memory that torch's CUDA allocator has allocated to tensors.
        cuda_reserved_bytes: Memory that torch's CUDA allocator has reserved from the device.
        cuda_peak_bytes: Highest allocated memory since the measurement started.
        device_used_bytes: Memory of the device that all processes use.
    """

    rss_bytes: float = NAN
    peak_bytes: float = NAN
    cuda_allocated_bytes: float = NAN
    cuda_reserved_bytes: float = NAN
    cuda_peak_bytes: float = NAN
    device_used_bytes: float = NAN

    @classmethod
    def of_all(cls, each: Sequence[Memory]) -> Memory:
        """Return the sum over several processes, whose peaks may lie at different times.

        Args:
            each: Memory of each process.
        """
        return cls(*map(sum, zip(*map(_values, each), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Return bytes by name, as `ortlab.metrics.recorder.Sample` names them.

        This is cheap enough for every step.
        """
        return dict(zip(_FIELDS, _values(self), strict=True))


_FIELDS = tuple(field.name for field in fields(Memory))
_values = operator.attrgetter(*_FIELDS)


class Meter:
    """Readings of the `DeviceSampler` for one run, with the peak since its previous reading.

    Args:
        now: Memory at the start of the measurement.
    """

    def __init__(self, now: Memory) -> None:
        # No lock: any allocation may run the garbage collector, which may finalize a dropped loop
        # and thereby read every meter. Readings are numbered instead, so that one that arrives
        # during `take` is not lost.
        self._latest = 0, replace(now, peak_bytes=now.rss_bytes)
        self._taken = -1
        self._highest = now.rss_bytes

    def take(self) -> Memory:
        """Return the latest reading; its peak covers all readings since the last `take`."""
        self._taken, memory = self._latest
        return memory

    def highest_peak_bytes(self) -> float:
        """Return the highest peak since the start, of CUDA's allocated or else resident bytes."""
        on_cuda = self._latest[1].cuda_peak_bytes
        return self._highest if math.isnan(on_cuda) else on_cuda

    def tick(self, now: Memory) -> None:
        """Record a reading; only the sampler calls this, one call at a time.

        Args:
            now: The reading.
        """
        number, before = self._latest
        peak = now.peak_bytes
        if self._taken != number:
            peak = max(before.peak_bytes, peak)
        self._latest = number + 1, replace(now, peak_bytes=peak)
        self._highest = max(self._highest, now.peak_bytes)


class DeviceSampler:
    """Sampler that reads this process's memory twice a second while any meter is active.

    On Linux the resident size comes from /proc/self/statm. The true peak of each interval is VmHWM,
    which is reset by writing 5 to /proc/self/clear_refs (proc(5)); this also resets ru_maxrss of
    ``resource``. On other systems psutil's resident size also serves as the peak, so peaks between
    readings are missed. If torch has initialized CUDA, the statistics of its caching allocator are
    read, whose peak is reset when the first meter starts, and the usage of the device from NVML.
    """

    PERIOD_S = 0.5

    def __init__(self) -> None:
        # Reentrant: the garbage collector may finalize a dropped loop while this thread has it.
        self._lock = threading.RLock()
        self._meters: list[Meter] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Meter:
        """Start a measurement and return its meter, which is updated until `end`."""
        with self._lock:
            # Active meters record the peak of the interval that ends here.
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
        """Take a last reading and stop updating `meter`; the thread ends with the last meter.

        Calling this again has no effect.

        Args:
            meter: A meter from `start`.
        """
        thread = None
        with self._lock:
            if meter not in self._meters:
                return
            self._tick()
            self._meters.remove(meter)
            if not self._meters:
                thread, self._thread = self._thread, None
                self._stop.set()
        # The garbage collector may have called this on the sampling thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def running(self) -> bool:
        """True while the sampling thread is active."""
        return self._thread is not None

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(self.PERIOD_S):
            # A thread that waits for this one to end may have the lock, if the garbage collector
            # finalized a loop while the lock was taken.
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
        import torch  # heavy: torch

        # Reading the statistics would otherwise create a context of several hundred megabytes.
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
    """Return the memory of a CUDA device that all processes use.

    Args:
        index: Index of the device in torch; None is torch's current device.

    Returns:
        Bytes, or NaN if NVML does not report them.
    """
    import pynvml  # heavy: pynvml
    import torch  # heavy: torch

    try:
        # NVML counts all devices and torch the visible ones; only the UUID is the same in both.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return float(pynvml.nvmlDeviceGetMemoryInfo(_nvml_device(uuid)).used)
    except pynvml.NVMLError:
        return NAN  # a MIG slice, or a container without the driver's library


@functools.cache
def _nvml_device(uuid: str) -> Any:
    import pynvml  # heavy: pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


SAMPLER = DeviceSampler()
"""The sampler of this process; its thread starts with the first measurement."""


def _restart_cuda_peak() -> None:
    import torch  # heavy: torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def memory(size_bytes: float) -> str:
    """Format a size in GiB, MiB or KiB.

    Args:
        size_bytes: Size in bytes.
    """
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.2f} GiB"
    unit, power = ("MiB", 20) if size_bytes >= 2**20 else ("KiB", 10)
    return f"{size_bytes / 2**power:.1f} {unit}"


def raised(before_bytes: int, after_bytes: int) -> str:
    """Return "raises the peak by 5.8 MiB (193.8 MiB to 199.6 MiB)"; "" below a thousandth of it.

    Args:
        before_bytes: Peak before a change.
        after_bytes: Peak with it.
    """
    if after_bytes <= 1.001 * before_bytes:
        return ""
    pair = dict.fromkeys(map(memory, (before_bytes, after_bytes)))  # equal if both are rounded
    return f"raises the peak by {memory(after_bytes - before_bytes)} ({' to '.join(pair)})"


def parse_bytes(size: int | str) -> int:
    """Parse a memory size.

    Args:
        size: Bytes, or text with a unit such as "16GiB" or "500 MB".

    Returns:
        The size in bytes.

    Raises:
        ValueError: `size` is not a positive size; the message shows the format.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ValueError(
            f"{size!r} is not a memory size; use a number of bytes, or a unit as in 16GiB or 500MB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


_SCARCE = 0.05
"""Fraction of all memory; with less than this available, caches are released."""


def is_scarce(device: str) -> bool:
    """Return True if less than 5% of a device's memory is available.

    Args:
        device: "cpu" or "cuda".
    """
    import psutil  # heavy: psutil
    import torch  # heavy: torch

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        now = psutil.virtual_memory()
        free, total = now.available, now.total
    return bool(free < _SCARCE * total)


def free_bytes(device: str) -> int:
    """Return the available memory of a device in bytes.

    Args:
        device: "cpu" or "cuda".
    """
    import psutil  # heavy: psutil
    import torch  # heavy: torch

    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _host_memory() -> tuple[float, float]:
    """Return the resident size and, on Linux, its peak since the last call."""
    try:
        with open("/proc/self/statm", "rb") as file:
            rss = int(file.read().split()[1]) * _PAGE
        with open("/proc/self/status", "rb") as file:
            status = file.read()
        with open("/proc/self/clear_refs", "wb") as file:
            file.write(b"5")
    except OSError:
        import psutil  # heavy: psutil

        rss = psutil.Process().memory_info().rss
        return rss, rss
    start = status.index(b"VmHWM:") + 6
    return rss, int(status[start : status.index(b"kB", start)]) * 1024
