"""The fleet as the coordinator reports it, watched for as long as requests need it."""

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
"""Before the next try when the coordinator does not let us watch."""


class FleetView:
    """Stages and models. On one event loop."""

    def __init__(self, connection: Connection, request: WatchFleetRequest | None = None) -> None:
        """``request``: what is watched; None: everything."""
        self._connection = connection
        self._request = request or WatchFleetRequest()
        self._stages: dict[str, Stage] = {}
        self.stages: Sequence[Stage] = ()
        """Every stage, in slot order; another sequence after each news."""
        self._models: dict[str, Model] | None = None
        self._changed = asyncio.Event()
        self.news = 0
        """How often the coordinator has told something."""
        self.revision = 0
        """Of the fleet, as the coordinator numbers its changes, at the last news."""
        self._refusal: Unauthenticated | Forbidden | None = None
        self._closed = False
        self._watching: asyncio.Task[None] | None = None
        self._on_loss: dict[str, dict[object, tuple[int, Callable[[], object]]]] = {}

    @property
    def models(self) -> list[Model]:
        """Every model that is known, by name."""
        return [model for _, model in sorted((self._models or {}).items())]

    def model(self, name: str) -> Model | None:
        """A model, if it is known."""
        return (self._models or {}).get(name)

    @property
    def is_known(self) -> bool:
        """Whether the coordinator has told of the fleet."""
        return self._models is not None

    def lacks(self, model: str) -> bool:
        """Whether the coordinator has told of its models, and this was not among them."""
        return bool(model) and self._models is not None and model not in self._models

    def serves(self, model: str, adapter: str) -> bool:
        """Whether the model ("": any) has the adapter, by the coordinator's last word."""
        ours = [known for known in self.models if model in ("", known.name)]
        return any(adapter == held.name for known in ours for held in known.adapters)

    def refuse_any(self, model: str) -> None:
        """Raise FIELD_REQUIRED where no model is named and there are several: their weights are not the same."""
        if not model and len(self._models or ()) > 1:
            there = ", ".join(known.name for known in self.models)
            raise Reason.FIELD_REQUIRED.error(f"which model? There are: {there}", field="model")

    async def changed(self) -> None:
        """Wait for news. Raises ILLEGAL_STATE on another event loop than its connection's."""
        self._connection.check_loop()
        self._watch_now()
        self._changed.clear()
        await self._changed.wait()

    def check(self) -> None:
        """Raise TOKEN_MISSING or TOKEN_INVALID where there will be no news, as the coordinator does not let us watch;
        CANCELLED once it is closed, ILLEGAL_STATE on another event loop than its connection's.

        One that has told of its fleet may do so again: its stages go on serving meanwhile.
        """
        self._connection.check_loop()
        if self._closed:
            raise closed()
        if self._models is None and self._refusal is not None:
            raise self._refusal

    async def known(self) -> None:
        """Wait until the coordinator has told of the fleet for the first time. Raises as :meth:`check`."""
        self.check()
        self._watch_now()
        while self._models is None:
            await self.changed()
            self.check()

    def on_loss(self, stage: Stage, call: Callable[[], object]) -> Callable[[], None]:
        """Call it when the stage's process is gone as far as the coordinator can tell, until what this returns is
        called.

        A connection to a machine that is gone says nothing for as long as a keepalive takes.
        """
        key = object()
        watched = self._on_loss.setdefault(stage.registration.slot, {})
        watched[key] = (stage.incarnation, call)

        def forget() -> None:
            watched.pop(key, None)

        return forget

    async def close(self) -> None:
        """Stop watching; whoever waits for news is woken."""
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
                pass  # the coordinator is away: stages that hold their lease go on serving
            await asyncio.sleep(AGAIN_S)

    def _take(self, event: FleetEvent) -> None:
        self._refusal = None
        known = self._models or {}
        if event.kind == FLEET_EVENT_KIND_SNAPSHOT:
            self._stages.clear()
            known = {}
        # At once: other threads look at them.
        self._models = {**known, **{model.name: model for model in event.fleet.models}}
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
