"""The IPython extension: everything that ``%load_ext ortlab`` adds to a shell and later removes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.deploy import page
from ortlab.notebook.magics import cells, completion
from ortlab.notebook.magics.displays import Displays
from ortlab.notebook.magics.magics import OrtMagics
from ortlab.notebook.views.closing import cell_begins
from ortlab.session import session
from ortlab.utils import warn_once

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.deploy.exported import Exported


class Extension:
    """Magics, cell form, completion and displays of one shell.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._magics = OrtMagics(shell)
        self._calls = cells.Calls(OrtMagics.__name__)
        self._matcher = completion.matcher(completion.Names(shell))
        self._displays = Displays(shell)

    def load(self) -> None:
        """Add everything to the shell."""
        shell = self._shell
        shell.register_magics(self._magics)
        shell.input_transformers_cleanup.append(cells.mark)
        shell.ast_transformers.append(self._calls)
        shell.Completer.custom_matchers.append(self._matcher)
        shell.events.register("pre_run_cell", self._displays.forget)
        shell.events.register("pre_run_cell", cell_begins)
        shell.events.register("pre_run_cell", _count_cell)
        shell.events.register("pre_run_cell", self._magics.cell_started)
        shell.events.register("post_run_cell", self._magics.cell_ended)
        session.viewers.append(self._displays.show)
        session.waits = True
        warn_once.are_seen()
        page.register(_in_page)
        session.wrapped.namespace = shell.user_ns
        self._displays.register()

    def unload(self) -> None:
        """Remove everything; models stay wrapped and runs continue without charts."""
        shell = self._shell
        shell.input_transformers_cleanup.remove(cells.mark)
        shell.ast_transformers.remove(self._calls)
        shell.Completer.custom_matchers.remove(self._matcher)
        shell.events.unregister("pre_run_cell", self._displays.forget)
        shell.events.unregister("pre_run_cell", cell_begins)
        shell.events.unregister("pre_run_cell", _count_cell)
        shell.events.unregister("pre_run_cell", self._magics.cell_started)
        shell.events.unregister("post_run_cell", self._magics.cell_ended)
        session.viewers.remove(self._displays.show)
        session.waits = False
        warn_once.are_seen(by_themselves=True)
        page.register(None)
        session.wrapped.namespace = None
        self._displays.unregister()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("ort", None)
        del shell.magics_manager.registry[OrtMagics.__name__]


def _count_cell(_: object) -> None:
    session.cell += 1


def _in_page(exported: Exported, form: str | None) -> Any:
    from ortlab.notebook.views.in_page import InPage  # heavy: onnx

    return InPage(exported, form)


_extensions: dict[InteractiveShell, Extension] = {}


def load(shell: InteractiveShell) -> None:
    """See `ortlab.load_ipython_extension`. Loading twice changes nothing."""
    if shell not in _extensions:
        _extensions[shell] = Extension(shell)
        _extensions[shell].load()


def unload(shell: InteractiveShell) -> None:
    """See `ortlab.unload_ipython_extension`. Without `load` before, nothing changes."""
    extension = _extensions.pop(shell, None)
    if extension is not None:
        extension.unload()
