"""Timeline of a step on several ranks: when each computes and communicates, and what it sends."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from ortlab.metrics.rank_metrics import PAPER, SLOWER, SLOWER_MS, milliseconds
from ortlab.utils import files, svg_bars
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table

COMMUNICATION: Final = "communication"
OTHER: Final = "other"
KINDS: Final = {
    "forward": ("#d55e00", 1.0),
    "backward": ("#009e73", 1.0),
    "optimizer": ("#c5659f", 1.0),
    OTHER: ("#8a8a8a", 1.0),
    COMMUNICATION: ("#9539e6", 1.0),
}
"""Kinds of spans with their colors, those of the charts of a run."""
_LANE, _ROW, _NAME = 12, 34, 64
_TICKS: Final = 5

_Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Part of a step on one rank.

    Attributes:
        kind: A key of `KINDS`.
        name: The collective, such as "all_reduce", or the kind.
        began_ms: Begin since the begin of the step, in milliseconds.
        ended_ms: End.
        sent_bytes: For a collective, the bytes of the tensor that the rank gives; else 0.
    """

    kind: str
    name: str
    began_ms: float
    ended_ms: float
    sent_bytes: int = 0


@dataclass(frozen=True)
class RankTimeline:
    """Step of one rank.

    Attributes:
        rank: Number of the rank.
        step_ms: Duration of the step with the profiler, in milliseconds.
        spans: Computation by phase, and collectives, which may overlap with it.
        wire_bytes: Bytes that the process sent over TCP in the step; None if unknown.
        trace: Events of torch's profiler in Chrome's trace format.
    """

    rank: int
    step_ms: float
    spans: tuple[Span, ...]
    wire_bytes: int | None = None
    trace: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False)

    @property
    def computing_ms(self) -> float:
        """Time of computation."""
        return _length(self._union(communication=False))

    @property
    def communicating_ms(self) -> float:
        """Time with a collective in flight, including the wait for other ranks."""
        return _length(self._union(communication=True))

    @property
    def exposed_ms(self) -> float:
        """Time with a collective in flight and no computation: what overlap does not hide."""
        both = self._union(communication=False) + self._union(communication=True)
        return round(_length(_union(both)) - self.computing_ms, 6)

    @property
    def idle_ms(self) -> float:
        """Rest of the step: neither computation nor communication."""
        return max(0.0, self.step_ms - self.computing_ms - self.exposed_ms)

    @property
    def collectives(self) -> tuple[Span, ...]:
        """Collectives of the step."""
        return tuple(span for span in self.spans if span.kind == COMMUNICATION)

    def _union(self, *, communication: bool) -> list[_Interval]:
        return _union(
            (span.began_ms, span.ended_ms)
            for span in self.spans
            if (span.kind == COMMUNICATION) is communication
        )


class Timeline:
    """Timelines of all ranks in one step.

    Args:
        ranks: Timeline of each rank.
        predicted_bytes: Bytes that each rank sends by `predicted_bytes`; None if unknown.

    Attributes:
        ranks: Timeline of each rank.
        predicted_bytes: As given.
    """

    def __init__(
        self, ranks: Sequence[RankTimeline], *, predicted_bytes: float | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self.predicted_bytes = predicted_bytes

    @property
    def slowest(self) -> RankTimeline | None:
        """Rank whose computation takes longest; None if all are similar."""
        slowest = max(self.ranks, key=lambda rank: rank.computing_ms)
        others = [rank.computing_ms for rank in self.ranks if rank is not slowest]
        if not others:
            return None
        usual = median(others)
        return slowest if slowest.computing_ms > usual + max(SLOWER * usual, SLOWER_MS) else None

    def table(self) -> Table[RankTimeline]:
        """Return times and bytes with a row for each rank."""

        def of_step(part: float, rank: RankTimeline) -> str:
            return f"{milliseconds(part)} ({part / rank.step_ms:.0%})"

        columns = [
            Column[RankTimeline]("rank", lambda rank: str(rank.rank), number=True),
            Column[RankTimeline]("step", lambda rank: milliseconds(rank.step_ms), number=True),
            Column[RankTimeline](
                "computation", lambda rank: of_step(rank.computing_ms, rank), number=True
            ),
            Column[RankTimeline](
                "communication alone", lambda rank: of_step(rank.exposed_ms, rank), number=True
            ),
            Column[RankTimeline](
                "hidden by computation",
                lambda rank: milliseconds(round(rank.communicating_ms - rank.exposed_ms, 6)),
                number=True,
            ),
            Column[RankTimeline]("neither", lambda rank: of_step(rank.idle_ms, rank), number=True),
            Column[RankTimeline](
                "collectives", lambda rank: str(len(rank.collectives)), number=True
            ),
            Column[RankTimeline](
                "sent",
                lambda rank: "?" if rank.wire_bytes is None else memory(rank.wire_bytes),
                number=True,
            ),
        ]
        return Table(self.ranks, columns, notes=list(self._notes()))

    def picture(self) -> str:
        """Draw computation and communication of each rank over the time of the step.

        Returns:
            An SVG document. Above is the computation by phase, below it the collectives; each part
            has a title with its name, time and bytes.
        """
        longest = max(rank.step_ms for rank in self.ranks) or 1.0
        scale = (svg_bars.WIDTH - _NAME - 12) / longest
        parts, left = [], float(_NAME)
        for kind, look in KINDS.items():
            parts += [svg_bars.box(left, 4, 10, 10, look), svg_bars.text(left + 14, 9, kind)]
            left += 40 + 6.6 * len(kind)
        top = svg_bars.LEGEND
        for rank in self.ranks:
            parts.append(svg_bars.text(_NAME - 8, top + _LANE, f"rank {rank.rank}", anchor="end"))
            for span in _joined(rank.spans, 1 / scale):
                lane = top + _LANE if span.kind == COMMUNICATION else top
                box = svg_bars.box(
                    _NAME + span.began_ms * scale,
                    lane,
                    max(0.6, (span.ended_ms - span.began_ms) * scale),
                    _LANE - 1,
                    KINDS[span.kind],
                )
                parts.append(f"<g><title>{html.escape(_title(span))}</title>{box}</g>")
            top += _ROW
        for tick in range(_TICKS + 1):
            x, at = _NAME + tick * longest * scale / _TICKS, tick * longest / _TICKS
            anchor = "end" if tick == _TICKS else "middle" if tick else "start"
            parts.append(svg_bars.text(x, top, milliseconds(at), anchor=anchor))
        height = top + 12
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg_bars.WIDTH} {height}" '
            f'width="{svg_bars.WIDTH}" height="{height}" font-family="sans-serif" '
            f'font-size="{svg_bars.FONT}">{svg_bars.PAPER}{"".join(parts)}</svg>'
        )

    def save(self, path: str | Path) -> Path:
        """Write all events of torch's profiler, every rank a process, for ui.perfetto.dev.

        Args:
            path: JSON file in Chrome's trace format, written anew.

        Returns:
            The path.
        """
        events: list[dict[str, Any]] = []
        for rank in self.ranks:
            name = {"name": f"rank {rank.rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": rank.rank, "args": name})
            events += [{**event, "pid": rank.rank} for event in rank.trace]
        path = Path(path)
        files.write_private(path, json.dumps({"traceEvents": events}).encode())
        return path

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        alt = f"Timeline of a step on {len(self.ranks)} ranks"
        return f"{svg_bars.hoverable(self.picture(), alt)}{self.table()._repr_html_()}"

    def _notes(self) -> Iterator[str]:
        yield (
            "one step with torch's profiler, which makes it slower; the ranks began it together, "
            "after a barrier"
        )
        if (slow := self.slowest) is not None:
            others = median(rank.computing_ms for rank in self.ranks if rank is not slow)
            yield (
                f"rank {slow.rank} is the slowest: it computes for "
                f"{milliseconds(slow.computing_ms)}, the others for {milliseconds(others)}"
            )
        measured = [rank.wire_bytes for rank in self.ranks if rank.wire_bytes is not None]
        if measured and self.predicted_bytes:
            mean = sum(measured) / len(measured)
            yield (
                f"each rank sent {memory(mean)} on average; the ZeRO paper ({PAPER}, section 7) "
                f"predicts {memory(self.predicted_bytes)} ({mean / self.predicted_bytes - 1:+.0%})"
            )


def predicted_bytes(parameters: float, gradients: float, *, stage: int, workers: int) -> float:
    """Return the bytes that each data parallel rank sends in a step, with ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather, each of which sends all but the own part
    once. Stages 0 to 2 reduce the gradients and gather them or, from stage 1 on, the parameters;
    stage 3 gathers the parameters in forward and again in backward.

    Args:
        parameters: Bytes of the model's parameters.
        gradients: Bytes of its gradients.
        stage: Stage of ZeRO, 0 to 3 (arXiv:1910.02054, section 7).
        workers: Number of ranks.
    """
    gathered = gradients if stage == 0 else parameters * (2 if stage == 3 else 1)
    return (workers - 1) / workers * (gradients + gathered)


def _joined(spans: Sequence[Span], gap_ms: float) -> list[Span]:
    """Join a phase's computation over gaps that are too short to be seen."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if (
            last is not None
            and last.kind == span.kind != COMMUNICATION
            and span.began_ms - last.ended_ms < gap_ms
        ):
            found[-1] = dataclasses.replace(last, ended_ms=span.ended_ms)
        else:
            found.append(span)
    return found


def _title(span: Span) -> str:
    size = f", {memory(span.sent_bytes)}" if span.sent_bytes else ""
    return (
        f"{span.name}: {milliseconds(span.ended_ms - span.began_ms)} from "
        f"{milliseconds(span.began_ms)}{size}"
    )


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Merge intervals that overlap."""
    found: list[_Interval] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(ended, found[-1][1]))
        else:
            found.append((began, ended))
    return found


def _length(intervals: Sequence[_Interval]) -> float:
    return sum(ended - began for began, ended in intervals)
