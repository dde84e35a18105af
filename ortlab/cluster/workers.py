"""Workers: the ranks of a cluster, the calls that run on them, and their failures."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import psutil

from ortlab.cluster import facts
from ortlab.cluster import rank as on_rank
from ortlab.cluster.call import RankDied, WorkerCall
from ortlab.cluster.checks import Elsewhere
from ortlab.cluster.launch import LOOPBACK, Cluster
from ortlab.cluster.payload import packed
from ortlab.cluster.placement import (
    ANSWER_S,
    PlacedRank,
    place_ranks,
    warn_of_sharing,
)
from ortlab.cluster.worker_table import COLUMNS, Worker, listening_note
from ortlab.engines.base import tell
from ortlab.history.run_folder import private_home
from ortlab.training.memory_advice import available_bytes
from ortlab.utils import at_exit, scratch
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Table
from ortlab.utils.wording import counted

P = ParamSpec("P")
R = TypeVar("R")
WORKER_BYTES = 200 << 20
"""Memory of a process that has imported torch and ortlab (207 MiB with torch 2.13)."""

_GRACE_S: Final = 1.0
"""Seconds that ranks have to finish after another rank failed, and after each interrupt."""

_INTERRUPTS: Final = 3
"""Interrupts before a rank is killed; a rank whose call has not begun yet ignores them."""


@dataclass(frozen=True)
class Group:
    """Process group of all ranks.

    Attributes:
        backend: Its backend: gloo for CPU tensors, and NCCL for CUDA tensors if every rank has a
            GPU of its own.
        folder: A private folder of this machine.
        shared: True if all ranks can read the folder.
        store: Store through which ranks on hosts have met, which lives as long as the group.
    """

    backend: str
    folder: Path
    shared: bool = True
    store: Any = None


class Workers:
    """Worker processes: ranks, each with a device and its part of the threads.

    They run from the constructor's return until `stop` or the end of this process. Local workers
    end with this process even if it is killed. A warning says if workers share cores or devices.

    Args:
        count: Number of workers.
        profile: ipyparallel profile that says how they are started (SSH, MPI, Slurm, ...); None
            starts local processes.
        hosts: Hosts on which they are started by SSH, Slurm or mpirun; None for this machine, or
            the profile.

    Raises:
        HostsRefused: If a host cannot run workers; nothing was started then.
        RuntimeError: If they cannot be started, or have other versions of Python or a library than
            this process.
        ValueError: If the profile is unknown.
    """

    def __init__(
        self, count: int, *, profile: str | None = None, hosts: Elsewhere | None = None
    ) -> None:
        self.profile, self.hosts = profile, hosts
        self.broken: str | None = None
        """Reason why they cannot be used anymore; None while they can."""
        self._busy: str | None = None
        self._lock = threading.RLock()
        self._group: Group | None = None
        self._in_group = 0
        began = time.monotonic()
        if not self.elsewhere:
            warn_of_sharing("this machine", count, facts.cores(), "core")
        tell(f"starting {counted(count, 'worker')}")
        threads = max(1, facts.cores() // count)
        self._cluster = Cluster(count, profile=profile, threads=threads, hosts=hosts)
        try:
            self._ranks = place_ranks(self._cluster, elsewhere=self.elsewhere)
        except BaseException:
            self._cluster.stop(kill=True)
            raise
        at_exit.register(self.stop, last=True)
        tell(f"{counted(count, 'worker')} up after {time.monotonic() - began:.1f} s")

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    @property
    def elsewhere(self) -> bool:
        """True if they may be on other machines."""
        return self.hosts is not None or self.profile is not None

    @property
    def local(self) -> bool:
        """True if all workers are processes of this machine."""
        return all(rank.local for rank in self._ranks)

    @property
    def first_on_host(self) -> list[bool]:
        """For each rank, True if it is the first one of its host."""
        return [rank.place.local_rank == 0 for rank in self._ranks]

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.pid for rank in self._ranks]

    @property
    def busy(self) -> str | None:
        """Name of the function that they are running; None when they are idle."""
        return self._busy

    @property
    def summary(self) -> str:
        """Their number, place and state, without asking them."""
        if self.broken is not None:
            return f"none: {self.broken}; {self._again()}"
        where = "on this machine" if self.profile is None else f"of profile {self.profile}"
        if self.hosts is not None:
            where = self.hosts.where
        return f"{len(self)} {where}, {f'busy: {self._busy}' if self._busy else 'idle'}"

    def usable(self) -> bool:
        """Return whether all workers are still running."""
        self._look()
        return self.broken is None

    def table(self) -> Table[Worker]:
        """Return a table of the ranks: host, process, device, threads, memory and state.

        The notes list every socket that the controller and the engines listen on.
        """
        if not self.usable():
            return Table[Worker]([], COLUMNS, empty=f"no workers: {self.broken}; {self._again()}")
        footprints = [self._footprint(rank) for rank in self._ranks]
        state = "idle" if self._busy is None else f"busy: {self._busy}"
        rows = [
            Worker(
                rank.place.rank, rank.host, rank.pid, rank.device, rank.place.threads, rss, state
            )
            for rank, (rss, _) in zip(self._ranks, footprints, strict=True)
        ]
        pid = self._cluster.controller_pid
        heard = None if pid is None else on_rank.footprint(pid)[1]
        notes = [listening_note(f"controller (pid {pid})" if pid else "controller", heard)]
        notes += [
            listening_note(f"rank {rank.place.rank} (pid {rank.pid})", found)
            for rank, (_, found) in zip(self._ranks, footprints, strict=True)
        ]
        return Table(rows, COLUMNS, notes=notes)

    def stop(self) -> None:
        """End the workers; a running call fails. A second call does nothing."""
        at_exit.unregister(self.stop)
        self.broken = self.broken or "they were stopped"
        self._cluster.stop()

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a function on every rank.

        The function and its arguments are sent by value, also if a notebook cell defines them.
        Output of the ranks is printed here, each line after the rank's number. After a failure,
        ranks that are still running some seconds later are interrupted, then killed. A rank that
        fails leaves its process group, so that the others do not wait for it there. An interrupt
        ends the call on every rank.

        Args:
            function: The function.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The results, by rank.

        Raises:
            ValueError: If something cannot be pickled, before anything runs; the message names it.
            RankError: If a rank failed; the message names the first one.
            RankDied: If the process of a rank ended; all workers are stopped then.
            RuntimeError: If the workers were stopped.
        """
        return self._call(function, args, kwargs, on_rank.call)

    def run_together(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a function that fails on all ranks or on none; ranks stay in their process group.

        Args:
            function: The function.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The results, by rank.

        Raises:
            RankError: As in `run`; its ``together`` is True if the call failed on all ranks.
        """
        return self._call(function, args, kwargs, on_rank.call_together)

    def run_each(self, function: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
        """Call a function as `run_together` does, with other arguments on each rank.

        Args:
            function: The function.
            arguments: Its positional arguments, by rank.

        Returns:
            The results, by rank.

        Raises:
            RankError: As in `run_together`.
        """
        name = _name(function)
        payloads: dict[int, bytes] = {}
        for each in arguments:
            if id(each) not in payloads:  # several ranks may have the same, large ones
                payloads[id(each)] = packed(name, function, each, {})
        return self._sent(name, [payloads[id(each)] for each in arguments], on_rank.call_together)

    def _call(
        self,
        function: Callable[P, R],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Callable[[bytes], bytes | on_rank.Failure],
    ) -> list[R]:
        name = _name(function)
        return self._sent(name, [packed(name, function, args, kwargs)] * len(self), how)

    def _sent(
        self,
        name: str,
        payloads: Sequence[bytes],
        how: Callable[[bytes], bytes | on_rank.Failure],
    ) -> list[Any]:
        with self._taken(name):
            client = self._cluster.client
            return self._finish(
                WorkerCall(
                    [
                        client[rank.engine].apply_async(how, payload)
                        for rank, payload in zip(self._ranks, payloads, strict=True)
                    ]
                )
            )

    @contextlib.contextmanager
    def rendezvous(self, name: str = "", *, timeout_s: float = 1800.0) -> Iterator[Group]:
        """Join all ranks in one process group of torch.distributed within the context.

        The workers are reserved meanwhile: calls of other threads are refused with a message that
        has the `name`. Contexts of the same thread may overlap in any order and share one group,
        which ends with the last of them.

        The ranks find each other through a file in a private folder, without a port. If all are on
        this machine, their sockets are on loopback only. Otherwise the folder is below
        $ORTLAB_HOME. Ranks on hosts, which may share no folder, find each other through a
        TCPStore of this process instead, on the address of the controller.

        Args:
            name: Name of the work, for the messages.
            timeout_s: Seconds that a rank waits for another one in a collective.

        Yields:
            The group.

        Raises:
            RuntimeError: If a rank cannot read the folder, or the workers were stopped.
            ValueError: If another thread uses the workers.
        """
        with self._taken(name or "a process group"):
            if self._group is None:
                self._group = self._met(timeout_s)
            group = self._group
            self._in_group += 1
            try:
                yield group
            finally:
                self._in_group -= 1
                if not self._in_group:
                    self._group = None
                    self._part(group)

    def _met(self, timeout_s: float) -> Group:
        backend = "cpu:gloo,cuda:nccl" if self._own_gpus() else "gloo"
        interface = _loopback_interface() if self.local else None
        folder, store = self._meeting_place(), None
        place: str | tuple[str, int] = str(folder / "store")
        try:
            if self._cluster.address is not None:
                store, place = _store(self._cluster.address)
            self.run(on_rank.join_group, place, backend, interface, timeout_s)
        except BaseException:
            scratch.remove(folder)
            raise
        return Group(backend, folder, shared=store is None, store=store)

    def _part(self, group: Group) -> None:
        try:
            if self.broken is None:
                self.run(on_rank.leave_group)
        finally:
            scratch.remove(group.folder)

    # ---- a call ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _taken(self, name: str) -> Iterator[None]:
        """Reserve the workers for this thread; ValueError while another one uses them."""
        if not self.usable():
            raise RuntimeError(f"no workers: {self.broken}; {self._again()}")
        if not self._lock.acquire(blocking=False):
            raise ValueError(f"the workers are busy with {self._busy}; wait until it ends")
        before = self._busy
        try:
            self._busy = before or name
            yield
        finally:
            self._busy = before
            self._lock.release()

    def _finish(self, call: WorkerCall) -> list[Any]:
        """Wait for the end of a call on all ranks; see `run`."""
        try:
            self._watch(call)
            self._watch(call, _GRACE_S)  # after a failure the others may still finish
            alike = len(call.failures) == len(self)
            self._interrupt(call)
        except KeyboardInterrupt:
            self._interrupt(call)
            raise
        error = call.error()
        if error is not None:
            midway = any(failure.midway for failure in call.failures.values())
            error.together = alike and not midway
            if self.broken is not None:
                error.add_note(f"{self.broken}; {self._again()}")
            raise error
        return call.values()

    def _watch(self, call: WorkerCall, seconds: float = math.inf) -> None:
        """Poll until all ranks are done, or until `seconds` are over.

        Without a limit it also returns when a rank has failed. RankDied if a process ended.
        """
        until = time.monotonic() + seconds
        while call.pending and time.monotonic() < until:
            if seconds == math.inf and call.failures:
                return
            call.poll()
            if self.broken is not None:  # stopped by another thread
                raise RuntimeError(f"no workers: {self.broken}")
            if call.lost or self._gone():
                raise self._died(call.lost)

    def _interrupt(self, call: WorkerCall) -> None:
        """End a call on the ranks that still run it, by SIGINT and finally by SIGKILL.

        A keyboard interrupt during this wait kills them at once.
        """
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(_INTERRUPTS):
                if not call.pending:
                    return
                engines = [self._ranks[rank].engine for rank in call.pending]
                self._cluster.client.send_signal(signal.SIGINT, targets=engines, block=False)
                self._watch(call, _GRACE_S)
        if call.pending:
            ranks = ", ".join(map(str, call.pending))
            self._break(f"rank {ranks} of {len(self)} did not end when interrupted, and was killed")

    def _look(self) -> None:
        """Detect a worker that died while no call was running."""
        if self.broken is None and self._busy is None and self._gone():
            self._died()

    def _gone(self) -> list[int]:
        """Return the ranks whose process ended; all of them if the controller did."""
        ended, left = self._cluster.exit_codes(), self._cluster.client.ids
        lost = self._cluster.controller_died()
        return [
            number
            for number, rank in enumerate(self._ranks)
            if lost or (rank.host, rank.pid) in ended or rank.engine not in left
        ]

    def _died(self, lost: Sequence[int] = ()) -> RankDied:
        """Stop the remaining ranks after one ended, and return the error that names it."""
        if self._cluster.controller_died():
            reason, rank = "the controller died, so the workers cannot be reached", 0
        else:
            rank = [*lost, *self._gone()][0]
            ended = self._ranks[rank]
            which = (ended.host, ended.pid)
            until = time.monotonic() + _GRACE_S
            while which not in self._cluster.exit_codes() and time.monotonic() < until:
                time.sleep(0.01)
            reason = f"rank {rank} of {len(self)}"
            if self.hosts is not None:
                reason += f" on {ended.host}"
            if cut := self._cluster.lost(ended.host):
                reason += f" was lost: {cut}"
            else:
                reason += f" died{_how(self._cluster.exit_codes().get(which))}"
            if taken := self._cluster.hosts_ended():
                reason += f"; {taken}"
        self._break(reason)
        return RankDied(f"{reason}; {self._again()}", rank)

    def _break(self, reason: str) -> None:
        at_exit.unregister(self.stop)
        self.broken = reason
        self._cluster.stop(kill=True)

    def _again(self) -> str:
        typed, called = str(len(self)), str(len(self))
        if self.hosts is not None:
            typed, called = self.hosts.typed, self.hosts.called
        return f"%ort workers {typed}, or ortlab.workers({called}), starts fresh ones"

    # ---- information on the ranks ----------------------------------------------------------------

    def _footprint(self, rank: PlacedRank) -> tuple[int | None, set[tuple[str, int]] | None]:
        """Return resident bytes and listening sockets; None for a busy rank on another host."""
        if rank.local:
            return on_rank.footprint(rank.pid)
        if self._busy is not None:
            return None, None
        asked = self._cluster.client[rank.engine].apply_async(on_rank.footprint, rank.pid)
        found: tuple[int, set[tuple[str, int]]] = asked.get(ANSWER_S)
        return found

    def _meeting_place(self) -> Path:
        """Return a new private folder that every rank can read, if they are not on `hosts`."""
        if self.local or self.hosts is not None:
            return scratch.folder("group")
        home = private_home()
        folder = scratch.folder("group", home)
        for rank, seen in enumerate(self.run(on_rank.sees, str(folder))):
            if not seen:
                scratch.remove(folder)
                raise RuntimeError(
                    f"rank {rank} on {self._ranks[rank].host} cannot read {home}; set ORTLAB_HOME "
                    "to a folder that all hosts share"
                )
        return folder

    def _own_gpus(self) -> bool:
        """Return whether every rank has a GPU of its own."""
        return all(rank.devices >= rank.place.local_world for rank in self._ranks)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def refuse_too_many(count: int) -> None:
    """Raise ValueError if the machine has no memory for that many local workers.

    Args:
        count: Number of workers.

    Raises:
        ValueError: If they need more than the free memory; the message has the largest number.
    """
    free = available_bytes("cpu")
    if count * WORKER_BYTES > free:
        raise ValueError(
            f"not enough memory for {count} workers: each takes {memory(WORKER_BYTES)} without its "
            f"model, and {memory(free)} are free; start at most {max(1, free // WORKER_BYTES)}"
        )


def _store(address: str) -> tuple[Any, tuple[str, int]]:
    """Return a TCPStore that listens on one address, and its place.

    torch's own socket would listen on every network.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # heavy: torch

    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, (address, port)


def _how(code: int | None) -> str:
    """Return how a process ended, by its exit code; "" if that is unknown."""
    if code is None:
        return ""
    return f": {signal.Signals(-code).name} (signal {-code})" if code < 0 else f": exit code {code}"


def _loopback_interface() -> str | None:
    """Return the name of the network interface of 127.0.0.1, such as lo on Linux."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return str(name)
    return None
