"""Base class of the user's callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.training.run import Run


class Callback:
    """Base class of callbacks; any other object with some of these methods will do.

    A run calls them in its own thread between two steps, so training waits until they return.
    They may call ``run.pause()``, ``run.stop()``, ``run.apply()`` and ``run.checkpoint()``. Random
    numbers that they draw do not change training. A callback that raises pauses the run in a
    notebook and ends it in a script.

    Example:
        >>> class Told(ortlab.Callback):
        ...     def on_evaluate(self, run):
        ...         print(run.step, run.evaluations[-1].loss)
        >>> run = ortlab.finetune(model, train, eval_dataset=valid, callbacks=Told())
    """

    def on_run_start(self, run: Run) -> None:
        """React before the first step and the first evaluation.

        Args:
            run: The run.
        """

    def on_step_end(self, run: Run) -> None:
        """React to an optimizer step.

        Args:
            run: The run; ``run.step`` is the number of steps done, ``run.loss`` the last loss.
        """

    def on_evaluate(self, run: Run) -> None:
        """React to an evaluation.

        Args:
            run: The run; ``run.evaluations[-1]`` is the evaluation.
        """

    def on_checkpoint(self, run: Run) -> None:
        """React to checkpoints written since the last step, and to the one at the end.

        Args:
            run: The run; ``run.checkpoints[-1].path`` is the newest file.
        """

    def on_pause(self, run: Run) -> None:
        """React to a pause, before the run waits.

        Args:
            run: The run.
        """

    def on_run_end(self, run: Run) -> None:
        """React to the end, also of a run that failed or was stopped.

        Args:
            run: The run; ``run.so_far()`` is the result, ``run.error`` the error that ended it.
        """
