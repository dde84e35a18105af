"""Tests of the command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ortlab
from ortlab import bench
from ortlab.cli import main
from ortlab.engines.ortmodule import compat, graph_cache
from ortlab.utils.findings import package_version

COMMAND = Path(sys.executable).with_name("ortlab")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ortlab.cli", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_version() -> None:
    assert run("--version").stdout == f"ortlab {ortlab.__version__}\n"


@pytest.mark.skipif(not COMMAND.exists(), reason=f"ortlab is not installed: no {COMMAND}")
def test_the_installed_command() -> None:
    listed = subprocess.run([COMMAND, "--help"], check=True, capture_output=True, text=True)
    assert "doctor" in listed.stdout


@pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
def test_doctor_where_ortmodule_can_run() -> None:
    answer = run("doctor", "--build")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for check in ("Python", "torch", "onnxruntime-training", "C++ compiler", "jupyterlab"):
        assert check in answer.stdout
    assert "MISSING" not in "".join(answer.stdout.splitlines()[:6])


def test_doctor_where_it_cannot(tmp_path: Path) -> None:
    """Without a compiler and without built extensions, doctor reports what is missing."""
    answer = run("doctor", PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path))
    # Engine ort needs no compiler.
    trained = package_version("onnxruntime-training") is not None
    assert answer.returncode == int(trained)
    assert "MISSING C++ compiler" in answer.stdout
    assert "apt-get install" in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("given", "address"), [((), "127.0.0.1"), (("--ip=localhost",), "localhost")]
)
def test_lab(given: tuple[str, ...], address: str, tmp_path: Path) -> None:
    """JupyterLab runs with the options of ortlab and of the user, and its kernels with ours."""
    config = tmp_path / "jupyter_lab_config.py"
    config.write_text(
        "import os, sys\n"
        "print(os.environ['OMP_WAIT_POLICY'], file=sys.stderr)\n"
        "print('telemetry off:', os.environ['ORT_DISABLE_TELEMETRY'], file=sys.stderr)\n"
    )
    environment = {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_NO_CONFIG": ""}
    environment["OMP_WAIT_POLICY"] = environment["ORT_DISABLE_TELEMETRY"] = ""
    answer = run("lab", *given, "--show-config", **environment)
    assert answer.returncode == 0, answer.stderr
    assert {"passive", "telemetry off: 1"} <= {*answer.stderr.splitlines()}
    assert f".ip = '{address}'" in answer.stdout
    assert ".transport_encryption = 'auto'" in answer.stdout
    assert ".shutdown_wait_time = 60.0" in answer.stdout


def test_options_of_others_are_refused() -> None:
    answer = run("cache", "--no-browser")
    assert answer.returncode == 2
    assert "unrecognized arguments: --no-browser" in answer.stderr


def test_cache() -> None:
    graph_cache.store("0" * 64, graph_cache.CachedGraph({"a.onnx": b"graph"}, {}))
    shown = run("cache").stdout
    assert shown == f"{graph_cache.usage()}\n"
    assert shown.startswith("1 exported graph, ")
    assert run("cache", "clear").stdout == f"removed {shown}"
    assert graph_cache.usage().graphs == 0


def test_a_command_that_was_removed_names_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--model", "bert-768"]) == 2
    said = capsys.readouterr()
    assert said.err == "ortlab bench step was removed; use ortlab bench engines --profile\n"
    for name in ("step", "StepSettings"):
        with pytest.raises(AttributeError, match=rf"{name} was removed; .*engines\(profile=True\)"):
            getattr(bench, name)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("doctr",),
        ("doctor", "--bild"),
        ("cache", "claer"),
        ("cache", "--build"),
        ("bench",),
        ("bench", "engine"),
        ("kernelspec",),
        ("kernelspec", "instal"),
        ("kernelspec", "install", "--user", "--prefix", "x"),
    ],
)
def test_what_it_does_not_know(arguments: tuple[str, ...]) -> None:
    answer = run(*arguments)
    assert answer.returncode == 2
    assert "usage: ortlab" in answer.stderr
