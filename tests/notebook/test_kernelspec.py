"""Tests of `ortlab kernelspec`: kernels as Jupyter finds and starts them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import start_new_kernel

import ortlab
from ortlab.cli import main
from ortlab.engines import doctor
from ortlab.utils import hardware
from tests.support.jupyter_kernel import Kernel


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder in which Jupyter keeps this user's kernels."""
    folder = tmp_path / "data"
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder))
    return folder


def kernel_json(folder: Path) -> dict[str, object]:
    stored: dict[str, object] = json.loads((folder / "kernel.json").read_text())
    return stored


@contextlib.contextmanager
def started(name: str) -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name=name)
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_install_start_list_remove(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernelspec", "install", "--name", "mine", "--threads", "1"]) == 0
    folder = data / "kernels" / "mine"
    assert str(folder) in capsys.readouterr().out
    spec = KernelSpecManager().get_kernel_spec("mine")
    assert spec.display_name == "ortlab (CPU)"
    assert spec.argv[0] == sys.executable
    # JupyterLab's launcher and Notebook read these files from the folder.
    for logo in ("logo-svg.svg", "logo-32x32.png", "logo-64x64.png"):
        assert (folder / logo).stat().st_size > 300
    with started("mine") as kernel:
        # %ort is available without %load_ext, and loading it again changes nothing.
        assert "what this kernel runs on" in kernel("%ort --help").text
        assert "already loaded" in kernel("%load_ext ortlab").text
        asked = "import os, sys, ortlab, torch; print(sys.executable, ortlab.__file__)"
        assert kernel(asked).text.split() == [sys.executable, ortlab.__file__]
        asked = "print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads(), end=' ')\n"
        asked += "print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.is_available())"
        assert kernel(asked).text == "1 1 -1 False\n"
        (table,) = kernel("%ort device").shown
        assert "of torch, as many in a session of ORT" in table["text/plain"]
    capsys.readouterr()
    assert main(["kernelspec", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "mine"
    assert main(["kernelspec", "remove", "mine"]) == 0
    assert not folder.exists()
    assert main(["kernelspec", "list"]) == 0
    assert "no kernel of ortlab;" in capsys.readouterr().out


def test_threads_are_the_machines_and_ours_are_replaced(data: Path) -> None:
    assert main(["kernelspec", "install", "--threads", "7"]) == 0
    assert main(["kernelspec", "install", "--display-name", "Lab"]) == 0
    spec = KernelSpecManager().get_kernel_spec("ortlab")
    assert spec.env["OMP_NUM_THREADS"] == str(hardware.best_threads())
    assert spec.env["OMP_WAIT_POLICY"] == "passive"
    assert spec.display_name == "Lab"
    assert os.listdir(data / "kernels") == ["ortlab"]


def test_below_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "prefix"
    assert main(["kernelspec", "install", "--prefix", str(prefix)]) == 0
    folder = prefix / "share" / "jupyter" / "kernels" / "ortlab"
    assert kernel_json(folder)["display_name"] == "ortlab (CPU)"
    # Jupyter does not search there by default.
    assert f"JUPYTER_PATH contains {prefix}/share/jupyter\n" in capsys.readouterr().out


def test_gpu_without_one(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    if doctor.no_gpu() is None:
        pytest.skip("this machine has a GPU")
    assert main(["kernelspec", "install", "--gpu"]) == 1
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 2
    assert str(doctor.no_gpu()) in told
    assert not data.exists()


def test_gpu(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """A machine with a GPU gets this kernel; nothing is started."""
    monkeypatch.setattr(doctor, "no_gpu", lambda: None)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda-11.8/lib64")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert main(["kernelspec", "install", "--gpu"]) == 0
    stored = kernel_json(data / "kernels" / "ortlab-gpu")
    assert stored["display_name"] == "ortlab (GPU)"
    assert stored["env"] == {
        "OMP_NUM_THREADS": str(hardware.best_threads()),
        "OMP_WAIT_POLICY": "passive",
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "LD_LIBRARY_PATH": "/opt/cuda-11.8/lib64",
    }
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    assert main(["kernelspec", "install", "--gpu", "--name", "other"]) == 0
    environment = kernel_json(data / "kernels" / "other")["env"]
    assert isinstance(environment, dict)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    assert environment["ORT_DISABLE_TELEMETRY"] == "0"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("install", "--name", "a b"), "Invalid kernel name"),
        (("install", "--name", "python3"), "choose another name"),
        (("install", "--threads", "0"), "needs at least one thread"),
        (("remove", "ortlb"), "did you mean 'ortlab'?"),
        (("remove", "python3"), "was not installed by ortlab"),
    ],
)
def test_refused(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    assert main(["kernelspec", "install"]) == 0
    kept = kernel_json(data / "kernels" / "ortlab")
    assert main(["kernelspec", *arguments]) == 1
    assert told in capsys.readouterr().err
    assert kernel_json(data / "kernels" / "ortlab") == kept
    assert os.listdir(data / "kernels") == ["ortlab"]
    assert "python3" in KernelSpecManager().find_kernel_specs()
