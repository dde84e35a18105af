"""Report that compares published results with this machine's, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ortlab.bench.interleaved import Spread
from ortlab.bench.papers import PAPERS, Paper, Shape
from ortlab.bench.result import EngineBench, table

FORM = 1
NONE = "not found"


@dataclass(frozen=True)
class PaperBench:
    """Results of the published benchmarks.

    Attributes:
        measured: Results on this machine.
        device: Device that the models trained on, "cpu" or "cuda".
        shapes: Shape of each benchmark here.
    """

    measured: EngineBench
    device: str
    shapes: Mapping[str, Shape]

    @property
    def interrupted(self) -> bool:
        """True if the benchmark was stopped before its end."""
        return self.measured.interrupted

    def samples_per_s(self, name: str, engine: str, precision: str) -> Spread | None:
        """Return the samples per second over the rounds, or None if it was not timed.

        Args:
            name: Name of the benchmark.
            engine: Name of the engine.
            precision: Precision of matrix products.
        """
        cell = self.measured.cell(name, engine, precision)
        if cell is None or not cell.step_ms:
            return None
        return Spread.of([1e3 * self.shapes[name].rows / ms for ms in cell.step_ms])

    def gain(self, name: str, precision: str) -> Spread | None:
        """Return the relative gain of ORT over eager torch, compared in each round.

        Args:
            name: Name of the benchmark.
            precision: Precision of matrix products.

        Returns:
            Gain, where 0.1 is 10% more samples per second. None if one of the two was not timed.
        """
        eager, ort = (self.measured.cell(name, each, precision) for each in ("eager", "ortmodule"))
        if eager is None or ort is None or not (eager.step_ms and ort.step_ms):
            return None
        pairs = zip(eager.step_ms, ort.step_ms, strict=False)
        return Spread.of([theirs / ours - 1 for theirs, ours in pairs])

    def as_dict(self) -> dict[str, Any]:
        """Return all values in a form that JSON can store, published ones with their sources."""
        return {
            "form": FORM,
            "device": self.device,
            "published": {name: self._published(PAPERS[name]) for name in self.shapes},
            "shapes": {name: dataclasses.asdict(shape) for name, shape in self.shapes.items()},
            "here": {name: list(self._here(name)) for name in self.shapes},
            "measured": self.measured.as_dict(),
        }

    @staticmethod
    def _published(paper: Paper) -> dict[str, Any]:
        figures = dataclasses.asdict(paper.published) | {"gain": paper.published.gain}
        shape = dataclasses.asdict(paper.published_shape)
        return figures | {"precision": "fp16", "shape": shape, "shape_source": paper.shape_source}

    def _here(self, name: str) -> Iterator[dict[str, Any]]:
        for precision in self._precisions():
            found = {
                "eager": self.samples_per_s(name, "eager", precision),
                "ort": self.samples_per_s(name, "ortmodule", precision),
                "gain": self.gain(name, precision),
            }
            plain = {what: v if v is None else dataclasses.asdict(v) for what, v in found.items()}
            yield {"precision": precision, **plain}

    def _precisions(self) -> list[str]:
        return list(dict.fromkeys(precision for _, precision in self.measured.settings.cells))

    def markdown(self) -> str:
        """Return a table of published and measured results, the sources, and all measurements."""
        papers = {name: PAPERS[name] for name in self.shapes}
        quick = self.measured.settings.quick
        lines = self.measured.warnings()
        if self.device == "cpu" and not quick:
            lines += [
                "**Scaled down**: on a CPU the models are smaller than the published ones, so only "
                "the gains can be compared, and only with care.",
                "",
            ]
        lines += [
            f"ORT and eager torch on this machine in samples/s, medians of "
            f"{self.measured.settings.rounds} rounds, and the gain with its quartiles; then the "
            "published results in fp16:",
            "",
        ]
        heads = ["benchmark", "shape here", "precision", "eager", "ort", "gain"]
        heads += ["published shape", "PyTorch", "ORT", "gain"]
        rows = [row for name, paper in papers.items() for row in self._rows(name, paper)]
        lines += [
            *table(heads, rows),
            "",
            "Published shapes are those of one GPU. Hardware and sources of the published results:",
            "",
        ]
        for paper in papers.values():
            was = paper.published
            lines += [
                f"- {paper.title}: {was.hardware}; <{was.source}>, batch <{paper.shape_source}>"
            ]
        return "\n".join([*lines, "", "## All cells", "", self.measured.tables(), ""])

    _repr_markdown_ = markdown

    def _rows(self, name: str, paper: Paper) -> Iterator[list[str]]:
        was = paper.published
        published = [str(paper.published_shape), _figure(was.torch), _figure(was.ort)]
        published.append(NONE if was.gain is None else f"{was.gain:+.1%}")
        for precision in self._precisions():
            speeds = [self.samples_per_s(name, e, precision) for e in ("eager", "ortmodule")]
            gain = self.gain(name, precision)
            yield [
                paper.title,
                str(self.shapes[name]),
                precision,
                *("not run" if speed is None else f"{speed.median:.3g}" for speed in speeds),
                "" if gain is None else f"{gain.median:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})",
                *published,
            ]


def _figure(samples_per_s: float | None) -> str:
    return NONE if samples_per_s is None else f"{samples_per_s:,.2f}"
