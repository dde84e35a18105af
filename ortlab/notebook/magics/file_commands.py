"""Commands that write files: a training script, a model for inference or for on-device training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import display

from ortlab.api import export, script
from ortlab.notebook.magics.reporting import progress

if TYPE_CHECKING:
    from ortlab.deploy.exported import Exported
    from ortlab.deploy.on_device_training import TrainingArtifacts
    from ortlab.deploy.torchrun_script import Script
    from ortlab.notebook.magics.parsing import ParsedCommand
    from ortlab.notebook.magics.variables import Variables


class FileCommands:
    """One method per command, named like the command.

    Args:
        variables: The user's variables.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def script(self, given: ParsedCommand) -> Script:
        """Write the fine-tuning of a model as a script."""
        words, settings = given.words, dict(given.settings)
        loss = settings.pop("loss", None)
        return script(
            self._variables.model(words["model"]),
            self._variables.optional("loader", words["data"]),
            to=words["to"] or "standalone",
            make_model=words["make_model"],
            make_data=words["make_data"],
            loss=self._variables.loss(loss),
            **settings,
        )

    def export(self, given: ParsedCommand) -> Exported | TrainingArtifacts:
        """Write a model for inference, or with ``--trainable`` for on-device training."""
        words = given.words
        if words["trainable"] is not None:
            return self._export_training(given)
        if words["loss"] is not None:
            raise ValueError("--loss needs --trainable; a graph for inference has no loss")
        settings = dict(given.settings)
        web = settings.pop("web", False)
        with progress():
            exported = export(
                self._variables.model(words["model"]),
                words["path"],
                self._variables.batch(given),
                second=self._variables.optional("batch", words["second"]),
                eval_dataset=self._variables.optional("loader", words["eval_dataset"]),
                **settings,
            )
        if web:
            display(exported.in_page())  # type: ignore[no-untyped-call]
        return exported

    def _export_training(self, given: ParsedCommand) -> TrainingArtifacts:
        words = given.words
        for name in ("second", "eval_dataset", *given.settings):
            if words.get(name) is not None or name in given.settings:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for inference; leave it out with --trainable")
        if words["batch"] is None:
            raise ValueError("--trainable needs a batch with its labels: --batch train")
        with progress():
            made: TrainingArtifacts = export(
                self._variables.model(words["model"]),
                words["path"],
                self._variables.batch(given),
                trainable=words["trainable"].split(","),
                loss=self._variables.loss(words["loss"]),
            )
        return made
