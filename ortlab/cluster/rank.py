"""Code that runs on a worker: its placement, its calls, and its process group."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import psutil

from ortlab.cluster import meeting
from ortlab.utils.errors import concise


@dataclass(frozen=True)
class Place:
    """Rank of a worker, among all workers and among those of its host, and its threads."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    threads: int


@dataclass(frozen=True)
class Failure:
    """Failure of a call on a worker.

    ``error`` is the error in one line, ``lines`` are the user's lines in its traceback, and
    ``traceback`` is the whole of it. ``at_s`` is the worker's clock in seconds, to order failures.
    ``interrupted`` is True if the call was interrupted, ``follows`` if another rank's failure
    caused it, and ``midway`` if it happened in the middle of a step that other ranks may have taken
    (see `ortlab.engines.distributed.data_parallel`).
    """

    error: str
    lines: tuple[str, ...]
    traceback: str
    at_s: float
    interrupted: bool
    follows: bool = False
    midway: bool = False


def take_place(place: Place) -> tuple[str, int]:
    """Set the device, the threads and torchrun's environment variables of this process.

    The variables (RANK, WORLD_SIZE, ...) are for libraries that read them.

    Args:
        place: This worker's rank and threads.

    Returns:
        The device's name, and the number of CUDA devices of the host.
    """
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
        OMP_NUM_THREADS=str(place.threads),  # for libraries that are loaded later
    )
    # Above all its levels: torch's profiler would print where it starts and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import torch  # heavy: torch

    torch.set_num_threads(place.threads)
    devices = torch.cuda.device_count()
    if not devices:
        return "cpu", 0
    index = place.local_rank % devices
    torch.cuda.set_device(index)
    return f"cuda:{index}", devices


def call(payload: bytes) -> bytes | Failure:
    """Run a packed call and return its packed result.

    After an error it leaves the process group at once, so that ranks that wait for this one fail
    too.

    Args:
        payload: A pickle of (function, args, kwargs).

    Returns:
        The pickled result, or the failure.
    """
    outcome = call_together(payload)
    if isinstance(outcome, Failure):
        leave_group()
    return outcome


def call_together(payload: bytes) -> bytes | Failure:
    """Run a packed call and stay in the process group even if it fails.

    Args:
        payload: A pickle of (function, args, kwargs).

    Returns:
        The pickled result, or the failure.
    """
    from ortlab.cluster.values import dumps  # optional: cloudpickle

    try:
        function, args, kwargs = pickle.loads(payload)
        packed = dumps(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - raised again in the calling process
        return _failure(error)
    return packed


def _failure(error: BaseException) -> Failure:
    message, *lines = concise(error)
    place = error.__traceback__
    theirs = place and place.tb_next  # omits the line of `call_together`
    return Failure(
        message.removesuffix(": "),
        tuple(lines),
        "".join(traceback.format_exception(type(error), error, theirs)),
        time.time(),
        isinstance(error, KeyboardInterrupt),
        getattr(error, "follows", False),
        getattr(error, "midway", False),
    )


def sees(path: str) -> bool:
    """Return whether this worker can see the file `path`."""
    return os.path.exists(path)


def join_group(
    store: str | tuple[str, int], backend: str, interface: str | None, timeout_s: float
) -> None:
    """Join the process group of all workers.

    Args:
        store: File through which the workers find each other, or address and port of the kernel's
            TCPStore, see `ortlab.cluster.meeting`.
        backend: Name of torch.distributed's backend, such as "gloo".
        interface: Network interface to which the sockets are limited; None for any.
        timeout_s: Seconds that a collective waits for another worker.
    """
    import torch.distributed as dist  # heavy: torch

    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    met = (
        dist.FileStore(store, world)  # type: ignore[attr-defined]
        if isinstance(store, str)
        else meeting.meet(store, timeout)
    )
    dist.init_process_group(backend, store=met, rank=rank, world_size=world, timeout=timeout)


def leave_group() -> None:
    """Leave the process group, if there is one."""
    import torch.distributed as dist  # heavy: torch

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def footprint(pid: int) -> tuple[int, set[tuple[str, int]]]:
    """Return the memory and the listening sockets of a process and its children.

    Args:
        pid: The process id.

    Returns:
        Resident bytes, and the sockets as pairs of address and port; nothing for processes that
        have ended.
    """
    resident, sockets = 0, set()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += one.memory_info().rss
                sockets |= {
                    (socket.laddr.ip, socket.laddr.port)
                    for socket in one.net_connections("inet")
                    if socket.status == psutil.CONN_LISTEN
                }
    return resident, sockets
