"""Tests of the timeline of a step: its notes, its picture, its trace, and the volume in theory."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ortlab.metrics.timeline import RankTimeline, Span, Timeline, predicted_bytes

MIB = 2**20


def ranks(*computing: float) -> list[RankTimeline]:
    return [
        RankTimeline(
            number,
            100.0,
            (
                Span("forward", "forward", 0, each),
                Span("communication", "<all & reduce>", each, 100, MIB),
            ),
            wire_bytes=2 * MIB,
            trace=({"name": "aten::mm", "ph": "X", "pid": 7, "tid": 1, "ts": 0, "dur": 5},),
        )
        for number, each in enumerate(computing)
    ]


def test_the_slowest_rank_is_named() -> None:
    found = Timeline(ranks(50, 70, 51))
    assert found.slowest is found.ranks[1]
    assert "rank 1 is the slowest: it computes for 70 ms, the others for 50.5 ms" in repr(found)
    assert Timeline(ranks(50, 52)).slowest is None
    assert Timeline(ranks(50)).slowest is None


def test_bytes_beside_the_paper() -> None:
    told = repr(Timeline(ranks(50, 50), predicted_bytes=1.6 * MIB))
    assert "each rank sent 2.0 MiB on average" in told
    assert "predicts 1.6 MiB (+25%)" in told
    assert "paper" not in repr(Timeline(ranks(50, 50)))


@pytest.mark.parametrize(("stage", "expected"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_of_the_paper(stage: int, expected: float) -> None:
    """In the limit of many ranks 2, and at stage 3 three times the model (section 7)."""
    sent = predicted_bytes(1000, 1000, stage=stage, workers=10**6)
    assert sent == pytest.approx(1000 * expected, rel=1e-5)
    half = predicted_bytes(1000, 500, stage=stage, workers=2)
    assert half == (500 + (500 if stage == 0 else 1000 if stage < 3 else 2000)) / 2


def test_the_picture_has_all_ranks_and_escapes_names() -> None:
    found = Timeline(ranks(50, 70))
    root = ET.fromstring(found.picture())
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "forward", "communication", "100 ms"} <= set(words)
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "<all & reduce>: 30 ms from 70 ms, 1.0 MiB" in titles
    assert "rank" in found._repr_html_()


def test_gaps_that_cannot_be_seen_are_not_drawn() -> None:
    every = [Span("forward", "forward", 10 * i, 10 * i + 9.99) for i in range(10)]
    every += [Span("backward", "backward", 100, 110), Span("backward", "backward", 150, 200)]
    picture = Timeline([RankTimeline(0, 200.0, tuple(every))]).picture()
    assert picture.count("<title>") == 3
    assert "forward: 100 ms from 0 ms" in picture


def test_a_trace_has_a_process_for_each_rank(tmp_path: Path) -> None:
    path = Timeline(ranks(50, 70)).save(tmp_path / "trace.json")
    events = json.loads(path.read_bytes())["traceEvents"]
    assert {each["pid"] for each in events if each["ph"] == "X"} == {0, 1}
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
