"""Jupyter kernel specs for this environment: install, list and remove.

A kernel of ortlab is an IPython kernel with this Python, its own environment variables, and the
magics loaded. JupyterLab, Notebook and VS Code find kernels in the folders that
`jupyter kernelspec list` searches.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpecManager

from ortlab._version import __version__
from ortlab.engines import doctor
from ortlab.settings import unknown_name
from ortlab.utils import contention
from ortlab.utils.hardware import best_threads
from ortlab.utils.plain_onnxruntime import NO_TELEMETRY
from ortlab.utils.tables import Column, Table

OURS = "ortlab"
"""Key in a kernel's metadata whose value is the version of ortlab that installed it."""
_LOGO = Path(__file__).with_name("logo")
_KEPT = ("LD_LIBRARY_PATH", "CUDA_HOME")
"""Variables for CUDA's libraries that are set in a shell but not by a desktop launcher."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class InstalledKernel:
    """A kernel that ortlab installed.

    Attributes:
        name: Name that notebooks store.
        display_name: Name in JupyterLab's launcher.
        python: Path of the Python interpreter.
        environment: Environment variables of the kernel.
        folder: Folder of the kernel spec.
    """

    name: str
    display_name: str
    python: str
    environment: Mapping[str, str]
    folder: Path


def install(
    name: str | None = None,
    *,
    gpu: bool = False,
    display_name: str | None = None,
    threads: int | None = None,
    prefix: str | None = None,
) -> InstalledKernel:
    """Install a kernel with this Python; an earlier kernel of ortlab with that name is replaced.

    Args:
        name: Name that notebooks store; by default ortlab, or ortlab-gpu with `gpu`.
        gpu: Whether the kernel uses the GPU.
        display_name: Name in JupyterLab's launcher; by default "ortlab (CPU)" or "ortlab (GPU)".
        threads: Threads of torch; by default `hardware.best_threads`.
        prefix: Installation prefix; by default the kernel is installed for the user.

    Raises:
        ValueError: If torch finds no GPU, or the name is not valid or belongs to another kernel.
        OSError: If the kernel cannot be written.
    """
    if gpu and (missing := doctor.no_gpu()):
        raise ValueError(
            f"--gpu: {missing}\n"
            "leave --gpu out for a kernel on the CPU; `ortlab doctor` has more details"
        )
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads}: torch needs at least one thread; give 1 or more")
    manager = KernelSpecManager()
    name = (name or ("ortlab-gpu" if gpu else "ortlab")).lower()
    places = [manager]
    if prefix is not None:
        below = os.path.join(os.path.abspath(prefix), "share", "jupyter", "kernels")
        places.append(KernelSpecManager(kernel_dirs=[below], ensure_native_kernel=False))
    for place in places:
        other = place.get_all_specs().get(name)
        if other is not None and not _is_ours(other):
            raise ValueError(
                f"--name {name}: the kernel of that name in {other['resource_dir']} was not "
                "installed by ortlab; choose another name"
            )
    # The extension is loaded at the start; a later `%load_ext ortlab` has no effect.
    spec = get_kernel_dict(extra_arguments=["--ext=ortlab"])
    spec["display_name"] = display_name or f"ortlab ({'GPU' if gpu else 'CPU'})"
    spec["env"] = _environment(gpu=gpu, threads=threads or best_threads())
    spec["metadata"][OURS] = __version__
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(_LOGO, Path(folder, "kernel"))
        text = json.dumps(spec, indent=1) + "\n"
        source.joinpath("kernel.json").write_text(text, encoding="utf-8")
        to = manager.install_kernel_spec(str(source), name, user=prefix is None, prefix=prefix)
    return _kernel(name, {"resource_dir": to, "spec": spec})


def _environment(*, gpu: bool, threads: int) -> dict[str, str]:
    """Return the environment variables of a kernel; the shell's CUDA variables are kept."""
    chosen = {"OMP_NUM_THREADS": str(threads), **contention.SLEEPING}
    chosen |= {name: os.environ.get(name, value) for name, value in NO_TELEMETRY.items()}
    if not gpu:
        # Otherwise, device='auto' would select the GPU in a kernel named CPU.
        return chosen | {"CUDA_VISIBLE_DEVICES": "-1"}
    # Expandable segments avoid fragmentation if batch sizes vary (torch's CUDA semantics notes).
    chosen[_ALLOCATOR] = os.environ.get(_ALLOCATOR, "expandable_segments:True")
    return chosen | {name: os.environ[name] for name in _KEPT if os.environ.get(name)}


def installed() -> Table[InstalledKernel]:
    """Return a table of the kernels that ortlab installed."""
    specs = KernelSpecManager().get_all_specs()
    kernels = [_kernel(name, specs[name]) for name in sorted(specs) if _is_ours(specs[name])]
    columns = (
        Column[InstalledKernel]("name", lambda kernel: kernel.name),
        Column[InstalledKernel]("in JupyterLab", lambda kernel: kernel.display_name),
        Column[InstalledKernel]("Python", lambda kernel: kernel.python),
        Column[InstalledKernel]("folder", lambda kernel: str(kernel.folder)),
    )
    return Table(
        kernels, columns, empty="no kernel of ortlab; `ortlab kernelspec install` installs one"
    )


def remove(name: str) -> Path:
    """Remove a kernel that ortlab installed.

    Args:
        name: Name of the kernel.

    Returns:
        The folder that was removed.

    Raises:
        ValueError: If there is no such kernel, or ortlab did not install it.
    """
    manager = KernelSpecManager()
    name = name.lower()
    specs = manager.get_all_specs()
    ours = sorted(each for each in specs if _is_ours(specs[each]))
    if name in ours:
        return Path(manager.remove_kernel_spec(name))
    if name in specs:
        raise ValueError(
            f"the kernel {name} was not installed by ortlab; `jupyter kernelspec remove {name}` "
            "removes it"
        )
    raise ValueError(f"no kernel is called {name}: {unknown_name(name, ours)}")


def _is_ours(found: Mapping[str, Any]) -> bool:
    return OURS in found["spec"]["metadata"]


def _kernel(name: str, found: Mapping[str, Any]) -> InstalledKernel:
    spec = found["spec"]
    return InstalledKernel(
        name, spec["display_name"], spec["argv"][0], spec["env"], Path(found["resource_dir"])
    )
