"""Report that compares published results with this machine's, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ortlab.bench.interleaved import Spread
from ortlab.bench.papers import PAPERS, Paper, Shape
from ortlab.bench.result import EngineBench, table
from ortlab.settings import REFERENCE

FORM = 2
NONE = "not found"
EAGER, _ = REFERENCE


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

    def gain(self, name: str, engine: str, precision: str) -> Spread | None:
        """Return the relative gain of an engine over eager torch, compared in each round.

        Args:
            name: Name of the benchmark.
            engine: Name of the engine.
            precision: Precision of matrix products.

        Returns:
            Gain, where 0.1 is 10% more samples per second. None if one of the two was not timed.
        """
        eager, other = (self.measured.cell(name, each, precision) for each in (EAGER, engine))
        if eager is None or other is None or not (eager.step_ms and other.step_ms):
            return None
        pairs = zip(eager.step_ms, other.step_ms, strict=False)
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
                engine: {
                    "samples_per_s": self.samples_per_s(name, engine, precision),
                    "gain": self.gain(name, engine, precision),
                }
                for engine in self._engines()
            }
            plain = {
                engine: {what: v if v is None else dataclasses.asdict(v) for what, v in own.items()}
                for engine, own in found.items()
            }
            yield {"precision": precision, "engines": plain}

    def _engines(self) -> list[str]:
        return list(dict.fromkeys(engine for engine, _ in self.measured.settings.cells))

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
            "Samples/s of each engine on this machine, medians of "
            f"{self.measured.settings.rounds} rounds, with the gain over eager torch and its "
            "quartiles; then the published results in fp16:",
            "",
        ]
        heads = ["benchmark", "shape here", "precision", *self._engines()]
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
            yield [
                paper.title,
                str(self.shapes[name]),
                precision,
                *(self._cell(name, engine, precision) for engine in self._engines()),
                *published,
            ]

    def _cell(self, name: str, engine: str, precision: str) -> str:
        speed, gain = (each(name, engine, precision) for each in (self.samples_per_s, self.gain))
        if speed is None:
            return "not run"
        if gain is None or engine == EAGER:
            return f"{speed.median:.3g}"
        return f"{speed.median:.3g}, {gain.median:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


def _figure(samples_per_s: float | None) -> str:
    return NONE if samples_per_s is None else f"{samples_per_s:,.2f}"
