"""Start of a race or a search: check the model, collect its settings, start the background work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ortlab.engines import wrapped_models
from ortlab.engines.base import EngineUnavailable, LossFunction, unfit
from ortlab.engines.registry import engine
from ortlab.search.comparison import Surroundings
from ortlab.settings import EngineSettings, SearchSettings
from ortlab.training.start import loss_called

if TYPE_CHECKING:
    from ortlab.cluster.workers import Workers
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune
    from ortlab.training.run_registry import RunRegistry

S = TypeVar("S", "Race", "Tune")
D = TypeVar("D", bound=SearchSettings)


class SearchStarter:
    """Creates and starts the races and searches of a session.

    Args:
        wrapped: The wrapped models of the session.
        registry: Registry that new searches are added to.
        workers: Return so many workers for candidates that train in several processes.
        show: Show a search to every viewer.
    """

    def __init__(
        self,
        wrapped: wrapped_models.WrappedModels,
        registry: RunRegistry,
        workers: Callable[[int], Workers],
        show: Callable[[Race | Tune], None],
    ) -> None:
        self._wrapped = wrapped
        self._registry = registry
        self._workers = workers
        self._show = show

    def start(
        self,
        kind: Callable[..., S],
        declared: type[SearchSettings],
        model: nn.Module,
        data: Iterable[Any],
        loss: str | LossFunction | None,
        given: Mapping[str, Any],
    ) -> S:
        """Start a race or a search and return it at once.

        Args:
            kind: The class `Race` or `Tune`.
            declared: Its settings.
            model: The model, wrapped or not; it is copied.
            data: Training data.
            loss: Loss function or its name; None where the model returns its own loss.
            given: Settings of the search and of the runs that it compares.

        Raises:
            ValueError: If the model cannot be trained, settings are wrong, or a run or another
                search is active.
        """
        module = wrapped_models.check_model("the first argument", model)
        entry = self._wrapped.entry(module)
        original = module if entry is None else entry.engine.unwrap(module)
        if (reason := unfit(original)) is not None:
            raise ValueError(f"cannot train this {type(module).__name__}: it {reason}")
        self._registry.check_idle()
        shared = {} if entry is None else _chosen(entry.settings)
        settings, more = declared.apart(given)
        settings, left_out = of_this_machine(settings)
        function, _ = loss_called(loss)
        named = {"loss": loss} if isinstance(loss, str) else {}
        registry = self._registry
        search = kind(
            original,
            data,
            settings,
            shared={**shared, **more, **named},
            loss=function,
            around=Surroundings(
                registry.active_runs, registry.prefer(original), self._workers, left_out
            ),
        )
        registry.searches.append(search)
        search.start(self._show)
        return search


def of_this_machine(settings: D) -> tuple[D, tuple[str, ...]]:
    """Return settings without engines that cannot run here and were not asked for.

    Args:
        settings: Settings of a race or a search.

    Returns:
        The settings, and lines that name the engines and say why.
    """
    if {"engines", "preset"} & settings.changed().keys():
        return settings, ()
    able, missing = [], defaultdict[str, list[str]](list)
    for name in settings.engines.split(","):
        try:
            engine(name)
            able.append(name)
        except EngineUnavailable as error:
            missing[str(error).partition(". ")[0]].append(name)
    notes = tuple(f"left out: {', '.join(names)}, because {why}" for why, names in missing.items())
    return settings.replace(engines=",".join(able)), notes


def _chosen(settings: EngineSettings) -> dict[str, Any]:
    """Return the settings of a wrapper that are not the defaults and that a search may share."""
    changed = settings.changed()
    return {name: changed[name] for name in changed if name not in SearchSettings.without}
