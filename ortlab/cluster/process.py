"""The controller and the engines of a local cluster, as processes that end when the kernel does.

``python -m ortlab.cluster.process controller|engine PID ARGUMENT ...`` is ipyparallel's controller
or engine with these arguments, for the kernel of this process id. ipyparallel's own would outlive a
kernel that was killed: they watch each other by their heartbeats, and nothing watches the kernel.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable

_POLL_S = 0.5
_TO_CLEAN_UP_S = 5.0


def end_with(parent: int, end: Callable[[], object]) -> None:
    """Calls `end` in a thread once the process `parent`, which started this one, is gone."""

    def watch() -> None:
        # A dead parent's id may live on, in a zombie or a stranger; its children's ppid does not.
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        end()
        time.sleep(_TO_CLEAN_UP_S)
        os._exit(1)

    threading.Thread(target=watch, name="ortlab-parent", daemon=True).start()


def _end_children_too() -> None:
    """Has the processes that this one forks from now on (its heart monitor) end with it."""
    exit_now = functools.partial(os._exit, 1)
    os.register_at_fork(after_in_child=lambda: end_with(os.getppid(), exit_now))


def _run_controller(parent: int, arguments: list[str]) -> None:
    from ipyparallel.controller.app import IPController

    # As if it were told to: it ends its children and removes its connection files.
    end_with(parent, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _end_children_too()
    IPController.launch_instance(argv=arguments)
    if os.getppid() != parent:  # nobody else is left to do it
        shutil.rmtree(os.environ["IPP_PROFILE_DIR"], ignore_errors=True)


def _run_engine(parent: int, arguments: list[str]) -> None:
    from ipyparallel.engine.app import IPEngine

    end_with(parent, functools.partial(os._exit, 1))
    IPEngine.launch_instance(argv=arguments)


if __name__ == "__main__":
    role, kernel, *rest = sys.argv[1:]
    {"controller": _run_controller, "engine": _run_engine}[role](int(kernel), rest)
