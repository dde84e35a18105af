"""Launch of an ipyparallel cluster: starts its processes, detects which died, and ends them.

Without a profile ipyparallel's controller is a child of this process, and so are the engines,
unless hosts are given: then they run there (`ortlab.cluster.host_side`), started over SSH, by Slurm
or by mpirun. They communicate over loopback TCP, or with hosts over one address that the hosts
reach, with encrypted and signed messages; their files are in a temporary folder of mode 0700. A
profile chooses the launchers (SSH, MPI, Slurm, ...), addresses and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from ortlab.cluster.checks import Elsewhere, Reached
from ortlab.settings import unknown_name
from ortlab.utils import contention, scratch
from ortlab.utils.files import write_private
from ortlab.utils.threads import Thread

T = TypeVar("T")

LOOPBACK: Final = "127.0.0.1"

_TO_END_S: Final = 2
"""Seconds that an engine has to end after SIGTERM before it is killed."""

_ENGINE: Final = ("--timeout=60",)  # on a busy machine, registering takes longer than 5 s
_CONTROLLER: Final = (
    f"--IPController.client_ip={LOOPBACK}",
    f"--IPController.monitor_ip={LOOPBACK}",
    f"--location={LOOPBACK}",  # the default is the host's name, which may not resolve
    "--nodb",  # a database would store everything that is sent, including models
    "--usethreads",  # two processes instead of eight
    "--ping=250",  # ms; an engine is registered once it has answered two pings
    "--HeartMonitor.max_heartmonitor_misses=240",  # a minute, for an engine that swaps
)


class Cluster:
    """Running cluster of engines, with a connected client.

    Args:
        count: Number of engines.
        profile: ipyparallel profile that the cluster is started with; None starts local processes.
        threads: Threads of each local engine.
        hosts: Hosts on which the engines are started, with a local controller; None for this
            machine.

    Raises:
        HostsRefused: If one of the hosts cannot run workers.
        RuntimeError: If ipyparallel is not installed, or the engines do not start.
        ValueError: If there is no such profile.
    """

    def __init__(
        self, count: int, *, profile: str | None, threads: int, hosts: Elsewhere | None = None
    ) -> None:
        ipp = installed()
        self.hosts = hosts
        self._reached: Reached | None = None if hosts is None else hosts.reach()
        self._folder: Path | None = None
        self._stopped = False
        self._client: Any = None
        self._embedded: dict[str, Any] = {}
        common: dict[str, Any] = {"log": _silent(), "shutdown_atexit": False, "n": count}
        with contextlib.ExitStack() as undo:
            if self._reached is not None:
                undo.callback(self._reached.end, kill=True)
            self._cluster = self._made(ipp, profile, threads, common)
            undo.pop_all()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(self._loop.run_forever, name="ortlab-workers")
        self._thread.start()
        try:
            self._wait(self._start(count))
        except BaseException as error:
            words = self._last_words()
            self.stop(kill=True)
            if isinstance(error, Exception):
                reason = str(error).partition(" while waiting for ")[0]  # omits paths
                raise RuntimeError(
                    f"the workers did not start: {reason}{f' ({words})' if words else ''}"
                ) from error
            raise

    def _made(self, ipp: Any, profile: str | None, threads: int, common: Mapping[str, Any]) -> Any:
        """Return ipyparallel's cluster, of which nothing runs yet."""
        if profile is not None:
            _check_profile(ipp, profile)
            return ipp.Cluster(profile=profile, config=_config({}), **common)
        self._folder = scratch.folder("workers")
        _encrypt(self._folder)
        self._embedded = {
            # Engines can import whatever this process can.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(threads),
            **contention.SLEEPING,
        }
        return ipp.Cluster(
            profile_dir=str(self._folder),
            load_profile=False,
            cluster_file="",
            delay=0,
            config=_config({"LocalProcessLauncher": {"stop_seconds_until_kill": _TO_END_S}}),
            **common,
        )

    @property
    def client(self) -> Any:
        """Client of ipyparallel, connected to all engines."""
        return self._client

    @property
    def controller_pid(self) -> int | None:
        """Process id of the controller; None if it is not local."""
        pid = getattr(self._cluster.controller, "pid", -1)
        return pid if pid > 0 else None

    def controller_died(self) -> bool:
        """Return whether the controller that this process started has ended."""
        controller = self._cluster.controller
        return controller is None or controller.state == "after"

    def exit_codes(self) -> dict[tuple[str, int], int | None]:
        """Return the exit codes of engines that ended, by host and process id.

        Nothing is known of the engines of a profile on other hosts.

        Returns:
            The codes; a negative one is the number of a signal, None is unknown.
        """
        if self._reached is not None:
            return {
                (link.host, pid): code
                for link in self._reached.links
                for pid, code in dict(link.ended).items()
            }
        data = getattr(self._cluster.engine_set, "stop_data", None) or {}
        ended = data.get("engines", {}).values()
        here = socket.gethostname()
        return {
            (here, engine["pid"]): engine.get("exit_code") for engine in ended if "pid" in engine
        }

    def lost(self, host: str) -> str:
        """Return which connection to a host has ended; "" if none has.

        Args:
            host: The host.
        """
        if self._reached is None or any(
            link.host == host and link.alive for link in self._reached.links
        ):
            return ""
        return f"{self._reached.connection} to the host ended"

    def hosts_ended(self) -> str:
        """Return why all hosts were taken away, such as a time limit; "" if they were not."""
        return "" if self._reached is None else self._reached.ended()

    @property
    def host_names(self) -> list[str]:
        """Names of the hosts; empty without hosts."""
        return [] if self._reached is None else [link.host for link in self._reached.links]

    @property
    def address(self) -> str | None:
        """Address of this machine by which the hosts reach it; None without hosts."""
        return None if self._reached is None else self._reached.address

    def stop(self, *, kill: bool = False) -> None:
        """End engines and controller and wait for them; a second call does nothing.

        Args:
            kill: True to end them by SIGKILL, not by SIGTERM.
        """
        if self._stopped:
            return
        self._stopped = True
        helpers = self._helpers()
        silent = [] if self._reached is None else self._reached.end(kill=kill)
        if silent:
            warnings.warn(
                f"{', '.join(silent)} did not answer: workers there end by themselves within a "
                "minute",
                stacklevel=3,
            )
        if self._client is not None:
            self._client.close(linger=0)
        try:
            self._wait(self._end(signal.SIGKILL if kill else signal.SIGTERM))
        except Exception as error:  # noqa: BLE001 - launchers raise anything; the rest still ends
            warnings.warn(f"some of the workers may still be running: {error}", stacklevel=3)
        for helper in helpers:  # otherwise they end some seconds later
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._folder is not None:
            scratch.remove(self._folder)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread whose event loop ipyparallel's launchers use."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self, count: int) -> None:
        cluster = self._cluster
        if self._embedded:
            await cluster.start_controller(
                controller_cmd=_command("controller"),
                controller_args=[
                    *_CONTROLLER,
                    f"--IPController.engine_ip={self.address or LOOPBACK}",
                ],
                environment=dict(self._embedded),
            )
        if self._reached is not None:
            information = await cluster.controller.get_connection_info()
            for link in self._reached.links:
                link.start(information["engine"])
        elif self._embedded:
            await cluster.start_engines(
                count,
                engine_cmd=_command("engine"),
                engine_args=list(_ENGINE),
                environment=dict(self._embedded),
            )
        else:
            await cluster.start_cluster(count)
        self._client = await cluster.connect_client()
        until = time.monotonic() + cluster.engine_timeout
        while len(self._client.ids) < count:
            if self.exit_codes() or self.controller_died():
                raise RuntimeError("one of their processes ended")
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{len(self._client.ids)} of {count} registered within "
                    f"{cluster.engine_timeout} s"
                )
            await asyncio.sleep(0.05)

    async def _end(self, number: int) -> None:
        # Signal all engines at once: ipyparallel's stop would wait for one after the other.
        with contextlib.suppress(Exception):
            await self._cluster.signal_engines(number)
        await self._cluster.stop_cluster()

    def _last_words(self) -> str:
        """Return the last line that one of the processes printed."""
        if self._reached is not None:
            for link in self._reached.links:
                if link.ended and link.words:
                    return f"{link.host}: {link.words[-1]}"
        parts = (self._cluster.controller, self._cluster.engine_set)
        lines = [line for part in parts if part for line in part.get_output().splitlines()]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _helpers(self) -> list[Any]:
        """Return the child processes of local engines, which forward signals or load data."""
        found: list[Any] = []
        engines = getattr(self._cluster.engine_set, "launchers", {}) if self._embedded else {}
        for engine in list(engines.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(engine.pid).children(recursive=True)
        return found


def installed() -> Any:
    """Return the `ipyparallel` module.

    Raises:
        RuntimeError: If ipyparallel or cloudpickle, which pickles classes of cells, is missing.
    """
    try:
        import cloudpickle  # noqa: F401 - optional: cloudpickle
        import ipyparallel  # optional: ipyparallel
    except ImportError as error:
        raise RuntimeError(
            f"workers need {error.name}, which is not installed: pip install 'ortlab[workers]'"
        ) from error
    return ipyparallel


def _encrypt(folder: Path) -> None:
    """Configure the controller of a profile folder to encrypt its messages, besides signing them.

    Otherwise other users of the machine could read the output of the ranks. The key is in a file
    because command-line arguments are visible to other users.
    """
    key = secrets.token_hex(32).encode()
    chosen = f"c.IPController.enable_curve = True\nc.Session.key = {key!r}\n"
    write_private(folder / "ipcontroller_config.py", chosen.encode())


def _check_profile(ipp: Any, name: str) -> None:
    """Raise ValueError for an unknown profile, for which ipyparallel would make an empty one."""
    found = Path(ipp.util.get_ipython_dir()).glob("profile_*")
    known = [path.name.removeprefix("profile_") for path in found if path.is_dir()]
    if name not in known:
        raise ValueError(f"no profile is called {name!r}: {unknown_name(name, known)}")


def _config(sections: Mapping[str, Mapping[str, Any]]) -> Any:
    from traitlets.config import Config  # optional: traitlets

    return Config(sections)


def _silent() -> logging.Logger:
    """Return a logger without output; important problems are raised as errors."""
    log = logging.Logger("ortlab.workers")
    log.addHandler(logging.NullHandler())
    return log


def _command(role: str) -> list[str]:
    return [sys.executable, "-m", "ortlab.cluster.process", role, str(os.getpid())]
