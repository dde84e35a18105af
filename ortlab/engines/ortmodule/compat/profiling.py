"""Profile of an execution manager's session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ortlab.utils.session_profile import Ran, read


def finish(manager: Any) -> list[Ran]:
    """End the profile of a session, which keeps running without it, and return its runs.

    Args:
        manager: ORT's execution manager whose session is profiled.
    """
    return read(Path(manager._execution_agent._inference_session.end_profiling()))
