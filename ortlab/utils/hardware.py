"""Hardware that this process can use: processor, cores, memory and its limits, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ortlab.utils.process_memory import device_used_bytes
from ortlab.utils.processor import CPUINFO, first_processor

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Processor:
    """Processor of this machine.

    Attributes:
        name: Model name.
        cores: Physical cores of the whole machine.
        cpus: Hardware threads that this process may use.
        flags: Instruction set extensions; empty where the system does not report them.
    """

    name: str
    cores: int
    cpus: int
    flags: frozenset[str]


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes.

    Attributes:
        total_bytes: Memory of the machine.
        available_bytes: Memory that is not in use.
        limit_bytes: Limit of the control groups (cgroups) of this process; None without one.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """GPU that torch can use.

    Attributes:
        index: Index of the device in torch.
        name: Model name.
        total_bytes: Memory of the device.
        used_bytes: Memory that all processes use; NaN where the driver does not report it.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: float


def processor() -> Processor:
    """Return the processor of this machine."""
    import psutil  # heavy: psutil

    found = first_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")
    # macOS and Windows do not have sched_getaffinity.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return Processor(
        name=found.get("model name") or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        cpus=len(allowed),
        flags=frozenset(found.get("flags", "").split()),
    )


def best_threads() -> int:
    """Return the number of threads that computes fastest: one per core that this process may use.

    A second hardware thread of a core adds no arithmetic units, and threads beyond a container's
    CPU quota wait for one another. torch considers neither.
    """
    import joblib  # heavy: joblib

    return int(joblib.cpu_count(only_physical_cores=True))


def host_memory() -> HostMemory:
    """Return the memory of the machine and the limit that the control groups set for it."""
    import psutil  # heavy: psutil

    now = psutil.virtual_memory()
    limit = _cgroup_limit(now.total)
    return HostMemory(now.total, now.available, limit)


def _cgroup_limit(total_bytes: int) -> int | None:
    """Return the lowest memory limit of this process's control groups; None if none applies.

    In version 2 (cgroup-v2.rst, ``memory.max``) the limits of the parent groups apply as well;
    inside a container the root of the hierarchy is the container's own. Version 1 has
    ``memory.limit_in_bytes``.
    """
    limits = []
    with contextlib.suppress(OSError):
        for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                limits += _limits(CGROUPS, group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits(CGROUPS / "memory", group, "memory.limit_in_bytes")
    below = [limit for limit in limits if limit < total_bytes]
    return min(below, default=None)


def _limits(root: Path, group: str, name: str) -> list[int]:
    """Return the limits in the files `name` of a group and its parents; "max" is not a limit."""
    folder = root / group.lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):
            found.append(int((place / name).read_text(encoding="utf-8")))
    return found


def gpus() -> list[Gpu]:
    """Return the GPUs that torch can use, without allocating memory on them."""
    import torch  # heavy: torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, of.name, of.total_memory, device_used_bytes(index)))
    return found


def advice() -> list[str]:
    """Return advice that would make torch compute faster on this machine, one line each.

    Returns:
        The lines; empty if there is nothing to improve.
    """
    import torch  # heavy: torch

    threads, best = torch.get_num_threads(), best_threads()
    if threads <= best:
        return []
    cores = f"{best} core{'s' * (best > 1)}"
    return [
        f"torch's {threads} threads share {cores}: call torch.set_num_threads({best}), or use the "
        "kernel that `ortlab kernelspec install` creates"
    ]
