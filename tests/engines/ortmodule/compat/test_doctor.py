"""The doctor: every finding names a fix, and no check raises because of a missing part."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import ortlab
from ortlab.engines import doctor
from ortlab.engines.base import EngineUnavailable
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import base, extensions, requirements
from ortlab.utils.findings import Finding, findings_table
from tests.support.readme import ROOT


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the versions to simulate by distribution; None for one that is not installed."""
    pretended: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = pretended[name] if name in pretended else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return pretended


def test_this_machine(ort: compat.TrainingRuntime) -> None:
    findings = doctor.checks()
    assert doctor.can_run(findings)
    assert by_name(findings)["extension loads"].ok
    assert len(by_name(findings)) == len(findings)
    assert requirements.obstacle() is None


def test_what_is_wrong_has_a_fix(versions: dict[str, str | None]) -> None:
    names = "torch", "onnxruntime", "onnx", "jupyterlab", "ipywidgets", "anywidget"
    versions.update(dict.fromkeys((*names, "onnxruntime-gpu", "onnxruntime-training")))
    findings = doctor.checks()
    wrong = [finding for finding in findings if finding.ok is False]
    assert {finding.name for finding in wrong} >= set(names)
    assert all(finding.fix for finding in wrong)
    assert not doctor.can_run(findings)


def test_an_ipykernel_whose_buttons_wait_is_no_fault(versions: dict[str, str | None]) -> None:
    versions["ipykernel"] = "6.17.1"
    finding = by_name(doctor.checks())["ipykernel"]
    assert finding.ok is None
    assert "leave out `await`" in finding.found
    versions["ipykernel"] = "7.3.0"
    assert by_name(doctor.checks())["ipykernel"].ok


def test_a_missing_compiler(tmp_path: Path) -> None:
    """With an empty PATH and nothing built, a separate process reports the missing compiler."""
    code = """
import json
from ortlab.engines import doctor
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
    ort: compat.TrainingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    findings = doctor.checks()
    assert by_name(findings)["C++ compiler"].ok is False
    assert doctor.can_run(findings)


def test_what_is_not_built_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ort: compat.TrainingRuntime
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = by_name(doctor.checks())["torch extension"]
    assert finding.ok is None
    assert "ortlab doctor --build" in finding.fix
    assert not list(tmp_path.iterdir())


def test_ort_that_is_loaded_is_not_looked_for(
    ort: compat.TrainingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        requirements, "obstacle", lambda: pytest.fail("charts ask with every update")
    )
    assert compat.unavailable() is None


@pytest.mark.parametrize(
    ("distribution", "version", "said"),
    [
        ("torch", None, "torch is not installed"),
        ("torch", "2.8.0", "not in 2.9 to 2.15"),
        ("torch", "2.16.1", "not in 2.9 to 2.15"),
        ("onnxruntime-training", None, "onnxruntime-training is not installed"),
        ("onnxruntime-training", "1.17.0", "patches are for 1.19.2"),
        ("onnxruntime", "1.23.0", "break each other"),
        ("onnx", None, "onnx is not installed"),
    ],
)
def test_obstacles(
    ort: compat.TrainingRuntime,
    ort_not_loaded: None,
    versions: dict[str, str | None],
    distribution: str,
    version: str,
    said: str,
) -> None:
    versions[distribution] = version
    assert said in (compat.unavailable() or "")
    obstacle = requirements.obstacle()
    assert obstacle is not None
    assert [each for each in doctor.checks() if obstacle.found in each.found]


@pytest.mark.parametrize(
    ("here", "ok", "fix"),
    [
        ({}, False, "pip install onnxruntime"),
        ({"onnxruntime": "1.32.0"}, True, ""),
        ({"onnxruntime-gpu": "1.32.0"}, True, ""),
        (
            {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.0"},
            False,
            "pip uninstall -y onnxruntime && "
            "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.0",
        ),
        (
            {
                "onnxruntime": "1.32.0",
                "onnxruntime-training": "1.19.2",
                "onnxruntime-gpu": "1.32.0",
            },
            False,
            "pip uninstall -y onnxruntime-gpu onnxruntime && "
            "pip install --force-reinstall --no-deps onnxruntime-training==1.19.2",
        ),
    ],
)
def test_exactly_one_onnxruntime(
    versions: dict[str, str | None], here: dict[str, str], ok: bool, fix: str
) -> None:
    names = "onnxruntime", "onnxruntime-gpu", "onnxruntime-training"
    versions.update({name: here.get(name) for name in names})
    findings = doctor.checks()
    found = by_name(findings)["onnxruntime"]
    assert (found.ok, found.fix) == (ok, fix)
    assert doctor.can_run(findings) == ok
    if "onnxruntime-training" not in here:
        assert by_name(findings)["engine ortmodule"].ok is None


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
    ort_not_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    python: tuple[int, int],
    system: str,
    machine: str,
    said: str,
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    reason = compat.unavailable() or ""
    assert said in reason
    assert "engine='ort' trains in onnxruntime on any Python" in reason
    finding = requirements.obstacle()
    assert finding is not None
    with pytest.raises(base.OrtUnavailable) as caught:
        compat._load(None)
    assert (caught.value.reason, caught.value.fix) == (finding.found, finding.fix)


# ---- ROCm ----------------------------------------------------------------------------------------

# torch/version.py of the ROCm wheel, which cannot run here.
ROCM = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+rocm7.2'
debug = False
cuda: Optional[str] = None
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = '7.2.53211'
rocm: Optional[str] = '7.2.0'
xpu: Optional[str] = None
"""


def test_a_torch_for_rocm_is_named(tmp_path: Path) -> None:
    """A folder like the wheel's, ahead of the real torch, is recognized without importing it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(ROCM)
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libamdhip64.so.7')")
    about = tmp_path / "torch-2.13.0+rocm7.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+rocm7.2\n")
    code = """
import json
from ortlab.engines import doctor
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import base
from ortlab.utils.findings import findings_table
try:
    compat.ortmodule()
except base.OrtUnavailable as error:
    table = findings_table(doctor.checks())
    print(json.dumps([compat.unavailable(), error.reason, error.fix, table]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    unavailable, reason, fix, table = json.loads(done.stdout)
    assert reason == (
        "torch is built for ROCm 7.2.53211, but PyPI has no wheel of onnxruntime-training for ROCm"
    )
    assert fix.startswith("Install torch for the CPU or for CUDA; engine='ort' trains")
    assert unavailable == f"{reason}. {fix}"
    assert reason in table


def test_wrapping_refuses_on_rocm(
    ort: compat.TrainingRuntime, ort_not_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_torch_version_file", lambda: ROCM)
    with pytest.raises(EngineUnavailable, match=r"no wheel .* for ROCm\. Install torch for"):
        ortlab.wrap(torch.nn.Linear(2, 2), engine="ortmodule")
    assert ortlab.wrap(torch.nn.Linear(2, 2), engine="eager")


def test_cpu_and_cuda_builds_are_not_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda in ("None", "'13.2'"):
        text = ROCM.replace("'7.2.53211'", "None").replace("'7.2.0'", "None")
        text = text.replace("cuda: Optional[str] = None", f"cuda: Optional[str] = {cuda}")
        monkeypatch.setattr(extensions, "_torch_version_file", lambda text=text: text)
        assert extensions.rocm_version() == ""
        assert by_name(doctor.checks())["torch's build"].ok


# ---- CUDA's libraries: the mechanism, tested with libraries of our own, as there is no GPU -------


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """Create site-packages with libraries named and arranged as in NVIDIA's wheels."""
    site = tmp_path / "site-packages"
    folders = {
        "nvidia-cuda-runtime-cu11": "cuda_runtime", "nvidia-cublas-cu11": "cublas",
        "nvidia-cudnn-cu11": "cudnn", "nvidia-curand-cu11": "curand", "nvidia-cufft-cu11": "cufft",
    }  # fmt: skip
    for library, package in extensions.CUDA_LIBRARIES.items():
        path = site / "nvidia" / folders[package] / "lib" / library
        path.parent.mkdir(parents=True, exist_ok=True)
        compiled(path, "int nothing() { return 1; }", f"-Wl,-soname,{library}")
    return site


def beside(site: Path, code: str) -> str:
    """Return the output of `code` in a separate process, where torch is located in `site`."""
    code = f"""
import ctypes
from pathlib import Path
from ortlab.engines import doctor
from ortlab.engines.ortmodule.compat import extensions
extensions._torch_folder = lambda: Path({str(site)!r}, "torch")
{code}
"""
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(path: Path, code: str, *options: str) -> None:
    command = extensions.compiler()
    assert command is not None
    subprocess.run(
        [*command, "-xc++", "-shared", "-fPIC", "-", "-o", str(path), "-xnone", *options],
        input=f'extern "C" {code}', text=True, check=True,
    )  # fmt: skip


def test_cuda_libraries_are_loaded_from_nvidias_packages(nvidia: Path, tmp_path: Path) -> None:
    """A provider that links to them by name, as ORT's does, loads without LD_LIBRARY_PATH."""
    libraries = [str(path) for path in sorted(nvidia.glob("nvidia/*/lib/*"))]
    provider = tmp_path / "libprovider.so"
    compiled(provider, "int provider() { return 2; }", "-Wl,--no-as-needed", *libraries)
    code = f"""
try:
    ctypes.CDLL({str(provider)!r})
except OSError as error:
    assert "cannot open shared object file" in str(error), error
    assert extensions.preload_cuda() == []
    print(ctypes.CDLL({str(provider)!r}).provider())
"""
    assert beside(nvidia, code) == "2\n"


DOCTOR = """
import torch
torch.cuda.is_available = lambda: True
finding = doctor.cuda_provider()
print(finding.ok, finding.found, finding.fix)
"""


def test_each_missing_cuda_library_is_named(nvidia: Path) -> None:
    assert beside(nvidia, DOCTOR).startswith("True all its libraries are installed")
    for name in ("libcudnn.so.8", "libcufft.so.10"):
        (path,) = nvidia.glob(f"nvidia/*/lib/{name}")
        path.unlink()
    said = beside(nvidia, DOCTOR)
    assert said.startswith("False missing libcudnn.so.8 (nvidia-cudnn-cu11), libcufft.so.10 (")
    assert "libcublas.so.11" not in said
    assert 'pip install "ortlab[cuda]"' in said


def test_the_extra_cuda_has_every_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = [Requirement(text) for text in project["optional-dependencies"]["cuda"]]
    assert {each.name for each in pinned} == set(extensions.CUDA_LIBRARIES.values())
    assert all(str(each.specifier).startswith("==") for each in pinned)


def test_workers_are_optional(versions: dict[str, str | None]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, _ = map(Requirement, project["optional-dependencies"]["workers"])
    for version, ok in ((None, None), ("9.1.0", False), ("9.2.3", True)):
        versions["ipyparallel"] = version
        found = by_name(doctor.checks())["ipyparallel"]
        assert found.ok is ok
        assert bool(found.fix) is not bool(ok)
        assert version is None or wanted.specifier.contains(version) is ok


def test_no_part_is_needed_to_look(tmp_path: Path) -> None:
    """The checks run in a Python without torch, ORT or any other dependency."""
    code = (
        "from ortlab.engines import doctor; from ortlab.utils.findings import findings_table; "
        "print(findings_table(doctor.checks()))"
    )
    root = str(Path(extensions.__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({root!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch is not installed" in done.stdout
    assert done.stderr == ""


def test_the_table() -> None:
    text = findings_table(
        [Finding("a", True, "found"), Finding("long name", False, "bad", "fix it")]
    )
    assert text.splitlines() == [
        "ok      a          found",
        "MISSING long name  bad",
        "                   -> fix it",
    ]
