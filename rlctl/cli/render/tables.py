"""Tables: drawn by rich on a terminal, as aligned plain text elsewhere. Plain text is never wrapped or cut."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EMPTY = "-"
GAP = "  "
UNBOUNDED = 4000

_DIGEST = re.compile(r"[0-9a-f]{64}(?:@[0-9a-f]{32})?")
_DIGEST_SHOWN = 12

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-([0-9a-f]{12})")

_EXPENDABLE = (
    *("UPDATABLE", "EVIDENCE", "CREATED", "NODE", "DEVICE", "VERIFIED", "TENSORS", "BYTES", "STEP", "ELAPSED"),
    *("MODEL", "SEQ", "CONFIRMED", "RANKS", "HEARD", "VERSION"),
)
"""Columns that a narrow terminal omits, in this order; then further columns from the right, except _KEPT."""

_KEPT = frozenset({"SLOT", "RANK", "OPERATION", "VERB", "STATE", "OUTCOME", "ROUTABLE", "MEANING", "TEXT"})

_NOTES = frozenset({"ERROR", "WHY NOT"})
"""Columns of sentences. Printed below the table if less than _NOTE_WIDTH remains."""

_NOTE_WIDTH = 40

_WRAPPED_WIDTH = 24
"""Largest width that the last column needs: the column wraps."""

_STYLES = {
    **dict.fromkeys(("READY", "APPLIED", "OK", "VERIFIED", "yes"), "green"),
    **dict.fromkeys(("PAUSED", "ASLEEP", "UPDATING", "JOINING", "RUNNING", "SKIPPED", "EXCLUDED", "PARTIAL"), "yellow"),
    **dict.fromkeys(("STALE", "DRAINING", "CANCELLED", "NOT_SENT"), "yellow"),
    **dict.fromkeys(("DIRTY", "UNKNOWN", "UNREACHABLE", "REJECTED", "FAILED", "no"), "red"),
    "ok": "green",
    "warning": "yellow",
    "failure": "red",
    EMPTY: "dim",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under headers.

    Attributes:
        headers: a header for each column, upper case; all "": no line of headers.
        rows: cells; "" shows as "-".
        optional: headers of columns that are omitted if every cell is empty.
        title: a line above the table.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    optional: frozenset[str] = frozenset()
    title: str = ""

    def shown(self) -> tuple[list[str], list[list[str]]]:
        """Return (headers, rows) without empty optional columns."""
        columns = [
            index
            for index, header in enumerate(self.headers)
            if header not in self.optional or any(row[index] for row in self.rows)
        ]
        return (
            [self.headers[index] for index in columns],
            [[row[index] or (EMPTY if self.headers[index] else "") for index in columns] for row in self.rows],
        )


def facts(pairs: Sequence[tuple[str, str]], title: str = "") -> Table:
    """Return a table of names and values, without empty values."""
    return Table(("", ""), [(f"{name}:", value) for name, value in pairs if value], title=title)


def prose(lines: Sequence[str], title: str = "") -> Table:
    return Table(("",), [(line,) for line in lines], title=title)


def plain(tables: Sequence[Table]) -> str:
    return "\n".join(line for index, table in enumerate(tables) for line in _plain(table, first=index == 0))


def _plain(table: Table, *, first: bool) -> Iterator[str]:
    if not first:
        yield ""
    if table.title:
        yield table.title
    headers, rows = table.shown()
    lines = [headers, *rows] if any(headers) else rows
    if not lines:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def console(color: str, *, overflow: bool = False) -> Console | None:
    """Return a console for rich, or None for plain text. ``color``: auto, always, never.

    ``overflow``: lines of any length, whatever the terminal's width.
    """
    terminal = sys.stdout.isatty()
    if not terminal and color != "always":
        return None
    from rich.console import Console

    colorless = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    width = None if terminal and not overflow else UNBOUNDED
    return Console(force_terminal=True, no_color=colorless, highlight=False, width=width)


def rich(tables: Sequence[Table], *, width: int, whole_ids: bool) -> RenderableType:
    """Return the tables for a terminal of this width. ``whole_ids``: digests are not shortened."""
    from rich.console import Group
    from rich.padding import Padding

    parts = [_rich(table, width, whole_ids=whole_ids) for table in tables]
    return Group(*(Padding(part, (0 if index == 0 else 1, 0, 0, 0), expand=False) for index, part in enumerate(parts)))


def style(word: str) -> str:
    return _STYLES.get(word, "")


def _rich(table: Table, width: int, *, whole_ids: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    headers, rows = table.shown()
    if not whole_ids:
        rows = [[_DIGEST.sub(_shorten, cell) for cell in row] for row in rows]
    headers, rows, notes = _notes_apart(headers, rows, width)
    if any(headers):
        headers, rows, hidden = _fitted(headers, rows, width)
        notes += [f"(too narrow for {', '.join(hidden)}; -o wide shows everything)"] if hidden else []
    grid = RichTable(
        box=None,
        pad_edge=False,
        padding=(0, len(GAP), 0, 0),
        header_style="bold",
        show_header=any(headers),
        title=table.title or None,
        title_justify="left",
        title_style="bold",
    )
    for index, header in enumerate(headers):
        last = index == len(headers) - 1
        grid.add_column(header, no_wrap=not last, overflow="fold" if last else "ellipsis")
    for row in rows:
        grid.add_row(*(Text(cell, style=style(cell)) for cell in row))
    return Group(grid, *(Text(note) for note in notes)) if notes else grid


def _notes_apart(headers: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Return (headers, rows, lines below): on a narrow terminal the sentences of the last column move below."""
    if headers[-1] not in _NOTES:
        return headers, rows, []
    lines = [headers, *rows]
    used_width = sum(max(len(line[column]) for line in lines) + len(GAP) for column in range(len(headers) - 1))
    longest = max(len(line[-1]) for line in lines)
    if longest <= width - used_width or width - used_width >= _NOTE_WIDTH:
        return headers, rows, []
    notes = [f"{row[0]}: {row[-1]}" for row in rows if row[-1] != EMPTY]
    return headers[:-1], [row[:-1] for row in rows], notes


def _fitted(headers: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Return (headers, rows, headers of omitted columns) that fit; ids are shortened first."""
    if _needed(headers, rows) > width:
        rows = [[_ID.sub(r"…\1", cell) for cell in row] for row in rows]
    hidden = []
    least = [header for header in _EXPENDABLE if header in headers[1:]]
    least += [header for header in reversed(headers[1:]) if header not in {*_EXPENDABLE, *_KEPT}]
    for header in least:
        if _needed(headers, rows) <= width:
            break
        column = headers.index(header)
        hidden.append(header)
        headers, *rows = [[*line[:column], *line[column + 1 :]] for line in (headers, *rows)]
    return headers, rows, hidden


def _needed(headers: list[str], rows: list[list[str]]) -> int:
    """Return the width that a table takes without a cut cell, in columns of the terminal."""
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]
    widths[-1] = max(len(headers[-1]), min(widths[-1], _WRAPPED_WIDTH))
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shorten(match: re.Match[str]) -> str:
    return match[0][:_DIGEST_SHOWN] + "…"
