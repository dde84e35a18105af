"""Tests of the ranks' sparklines: ortlab/notebook/js/src/spark.js in a Chromium, without Lab."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

import ortlab
from ortlab.metrics.recorder import NAN
from ortlab.notebook.views.rank_feed import drawn

pytestmark = pytest.mark.browser

SOURCE = Path(ortlab.__file__).parent / "notebook" / "js" / "src" / "spark.js"
DRAW = """async ([source, line]) => {
    const { path } = await import(`data:text/javascript;base64,${source}`);
    return path(line);
}"""


@pytest.mark.parametrize(
    ("values", "d", "width"),
    [
        ([0, 0.5, 1], "M0 254L1 127L2 0", 2),
        ([1, 0, NAN, 1, 1], "M0 0L1 254M3 0L4 0", 4),
        ([NAN, 0, NAN, 1], "M1 254h0.9M3 0h0.9", 3),
        ([4.0], "M0 127h0.9", 1),
        ([NAN, NAN], "", 1),
    ],
)
def test_a_line_is_drawn_as_it_was_sent(
    chromium: Browser, values: list[float], d: str, width: int
) -> None:
    source = base64.b64encode(SOURCE.read_bytes()).decode()
    page = chromium.new_page()
    try:
        found: dict[str, Any] = page.evaluate(DRAW, [source, drawn(np.array([values]))[0]])
    finally:
        page.close()
    assert found == {"d": d, "width": width}
