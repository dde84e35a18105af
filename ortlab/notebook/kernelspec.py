"""Jupyter kernels that run in this environment: installed, listed and removed.

A kernel of ortlab is ipykernel's with this Python, variables of its own and the magics loaded.
JupyterLab, Notebook and VS Code look for kernels where `jupyter kernelspec list` finds them.
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
from ortlab.utils.hardware import best_threads
from ortlab.utils.tables import Column, Table

OURS = "ortlab"
"""The key in a kernel's metadata that says that ortlab installed it, and which version did."""
_LOGO = Path(__file__).with_name("logo")
_KEPT = ("LD_LIBRARY_PATH", "CUDA_HOME")
"""What a shell may say of CUDA's libraries, and the launcher of a desktop does not."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class InstalledKernel:
    """A kernel that ortlab installed; ``environment`` are the variables that it starts with."""

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
    """Makes a kernel with this Python, for the user or below `prefix`; one of ortlab's is replaced.

    `name` is what notebooks store, else ortlab or ortlab-gpu. `threads` are what torch computes
    with, else `hardware.best_threads`. ValueError where `gpu` is asked for and torch sees none,
    where a name is no kernel's or another kernel has it; OSError where it cannot be written.
    """
    if gpu and (missing := doctor.no_gpu()):
        raise ValueError(
            f"--gpu: {missing}\n"
            "leave --gpu out for a kernel on the CPU; `ortlab doctor` has the rest"
        )
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads}: torch computes with one thread or more")
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
                f"--name {name}: the kernel of that name in {other['resource_dir']} is not of "
                "ortlab's making; choose another name"
            )
    # What the name of the kernel promises is loaded; `%load_ext ortlab` changes nothing then.
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
    """The variables of a kernel. Those of the shell stand where it says how CUDA is to be used."""
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if not gpu:
        # Else the device 'auto' of a kernel called CPU would be the GPU.
        return chosen | {"CUDA_VISIBLE_DEVICES": "-1"}
    # Segments that grow leave no holes where the sizes of batches vary (torch's notes on CUDA).
    chosen[_ALLOCATOR] = os.environ.get(_ALLOCATOR, "expandable_segments:True")
    return chosen | {name: os.environ[name] for name in _KEPT if os.environ.get(name)}


def installed() -> Table[InstalledKernel]:
    """The kernels that ortlab installed, as a table."""
    specs = KernelSpecManager().get_all_specs()
    kernels = [_kernel(name, specs[name]) for name in sorted(specs) if _is_ours(specs[name])]
    columns = (
        Column[InstalledKernel]("name", lambda kernel: kernel.name),
        Column[InstalledKernel]("in JupyterLab", lambda kernel: kernel.display_name),
        Column[InstalledKernel]("Python", lambda kernel: kernel.python),
        Column[InstalledKernel]("folder", lambda kernel: str(kernel.folder)),
    )
    return Table(
        kernels, columns, empty="no kernel of ortlab's; `ortlab kernelspec install` makes one"
    )


def remove(name: str) -> Path:
    """Removes a kernel that ortlab installed; the folder that it was in. ValueError for others."""
    manager = KernelSpecManager()
    name = name.lower()
    specs = manager.get_all_specs()
    ours = sorted(each for each in specs if _is_ours(specs[each]))
    if name in ours:
        return Path(manager.remove_kernel_spec(name))
    if name in specs:
        raise ValueError(
            f"the kernel {name} is not of ortlab's making; `jupyter kernelspec remove {name}` "
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
