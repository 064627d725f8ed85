"""A list of stages that is kept outside of the fleet, a router's say, and that a stage leaves before it changes.

The coordinator tells which stages may be routed to, and waits a moment for the confirmation that the list is as it was
told (``ConfirmFleet``) before it pauses those that are to leave it, or lets them be written to.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from rlctl.client.connection import Connection
from rlctl.client.fleet_watch import FleetView
from rlctl.contract.errors import RlctlError
from rlctl.v1.coordinator_pb2 import ConfirmFleetRequest, WatchFleetRequest
from rlctl.v1.fleet_pb2 import Stage

CONFIRM_S = 2.0
"""For telling. A coordinator that could not be told is told with the next news, and does not wait that long."""


class ConfirmedView:
    """A watch of a model's stages that is confirmed. On one event loop."""

    def __init__(self, connection: Connection, model: str, name: str) -> None:
        """``model``: whose stages, "": all; ``name``: what keeps the list, for the coordinator's log."""
        self._watch_id = f"{name}-{uuid.uuid4().hex}"
        self._connection = connection
        self._model = model
        # Of all models: a watch of one that no stage serves yet is refused.
        self._view = FleetView(connection, WatchFleetRequest(watch_id=self._watch_id))
        self._seen = 0
        self._confirmed: tuple[int, int] | None = None

    @property
    def routable(self) -> list[Stage]:
        """The stages that may be routed to, in slot order, as the coordinator last told."""
        stages = self._view.stages
        return [stage for stage in stages if stage.routable and self._model in ("", stage.registration.model)]

    @property
    def told(self) -> tuple[int, int]:
        """What is to be confirmed once the list is as :attr:`routable` is now: which news, and their revision."""
        return self._view.news, self._view.revision

    async def news(self, timeout_s: float | None = None) -> None:
        """Wait for news that nobody has waited for yet, no longer than ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._view.news == self._seen:
                    await self._view.changed()
        self._seen = self._view.news

    async def confirm(self, told: tuple[int, int]) -> None:
        """Say, once, that the list is as it was told. A coordinator that is away is told with the news that follow."""
        if told == self._confirmed:
            return
        self._confirmed = told
        request = ConfirmFleetRequest(watch_id=self._watch_id, revision=told[1])
        with contextlib.suppress(RlctlError):
            await self._connection.call("ConfirmFleet", request, CONFIRM_S)

    async def close(self) -> None:
        """Stop watching."""
        await self._view.close()
