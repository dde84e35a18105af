"""`ortlab bench papers --claim`: claims of ORT's papers, measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlab import bench
from ortlab.bench import claims
from ortlab.bench.claims.batch import LargestBatches
from ortlab.bench.claims.children import Request, SetUp, TrialFailed, child
from ortlab.bench.claims.claim import Claim, ClaimSettings, Quote, TimedClaimSettings
from ortlab.bench.claims.recompute import Side, _in_use, shown
from ortlab.bench.claims.search import (
    SET_UPS,
    Largest,
    RecomputeSettings,
    Search,
    SearchSettings,
    bisected,
)
from ortlab.cli import main
from ortlab.engines.base import progress, tell
from ortlab.engines.ortmodule import compat

QUOTE = Quote("ORT adds faster, by 45%, on a V100", "https://example.com/adds")


class Sums:
    """A measurement whose third round is interrupted if it has one."""

    def __init__(self, settings: TimedClaimSettings) -> None:
        self.settings = settings
        self.sums: list[float] = []

    def run(self) -> None:
        for number in range(self.settings.rounds):
            tell(f"round {number + 1} with {torch.get_num_threads()} thread")
            if number == 2:
                raise KeyboardInterrupt
            self.sums.append(float(torch.ones(number + 1).sum()))

    def tables(self) -> list[str]:
        return [f"| {self.sums} |"]

    def as_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("Sums are fast", (QUOTE,), TimedClaimSettings, Sums)
    monkeypatch.setitem(claims.CLAIMS, "sums", claim)


def test_a_claim_is_shown_with_its_source() -> None:
    found = bench.papers(claim="sums", rounds=2, device="cpu", quick=True)
    text = found.markdown()
    assert f"- {QUOTE.text} <{QUOTE.source}>" in text
    assert "| [1.0, 2.0] |" in text
    assert text.count("**Not a benchmark**") == 1
    stored = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert stored["published"] == [{"text": QUOTE.text, "source": QUOTE.source}]
    assert (stored["claim"], stored["here"]) == ("sums", {"sums": [1.0, 2.0]})
    assert stored["settings"]["rounds"] == 2
    assert stored["environment"]["ortlab"]


def test_an_interrupt_keeps_what_was_found() -> None:
    found = bench.papers(claim="sums", rounds=5, device="cpu")
    assert found.interrupted
    assert found.as_dict()["here"] == {"sums": [1.0, 2.0]}
    assert "**Interrupted**" in found.markdown()


def test_wrong_names_and_values() -> None:
    with pytest.raises(ValueError, match=r"claim='sum': .*did you mean 'sums'"):
        bench.papers(claim="sum")
    with pytest.raises(ValueError, match="unknown setting 'precisions'"):
        bench.papers(claim="sums", precisions="bf16")
    with pytest.raises(ValueError, match="rounds=0"):
        bench.papers(claim="sums", rounds=0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sums.json"
    given = ["bench", "papers", "--claim", "sums", "--device", "cpu"]
    token = progress.set(None)  # the command reports progress on standard error
    try:
        assert main([*given, "--rounds", "2", "--threads", "1", "--json", str(file)]) == 0
        said = capsys.readouterr()
        assert "| [1.0, 2.0] |" in said.out
        assert "round 2 with 1 thread" in said.err
        assert json.loads(file.read_text())["here"] == {"sums": [1.0, 2.0]}
        assert main([*given, "--rounds", "3"]) == 130
        assert "**Interrupted**" in capsys.readouterr().out
        for wrong, told in (
            (["--claim", "sum"], "did you mean 'sums'?"),
            (["--claim", "sums", "--roofline"], "--roofline has no effect with --claim sums"),
            (["--claim", "sums", "--precisions", "bf16"], "--precisions has no effect"),
        ):
            with pytest.raises(SystemExit, match="2"):
                main(["bench", "papers", *wrong])
            assert told in capsys.readouterr().err
    finally:
        progress.reset(token)


def test_every_claim_quotes_an_address() -> None:
    for name, claim in claims.CLAIMS.items():
        assert claim.quotes, name
        assert all(quote.source.startswith("https://") for quote in claim.quotes), name
        assert issubclass(claim.settings, ClaimSettings)


@pytest.mark.parametrize("most", [0, 1, 7, 8, 9, 63, 100])
@pytest.mark.parametrize(("start", "step"), [(8, 8), (50, 6), (1, 1)])
def test_the_search_finds_the_largest_number_that_fits(most: int, start: int, step: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        assert number > 0
        tried.append(number)
        return number <= most

    assert bisected(fits, start=start, step=step) == (most, most + 1)
    assert len(tried) == len(set(tried)) <= 14


def test_a_coarse_search_ends_early_and_one_without_end_says_so() -> None:
    low, high = bisected(lambda number: number <= 100, start=8, step=8, close=0.25)
    assert low <= 100 < high <= 1.25 * low
    with pytest.raises(ValueError, match="choose less memory"):
        bisected(lambda _: True, start=8, step=8)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
NEEDS_ORT = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
TINY: dict[str, Any] = {"model": "bert-128", "engine": "eager", "threads": 1, "quick": True}
LIMIT_BYTES = 24 * 2**20


def answer(**request: Any) -> dict[str, Any]:
    with child(Request(**TINY, **request)) as trial:
        return trial.answer()


@LINUX
@pytest.mark.slow
def test_the_batch_that_was_found_fits_and_a_larger_one_does_not() -> None:
    settings = SearchSettings(threads=1, quick=True)
    found = Search("bert-128", SetUp("eager", "eager"), LIMIT_BYTES, settings).run(hint=200)
    assert found.rows
    assert found.refused_rows
    assert found.rows < found.refused_rows <= 2 * found.rows
    assert found.peak_bytes
    assert found.peak_bytes <= LIMIT_BYTES
    assert found.library_bytes
    tried = dict(found.trials)
    assert tried[found.rows]
    assert not tried[found.refused_rows]
    assert "allocate memory" in found.why
    assert answer(rows=found.refused_rows)["fits"]  # without a limit


@LINUX
def test_another_error_is_not_a_batch_that_does_not_fit() -> None:
    with pytest.raises(TrialFailed, match="precision='fp64'"):
        answer(rows=2, options={"precision": "fp64"})
    settings = SearchSettings(threads=1, quick=True)
    wrong = SetUp("wrong", "eager", {"precision": "fp64"})
    found = Search("bert-128", wrong, LIMIT_BYTES, settings).run()
    assert found.rows is None
    assert "precision='fp64'" in found.error
    assert found.trials == ()


@LINUX
def test_the_limit_counts_little_of_the_stacks_of_threads() -> None:
    code = """
import threading
from ortlab.bench.claims import trial
trial._shorten_stacks()
before, event = trial._memory()["VmData"], threading.Event()
for _ in range(16):
    threading.Thread(target=event.wait).start()
print(trial._memory()["VmData"] - before)
event.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 16 * 2**20 <= int(done.stdout) < 32 * 2**20


def test_the_table_has_every_set_up() -> None:
    measured = LargestBatches(SearchSettings(engines="eager,ort"))
    measured.found = [
        Largest("m", "eager", 40, 41, "no memory", 500 * 2**20, 390 * 2**20, unplanned="no plan"),
        Largest("m", "ort", 50, 51, "bad_alloc", 510 * 2**20, 395 * 2**20, 52, 380 * 2**20),
        Largest("m", "ort, recompute=layers", error="RuntimeError: no graph"),
    ]
    text = "\n".join(measured.tables())
    assert "| m | eager | 40 | 1.00 | 390.0 MiB | 890.0 MiB | no plan |  |  |  |" in text
    assert "| m | ort | 50 | 1.25 | 395.0 MiB | 905.0 MiB | 52 | +4.0% | 380.0 MiB |" in text
    assert "| m | ort, recompute=layers | error, see below |" in text
    assert "- m, ort, recompute=layers: RuntimeError: no graph" in text
    assert "- m, ort, batch 51: bad_alloc" in text
    assert "Of 1 predicted batches 1 are within 5%, 1 are too high" in text
    (ort,) = [each for each in measured.as_dict()["largest"] if each["set_up"] == "ort"]
    assert (ort["rows"], ort["predicted_rows"], ort["rows_error"]) == (50, 52, pytest.approx(0.04))


@LINUX
def test_set_ups_take_turns_in_processes_of_their_own() -> None:
    eager, checkpointing = SET_UPS["eager"]
    wrong = SetUp("wrong", "eager", {"precision": "fp64"})
    settings = RecomputeSettings(rounds=2, threads=1, quick=True)
    side = Side("bert-128", [(eager, 4), (checkpointing, 8), (wrong, 4)], settings)
    side.run()
    found = list(side.timed.values())
    assert [len(each.step_ms) for each in found] == [2, 2, 0]
    assert all(each.peak_bytes for each in found[:2])
    gain = found[1].gain(found[0])
    assert gain is not None
    ratios = sorted(2 * a / b for a, b in zip(found[0].step_ms, found[1].step_ms, strict=True))
    assert (gain.low + gain.high) / 2 == pytest.approx(sum(ratios) / 2)
    lines = shown(found)
    assert len(lines) == 5
    assert lines[2].startswith("| eager | 4 |")
    assert "| 1.00 (1.00 to 1.00) |" in lines[2]
    assert "█" * 20 in "".join(lines)
    assert "not timed: ValueError: precision='fp64'" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


def test_largest_batches_are_timed_with_the_arena() -> None:
    timed = _in_use(SET_UPS["ort"][1])
    assert timed.label == "ort, recompute=layers"
    assert timed.options == {"recompute": "layers"}


@LINUX
@pytest.mark.slow
def test_recompute_as_a_whole() -> None:
    given = {"models": "bert-128", "engines": "eager", "threads": 1, "rounds": 1, "quick": True}
    result = bench.papers(claim="recompute", **given)
    here = json.loads(json.dumps(result.as_dict(), allow_nan=False))["here"]
    (largest,) = here["largest"]
    own, curve = here["sides"]
    assert [(each["set_up"], each["rows"]) for each in own["timed"]] == [("eager", largest["rows"])]
    assert [each["set_up"] for each in curve["timed"]] == ["eager"]
    assert all(each["step_ms"] for each in curve["timed"])
    assert f"| bert-128 | eager | {largest['rows']} |" in result.markdown()


@LINUX
@NEEDS_ORT
@pytest.mark.slow
def test_memory_is_predicted_from_a_small_batch() -> None:
    given = {**TINY, "engine": "ortmodule", "options": {"arena": False}}
    with child(Request(**given, rows=4, predict_bytes=LIMIT_BYTES)) as trial:
        predicted = trial.answer()["predicted"]
    assert predicted == sorted(predicted)
    with child(Request(**given, rows=400, limit_bytes=1 << 30)) as trial:
        measured = trial.answer()
    assert predicted[399] == pytest.approx(measured["peak_bytes"], rel=0.05)
    assert predicted[399] > 1.5 * predicted[3]
