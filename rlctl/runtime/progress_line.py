"""A line with a bar on the terminal at stderr, while a program waits for work of a fleet."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SILENT_S = 1.0
"""Most operations end within this time, and show no line."""

_BAR_WIDTH = 12
"""Characters of the bar. A terminal with 80 columns has room for a text of 65 characters beside the bar."""


def at_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


def size(number: int) -> str:
    """Return a number of bytes such as 512 B, 1.5 MB, 20 GB."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{number} B" if unit == "B" else f"{value:.3g} {unit}"


class ProgressLine:
    """A line that appears at the first :meth:`show` after SILENT_S, and disappears at :meth:`close`.

    For one thread at a time.
    """

    def __init__(self, *, color: bool = True) -> None:
        self._color = color
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def show(self, text: str, done: int, total: int) -> None:
        """Replace the text, and draw ``done`` of ``total`` as a bar. ``total`` 0: a moving bar."""
        if time.monotonic() - self._started < SILENT_S:
            return
        if self._progress is None:
            self._progress = self._begin()
        self._progress.update(self._progress.task_ids[0], description=text, completed=done, total=total or None)

    def close(self) -> None:
        """Remove the line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _begin(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.table import Column

        # A new console takes NO_COLOR and the width of the terminal from the environment.
        console = Console(stderr=True, highlight=False, no_color=None if self._color else True)
        words = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        progress = Progress(SpinnerColumn(), BarColumn(_BAR_WIDTH), words, console=console, transient=True)
        progress.add_task("", total=None)
        progress.start()
        return progress
