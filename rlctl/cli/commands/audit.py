"""``rlctl audit``: changes and denied calls, with callers."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import DURATION
from rlctl.cli.render import values
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.v1.coordinator_pb2 import AuditRecord
from rlctl.v1.results_pb2 import OperationState

_HEADERS = ("TIME", "PRINCIPAL", "CLIENT", "METHOD", "ABOUT", "RESULT", "REASON", "OPERATION")


@click.command("audit", cls=Command)
@click.option("--principal", default="", metavar="NAME", help="Only calls of this principal.")
@click.option("--denied", is_flag=True, help="Only denied calls.")
@click.option("--since", type=DURATION, metavar="DURATION", help="Only records that are younger than this.")
@click.option("--limit", type=click.IntRange(0), default=50, show_default=True, help="At most; 0: all.")
@pass_settings
def audit(settings: Settings, principal: str, denied: bool, since: float | None, limit: int) -> None:
    """List changes and denied calls with their callers, newest first. `--limit 0 -o jsonl` exports all records."""
    with bounded(settings) as fleet:
        records = fleet.audit(principal=principal, denied=denied, since_s=since, limit=limit)
    show(
        settings,
        View(
            records,
            lambda _: [Table(_HEADERS, [_row(record) for record in records], frozenset({"REASON"}))],
            lambda: [record.operation_id or record.method for record in records],
        ),
    )


def _row(record: AuditRecord) -> list[str]:
    state = values.name_of(OperationState.DESCRIPTOR, record.state)
    calls = f" ({record.count} calls)" if record.count > 1 else ""
    return [
        values.moment(record.time),
        values.principal(record.caller) or f"unknown, from {record.host}",
        values.client(record.caller),
        record.method,
        _about(record),
        f"DENIED{calls}" if record.denied else state,
        record.reason,
        record.operation_id,
    ]


def _about(record: AuditRecord) -> str:
    slots = ", ".join(record.slots) if record.targets <= len(record.slots) else f"{record.targets} stages"
    adapter = f"adapter {record.adapter}" if record.adapter else ""
    return " ".join(filter(None, [record.model, adapter, values.version(record.weight_version)])) or slots
