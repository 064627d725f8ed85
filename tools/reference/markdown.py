"""Pieces of markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table and an empty line; nothing without rows."""
    if rows:
        yield _row(headers)
        yield _row(["---"] * len(headers))
        yield from map(_row, rows)
        yield ""


def prose(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text, each on one line; a paragraph that begins with \b stays unchanged."""
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first.strip() == "\b":
            yield "```\n" + textwrap.dedent(rest) + "\n```\n"
        else:
            yield " ".join(paragraph.split()) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
