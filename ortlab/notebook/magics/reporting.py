"""Output of a command while it runs: progress lines, and ortlab's own errors as one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from ortlab.engines import base
from ortlab.settings import EngineSettings

if TYPE_CHECKING:
    from ortlab.engines.wrapped_models import CellReport, NotWrapped


@contextlib.contextmanager
def progress() -> Iterator[None]:
    """Print progress lines of long work, such as the build of ORT's extension."""
    token = base.progress.set(print)
    try:
        yield
    finally:
        base.progress.reset(token)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Show ortlab's own errors without a traceback; errors of the user's code keep theirs.

    Raises:
        UsageError: With the message of a ValueError or RuntimeError that ortlab raised.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not _raised_by_ortlab(error):
            raise
        raise UsageError(str(error)) from error


def _raised_by_ortlab(error: BaseException) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("ortlab.")


def print_wrapped(report: CellReport) -> None:
    """Print which models were wrapped, or why none was.

    Args:
        report: Result of `Session.bind_cell`.
    """
    wrapped = [", ".join(entry.names) for entry in report.wrapped]
    if wrapped:
        entry = report.wrapped[0]  # one engine for all
        verb = "run" if len(wrapped) > 1 else "runs"
        print(f"{' and '.join(wrapped)} {verb} on engine {entry.settings.engine!r}")
        if entry.choice:
            print(entry.choice)
        return
    print("%%ort wrapped nothing: the cell binds no trainable model of its own")
    for skipped in report.left:
        print(f"  {skipped.name} {skipped.reason}")


def print_not_wrapped(left: Sequence[NotWrapped], settings: EngineSettings) -> None:
    """Print which models a cell that did not finish left unwrapped, and how to wrap them.

    Args:
        left: Result of `Session.leave_cell`; nothing is printed if it is empty.
        settings: Settings of the cell.
    """
    if not left:
        return
    names = [one.name for one in left]
    declared, standing = EngineSettings.declarations(), EngineSettings()
    options = (
        declared[name].typed(value)
        for name, value in settings.as_dict().items()
        if value != standing[name]
    )
    print(
        f"not wrapped, because the cell did not finish: {', '.join(names)}; run the cell again, or "
        f"{' '.join(('%ort wrap', *names, *options))}"
    )
