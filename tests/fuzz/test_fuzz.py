"""Readers of untrusted bytes must end in their documented error, whatever the bytes are.

Hypothesis makes small changes anywhere in valid input. atheris searches for input that reaches new
branches, for a limited time (nightly).
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, WORDS

QUICK, LONG = 60, 3000
_SECONDS = 60

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def damaged(seed: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """Return `seed` after each of `changes`, which give positions as a share of the length."""
    data = bytearray(seed)
    for kind, share, more in changes:
        at = int(share * len(data))
        if kind == "flip" and data:
            data[at] ^= more[0] or 1
        elif kind == "cut":
            del data[at : at + 1 + more[0]]
        elif kind == "insert":
            data[at:at] = more
        elif kind == "repeat":
            data[at:at] = data[at : at + 1 + more[0]]
        elif data:
            data[at : at + len(more)] = more
    return bytes(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def attacked(name: str, folder: Path, examples: int) -> None:
    target = TARGETS[name]
    seed = target.seed(folder)
    target.run(seed, folder)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(edits | st.binary(max_size=200))
    def attack(changes: list[tuple[str, float, bytes]] | bytes) -> None:
        data = changes if isinstance(changes, bytes) else damaged(seed, changes)
        if name == "line" and isinstance(changes, bytes) and changes:
            data = WORDS[changes[0] % len(WORDS)] + b" " + changes[1:]
        target.run(data, folder)

    attack()


@pytest.mark.parametrize("name", TARGETS)
def test_damage_ends_in_the_documented_error(name: str, folder: Path) -> None:
    attacked(name, folder, QUICK)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_much_damage_ends_so_too(name: str, folder: Path) -> None:
    attacked(name, folder, LONG)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_new_branches_end_so_too(name: str, folder: Path) -> None:
    """Coverage-guided input ends the same way; atheris exits, so it runs in its own process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    seed = TARGETS[name].seed(folder)
    (corpus / "seed").write_bytes(seed)
    made = random.Random(0)
    for number in range(20):
        data = bytearray(seed)
        data[made.randrange(len(data))] ^= 1 << made.randrange(8)
        (corpus / f"near-{number}").write_bytes(data)
    command = [sys.executable, "-m", "tests.fuzz.coverage", name, str(corpus)]
    options = [f"-max_total_time={_SECONDS}", "-max_len=8192", "-rss_limit_mb=4096", "-timeout=20"]
    options.append(f"-artifact_prefix={folder}/")
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr, done.stderr[-3000:]
