"""An IPython shell into which tests type the magics, as a user types them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config

import ortlab
from ortlab.session import session

PRELUDE = """
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.inner(x))

def batches(count=4, size=4):
    return [(torch.randn(size, 4), torch.randint(2, (size,))) for _ in range(count)]
"""


class Typist:
    """Types cells into a shell and reads their output."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self.shell = shell
        self.capsys = capsys

    def __call__(self, cell: str) -> str:
        """Run a cell that must succeed; return the text it printed and displayed."""
        result, out, err = self.run(cell)
        assert result.success, out + err
        return out

    def run(self, cell: str) -> tuple[ExecutionResult, str, str]:
        self.capsys.readouterr()
        result = self.shell.run_cell(cell, store_history=True)
        return result, *self.capsys.readouterr()

    def refused(self, cell: str) -> str:
        """Run a cell that must fail with one or two lines and no traceback; return them."""
        result, out, err = self.run(cell)
        assert not result.success
        assert "Traceback" not in out + err
        assert err.startswith("UsageError: ")
        assert len(err.splitlines()) <= 2
        return err.removeprefix("UsageError: ").rstrip()

    def raised(self, cell: str) -> str:
        """Run a cell that must fail with a traceback; return it."""
        result, out, err = self.run(cell)
        assert not result.success
        assert "Traceback" in out, err
        return out

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]

    def completions(self, text: str) -> list[str]:
        """Return Tab's completions of `text`, which must agree between terminal and notebook."""
        _, short = self.shell.complete("", text, len(text))
        with provisionalcompleter():
            long = [c.text for c in self.shell.Completer.completions(text, len(text))]
        assert sorted(short) == sorted(long)
        return short


@pytest.fixture
def ip(capsys: pytest.CaptureFixture[str]) -> Iterator[Typist]:
    """Start a separate shell with the extension loaded; empty the session before and afterwards."""
    empty_session()
    InteractiveShell.clear_instance()
    config = Config(HistoryManager={"enabled": False})
    shell = InteractiveShell.instance(config=config, colors="nocolor")
    typist = Typist(shell, capsys)
    typist("%load_ext ortlab")
    typist(PRELUDE)
    yield typist
    empty_session()
    ortlab.unload_ipython_extension(shell)
    InteractiveShell.clear_instance()


def empty_session() -> None:
    """End and forget the session's runs, and unwrap its models."""
    for run in (*session.runs, *session.trainers):
        run.stop()
        assert run.wait_over(60)
    session.runs.clear()
    session.trainers.clear()
    for entry in session.wrapped.entries:
        assert entry.wrapper is not None
        session.wrapped.unwrap(entry.wrapper)
