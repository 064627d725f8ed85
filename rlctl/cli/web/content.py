"""The content of the page: the tables of the command line, bounded in size."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rlctl.cli.render import operations, progress, timeline, values
from rlctl.cli.render.stages import models_table, stages_table
from rlctl.cli.render.tables import Table
from rlctl.coordinator.service import Coordinator
from rlctl.v1.coordinator_pb2 import GetFleetRequest, GetOperationRequest
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, OPERATION_STATE_UNSPECIFIED, Operation

MOST_OPERATIONS = 50
"""Limit of listed operations, for running and for ended operations each."""

MOST_STAGES = 500
"""Limit of listed stages. Stages that are not routable come first in a larger fleet."""

MOST_CHARACTERS = 300
"""Limit of a cell: reasons and messages come from other programs."""


class Content:
    """The content of the page at any time."""

    def __init__(self, coordinator: Coordinator, address: str) -> None:
        self._coordinator = coordinator
        self._address = address
        self._history: dict[str, Table] = {}
        """Lines of the listed ended operations, which do not change. Each operation has the results of all stages."""

    async def state(self) -> dict[str, Any]:
        fleet = await self._coordinator.get_fleet(GetFleetRequest())
        running = [
            await self._coordinator.get_operation(GetOperationRequest(operation_id=operation.operation_id))
            for operation in self._coordinator.operations.running()[:MOST_OPERATIONS]
        ]
        routable = sum(stage.routable for stage in fleet.stages)
        return {
            "title": f"{routable} of {values.count(len(fleet.stages), 'stage')} routable",
            "about": f"{self._address} · epoch {fleet.header.fleet_epoch} · rlctl {fleet.rlctl_version}"
            f" · {datetime.now().astimezone():%Y-%m-%dT%H:%M:%S %Z}",
            "tables": [
                _section("running", "Running operations", self._running(running, fleet.stages)),
                _section("models", "Models", models_table(fleet, wide=False)),
                _section("stages", _title(len(fleet.stages)), stages_table(_first(fleet.stages), wide=False)),
                _section("history", "History", self._listing()),
            ],
        }

    def _running(self, running: Sequence[Operation], stages: Sequence[Stage]) -> Table:
        headers = ("OPERATION", "VERB", "PROGRESS", "MODEL", "FOR", "PHASES", "STAGES", "PRINCIPAL")
        rows = [
            (
                operation.operation_id,
                operation.verb,
                operations.confirmed(operation),
                operation.model,
                values.elapsed(time.monotonic() - self._coordinator.operations.get(operation.operation_id).begun_at),
                "; ".join(timeline.running(operation)),
                progress.states(operation, stages),
                values.principal(operation.caller),
            )
            for operation in running
        ]
        return Table(headers, rows, frozenset({"PHASES", "MODEL"}))

    def _listing(self) -> Table:
        runs = self._coordinator.operations.newest_first("", OPERATION_STATE_UNSPECIFIED)
        ended = (run.operation for run in runs if run.operation.state != OPERATION_STATE_RUNNING)
        recent = {each.operation_id: each for each in itertools.islice(ended, MOST_OPERATIONS)}
        self._history = {
            key: self._history.get(key) or operations.listing([operation]) for key, operation in recent.items()
        }
        empty = operations.listing([])
        return Table(empty.headers, [row for table in self._history.values() for row in table.rows], empty.optional)


def _title(stages: int) -> str:
    return "Stages" if stages <= MOST_STAGES else f"Stages ({MOST_STAGES} of {stages}; rlctl status lists all)"


def _first(stages: Sequence[Stage]) -> Sequence[Stage]:
    if len(stages) <= MOST_STAGES:
        return stages
    return sorted(stages, key=lambda stage: stage.routable)[:MOST_STAGES]


def _section(name: str, title: str, table: Table) -> dict[str, Any]:
    headers, rows = table.shown()
    return {
        "name": name,
        "title": title,
        "headers": headers,
        "rows": [[cell[:MOST_CHARACTERS] for cell in row] for row in rows],
    }
