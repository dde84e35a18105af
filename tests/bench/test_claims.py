"""`ortlab bench papers --claim`: claims of ORT's papers, measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlab import bench
from ortlab.bench import claims
from ortlab.bench.claims.claim import Claim, ClaimSettings, Quote, TimedClaimSettings
from ortlab.cli import main
from ortlab.engines.base import progress, tell

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
    shown = found.markdown()
    assert f"- {QUOTE.text} <{QUOTE.source}>" in shown
    assert "| [1.0, 2.0] |" in shown
    assert shown.count("**Not a benchmark**") == 1
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
        shown = capsys.readouterr()
        assert "| [1.0, 2.0] |" in shown.out
        assert "round 2 with 1 thread" in shown.err
        assert json.loads(file.read_text())["here"] == {"sums": [1.0, 2.0]}
        assert main([*given, "--rounds", "3"]) == 130
        assert "**Interrupted**" in capsys.readouterr().out
        for wrong, said in (
            (["--claim", "sum"], "did you mean 'sums'?"),
            (["--claim", "sums", "--roofline"], "--roofline has no effect with --claim sums"),
            (["--claim", "sums", "--precisions", "bf16"], "--precisions has no effect"),
        ):
            with pytest.raises(SystemExit, match="2"):
                main(["bench", "papers", *wrong])
            assert said in capsys.readouterr().err
    finally:
        progress.reset(token)


def test_every_claim_quotes_an_address() -> None:
    for name, claim in claims.CLAIMS.items():
        assert claim.quotes, name
        assert all(quote.source.startswith("https://") for quote in claim.quotes), name
        assert issubclass(claim.settings, ClaimSettings)
