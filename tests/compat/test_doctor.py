"""The doctor: every finding names a fix, and a missing part never makes a check raise."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortlab import compat
from ortlab.compat import doctor, extensions
from ortlab.compat.doctor import Finding


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions to pretend, by distribution; None for one that is not installed."""
    pretended: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = pretended[name] if name in pretended else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return pretended


def test_this_machine(ort: compat.Ort) -> None:
    findings = doctor.checks()
    assert doctor.can_run(findings)
    assert by_name(findings)["extension loads"].ok
    assert len(by_name(findings)) == len(findings)
    assert doctor.obstacle() is None


def test_what_is_wrong_has_a_fix(versions: dict[str, str | None]) -> None:
    names = "torch", "onnxruntime-training", "onnx", "jupyterlab", "ipywidgets", "anywidget"
    versions.update(dict.fromkeys(names))
    findings = doctor.checks()
    wrong = [finding for finding in findings if finding.ok is False]
    assert {finding.name for finding in wrong} >= set(names)
    assert all(finding.fix for finding in wrong)
    assert not doctor.can_run(findings)


def test_a_missing_compiler(tmp_path: Path) -> None:
    """PATH emptied, nothing built yet: in a process of its own, as a user would meet it."""
    code = """
import json
from ortlab.compat import doctor
findings = {f.name: f for f in doctor.checks()}
print(json.dumps([findings["torch extension"].ok, findings["C++ compiler"].fix,
                  doctor.can_run(list(findings.values()))]))
"""
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    built, fix, can_run = json.loads(done.stdout)
    assert (built, can_run) == (False, False)
    assert "apt-get install g++" in fix


def test_a_library_that_is_built_needs_no_compiler(
    ort: compat.Ort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    findings = doctor.checks()
    assert by_name(findings)["C++ compiler"].ok is False
    assert doctor.can_run(findings)


def test_what_is_not_built_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ort: compat.Ort
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = by_name(doctor.checks())["torch extension"]
    assert finding.ok is None
    assert "ortlab doctor --build" in finding.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("distribution", "version", "said"),
    [
        ("torch", None, "torch is not installed"),
        ("torch", "2.8.0", "outside of 2.9 to 2.15"),
        ("torch", "2.16.1", "outside of 2.9 to 2.15"),
        ("onnxruntime-training", None, "onnxruntime-training is not installed"),
        ("onnxruntime-training", "1.17.0", "patches are for 1.19.2"),
        ("onnxruntime", "1.23.0", "breaks it"),
        ("onnx", None, "onnx is not installed"),
    ],
)
def test_obstacles(
    ort: compat.Ort, versions: dict[str, str | None], distribution: str, version: str, said: str
) -> None:
    versions[distribution] = version
    assert said in (compat.unavailable() or "")
    assert doctor.obstacle() in doctor.checks()


@pytest.mark.parametrize(
    ("python", "system", "machine", "said"),
    [
        ((3, 12), "Linux", "x86_64", "wheels up to Python 3.11"),
        ((3, 11), "Darwin", "arm64", "Linux x86-64 only"),
        ((3, 11), "Windows", "AMD64", "Linux x86-64 only"),
        ((3, 11), "Linux", "aarch64", "Linux x86-64 only"),
    ],
)
def test_elsewhere_the_other_engines_are_named(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], system: str, machine: str, said: str
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    reason = compat.unavailable() or ""
    assert said in reason
    assert "engine='eager' and engine='compile' run here" in reason
    finding = doctor.obstacle()
    assert finding is not None
    with pytest.raises(compat.OrtUnavailable) as caught:
        compat._load(None)
    assert (caught.value.reason, caught.value.fix) == (finding.found, finding.fix)


def test_no_part_is_needed_to_look(tmp_path: Path) -> None:
    """A Python with nothing installed: neither torch nor ORT, nor anything else of ours."""
    code = "from ortlab.compat import doctor; print(doctor.table(doctor.checks()))"
    root = str(Path(extensions.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({root!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch is not installed" in done.stdout
    assert done.stderr == ""


def test_the_table() -> None:
    text = doctor.table([Finding("a", True, "found"), Finding("long name", False, "bad", "fix it")])
    assert text.splitlines() == [
        "ok      a          found",
        "MISSING long name  bad",
        "                   -> fix it",
    ]
