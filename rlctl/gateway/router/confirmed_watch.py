"""A routing follower: watches a list of stages kept outside of the fleet, such as a router's.

The coordinator reports the routable stages. Before the coordinator pauses a stage or allows writes, the coordinator
waits briefly for the confirmation that the list follows the report (``ConfirmFleet``).
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
"""Time limit of a confirmation, in seconds. After a failure the next news brings a new confirmation. The coordinator
waits less than this.
"""


class ConfirmedView:
    """A confirmed watch of a model's stages. On one event loop."""

    def __init__(self, connection: Connection, model: str, name: str) -> None:
        """``model`` selects the stages, "" all; ``name`` is the list's owner in the coordinator's log."""
        self._watch_id = f"{name}-{uuid.uuid4().hex}"
        self._connection = connection
        self._model = model
        # A watch of all models, because a watch of a model without stages is refused.
        self._view = FleetView(connection, WatchFleetRequest(watch_id=self._watch_id))
        self._seen = 0
        self._confirmed: tuple[int, int] | None = None

    @property
    def routable(self) -> list[Stage]:
        """The routable stages in slot order, as last reported by the coordinator."""
        stages = self._view.stages
        return [stage for stage in stages if stage.routable and self._model in ("", stage.registration.model)]

    @property
    def position(self) -> tuple[int, int]:
        """The news and revision to confirm once the list equals the present :attr:`routable`."""
        return self._view.news, self._view.revision

    async def news(self, timeout_s: float | None = None) -> None:
        """Wait for unseen news, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._view.news == self._seen:
                    await self._view.changed()
        self._seen = self._view.news

    async def confirm(self, position: tuple[int, int]) -> None:
        """Confirm, once, that the list follows the news. A failure is ignored; later news are confirmed in turn."""
        if position == self._confirmed:
            return
        self._confirmed = position
        request = ConfirmFleetRequest(watch_id=self._watch_id, revision=position[1])
        with contextlib.suppress(RlctlError):
            await self._connection.call("ConfirmFleet", request, CONFIRM_S)

    async def close(self) -> None:
        await self._view.close()
