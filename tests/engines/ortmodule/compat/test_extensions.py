"""The extensions' cache: built once, by the first process; a partial build is never visible."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import OrtUnavailable
from tests.support.waiting import HANGS_S

pytestmark = pytest.mark.skipif(
    compat.unavailable() is not None, reason=compat.unavailable() or "can run"
)

EXTENSIONS = (extensions.ATEN, *extensions.OPTIONAL)
BUILD = (
    "from ortlab.engines.ortmodule.compat import extensions; "
    "extensions.build(lambda l: print(l, flush=True))"
)

# Stands in for a compiler: counts its runs, waits, and copies a finished library.
COMPILER = """#!{python}
import shutil, sys, time
with open({counter!r}, "a") as file:
    file.write("run\\n")
time.sleep(0.2)
shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ortlab" / "extensions"


@pytest.fixture
def library() -> Path:
    """Return the real extension from the user's cache, built there if missing."""
    extensions.build()
    return extensions.ATEN.path()


@pytest.fixture
def compiler(library: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a slow compiler as CXX; return the file that counts its runs."""
    counter, program = tmp_path / "runs", tmp_path / "slow-c++"
    text = COMPILER.format(python=sys.executable, counter=str(counter), library=str(library))
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return counter


def test_two_processes_build_it_once(compiler: Path, cache: Path) -> None:
    command = [sys.executable, "-c", BUILD]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=HANGS_S)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    # One run compiles, the other links.
    assert compiler.read_text() == "run\nrun\n" * len(EXTENSIONS)
    for each in EXTENSIONS:
        assert said.count(f"building {each.title} ({each.purpose})") == 1
    assert "another process is building ORT's aten_op_executor" in said
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock"] * 4 + [".so"] * 4


def test_the_cache_is_the_users_own(compiler: Path, cache: Path) -> None:
    old = os.umask(0)
    try:
        extensions.build()
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    for each in EXTENSIONS:
        assert each.path().parent == cache
        assert stat.S_IMODE(each.path().stat().st_mode) == 0o600
    cache.chmod(0o777)
    with pytest.raises(OrtUnavailable, match="other users can write"):
        extensions.load()


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OrtUnavailable, match="XDG_CACHE_HOME"):
        extensions.build()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert extensions.cache_folder() == Path.home() / ".cache" / "ortlab" / "extensions"


def test_site_packages_are_left_alone(ort: compat.TrainingRuntime) -> None:
    for each in EXTENSIONS:
        assert Path(sysconfig.get_path("purelib")) not in each.path().parents
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "training/ortmodule/torch_cpp_extensions"
    assert list(folder.rglob("*.so")) == []


def test_another_torch_gets_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = extensions.ATEN.path()
    version = extensions._torch_version_file()
    monkeypatch.setattr(extensions, "_torch_version_file", lambda: version.replace("2.", "3."))
    assert extensions.ATEN.path() != here


def test_without_a_compiler(
    cache: Path, ort_not_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        OrtUnavailable, match=r"no C\+\+ compiler was found\. .*apt-get install g\+\+"
    ):
        extensions.build()
    assert "apt-get install g++" in (compat.unavailable() or "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert extensions.compiler() is None


def test_a_compiler_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(OrtUnavailable, match="building ORT's aten_op_executor failed") as caught:
        extensions.build()
    assert Path(caught.value.fix.rpartition(": ")[2]).is_file()  # the compiler's full output
    assert not list(cache.glob("*.so"))
    assert not extensions.built()


def test_an_optional_build_that_fails_is_told_and_not_tried_again(
    compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "slow-c++"
    refuses = "import sys\nif any('ortlab_kernels' in a for a in sys.argv): sys.exit('error: no')\n"
    head, _, rest = program.read_text().partition("\n")
    program.write_text(f"{head}\n{refuses}{rest}")
    assert extensions.build() == {
        "ortlab's kernels": "building ortlab's kernels failed: error: no. "
        f"Full output of the compiler: {extensions._log(extensions.KERNELS)}"
    }
    assert extensions.missing() == [extensions.KERNELS]
    with pytest.raises(OrtUnavailable, match="kernels is not built"):
        extensions.load_kernels()
    ran = compiler.read_text()
    assert "has failed before" in extensions.build()["ortlab's kernels"]
    assert compiler.read_text() == ran
    program.write_text(f"{head}\n{rest}")
    assert extensions.build(again=True) == {}


def test_a_library_that_does_not_load(compiler: Path, cache: Path) -> None:
    extensions.build()
    path = extensions.ATEN.path()
    path.write_bytes(b"not a library")
    with pytest.raises(OrtUnavailable, match="cannot be loaded") as caught:
        extensions.load()
    assert str(path) in caught.value.fix


@pytest.mark.nightly
def test_a_real_build(cache: Path) -> None:
    """The real build works; it takes 10 to 40 seconds, so every other test avoids it."""
    said: list[str] = []
    assert extensions.build(said.append) == {}
    assert extensions.missing() == []
    assert extensions.load()["aten_op_executor"].keys() == set(extensions.ATEN.functions)
    assert [line.partition(" ")[0] for line in said] == ["building", "built"] * 4
