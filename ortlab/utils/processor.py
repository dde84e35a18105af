"""The processor as Linux tells of it; imports the standard library alone."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux tells of the processors."""


def first_processor(cpuinfo: str) -> dict[str, str]:
    """What the text of `CPUINFO` says of the first processor, by its words for that."""
    pairs = [line.partition(":")[::2] for line in cpuinfo.splitlines()]
    return {name.strip(): value.strip() for name, value in reversed(pairs)}
