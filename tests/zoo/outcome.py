"""The result of one cell of the sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

OK, REFUSED, WRONG, FAILED = "ok", "refused", "WRONG", "FAILED"
"""Equal to eager torch; an error before a wrong step; neither of them; could not be tried."""


@dataclass(frozen=True)
class Outcome:
    """Result of a cell, with the reason where it is not ok.

    The errors are the largest relative errors seen: of losses, of gradients and buffers, and of
    the losses of ten steps. ``engine`` is the one in use, and ``exports`` the number of its graphs.
    Of engine ``ort``, ``ort_share`` is the share of compute nodes that run in ORT, and ``in_torch``
    names the others, graph breaks and what the check moved to torch.
    """

    name: str
    status: str
    reason: str = ""
    loss_error: float = math.nan
    gradient_error: float = math.nan
    steps_error: float = math.nan
    engine: str = ""
    exports: int = 0
    ort_share: float = math.nan
    in_torch: str = ""
    seconds: float = 0.0
