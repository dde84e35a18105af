"""The export lock, and a filter for the exporter's output on the process's standard streams."""

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
"""Lock that is held during an export: torch's TorchScript exporter is process-wide state."""


_NOISE = (
    rb"^(Torch IR graph at exception|Exported graph): .*?^  return \([^\n]*\n+"
    rb"|^(\[W|Warning: )[^\n]*\n"
    rb"|^[^\n]*type is missing, so it may result in wrong shape inference[^\n]*\n"
)
"""Pattern of the exporter's own messages on the process's standard streams."""


@contextlib.contextmanager
def streams_filtered(enable: bool = True, *, noise: bytes = _NOISE, **_log: Any) -> Iterator[None]:
    """Drop text that C++ code writes to the process's standard streams where it matches `noise`.

    All other text, printed by the model or by another thread, is written when the context exits.
    ORT's own implementation asks ``sys.stdout`` for its file descriptor; in a notebook that is not
    the descriptor that C++ code writes to, and elsewhere the call raises.

    Args:
        enable: False leaves the streams alone.
        noise: Regular expression of the text to drop, matched with ``MULTILINE`` and ``DOTALL``.
        **_log: Further arguments that ORT passes; ignored.
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
    """Flush C's streams; buffered text of a graph would otherwise appear later and in pieces."""
    with contextlib.suppress(OSError, TypeError):  # Windows, which ORT training does not support
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
