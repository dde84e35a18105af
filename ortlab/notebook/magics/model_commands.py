"""Commands for models: wrap and unwrap them; show graphs, memory, recompute plans, profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from ortlab.api import training_plan, zero_plan
from ortlab.notebook.magics.reporting import print_wrapped, progress
from ortlab.plan.published_runs import PublishedRun, published_table
from ortlab.session import session
from ortlab.settings import EngineSettings, RecomputeSettings

if TYPE_CHECKING:
    from ortlab.engines.step_check import StepCheck
    from ortlab.graph.capture import Graphs, Stage
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute_plans import RecomputePlans
    from ortlab.graph.source_lines import SourceLines
    from ortlab.graph.subgraphs import Subgraphs
    from ortlab.notebook.magics.parsing import ParsedCommand
    from ortlab.notebook.magics.variables import Variables
    from ortlab.plan.result import TrainingPlan
    from ortlab.plan.zero_memory import ZeroPlan
    from ortlab.utils.tables import Table


class ModelCommands:
    """One method per command, named like the command.

    Args:
        variables: The user's variables.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def wrap(self, given: ParsedCommand) -> None:
        """Wrap models and bind their names to the wrappers."""
        names = given.words["name"]
        if not names:
            raise UsageError("%ort wrap: name a model, as in %ort wrap model")
        settings = EngineSettings.of(given.settings)
        with progress():
            report = session.bind_cell(self._variables.namespace, names, names, settings)
        print_wrapped(report)

    def unwrap(self, given: ParsedCommand) -> None:
        """Bind names to their own modules again."""
        names = given.words["name"]
        models = [self._variables.model(name) for name in names]
        for name, model in zip(names, models, strict=True):
            if session.wrapped.entry(model) is None:
                raise ValueError(f"{name} is not wrapped; %ort lists the wrapped models")
        for model in dict.fromkeys(models):
            original = session.wrapped.unwrap(model)
            if line := session.wrapped.still_wrapped(model, original):
                print(line)

    def check(self, given: ParsedCommand) -> StepCheck:
        """Return a check of the next call of a model."""
        return session.check(self._variables.model(given.words["model"]))

    def graph(self, given: ParsedCommand) -> Graphs | Stage | Table[tuple[str, int, int]]:
        """Return the graphs of a model, one of them, or the difference between two."""
        model = self._variables.model(given.words["model"])
        with progress():
            found = session.graphs(model, self._variables.batch(given))
        stage, since = given.words["stage"], given.words["since"]
        if since is not None:
            return found.diff(since, stage or "execution")
        return found if stage is None else found.stage(stage)

    def memory(self, given: ParsedCommand) -> MemoryPlan:
        """Return the memory plan of a training step for a batch size or a budget."""
        model = self._variables.model(given.words["model"])
        optimizer = given.words["optimizer"] or "adamw"
        with progress():
            plan = session.memory_plan(model, self._variables.batch(given), optimizer=optimizer)
        sizes = dict(_size("memory", word) for word in given.words["sizes"])
        if given.words["budget"] is not None:
            largest = plan.at(**sizes).max_batch(given.words["budget"])
            print(f"batch={largest} is the largest that fits into {given.words['budget']}")
            sizes["batch"] = largest
        return plan.at(**sizes)

    def recompute(self, given: ParsedCommand) -> RecomputePlans | Subgraphs:
        """Return the recompute plans of a model, or ORT's subgraphs; choose a plan if asked to."""
        model = self._variables.model(given.words["model"])
        words = given.words
        chosen, budget = words["choose"], words["budget"]
        if chosen is not None and budget is not None:
            raise UsageError("%ort recompute: --budget and --choose both choose a plan; use one")
        settings = RecomputeSettings.of(given.settings)
        with progress():
            plans = session.recompute_plans(
                model, self._variables.batch(given), optimizer=words["optimizer"] or "adamw"
            ).at(**dict(_size("recompute", word) for word in words["sizes"]))
            if settings.measure:
                plans.measure()
            found = plans.subgraphs if settings.subgraphs else plans
            if budget is not None:
                chosen = plans.least_time(budget)
            if chosen is not None:
                plans.choose(chosen)
                print(f"{chosen} from the next step on")
        return found

    def profile(self, given: ParsedCommand) -> Profile:
        """Return the profile of a training step."""
        model = self._variables.model(given.words["model"])
        with progress():
            return session.profile(model, self._variables.batch(given), **given.settings)

    def lines(self, given: ParsedCommand) -> SourceLines:
        """Return the code of a model with the time and the memory of each line."""
        model = self._variables.model(given.words["model"])
        with progress():
            return session.lines(model, self._variables.batch(given), **given.settings)

    def zero(self, given: ParsedCommand) -> ZeroPlan:
        """Return the memory that training takes on each GPU at ZeRO's stages."""
        model, count = given.words["model"], given.words["params"]
        if (model is None) == (count is None):
            raise UsageError(
                "%ort zero plan: name a model or a number of parameters, as in --params 2.7B"
                + ("" if model is None else "; not both")
            )
        planned = count if model is None else self._variables.model(model)
        return zero_plan(planned, **given.settings)

    def plan(self, given: ParsedCommand) -> TrainingPlan | Table[PublishedRun]:
        """Return the plan of training a transformer, or the published runs."""
        word = given.words["model"]
        if word == "published" and word not in self._variables.namespace:
            return published_table()
        plan = training_plan(self._variables.namespace.get(word, word), **given.settings)
        if given.words["script"] is not None:
            for path in plan.write(given.words["script"]):
                print(path)
        return plan


def _size(command: str, word: str) -> tuple[str, int]:
    """Parse a size such as batch=32."""
    name, _, number = word.partition("=")
    if not name or not number.isdecimal():
        raise UsageError(
            f"%ort {command}: {word!r} is not a size; type NAME=NUMBER, as in batch=32"
        )
    return name, int(number)
