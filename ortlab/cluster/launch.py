"""Starts the processes of an ipyparallel cluster, tells which of them died, and ends them.

Without a profile all is local: ipyparallel's controller and engines as children of this process,
on loopback TCP with encrypted messages, their files in a temporary folder of mode 0700. With a
profile the launchers are those that it names (SSH, MPI, Slurm, ...), with its addresses and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from ortlab.settings import unknown_name
from ortlab.utils.threads import Thread

T = TypeVar("T")

LOOPBACK: Final = "127.0.0.1"

_TO_END_S: Final = 2
"""That an engine has to end when it is told to; then it is killed."""

_ENGINE: Final = ("--timeout=60",)  # a machine that is busy registers later than in 5 s
_CONTROLLER: Final = (
    f"--ip={LOOPBACK}",
    f"--location={LOOPBACK}",  # else the host's name, which it may not be able to look up
    "--nodb",  # would keep all that was sent, models among it
    "--usethreads",  # of its eight processes two are left
    "--ping=250",  # ms; an engine has come once two pings were answered
    "--HeartMonitor.max_heartmonitor_misses=240",  # so that one that swaps has a minute still
)


class Cluster:
    """A cluster of `count` engines that run and are connected to.

    RuntimeError where ipyparallel is not installed or the engines do not come; ValueError for a
    `profile` that there is none of.
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
            self._folder = Path(tempfile.mkdtemp(prefix="ortlab-workers-"))
            _encrypt(self._folder)
            self._embedded = {
                # What this process imports they can import.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": str(threads),
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
                reason = str(error).partition(" while waiting for ")[0]  # paths
                raise RuntimeError(
                    f"the workers did not start: {reason}{f' ({words})' if words else ''}"
                ) from error
            raise

    @property
    def client(self) -> Any:
        """ipyparallel's client, connected to all engines."""
        return self._client

    @property
    def controller_pid(self) -> int | None:
        """The controller's process where it is a local one."""
        pid = getattr(self._cluster.controller, "pid", -1)
        return pid if pid > 0 else None

    def controller_died(self) -> bool:
        """Whether the controller is gone that this process started."""
        controller = self._cluster.controller
        return controller is None or controller.state == "after"

    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of local engines that ended, by process; negative is a signal's number."""
        data = getattr(self._cluster.engine_set, "stop_data", None) or {}
        ended = data.get("engines", {}).values()
        return {engine["pid"]: engine.get("exit_code") for engine in ended if "pid" in engine}

    def stop(self, *, kill: bool = False) -> None:
        """Ends engines and controller, at once with `kill`; returns when they are gone.

        Twice is fine.
        """
        if self._stopped:
            return
        self._stopped = True
        helpers = self._helpers()
        if self._client is not None:
            self._client.close(linger=0)
        try:
            self._wait(self._end(signal.SIGKILL if kill else signal.SIGTERM))
        except Exception as error:  # noqa: BLE001 - whatever a launcher raises, the rest is ended
            warnings.warn(f"some of the workers may run on: {error}", stacklevel=3)
        for helper in helpers:  # else some seconds later, when they notice
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, in the thread whose loop ipyparallel's launchers report to."""
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
                    f"{len(self._client.ids)} of {count} came in {cluster.engine_timeout} s"
                )
            await asyncio.sleep(0.05)

    async def _end(self, number: int) -> None:
        # All at once; ipyparallel's stop, which tells them again, waits for one after the other.
        with contextlib.suppress(Exception):
            await self._cluster.signal_engines(number)
        await self._cluster.stop_cluster()

    def _last_words(self) -> str:
        """The last line that one of the processes wrote."""
        parts = (self._cluster.controller, self._cluster.engine_set)
        lines = [line for part in parts if part for line in part.get_output().splitlines()]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _helpers(self) -> list[Any]:
        """The processes below local engines: they hand on signals, or load data."""
        found: list[Any] = []
        engines = getattr(self._cluster.engine_set, "launchers", {}) if self._embedded else {}
        for engine in list(engines.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(engine.pid).children(recursive=True)
        return found


def installed() -> Any:
    """ipyparallel; RuntimeError says how to install it, and what sends cells' classes."""
    try:
        import cloudpickle  # noqa: F401
        import ipyparallel
    except ImportError as error:
        raise RuntimeError(
            f"workers need {error.name}, which is not installed: pip install 'ortlab[workers]'"
        ) from error
    return ipyparallel


def _encrypt(folder: Path) -> None:
    """Has a controller with its profile there encrypt all messages, which it signs as well.

    Else other users could listen to what ranks print. Arguments would show them the key.
    """
    key = secrets.token_hex(32).encode()
    chosen = f"c.IPController.enable_curve = True\nc.Session.key = {key!r}\n"
    (folder / "ipcontroller_config.py").write_text(chosen, encoding="utf-8")


def _check_profile(ipp: Any, name: str) -> None:
    """ipyparallel would make an empty profile of a name with a slip in it."""
    found = Path(ipp.util.get_ipython_dir()).glob("profile_*")
    known = [path.name.removeprefix("profile_") for path in found if path.is_dir()]
    if name not in known:
        raise ValueError(f"no profile is called {name!r}: {unknown_name(name, known)}")


def _config(sections: Mapping[str, Mapping[str, Any]]) -> Any:
    from traitlets.config import Config

    return Config(sections)


def _silent() -> logging.Logger:
    """A logger that nobody hears: what matters of it is raised."""
    log = logging.Logger("ortlab.workers")
    log.addHandler(logging.NullHandler())
    return log


def _command(role: str) -> list[str]:
    return [sys.executable, "-m", "ortlab.cluster.process", role, str(os.getpid())]
