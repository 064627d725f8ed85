"""``rlctl events``: recorded operations, and changes of the fleet in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.following import follow, watching
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.events import Changes, Event, ended, show_event, started
from rlctl.contract.errors import NotFound
from rlctl.v1.fleet_pb2 import FleetEvent
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet

LOOK_S = 1.0
"""Time between two lists of operations while the fleet does not change."""

PAGE, LONG_PAGE = 50, 1000


@click.command(cls=Command)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on with changes until Ctrl-C, or for --timeout.")
@click.option("--limit", type=click.IntRange(0, 1000), default=20, show_default=True, help="Operations on record.")
@click.option("--model", default="", metavar="NAME", help="Only this model.")
@pass_settings
def events(settings: Settings, following: bool, limit: int, model: str) -> None:
    """Print the latest operations, then with -f every change of the fleet, a line each.

    Changes are those of stages (state, version, incarnation, quarantine), models (version, open update, adapters) and
    operations (begun, ended), and the coordinator's loss and restart. Only operations are on record: earlier changes of
    stages are not shown. With -o json or jsonl an event is a line of JSON.
    """
    if settings.output not in ("table", "wide", "json", "jsonl"):
        raise click.BadParameter("events are lines: table, json or jsonl", param_hint="--output")
    with bounded(settings) as fleet:
        operations = fleet.operations(page_size=max(limit, PAGE))
        for operation in reversed(_of(model, operations[:limit])):
            show_event(settings, started(operation) if operation.state == OPERATION_STATE_RUNNING else ended(operation))
    if not following:
        return
    changes = Changes(settings.endpoint)
    list(changes.of_operations(_of(model, operations)))  # later lists show the operations begun and ended since

    def read(fleet: Fleet) -> Generator[Event, None, None]:
        with contextlib.closing(_looks(fleet, model)) as looks:
            for event in looks:
                if event is not None:
                    yield from changes.of_fleet(event)
                yield from changes.of_operations(_of(model, _listed(fleet, changes)))

    def lost(error: Any) -> None:
        show_event(settings, changes.of_loss(error))

    with watching(settings) as displayed:
        displayed.set()
        for event in follow(settings, read, lost):
            show_event(settings, event)


def _looks(fleet: Fleet, model: str) -> Generator[FleetEvent | None, None, None]:
    """Yield each change of the fleet, and None after :data:`LOOK_S` without a change."""
    watched = fleet.aio.watch(model)
    pending: asyncio.Future[FleetEvent] | None = None

    async def look() -> FleetEvent | None:
        nonlocal pending
        pending = pending or asyncio.ensure_future(anext(watched))
        done, _ = await asyncio.wait({pending}, timeout=LOOK_S)
        if not done:
            return None
        ready, pending = pending, None
        return ready.result()

    async def end() -> None:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        await watched.aclose()  # type: ignore[attr-defined]

    try:
        while True:
            try:
                event = fleet.loop.call(look())
            except StopAsyncIteration:
                return
            yield event
    finally:
        fleet.loop.finish(end())


def _listed(fleet: Fleet, changes: Changes) -> list[Operation]:
    """Return the operations begun or ended since the previous list, among further operations."""
    operations = fleet.operations(page_size=PAGE)
    if len(operations) == PAGE and changes.may_be_cut(operations):
        operations = fleet.operations(page_size=LONG_PAGE)
    for operation_id in changes.unlisted(operations):
        with contextlib.suppress(NotFound):
            operations.append(fleet.operation(operation_id))
    return operations


def _of(model: str, listed: list[Operation]) -> list[Operation]:
    """Return the operations of a model, and operations without a model."""
    return [operation for operation in listed if model in ("", operation.model) or not operation.model]
