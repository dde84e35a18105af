"""Buttons of notebooks, which wait for the end of a cell where the kernel is older."""

from __future__ import annotations

from ortlab.utils.findings import package_version, version_numbers

_ANSWERS = (7, 3)
"""First version of ipykernel that handles the messages of widgets while a cell awaits."""


def waiting() -> str | None:
    """Return a line saying that buttons wait for the end of a cell; None if they do not."""
    version = package_version("ipykernel")
    if version is None or version_numbers(version) >= _ANSWERS:
        return None
    return (
        f"with ipykernel {version}, buttons respond only while no cell runs: leave out `await`, "
        "or interrupt the cell first"
    )
