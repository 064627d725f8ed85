"""``rlctl status``: the fleet at a glance, once or live."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator

import click

from rlctl.cli.app.connection import bounded, connected
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages, tables
from rlctl.cli.render.printer import View, show
from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.terminal import time_limit
from rlctl.v1.fleet_pb2 import Fleet

AGAIN_S = 0.5


@click.command(cls=Command)
@click.option("--model", default="", metavar="NAME", help="Only this model.")
@click.option("-w", "--watch", is_flag=True, help="Follow it until Ctrl-C, or for --timeout.")
@pass_settings
def status(settings: Settings, model: str, watch: bool) -> None:
    """Show models and stages.

    With -w a terminal shows them live; elsewhere the whole is printed again after every change, with -o jsonl a line
    each.
    """
    if watch:
        deadline = None if settings.timeout_s is None else time.monotonic() + settings.timeout_s
        seen = threading.Event()
        try:
            with time_limit(settings.timeout_s, "watching"):
                _watch(settings, model, seen)
        except RlctlError as error:
            up = error.reason is Reason.DEADLINE_EXCEEDED and deadline is not None and time.monotonic() >= deadline
            if not (up and seen.is_set()):
                raise
        return
    with bounded(settings) as fleet:
        show(settings, stages.fleet_view(fleet.status(model), settings.endpoint))


def _watch(settings: Settings, model: str, seen: threading.Event) -> None:
    """``seen``: set once the fleet was."""
    console = tables.console(settings.color) if settings.output in ("table", "wide") else None
    if console is None or not console.is_terminal or not console.file.isatty():
        with contextlib.closing(_changes(settings, model, seen)) as changes:
            for fleet in changes:
                show(settings, stages.fleet_view(fleet, settings.endpoint))
        return
    from rich.live import Live

    wide = settings.output == "wide"
    view: View | None = None
    try:
        # On the terminal's other screen, and printed once more at the end: what stays is whole, wherever the
        # interrupt hit.
        live = Live(console=console, auto_refresh=False, screen=True)
        with live, contextlib.closing(_changes(settings, model, seen)) as changes:
            for fleet in changes:
                view = stages.fleet_view(fleet, settings.endpoint)
                live.update(tables.rich(view.tables(wide), width=console.width, whole_ids=wide), refresh=True)
    finally:
        if view is not None:
            show(settings, view)


def _changes(settings: Settings, model: str, seen: threading.Event) -> Generator[Fleet, None, None]:
    """The fleet now and after every change. A coordinator that goes away is waited for."""
    said = ""
    while True:
        try:
            with connected(settings) as fleet, contextlib.closing(fleet.watch(model)) as events:
                for _ in events:
                    now = fleet.status(model)
                    seen.set()
                    said = ""
                    yield now
        except RlctlError as error:
            if not seen.is_set() or error.reason is not Reason.UNREACHABLE:
                raise
            if error.message != said:
                settings.say(f"{error.message}; trying again")
            said = error.message
        time.sleep(AGAIN_S)
