"""sglang-router in front of this gateway: its workers are the stages that serve, each under a URL of the gateway's.

The router knows nothing of versions, so it is not let at engines: what it sends to ``/routed/{slot}`` goes through the
SDK and the stage's own gate like every other request. The slot is what the router has picked, by its prefix trees say;
it is kept to as long as that stage serves, and another one is taken where it does not. While nobody serves, the list
has one worker that names no stage: requests then wait here, where an empty list would have the router refuse them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from rlctl.client.aio import AsyncFleet
from rlctl.client.confirmed import ConfirmedView
from rlctl.errors import Reason, RlctlError
from rlctl.gateway.call import Call
from rlctl.gateway.dialect import Reply, Route, Scope
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.generation.running import ANY, PREFERRED, SLOT
from rlctl.gateway.sglang_router import START_S, SglangRouter
from rlctl.gateway.table import ENGINE

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""While the list is not as it is to be: the router removes a worker within a millisecond or so."""
CHECK_S = 5.0
"""While it is: the router may have ended, or taken a worker out by itself."""
AGAIN_S = 1.0
PREFIX = "/routed"
_AT = f"{PREFIX}/{{{PREFERRED}}}"
_ENGINE = f"{PREFIX}/{{{SLOT}}}"


async def _health(call: Call) -> Reply:
    """The gateway runs."""
    del call
    return Reply()


async def _info(call: Call) -> Reply:
    """What the router asks of a worker when it is added. Of a path that is no directory it looks for the tokenizer on
    the network.
    """
    models = await call.generation.fleet.models()
    name = models[0].name if len(models) == 1 else call.generation.settings.model
    path = await call.generation.tokenizers.directory(name)
    return Reply({"model_path": path, "served_model_name": name, "is_generation": True, "status": "ready"})


_ROUTES = (
    *routes(_AT),
    Route("GET", f"{_AT}/health", _health, Scope.OPEN),
    Route("GET", f"{_AT}/model_info", _info, Scope.OPEN),
    Route("GET", f"{_AT}/server_info", _info, Scope.OPEN),
)


def routed(dialect: Iterable[Route]) -> list[Route]:
    """What the router's workers answer; and, for clients that read its list, what the dialect has for engines."""
    engines = [route for route in dialect if route.path.startswith(ENGINE)]
    return [*_ROUTES, *(replace(route, path=_ENGINE + route.path.removeprefix(ENGINE)) for route in engines)]


class Keeper:
    """Keeps the router's workers equal to the stages that serve a model ("": any), and tells the coordinator that it
    has: a stage leaves the list before it is paused or written to (:mod:`rlctl.coordinator.followers`).
    """

    def __init__(self, router: SglangRouter, fleet: AsyncFleet, gateway_url: str, model: str) -> None:
        self._router = router
        self._view = ConfirmedView(fleet.connection, model, "sglang-router")
        self._url = gateway_url
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()

    async def start(self) -> None:
        """Start the router, and return when it has its workers. Raises as :meth:`SglangRouter.start`."""
        await asyncio.to_thread(self._router.start)
        self._task = asyncio.create_task(self._keep())
        try:
            async with asyncio.timeout(START_S):
                await self._settled.wait()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(f"sglang-router has not its workers after {START_S:g} s") from None

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._view.close()
        await asyncio.to_thread(self._router.stop)

    def _wanted(self) -> frozenset[str]:
        slots = [stage.registration.slot for stage in self._view.routable] or [ANY]
        return frozenset(f"{self._url}{PREFIX}/{slot}" for slot in slots)

    async def _keep(self) -> None:
        await self._view.news()
        while True:
            wanted, told = self._wanted(), self._view.told
            again_s = LOOK_S
            try:
                if self._router.ended:
                    log.warning("sglang-router has ended and is started again")
                    await asyncio.to_thread(self._router.start)
                known, coming = await asyncio.to_thread(self._router.towards, wanted)
                if known | coming <= wanted:
                    await self._view.confirm(told)
                if known == wanted and not coming:
                    self._settled.set()
                    again_s = CHECK_S
            except (OSError, RlctlError) as error:
                log.warning("sglang-router does not take its workers: %s", error)
                again_s = AGAIN_S
            await self._view.news(again_s)
