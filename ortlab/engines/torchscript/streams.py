"""Exports, one at a time, and kept quiet on the standard streams of the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


EXPORT = threading.RLock()
"""Held during an export."""


_NOISE = (
    rb"^(Torch IR graph at exception|Exported graph): .*?^  return \([^\n]*\n+"
    rb"|^(\[W|Warning: )[^\n]*\n"
    rb"|^[^\n]*type is missing, so it may result in wrong shape inference[^\n]*\n"
)
"""What the exporter says of itself on the process's standard streams."""


@contextlib.contextmanager
def streams_filtered(enable: bool = True, *, noise: bytes = _NOISE, **_log: Any) -> Iterator[None]:
    """What C++ code writes to the process's standard streams is dropped where `noise` matches it.

    The rest, printed by the model or another thread, is written when it is over. ORT's own form
    asks sys.stdout for its descriptor, which in a notebook is another one than C++ writes to, and
    elsewhere raises.
    """
    if not enable:
        yield
        return
    with EXPORT, contextlib.ExitStack() as stack:
        sys.stdout.flush()
        sys.stderr.flush()
        _flush()
        for stream in (1, 2):
            with contextlib.suppress(OSError):  # closed, as in a daemon
                stack.enter_context(_filtered(stream, noise))
        yield


def _flush() -> None:
    """Has C's streams written: what they hold of a graph's text would come later, and in halves."""
    with contextlib.suppress(OSError, TypeError):  # Windows, which ORT's training is not for
        ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _filtered(stream: int, noise: bytes) -> Iterator[None]:
    with tempfile.TemporaryFile() as sink:
        kept = os.dup(stream)
        try:
            os.dup2(sink.fileno(), stream)
            yield
        finally:
            _flush()
            os.dup2(kept, stream)
            os.close(kept)
            sink.seek(0)
            rest = re.sub(noise, b"", sink.read(), flags=re.MULTILINE | re.DOTALL)
            while rest:
                rest = rest[os.write(stream, rest) :]
