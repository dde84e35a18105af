"""Tests that engines' messages are printed only where no view shows them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.needed_engines import needs

SCRIPT = """
import torch, ortlab
from torch import nn

class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn_like(x)

for _ in range(2):
    model = ortlab.wrap(Noisy(4, 4), engine="ortmodule")
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
class Odd(nn.Linear):
    def forward(self, x):
        return torch.special.bessel_j0(super().forward(x))
ortlab.wrap(Odd(4, 4), fallback=True)(torch.ones(2, 4))
"""
UNCHECKED = (
    "ortlab: Noisy in engine 'ortmodule': not checked: forward draws random numbers besides dropout"
)


def said(before: str = "") -> list[str]:
    """Return ortlab's lines on stderr from a program that begins with `before`."""
    needs("ortmodule")
    done = subprocess.run(
        [sys.executable, "-c", before + SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "ortlab: " in line]


def test_a_script_hears_each_once_a_model() -> None:
    first, second, third = said()
    assert first == second == UNCHECKED
    assert third.startswith("ortlab: Odd: fallback to ort: ")
    assert "bessel_j0" in third


def test_a_program_has_them_where_its_log_goes() -> None:
    setup = "import logging; logging.basicConfig(format='LOG %(name)s %(levelname)s %(message)s')\n"
    assert said(setup)[0] == f"LOG ortlab WARNING {UNCHECKED}"


def test_a_notebook_whose_views_show_them_does_not() -> None:
    shell = "from IPython.core.interactiveshell import InteractiveShell\nimport ortlab\n"
    loads = "ip = InteractiveShell.instance(); ortlab.load_ipython_extension(ip)\n"
    assert said(shell + loads) == []
    unloads = "ortlab.unload_ipython_extension(ip)\n"
    assert len(said(shell + loads + unloads)) == 3
