"""What runs on a worker: its place among the others, calls that report back, the process group."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import psutil

from ortlab.utils.errors import concise


@dataclass(frozen=True)
class Place:
    """A worker among the others: its rank of all, and of those on its host."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    threads: int


@dataclass(frozen=True)
class Failure:
    """How a call failed: the error, the user's lines that it came through, the whole traceback.

    ``at_s`` is the worker's clock in seconds, to tell what came first. ``interrupted`` says that it
    was asked to end, ``follows`` that another rank's failure made it fail, and ``midway`` that it
    has left the ranks in the middle of a step (see `ortlab.engines.distributed.data_parallel`).
    """

    error: str
    lines: tuple[str, ...]
    traceback: str
    at_s: float
    interrupted: bool
    follows: bool = False
    midway: bool = False


def take_place(place: Place) -> tuple[str, int]:
    """Gives this process its device and its share of the threads.

    Returns the device's name and how many CUDA devices the host has. The variables are torchrun's
    (RANK, WORLD_SIZE, ...), for libraries that read them.
    """
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
        OMP_NUM_THREADS=str(place.threads),  # of libraries that are loaded from here on
    )
    import torch

    torch.set_num_threads(place.threads)
    devices = torch.cuda.device_count()
    if not devices:
        return "cpu", 0
    index = place.local_rank % devices
    torch.cuda.set_device(index)
    return f"cuda:{index}", devices


def call(payload: bytes) -> bytes | Failure:
    """Calls what was packed as (function, args, kwargs); returns its packed result.

    An error leaves the process group at once, so that ranks that wait for this one fail too.
    """
    outcome = call_together(payload)
    if isinstance(outcome, Failure):
        leave_group()
    return outcome


def call_together(payload: bytes) -> bytes | Failure:
    """As `call`, and stays in the process group in any case."""
    from ortlab.cluster.values import dumps

    try:
        function, args, kwargs = pickle.loads(payload)
        packed = dumps(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - it is raised again where the call came from
        return _failure(error)
    return packed


def _failure(error: BaseException) -> Failure:
    message, *lines = concise(error)
    place = error.__traceback__
    theirs = place and place.tb_next  # without the line of `call_together`
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
    """Whether this worker has the file `path`."""
    return os.path.exists(path)


def join_group(store: str, backend: str, interface: str | None, timeout_s: float) -> None:
    """Joins the process group of all workers, which meet in the file `store`.

    With `interface` its sockets are of that network interface alone.
    """
    import torch.distributed as dist

    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_group() -> None:
    """Leaves the process group, where there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def footprint(pid: int) -> tuple[int, set[tuple[str, int]]]:
    """Resident bytes of the process `pid` and its children, and the sockets where they listen.

    A socket is its address and port. Of processes that are gone there is nothing.
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
