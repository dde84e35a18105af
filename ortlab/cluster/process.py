"""Controller and engine processes of a cluster, which end when the kernel ends.

``python -m ortlab.cluster.process controller|engine PID ARGUMENT ...`` runs ipyparallel's
controller or engine with these arguments, for the kernel with that process id. ipyparallel's own
processes would survive a kernel that was killed: they watch each other by heartbeats, but not the
kernel. A ``remote-engine`` is the child of `ortlab.cluster.host_side` and reads the connection
information, which has the key, from its standard input: no file and no command line has it. An
``allocation`` runs a command of Slurm, which would wait in its queue when the kernel has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ortlab.cluster import facts

_POLL_S = 0.5
_TO_CLEAN_UP_S = 5.0


def end_with(parent: int, end: Callable[[], object]) -> None:
    """Start a thread that calls `end` when the parent process has ended.

    Args:
        parent: Process id of the process that started this one.
        end: Function that ends this process; if it still runs 5 s later, it exits with code 1.
    """

    def watch() -> None:
        # A zombie or another process may have the id of a dead parent, but then this process has
        # another parent id.
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        end()
        time.sleep(_TO_CLEAN_UP_S)
        os._exit(1)

    threading.Thread(target=watch, name="ortlab-parent", daemon=True).start()


def _end_children_too() -> None:
    """Make processes that this one forks from now on (its heart monitor) end with it."""
    exit_now = functools.partial(os._exit, 1)
    os.register_at_fork(after_in_child=lambda: end_with(os.getppid(), exit_now))


def _run_controller(parent: int, arguments: list[str]) -> None:
    from ipyparallel.controller.app import IPController  # optional: ipyparallel

    # On SIGTERM the controller ends its children and removes its connection files.
    end_with(parent, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _end_children_too()
    IPController.launch_instance(argv=arguments)
    if os.getppid() != parent:  # the kernel can no longer remove the folder
        shutil.rmtree(os.environ["IPP_PROFILE_DIR"], ignore_errors=True)


def _run_engine(parent: int, arguments: list[str]) -> None:
    from ipyparallel.engine.app import IPEngine  # optional: ipyparallel

    end_with(parent, functools.partial(os._exit, 1))
    IPEngine.launch_instance(argv=arguments)


def _run_remote_engine(parent: int, arguments: list[str]) -> None:
    from ipyparallel.engine.app import IPEngine  # optional: ipyparallel

    def end() -> None:  # the parent can no longer remove the folder of all workers
        shutil.rmtree(os.environ[facts.FOLDER], ignore_errors=True)
        os._exit(1)

    connection = sys.stdin.read()
    end_with(parent, end)
    IPEngine.launch_instance(argv=arguments, connection_info_env=connection)


def _run_allocation(parent: int, command: list[str]) -> None:
    salloc = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: salloc.terminate())
    end_with(parent, salloc.terminate)
    sys.exit(salloc.wait())


if __name__ == "__main__":
    role, kernel, *rest = sys.argv[1:]
    # Their logs lie in the folder for temporary files. If that disk is full, each call would print
    # an error into the user's cell.
    logging.raiseExceptions = False
    roles = {
        "controller": _run_controller,
        "engine": _run_engine,
        "allocation": _run_allocation,
        "remote-engine": _run_remote_engine,
    }
    roles[role](int(kernel), rest)
