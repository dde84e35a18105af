"""How fast each engine trains here, side by side: what ``ortlab bench engines`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.bench.settings import BenchSettings

if TYPE_CHECKING:
    from ortlab.bench.result import EngineBench

__all__ = ["BenchSettings", "engines"]


def engines(**options: Any) -> EngineBench:
    """Every engine in every precision on fixed models, in turn; minutes for each model.

    `options` are `BenchSettings` by name. The result shows itself as Markdown in a notebook and
    has ``markdown()`` and ``as_dict()``. Ctrl-C ends it early, with what was measured so far.
    ``ortlab.engines.base.progress`` names who hears how far it is. What torch.compile has in memory
    is dropped: other models compile again. ValueError for an unknown name.
    """
    settings = BenchSettings.of(options)
    from ortlab.bench import timing

    return timing.engines(settings)
