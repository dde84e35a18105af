"""Files that the kernel and its ranks exchange, also where they share no folder.

Ranks on this machine, and on hosts that share $ORTLAB_HOME, open the kernel's own files. Others get
copies in the private folder of their host's workers, in pieces over ipyparallel's encrypted
channel; the first rank of each host writes and reads them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from ortlab.cluster import facts

_PIECE: Final = 8 << 20
"""Bytes of a file in one message."""

AskEach = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]
"""Calls a function on each rank with its own arguments and returns the results, by rank."""


class HostFiles(Protocol):
    """Way in which the files of the kernel reach its ranks."""

    def lent(self, path: Path) -> contextlib.AbstractContextManager[str]:
        """Let the ranks read a file or a folder of files within the context.

        Args:
            path: The file or the folder.

        Yields:
            Its name on the ranks, for `place_of`.
        """

    def taken(self, folder: Path) -> contextlib.AbstractContextManager[str]:
        """Let the ranks write files within the context, which are in a folder after it.

        Args:
            folder: An empty folder.

        Yields:
            Its name on the ranks, for `place_of`.
        """


class SharedFiles:
    """`HostFiles` of ranks that see the kernel's folders."""

    @contextlib.contextmanager
    def lent(self, path: Path) -> Iterator[str]:
        """See `HostFiles.lent`."""
        yield str(path)

    @contextlib.contextmanager
    def taken(self, folder: Path) -> Iterator[str]:
        """See `HostFiles.taken`."""
        yield str(folder)


class SentFiles:
    """`HostFiles` of ranks on hosts that share no folder with the kernel.

    Args:
        ask_each: Function that calls another one on the ranks.
        firsts: Whether it is the first of its host, by rank.
    """

    def __init__(self, ask_each: AskEach, firsts: Sequence[bool]) -> None:
        self._ask_each = ask_each
        self._firsts = firsts

    @contextlib.contextmanager
    def lent(self, path: Path) -> Iterator[str]:
        """See `HostFiles.lent`."""
        with self._folder(path.name):
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in filter(Path.is_file, files):
                self._send(file, f"{path.name}/{file.name}")
            yield path.name if path.is_dir() else f"{path.name}/{path.name}"

    @contextlib.contextmanager
    def taken(self, folder: Path) -> Iterator[str]:
        """See `HostFiles.taken`."""
        with self._folder(folder.name):
            yield folder.name
            self._fetch(folder)

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[None]:
        """Make a folder on each host for the context."""
        self._on_hosts(_make, (name,))
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # they may have ended, and it with them
                self._on_hosts(_remove, (name,))

    def _send(self, file: Path, name: str) -> None:
        with file.open("rb") as source:
            while True:  # an empty file is a file, too
                offset = source.tell()
                piece = source.read(_PIECE)
                self._on_hosts(_write, (name, offset, piece))
                if len(piece) < _PIECE:
                    return

    def _fetch(self, folder: Path) -> None:
        listed = self._on_hosts(_sizes, (folder.name,))
        plans = [
            [
                (name, offset)
                for name, size in (sizes or {}).items()
                for offset in range(0, max(size, 1), _PIECE)
            ]
            for sizes in listed
        ]
        for number in range(max(map(len, plans))):
            asked = [plan[number] if number < len(plan) else None for plan in plans]
            pieces = self._ask_each(
                _if_asked, [(_read, each and (folder.name, *each, _PIECE)) for each in asked]
            )
            for each, piece in zip(asked, pieces, strict=True):
                if each is None:
                    continue
                name, offset = each
                if Path(name).name != name:
                    raise RuntimeError(f"a host sent a file with the impossible name {name!r}")
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
                with open(descriptor, "wb") as target:
                    target.seek(offset)
                    target.write(piece)

    def _on_hosts(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """Call a function on the first rank of each host."""
        first, other = (function, arguments), (function, None)
        return self._ask_each(_if_asked, [first if each else other for each in self._firsts])


# ---- on a rank -----------------------------------------------------------------------------------


def place_of(name: str) -> Path:
    """Return the path of a file or folder that the kernel named.

    Args:
        name: The name that `HostFiles` yielded.
    """
    return Path(os.environ.get(facts.FOLDER, "")) / name  # an absolute path stays what it is


def _if_asked(function: Callable[..., Any], arguments: tuple[Any, ...] | None) -> Any:
    return None if arguments is None else function(*arguments)


def _make(name: str) -> None:
    _remove(name)  # of a call that failed
    place_of(name).mkdir(mode=0o700)


def _remove(name: str) -> None:
    shutil.rmtree(place_of(name), ignore_errors=True)


def _write(name: str, offset: int, piece: bytes) -> None:
    with place_of(name).open("ab") as target:
        target.truncate(offset)
        target.write(piece)


def _sizes(name: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(place_of(name).iterdir())}


def _read(folder: str, name: str, offset: int, size: int) -> bytes:
    with (place_of(folder) / name).open("rb") as source:
        source.seek(offset)
        return source.read(size)
