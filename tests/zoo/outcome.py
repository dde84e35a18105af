"""How a cell of the sweep went."""

from __future__ import annotations

import math
from dataclasses import dataclass

OK, REFUSED, WRONG, FAILED = "ok", "refused", "WRONG", "FAILED"
"""As eager torch trains; an error before a wrong step; neither; the cell could not be tried."""


@dataclass(frozen=True)
class Outcome:
    """How a cell went, and why where it is not ok.

    Errors are the largest relative ones that were seen: of losses, of gradients and buffers, of the
    losses of ten steps. ``exports`` is the number of exported graphs.
    """

    name: str
    status: str
    reason: str = ""
    loss_error: float = math.nan
    gradient_error: float = math.nan
    steps_error: float = math.nan
    exports: int = 0
    seconds: float = 0.0
