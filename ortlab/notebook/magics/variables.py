"""The user's variables as commands read them: models, data, batches and loss functions by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engines.wrapped_models import model_called
from ortlab.notebook.magics.completion import Names
from ortlab.settings import unknown_name

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn

    from ortlab.notebook.magics.parsing import ParsedCommand


class Variables:
    """The variables of a shell's user.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._names = Names(shell)

    @property
    def namespace(self) -> dict[str, Any]:
        """The variables by name."""
        found: dict[str, Any] = self._shell.user_ns
        return found

    def names(self, kind: str) -> list[str]:
        """Return the names of the variables of a kind, as in `Names.of`."""
        return self._names.of(kind)

    def get(self, name: str | None) -> Any:
        """Return the value of a variable; None where there is none or `name` is None."""
        return None if name is None else self.namespace.get(name)

    def model(self, name: str) -> nn.Module:
        """Return the model called `name`.

        Raises:
            ValueError: If there is none; the message lists the models.
        """
        return model_called(name, self.namespace)

    def value(self, kind: str, name: str) -> Any:
        """Return the value of a variable.

        Args:
            kind: What it should be, as in `Names.of`; the error lists the variables of this kind.
            name: Name of the variable.

        Raises:
            ValueError: If there is no such variable.
        """
        if not name.isidentifier():
            raise ValueError(
                f"{name!r} is not the name of a variable; bind the value to one before, as in "
                f"x = {name}, and give x"
            )
        if name not in self.namespace:
            raise ValueError(
                f"nothing is called {name!r}: {unknown_name(name, self._names.of(kind))}"
            )
        return self.namespace[name]

    def optional(self, kind: str, name: str | None) -> Any:
        """Return the value of a variable as `value` does; None where `name` is None."""
        return None if name is None else self.value(kind, name)

    def batch(self, given: ParsedCommand) -> Any:
        """Return the batch that a command names with ``--batch``; None without one."""
        return self.optional("batch", given.words["batch"])

    def optimizer(self, name: str | None) -> Any:
        """Return the user's optimizer or factory called `name`, else `name` as one of ortlab."""
        value = self.get(name)
        return value if callable(value) or hasattr(value, "param_groups") else name

    def loss(self, name: str | None) -> Any:
        """Return the user's function called `name`, else `name` itself as a loss of ortlab."""
        value = self.get(name)
        return value if callable(value) else name
