"""Tables with the same content in a notebook, in a terminal and on paper."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

R = TypeVar("R")

_STYLE = """
<style>
.ortlab-table table {border-collapse: collapse; color: var(--jp-content-font-color1, inherit)}
.ortlab-table th, .ortlab-table td {padding: 2px 12px 2px 0; vertical-align: top}
.ortlab-table th {border-bottom: 1px solid var(--jp-border-color1, currentColor)}
.ortlab-table td {font-variant-numeric: tabular-nums}
.ortlab-table p {margin: 4px 0; color: var(--jp-content-font-color2, inherit)}
.ortlab-table p {overflow-wrap: anywhere}
</style>
"""

_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of the surrounding text."""
LONGEST = 40
"""Longest word that is never broken; longer ones are paths, which must leave room for numbers."""


@dataclass(frozen=True)
class Column(Generic[R]):
    """Column of a table.

    Attributes:
        head: Heading.
        text: Formats the cell of a record.
        number: True for numbers, which are aligned right.
    """

    head: str
    text: Callable[[R], str]
    number: bool = False


class Table(Sequence[R]):
    """Sequence of records that is displayed as a table.

    Args:
        records: The records.
        columns: The columns.
        notes: Lines shown below the table.
        empty: Text shown if there are no records.
    """

    def __init__(
        self,
        records: Sequence[R],
        columns: Sequence[Column[R]],
        *,
        notes: Sequence[str] = (),
        empty: str = "nothing",
    ) -> None:
        self._records = tuple(records)
        self._columns = tuple(columns)
        self._cells = [[column.text(record) for column in columns] for record in records]
        self.notes = tuple(notes)
        self._empty = empty

    def noted(self, *notes: str) -> Table[R]:
        """Return a copy of the table with additional notes.

        Args:
            *notes: Lines to show below the existing notes.
        """
        return Table(self._records, self._columns, notes=self.notes + notes, empty=self._empty)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> R: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[R]: ...

    def __getitem__(self, index: int | slice) -> R | Sequence[R]:
        return self._records[index]

    def __repr__(self) -> str:
        notes = [escaped(note, but="\n") for note in self.notes]
        if not self._records:
            return "\n".join([escaped(self._empty, but="\n"), *notes])
        heads = [escaped(column.head) for column in self._columns]
        rows = [[escaped(cell) for cell in cells] for cells in self._cells]
        widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
        lines = []
        for cells in (heads, ["-" * width for width in widths], *rows):
            padded = (
                cell.rjust(width) if column.number else cell.ljust(width)
                for cell, width, column in zip(cells, widths, self._columns, strict=True)
            )
            lines.append("  ".join(padded).rstrip())
        return "\n".join([*lines, *notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        if not self._records:
            return self._html(f"<p>{html.escape(self._empty)}</p>{notes}")
        head = self._html_row("th", [column.head for column in self._columns])
        body = "".join(self._html_row("td", cells) for cells in self._cells)
        return self._html(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{notes}")

    @staticmethod
    def _html(inside: str) -> str:
        return f'{_STYLE}<div class="ortlab-table">{inside}</div>'

    def _html_row(self, tag: str, cells: Sequence[str]) -> str:
        return "<tr>{}</tr>".format(
            "".join(
                # Inline, because JupyterLab's own rule for tables overrides a style sheet's.
                f'<{tag} style="{_style(tag, cell, column)}">{_text(tag, cell, column)}</{tag}>'
                for cell, column in zip(cells, self._columns, strict=True)
            )
        )


def escaped(text: str, *, but: str = "") -> str:
    """Escape control characters as Python does, because names come from files.

    Args:
        text: The text.
        but: Control characters to keep.
    """
    return _OBEYED.sub(lambda found: found[0] if found[0] in but else repr(found[0])[1:-1], text)


def rounded(value: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on.

    Args:
        value: The number.
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(tag: str, cell: str, column: Column[R]) -> str:
    """Return a cell's HTML; a number may wrap only before its parentheses, on a narrow page."""
    number, bracket, more = cell.partition(" (")
    if tag == "th" or not column.number or not bracket:
        return html.escape(cell)
    return f'{html.escape(number)} <span style="white-space: nowrap">({html.escape(more)}</span>'


def _style(tag: str, cell: str, column: Column[R]) -> str:
    if column.number:
        whole = tag == "td" and " (" not in cell
        return "text-align: right" + ("; white-space: nowrap" if whole else "")
    longest = max(map(len, cell.split()), default=0)
    return "text-align: left" + ("; overflow-wrap: anywhere" if longest > LONGEST else "")
