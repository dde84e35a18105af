"""What ORT makes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STAGES: Final[Mapping[str, str]] = {
    "exported": "as torch exported it",
    "forward": "optimized before the gradient",
    "gradient": "with the gradient that ORT builds",
    "execution": "what the session runs",
    "eval": "forward alone, as exported for evaluation",
}
"""The stages, and what each is."""
