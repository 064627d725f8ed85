"""A view that changes: on a terminal in place, elsewhere printed again after every change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from rlctl.cli.app.settings import Settings
from rlctl.cli.render import tables
from rlctl.cli.render.printer import View, show


def show_live(settings: Settings, views: Generator[View, None, None], shown: threading.Event) -> None:
    """Show each view until the last view or an interrupt. ``shown`` is set at the first view."""
    console = tables.console(settings.color) if settings.output in ("table", "wide") else None
    if console is None or not console.is_terminal or not console.file.isatty():
        with contextlib.closing(views):
            for view in views:
                shown.set()
                show(settings, view)
        return
    from rich.live import Live

    wide = settings.output == "wide"
    last: View | None = None
    try:
        # On the terminal's second screen, and printed once more at the end: the last output is complete at any
        # interrupt.
        live = Live(console=console, auto_refresh=False, screen=True)
        with live, contextlib.closing(views):
            for view in views:
                last = view
                shown.set()
                live.update(tables.rich(view.tables(wide), width=console.width, whole_ids=wide), refresh=True)
    finally:
        if last is not None:
            show(settings, last)
