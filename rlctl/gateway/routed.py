"""sglang-router in front of this gateway: its workers are the stages that serve, each under a URL of the gateway's.

The router knows nothing of versions, so it is not let at engines: what it sends to ``/routed/{slot}`` goes through the
SDK and the stage's own gate like every other request. The slot is what the router has picked, by its prefix trees say;
it is kept to as long as that stage serves, and another one is taken where the router's list is behind. While nobody
serves, the list stays as it is: requests then wait here, where an empty list would have the router refuse them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlctl.client.aio import AsyncFleet
from rlctl.errors import RlctlError
from rlctl.gateway.call import Call
from rlctl.gateway.dialect import Reply, Route, Scope
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.generation.running import PREFERRED
from rlctl.gateway.sglang_router import SglangRouter
from rlctl.v1.fleet_pb2 import Stage

log = logging.getLogger(__name__)

AGAIN_S = 1.0
PREFIX = "/routed"
_AT = f"{PREFIX}/{{{PREFERRED}}}"


async def _health(call: Call) -> Reply:
    """The gateway runs."""
    del call
    return Reply()


async def _info(call: Call) -> Reply:
    """What the router asks of a worker when it is added."""
    models = await call.generation.fleet.models()
    name = models[0].name if len(models) == 1 else call.generation.settings.model
    return Reply({"model_path": name, "served_model_name": name, "is_generation": True, "status": "ready"})


ROUTES = (
    *routes(_AT),
    Route("GET", f"{_AT}/health", _health, Scope.OPEN),
    Route("GET", f"{_AT}/model_info", _info, Scope.OPEN),
    Route("GET", f"{_AT}/server_info", _info, Scope.OPEN),
)


class Keeper:
    """Keeps the router's workers equal to the stages that serve a model ("": any)."""

    def __init__(self, router: SglangRouter, fleet: AsyncFleet, gateway_url: str, model: str) -> None:
        self._router = router
        self._fleet = fleet
        self._url = gateway_url
        self._model = model
        self._task: asyncio.Task[None] | None = None
        self._set: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Start the router. Raises as :meth:`SglangRouter.start`."""
        await asyncio.to_thread(self._router.start)
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._router.stop)

    def _wanted(self, stages: Sequence[Stage]) -> frozenset[str]:
        return frozenset(
            f"{self._url}{PREFIX}/{stage.registration.slot}"
            for stage in stages
            if stage.routable and self._model in ("", stage.registration.model)
        )

    async def _keep(self) -> None:
        async for stages in self._fleet.stages():
            wanted = self._wanted(stages) or self._set
            while wanted != self._set:
                try:
                    await asyncio.to_thread(self._router.set_workers, wanted)
                    self._set = wanted
                except (OSError, RlctlError) as error:
                    log.warning("sglang-router does not take its workers: %s", error)
                    await asyncio.sleep(AGAIN_S)
