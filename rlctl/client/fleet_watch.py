"""The fleet as the coordinator reports it, watched while requests need the view."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rlctl.client.connection import Connection, closed
from rlctl.contract.errors import Forbidden, Reason, RlctlError, Unauthenticated
from rlctl.v1.common_pb2 import STAGE_STATE_RETIRED, STAGE_STATE_UNREACHABLE
from rlctl.v1.coordinator_pb2 import WatchFleetRequest
from rlctl.v1.fleet_pb2 import FLEET_EVENT_KIND_SNAPSHOT, FleetEvent, Model, Stage

AGAIN_S = 0.02
REFUSED_S = 1.0
"""Pause before the next try when the coordinator refuses the watch."""


class FleetView:
    """Stages and models as last reported. Belongs to a single event loop."""

    def __init__(self, connection: Connection, request: WatchFleetRequest | None = None) -> None:
        """``request``: scope of the watch; None: the whole fleet."""
        self._connection = connection
        self._request = request or WatchFleetRequest()
        self._stages: dict[str, Stage] = {}
        self.stages: Sequence[Stage] = ()
        """Every stage, in slot order; a new sequence after each event."""
        self._models: dict[str, Model] | None = None
        self._changed = asyncio.Event()
        self.news = 0
        """Number of events from the coordinator."""
        self.revision = 0
        """Revision of the fleet at the last event, numbered by the coordinator."""
        self._refusal: Unauthenticated | Forbidden | None = None
        self._closed = False
        self._watching: asyncio.Task[None] | None = None
        self._on_loss: dict[str, dict[object, tuple[int, Callable[[], object]]]] = {}

    @property
    def models(self) -> list[Model]:
        """All known models, by name."""
        return [model for _, model in sorted((self._models or {}).items())]

    def model(self, name: str) -> Model | None:
        """Return a model, or None if the model is not known."""
        return (self._models or {}).get(name)

    @property
    def is_known(self) -> bool:
        """Whether the coordinator has reported the fleet."""
        return self._models is not None

    def lacks(self, model: str) -> bool:
        """Return whether the coordinator has reported the models, but not this model."""
        return bool(model) and self._models is not None and model not in self._models

    def serves(self, model: str, adapter: str) -> bool:
        """Return whether the model ("": any) has the adapter, by the coordinator's last report."""
        models = [entry for entry in self.models if model in ("", entry.name)]
        return any(adapter == loaded.name for entry in models for loaded in entry.adapters)

    def refuse_any(self, model: str) -> None:
        """Raise FIELD_REQUIRED if no model is named and the fleet has several: the weights of models differ."""
        if not model and len(self._models or ()) > 1:
            names = ", ".join(entry.name for entry in self.models)
            raise Reason.FIELD_REQUIRED.error(f"model is required; models of the fleet: {names}", field="model")

    async def changed(self) -> None:
        """Wait for the next event. Raises ILLEGAL_STATE on an event loop other than the connection's."""
        self._connection.check_loop()
        self._watch_now()
        self._changed.clear()
        await self._changed.wait()

    def check(self) -> None:
        """Raise the error that keeps events from coming.

        TOKEN_MISSING, TOKEN_INVALID, SCOPE_MISSING or PEER_NOT_ALLOWED if the coordinator refuses the watch, CANCELLED
        after ``close``, ILLEGAL_STATE on an event loop other than the connection's. After the first report of the fleet
        a refusal raises no error: the coordinator may accept the watch again, and the stages serve meanwhile.
        """
        self._connection.check_loop()
        if self._closed:
            raise closed()
        if self._models is None and self._refusal is not None:
            raise self._refusal

    async def reported(self) -> None:
        """Wait until the coordinator has reported the fleet for the first time. Raises as :meth:`check`."""
        self.check()
        self._watch_now()
        while self._models is None:
            await self.changed()
            self.check()

    def on_loss(self, stage: Stage, call: Callable[[], object]) -> Callable[[], None]:
        """Call ``call`` when the coordinator reports the stage's process as gone. Returns a function that cancels this.

        The connection to a failed machine itself is silent until the keepalive ends.
        """
        key = object()
        watched = self._on_loss.setdefault(stage.registration.slot, {})
        watched[key] = (stage.incarnation, call)

        def forget() -> None:
            watched.pop(key, None)

        return forget

    async def close(self) -> None:
        """Stop watching and wake all waiters."""
        self._closed = True
        self._changed.set()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _watch_now(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                async for event in self._connection.stream("WatchFleet", self._request):
                    self._take(event)
            except (Unauthenticated, Forbidden) as error:
                self._refusal = error
                self._changed.set()
                await asyncio.sleep(REFUSED_S)
            except RlctlError:
                pass  # the coordinator is unreachable: stages with a lease continue to serve
            await asyncio.sleep(AGAIN_S)

    def _take(self, event: FleetEvent) -> None:
        self._refusal = None
        models = self._models or {}
        if event.kind == FLEET_EVENT_KIND_SNAPSHOT:
            self._stages.clear()
            models = {}
        # In a single assignment: other threads read the models.
        self._models = {**models, **{model.name: model for model in event.fleet.models}}
        for stage in event.fleet.stages:
            self._stages[stage.registration.slot] = stage
            if stage.state == STAGE_STATE_RETIRED:
                del self._stages[stage.registration.slot]
            for incarnation, call in list(self._on_loss.get(stage.registration.slot, {}).values()):
                if stage.incarnation != incarnation or stage.state == STAGE_STATE_UNREACHABLE:
                    call()
        self.stages = tuple(stage for _, stage in sorted(self._stages.items()))
        self.revision = event.fleet.revision
        self.news += 1
        self._changed.set()
