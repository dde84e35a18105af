"""Launch of an ipyparallel cluster: starts its processes, detects which died, and ends them.

Without a profile everything is local: ipyparallel's controller and engines are children of this
process and communicate over loopback TCP with encrypted messages; their files are in a temporary
folder of mode 0700. A profile chooses the launchers (SSH, MPI, Slurm, ...), addresses and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

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
    f"--ip={LOOPBACK}",
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

    Raises:
        RuntimeError: If ipyparallel is not installed, or the engines do not start.
        ValueError: If there is no such profile.
    """

    def __init__(self, count: int, *, profile: str | None, threads: int) -> None:
        ipp = installed()
        self._folder: Path | None = None
        self._stopped = False
        self._client: Any = None
        self._embedded: dict[str, Any] = {}
        common: dict[str, Any] = {"log": _silent(), "shutdown_atexit": False, "n": count}
        if profile is not None:
            _check_profile(ipp, profile)
            self._cluster = ipp.Cluster(profile=profile, config=_config({}), **common)
        else:
            self._folder = scratch.folder("workers")
            _encrypt(self._folder)
            self._embedded = {
                # Engines can import whatever this process can.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": str(threads),
                **contention.SLEEPING,
            }
            self._cluster = ipp.Cluster(
                profile_dir=str(self._folder),
                load_profile=False,
                cluster_file="",
                delay=0,
                config=_config({"LocalProcessLauncher": {"stop_seconds_until_kill": _TO_END_S}}),
                **common,
            )
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

    def exit_codes(self) -> dict[int, int | None]:
        """Return the exit codes of local engines that ended, by process id.

        Returns:
            The codes; a negative one is the number of a signal, None is unknown.
        """
        data = getattr(self._cluster.engine_set, "stop_data", None) or {}
        ended = data.get("engines", {}).values()
        return {engine["pid"]: engine.get("exit_code") for engine in ended if "pid" in engine}

    def stop(self, *, kill: bool = False) -> None:
        """End engines and controller and wait for them; a second call does nothing.

        Args:
            kill: True to end them by SIGKILL, not by SIGTERM.
        """
        if self._stopped:
            return
        self._stopped = True
        helpers = self._helpers()
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
                controller_args=list(_CONTROLLER),
                environment=dict(self._embedded),
            )
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
