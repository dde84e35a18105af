"""Tests that errors in a notebook are short and name the user's own line."""

from __future__ import annotations

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from ortlab.engines.base import NotFinite
from ortlab.utils.errors import concise, place, short_place, shorten


def _deep(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Linear(2, 2)(x)


def test_the_users_line_is_named_and_nobody_elses() -> None:
    with pytest.raises(RuntimeError) as caught:
        _deep(torch.zeros(1, 3))
    caught.value.add_note("the batch was float32[1, 3]")
    message, note, *lines = concise(caught.value)
    assert message.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert note == "the batch was float32[1, 3]"
    assert any("test_errors.py" in line and "Linear(2, 2)(x)" in line for line in lines)
    assert not any("site-packages" in line for line in lines)


def _wrapped() -> None:
    try:
        _deep(torch.zeros(1, 3))
    except RuntimeError as error:
        raise ValueError("outer") from error


def test_the_lines_of_a_cause_count_too() -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        _wrapped()
    assert any("in _deep" in line for line in concise(caught.value))


@pytest.mark.parametrize("kind", [NotFinite, KeyError])
def test_a_notebook_shows_no_traceback(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("it is said in one line")
    if kind is KeyError:
        shorten(error)
    shell = InteractiveShell.instance()
    shell.user_ns["error"] = error
    shell.run_cell("raise error")
    shown = capsys.readouterr().out
    assert "it is said in one line" in shown
    assert "Traceback" not in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_cell_is_called_a_cell() -> None:
    assert place("/tmp/ipykernel_12/345.py", 4) == "cell line 4"
    assert place("<ipython-input-1-6f88>", 4) == "cell line 4"
    assert place("/tmp/ipython-input-2938354417.py", 4) == "cell line 4"  # in Colab
    assert place(__file__, 1).endswith(
        'test_errors.py:1: """Tests that errors in a notebook are short and name the user\'s '
        'own line."""'
    )


def test_a_short_place_has_the_number_of_the_cell() -> None:
    shell = InteractiveShell.instance()
    shell.run_cell("def here(): pass", store_history=True)
    file = shell.user_ns["here"].__code__.co_filename
    assert short_place(file, 1) == f"cell {shell.execution_count - 1}, line 1"
    assert short_place("/tmp/ipykernel_12/345.py", 4) == "cell line 4"
    assert short_place(__file__, 4) == "test_errors.py:4"
