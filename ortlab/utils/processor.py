"""Processor information from Linux; imports only the standard library."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""File in which Linux describes the processors."""


def first_processor(cpuinfo: str) -> dict[str, str]:
    """Parse the entry of the first processor.

    Args:
        cpuinfo: Text of `CPUINFO`.

    Returns:
        Values by field name, such as "model name" and "flags".
    """
    pairs = [line.partition(":")[::2] for line in cpuinfo.splitlines()]
    return {name.strip(): value.strip() for name, value in reversed(pairs)}
