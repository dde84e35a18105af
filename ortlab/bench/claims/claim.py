"""A claim of ORT's papers: what was published, and what measures it here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ortlab.bench.models import MODELS
from ortlab.settings import Settings, setting

if TYPE_CHECKING:
    from ortlab.bench.machine import Machine

FORM = 1


@dataclass(frozen=True)
class Quote:
    """A published statement.

    Attributes:
        text: The statement with its figures, hardware and versions; text in quotation marks is the
            source's own.
        source: Address of the statement.
    """

    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class ClaimSettings(Settings):
    """Settings of every claim."""

    threads: int | None = setting(
        None,
        minimum=1,
        help="threads that torch and ORT compute with, torch's default if unset",
    )
    quick: bool = setting(
        False, help="tiny models, to test that everything runs here; not a benchmark"
    )


@dataclass(frozen=True, kw_only=True)
class TimedClaimSettings(ClaimSettings):
    """Settings of a claim about the time of a step."""

    rounds: int = setting(10, minimum=1, help="measured rounds; in each, every set-up has a turn")
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="device to train on; cuda is not tested"
    )


@dataclass(frozen=True, kw_only=True)
class GradientSettings(TimedClaimSettings):
    """Settings of the claim about the gradient of some parameters."""

    models: str = setting(
        "bert-256/8x64",
        choices=tuple(name for name in MODELS if name.startswith("bert")),
        many=True,
        help="models to train, separated by commas",
    )
    engines: str = setting(
        "eager,ort,ortmodule",
        choices=("eager", "ort", "ortmodule"),
        many=True,
        help="engines to compare, separated by commas",
    )


class Measurement(Protocol):
    """A measurement that keeps its results up to an interrupt."""

    def run(self) -> None:
        """Measure. Progress goes to `ortlab.engines.base.tell`. Ctrl-C may end it anywhere."""

    def tables(self) -> list[str]:
        """Return the results so far as lines of Markdown: published, ours and eager torch's."""

    def as_dict(self) -> dict[str, Any]:
        """Return all results so far in a form that JSON can store."""


@dataclass(frozen=True)
class Claim:
    """A published claim.

    Attributes:
        title: The claim in a few words.
        quotes: Published statements.
        settings: Class of its settings.
        begin: Returns the measurement for settings of that class, before anything is measured.
    """

    title: str
    quotes: tuple[Quote, ...]
    settings: type[ClaimSettings]
    begin: Callable[[Any], Measurement]


@dataclass(frozen=True)
class ClaimBench:
    """Results of a claim on this machine.

    Attributes:
        name: Name of the claim.
        claim: The claim.
        settings: Settings of the measurement.
        date: Date in UTC.
        environment: Versions of the installed packages.
        machine: Machine that it ran on.
        lines: Results as lines of Markdown.
        figures: Results in a form that JSON can store.
        interrupted: True if it was stopped before its end.
    """

    name: str
    claim: Claim
    settings: ClaimSettings
    date: str
    environment: Mapping[str, Any]
    machine: Machine
    lines: tuple[str, ...]
    figures: Mapping[str, Any]
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return all values in a form that JSON can store, published ones with their sources."""
        return {
            "form": FORM,
            "claim": self.name,
            "title": self.claim.title,
            "published": [dataclasses.asdict(quote) for quote in self.claim.quotes],
            "benchmark": not self.settings.quick,
            "interrupted": self.interrupted,
            "date": self.date,
            "settings": self.settings.as_dict(),
            "environment": dict(self.environment),
            "machine": dataclasses.asdict(self.machine),
            "here": dict(self.figures),
        }

    def markdown(self) -> str:
        """Return the published statements with their sources, then this machine's results."""
        from ortlab.bench.result import origin, warnings  # heavy: torch

        lines = [f"# {self.claim.title}", ""]
        lines += warnings(self.machine, quick=self.settings.quick, interrupted=self.interrupted)
        lines += ["Published:", ""]
        lines += [f"- {quote.text} <{quote.source}>" for quote in self.claim.quotes]
        lines += ["", "Here:", "", *self.lines, ""]
        return "\n".join([*lines, origin(self.environment, self.machine, self.date), ""])

    _repr_markdown_ = markdown
