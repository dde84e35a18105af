"""What this process computes with: processor, cores, memory and its limits, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ortlab.utils.processor import CPUINFO, first_processor

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Processor:
    """``cores`` are the whole machine's, ``cpus`` the hardware threads that this process may use.

    ``flags`` are the instructions that it has, empty where nobody tells.
    """

    name: str
    cores: int
    cpus: int
    flags: frozenset[str]


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the machine, of it what nobody uses, and the cgroups' limit; None where none is."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees; ``used_bytes`` are everybody's, NaN where the driver does not tell."""

    index: int
    name: str
    total_bytes: int
    used_bytes: float


def processor() -> Processor:
    """This machine's."""
    import psutil

    found = first_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")
    # Not on macOS and Windows.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return Processor(
        name=found.get("model name") or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        cpus=len(allowed),
        flags=frozenset(found.get("flags", "").split()),
    )


def best_threads() -> int:
    """Threads that computing is fastest with: one for each core that this process may use.

    A second thread of a core has no arithmetic of its own, and beyond a container's quota of
    processor time threads wait for one another. torch itself looks at neither quota.
    """
    import joblib

    return int(joblib.cpu_count(only_physical_cores=True))


def host_memory() -> HostMemory:
    """The machine's memory, and what the groups of this process leave it of that."""
    import psutil

    now = psutil.virtual_memory()
    limit = _cgroup_limit(now.total)
    return HostMemory(now.total, now.available, limit)


def _cgroup_limit(total_bytes: int) -> int | None:
    """The lowest limit of the control groups that this process is in; None where none is below.

    Version 2 (cgroup-v2.rst, ``memory.max``) limits a group by those that it lies in, too; within a
    container the file's root is the container's own. Version 1 has ``memory.limit_in_bytes``.
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
    """What the files called `name` of a group and of those around it say; "max" says nothing."""
    folder = root / group.lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):
            found.append(int((place / name).read_text(encoding="utf-8")))
    return found


def gpus() -> list[Gpu]:
    """Those that torch sees; nothing is allocated on them."""
    import torch

    from ortlab.utils.process_memory import device_used_bytes

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, of.name, of.total_memory, device_used_bytes(index)))
    return found


def advice() -> list[str]:
    """What would have torch compute faster here, in a line; nothing where all is well."""
    import torch

    threads, best = torch.get_num_threads(), best_threads()
    if threads <= best:
        return []
    cores = f"{best} core{'s' * (best > 1)}"
    return [
        f"torch's {threads} threads share {cores}: torch.set_num_threads({best}), or the kernel "
        "that `ortlab kernelspec install` makes"
    ]
