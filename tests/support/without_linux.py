"""Train without what a system lacks: `python -m tests.support.without_linux windows` (or macos).

Its missing modules and functions are missing here, nothing below /proc can be read, and the C
library is not glibc. `sys.platform` remains Linux's, because torch and onnxruntime are builds for
Linux; packages that choose by it what they import keep what they choose (`BY_PLATFORM`).
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import importlib
import io
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

MODULES = {"macos": "", "windows": "fcntl grp pwd resource termios"}
FUNCTIONS = {
    "macos": "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity",
    "windows": (
        "confstr fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp "
        "getpriority getresuid getsid getuid killpg lchown mkfifo mknod nice pathconf "
        "posix_fadvise posix_fallocate pread preadv pwrite pwritev sched_getaffinity "
        "sched_setaffinity sched_yield sendfile setsid sync sysconf "
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
    ),
}
SYSTEM = sys.argv[-1]
NO_MODULES, NO_FUNCTIONS = MODULES[SYSTEM].split(), FUNCTIONS[SYSTEM].split()
BY_PLATFORM = (
    "IPython", "click", "filelock", "huggingface_hub", "pexpect", "platformdirs", "psutil",
    "ptyprocess", "tty", "typer",
)  # fmt: skip
"""Packages that use other modules and files where `sys.platform` is Windows or macOS."""


class _Os(types.ModuleType):
    """The module `os` of the other system."""

    def __getattribute__(self, name: str) -> Any:
        if name in NO_FUNCTIONS and not _by_platform():
            raise AttributeError(f"module 'os' has no attribute {name!r}", name=name, obj=self)
        return super().__getattribute__(name)


def block() -> None:
    """Take away from this process what the other system does not have."""
    real = builtins.__import__

    def find(name: str, *rest: Any, **named: Any) -> Any:
        if name in NO_MODULES and not _by_platform():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    builtins.__import__ = find
    os.__class__ = _Os
    for name in ("access", "listdir", "lstat", "open", "scandir", "stat"):
        setattr(os, name, _without_proc(getattr(os, name)))
    builtins.open = io.open = _without_proc(open)  # pathlib uses io's
    load, find_function = ctypes.CDLL.__init__, ctypes.CDLL.__getitem__

    def from_file(self: ctypes.CDLL, name: str | None, *rest: Any, **named: Any) -> None:
        if name is None and SYSTEM == "windows":
            raise TypeError("argument of type 'NoneType' is not iterable")
        load(self, name, *rest, **named)

    def function(self: ctypes.CDLL, name: Any) -> Any:
        if name in ("mallopt", "malloc_trim"):
            raise AttributeError(f"symbol {name} not found")
        return find_function(self, name)

    ctypes.CDLL.__init__ = from_file  # type: ignore[method-assign]
    ctypes.CDLL.__getitem__ = function  # type: ignore[method-assign]
    assert not os.path.exists("/proc")
    assert not any(hasattr(os, name) for name in NO_FUNCTIONS)
    for name in NO_MODULES:
        with pytest.raises(ModuleNotFoundError):
            __import__(name)


def _by_platform() -> bool:
    """Return True if a package of `BY_PLATFORM` called the caller."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in BY_PLATFORM


def _without_proc(real: Callable[..., Any]) -> Callable[..., Any]:
    def use(path: Any = ".", *rest: Any, **named: Any) -> Any:
        inside = not isinstance(path, int) and os.fsdecode(path).startswith("/proc")
        if inside and not _by_platform():
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return real(path, *rest, **named)

    return use


def import_all() -> None:
    """Import every module of ortlab, except those of optional packages that are not installed."""
    import ortlab

    for each in pkgutil.walk_packages(ortlab.__path__, "ortlab."):
        if each.name in ("ortlab.__main__", "ortlab.notebook.build"):
            continue
        try:
            importlib.import_module(each.name)
        except ImportError as error:
            if error.name in (*NO_MODULES, "os"):
                raise


def train() -> None:
    """Compare three steps of a model on engine `ort` with eager torch."""
    import torch

    import ortlab

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    reference, batches = copy.deepcopy(net), [torch.randn(5, 4) for _ in range(3)]
    model = ortlab.wrap(net, engine="ort", fallback=False)
    for trained in (model, reference):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
    for one, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def finetune() -> None:
    """Compare the losses of a run on engine `ort` with one in eager torch."""
    import torch

    from ortlab.utils import scratch
    from tests.support.worker_runs import Network, begin, losses

    found = []
    for engine in ("eager", "ort"):
        run = begin(Network(), engine=engine, fallback=False, max_steps=5)
        run.result(120)
        assert run.engine_used == engine, run.fallback_reason
        assert run.checkpoint().exists()
        found.append(torch.tensor(losses(run)))
    torch.testing.assert_close(*found)
    scratch.remove(scratch.folder("test"))


def notebook() -> None:
    """Type cells into IPython with the extension loaded."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    for cell in (
        "%load_ext ortlab",
        "%%ort --engine ort\nimport torch\nnet = torch.nn.Linear(4, 2)",
        "data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]",
        "run = %ort finetune net data --loss cross_entropy --engine ort\nrun.result(120)",
        "%ort",
        "%ort device",
        "%ort doctor",
    ):
        shell.run_cell(cell).raise_error()


def main() -> None:
    """Do all of it; raise at the first thing that fails."""
    block()
    import_all()
    train()
    finetune()
    notebook()


if __name__ == "__main__":
    main()
