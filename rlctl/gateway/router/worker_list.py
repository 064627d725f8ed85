"""sglang-router in front of this gateway: its workers are the serving stages, each under a URL of the gateway.

The router knows no versions, so the router never reaches engines directly. Requests to ``/routed/{slot}`` go through
the SDK and the stage's own gate. The router picks the slot, for example by its prefix trees. The slot is preferred
while its stage serves; otherwise a different stage is picked. While no stage serves, the list has one worker without a
stage. Requests then wait here; with an empty list the router would refuse them. For prefill and decode stages the
router picks both halves, each from its own list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from rlctl.contract.errors import Reason
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.gateway.http.placeholders import ANY, PREFERRED, PREFILL, SLOT
from rlctl.gateway.http.table import ENGINE
from rlctl.gateway.router.confirmed_watch import ConfirmedView
from rlctl.gateway.router.process import DECODE, REGULAR, START_S, SglangRouter
from rlctl.gateway.router.process import PREFILL as PROMPTS
from rlctl.gateway.router.split_pairs import Halves
from rlctl.rollout.picking.pairs import prefills
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.fleet_pb2 import Stage

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""Seconds between looks while the list differs. The router removes a worker within about a millisecond."""
CHECK_S = 5.0
"""Seconds between looks otherwise. The router may have ended, or have removed a worker by itself."""
AGAIN_S = 1.0
PREFIX, PREFILL_PREFIX = "/routed", "/prefill"
_AT = f"{PREFIX}/{{{PREFERRED}}}"
_PREFILL_AT = f"{PREFILL_PREFIX}/{{{PREFILL}}}"
_ENGINE = f"{PREFIX}/{{{SLOT}}}"
_PREFILL_ENGINE = f"{PREFILL_PREFIX}/{{{SLOT}}}"


async def _health(call: Call) -> Reply:
    """Answer that the gateway runs."""
    del call
    return Reply()


async def _info(call: Call) -> Reply:
    """Return the data that the router reads from a new worker.

    If the path is no directory, the router searches for the tokenizer on the network.
    """
    models = await call.generation.fleet.models()
    name = models[0].name if len(models) == 1 else call.generation.settings.model
    path = await call.generation.tokenizers.directory(name)
    return Reply({"model_path": path, "served_model_name": name, "is_generation": True, "status": "ready"})


_GENERATING = routes(_AT)


def _asked(at: str) -> list[Route]:
    """Return the routes that the router calls at every worker."""
    return [
        Route("GET", f"{at}/health", _health, Scope.OPEN),
        Route("GET", f"{at}/model_info", _info, Scope.OPEN),
        Route("GET", f"{at}/server_info", _info, Scope.OPEN),
    ]


def routed(dialect: Iterable[Route], *, pairs: bool) -> list[Route]:
    """Return the routes of the router's workers, then the dialect's engine routes for clients that read the list.

    ``pairs``: the workers are prefill and decode workers.
    """
    engines = [route for route in dialect if route.path.startswith(ENGINE)]
    other_routes = [*_asked(_AT), *_moved(engines, ENGINE, _ENGINE)]
    if not pairs:
        return [*_GENERATING, *other_routes]
    halves = Halves()
    posts = [route for route in _GENERATING if "POST" in route.methods]
    prompts = [replace(route, handler=halves.prompt) for route in _moved(posts, _AT, _PREFILL_AT)]
    other_routes += [*_asked(_PREFILL_AT), *_moved(engines, ENGINE, _PREFILL_ENGINE)]
    generating = [replace(route, handler=halves.whole(route.handler)) for route in posts]
    return [*generating, *prompts, *(route for route in _GENERATING if route not in posts), *other_routes]


def _moved(routes: Iterable[Route], start: str, to: str) -> list[Route]:
    return [replace(route, path=to + route.path.removeprefix(start)) for route in routes]


class Keeper:
    """Keeps the router's workers equal to the serving stages of a model ("" for any), and confirms the list.

    A stage leaves the list before it is paused or written to (:mod:`rlctl.coordinator.fleet.routing_followers`).
    """

    def __init__(self, router: SglangRouter, fleet: AsyncFleet, gateway_url: str, model: str) -> None:
        self._router = router
        self._view = ConfirmedView(fleet.connection, model, "sglang-router")
        self._url = gateway_url
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()

    async def start(self) -> None:
        """Start the router, and wait for its workers. Raises DEADLINE_EXCEEDED, and as :meth:`SglangRouter.start`."""
        await asyncio.to_thread(self._router.start)
        self._task = asyncio.create_task(self._keep())
        try:
            async with asyncio.timeout(START_S):
                await self._settled.wait()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(f"sglang-router has not its workers after {START_S:g} s") from None

    async def stop(self, drain_s: float) -> None:
        """Stop the router, as :meth:`SglangRouter.stop`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._view.close()
        await asyncio.to_thread(self._router.stop, drain_s)

    def _wanted(self) -> Mapping[str, str]:
        stages = self._view.routable
        if not self._router.pairs:
            return self._workers(stages, PREFIX, REGULAR)
        prompts = self._workers([stage for stage in stages if prefills(stage)], PREFILL_PREFIX, PROMPTS)
        return {**prompts, **self._workers([stage for stage in stages if not prefills(stage)], PREFIX, DECODE)}

    def _workers(self, stages: Sequence[Stage], prefix: str, kind: str) -> dict[str, str]:
        slots = [stage.registration.slot for stage in stages] or [ANY]
        return {f"{self._url}{prefix}/{quote(slot, safe='')}": kind for slot in slots}

    async def _keep(self) -> None:
        await self._view.news()
        while True:
            workers, confirmation = self._wanted(), self._view.position
            again_s = LOOK_S
            try:
                if self._router.ended:
                    log.warning("sglang-router has ended and is started again")
                    await asyncio.to_thread(self._router.start)
                present, coming = await asyncio.to_thread(self._router.towards, workers)
                if present | coming <= workers.keys():
                    await self._view.confirm(confirmation)
                if present == workers.keys() and not coming:
                    self._settled.set()
                    again_s = CHECK_S
            except Exception as error:  # noqa: BLE001 the list would stay as it is
                log.warning("sglang-router does not take its workers: %s: %s", type(error).__name__, error)
                again_s = AGAIN_S
            await self._view.news(again_s)
