"""Commands that compare set-ups of a model: race and tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ortlab.session import session

if TYPE_CHECKING:
    from ortlab.notebook.magics.parsing import ParsedCommand
    from ortlab.notebook.magics.variables import Variables
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune

S = TypeVar("S")


class SearchCommands:
    """One method per command, named like the command.

    Args:
        variables: The user's variables.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def race(self, given: ParsedCommand) -> Race:
        """Start a race."""
        return self._start(session.race, given)

    def tune(self, given: ParsedCommand) -> Tune:
        """Start a search of the fastest settings."""
        return self._start(session.tune, given)

    def _start(self, search: Callable[..., S], given: ParsedCommand) -> S:
        settings = dict(given.settings)
        loss = settings.pop("loss", None)
        return search(
            self._variables.model(given.words["model"]),
            self._variables.value("loader", given.words["data"]),
            loss=self._variables.loss(loss),
            **settings,
        )
