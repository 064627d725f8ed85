"""SGLang-Omni's RL admin interface: the router's for the fleet, a worker's below each engine URL.

Written from SGLang-Omni's page "RL Admin Control". A worker is an engine, with the stages of the engine. Each rank
answers for itself. :mod:`.requests` reads request bodies, :mod:`.replies` forms the responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from rlctl.contract.errors import Conflict, InvalidRequest, Reason, RlctlError
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.dialects.omni import generation as omni_generation
from rlctl.gateway.dialects.omni import replies, requests
from rlctl.gateway.dialects.omni.requests import Verb
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Dialect, Handler, Reply, Route, Scope
from rlctl.gateway.http.placeholders import SLOT
from rlctl.gateway.http.table import ENGINE
from rlctl.runtime.http_errors import headers_of
from rlctl.v1.fleet_pb2 import Fleet

KEY = "SGLANG_OMNI_ADMIN_KEY"

LOCK_S = 300.0
"""Longest wait of a changing broadcast for an earlier broadcast, in seconds."""


def dialect(generation: Generation) -> Dialect:
    router = _Router(generation.settings.admin_api_key or os.environ.get(KEY, ""))
    rows = [
        Route(
            verb.methods,
            path,
            router.guarded(functools.partial(router.broadcast, path, verb)),
            doc=verb.doc,
            lasting=False,
        )
        for path, verb in requests.VERBS.items()
    ]
    engine_routes = [
        Route(verb.methods, ENGINE + path, router.guarded(functools.partial(_ask, verb)), doc=verb.doc, lasting=False)
        for path, verb in requests.VERBS.items()
    ]
    workers = [
        Route("GET", "/workers", list_workers, Scope.VIEWER, "The workers, disabled and dead ones too."),
        Route("GET", "/workers/{id:.+}", get_worker, Scope.VIEWER, "One worker, by its slot or address."),
        Route("PUT", "/workers/{id:.+}", router.guarded(put_worker), doc='{"disabled": ...}: routed to or not.'),
        Route(
            "POST", "/workers", router.guarded(post_worker), doc="Enable an engine of the fleet; others are refused."
        ),
        Route("DELETE", "/workers/{id:.+}", router.guarded(delete_worker), doc="Disable an engine."),
        Route("POST", "/weight_update_journal/resolve", router.guarded(resolve_journal)),
    ]
    probes = [
        *(Route("GET", f"{at}/health", engine_urls.health, Scope.OPEN) for at in ("", ENGINE)),
        Route("GET", "/live", live, Scope.OPEN),
        Route("GET", "/ready", ready, Scope.OPEN),
    ]
    generating = [
        replace(route, handler=omni_generation.generate, doc="") if route.path.endswith("/generate") else route
        for route in (*routes(), *routes(ENGINE))
    ]
    return Dialect("omni", [*rows, *engine_routes, *workers, *probes, *generating], fail=fail)


def fail(error: RlctlError) -> Reply:
    """Form an error: 422 for a wrong field or a reused key, 503 for a conflict, 403 for a wrong admin key."""
    status = error.http_status
    if error.reason is Reason.TOKEN_INVALID:
        status = 403
    elif error.reason is Reason.REQUEST_ID_REUSED:
        status = 422
    elif isinstance(error, Conflict):
        status = 503
    elif isinstance(error, InvalidRequest) and error.field != "body":
        status = 422
    body = {"message": str(error), "code": error.reason.name.lower(), "param": error.field or None}
    return Reply({"error": body}, status, {**headers_of(error), **({"Retry-After": "1"} if status == 503 else {})})


class _Router:
    """The admin key and the lock of a gateway, shared by all requests."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._lock = asyncio.Lock()

    def guarded(self, handler: Handler) -> Handler:
        async def answer(call: Call) -> Any:
            if self._key:
                if call.token is None:
                    raise Reason.TOKEN_MISSING.error("an admin key is required", next_step="Authorization: Bearer KEY")
                if not hmac.compare_digest(call.token.encode(), self._key.encode()):
                    raise Reason.TOKEN_INVALID.error("invalid admin key", next_step="Use the key of the gateway.")
            return await handler(call)

        return answer

    async def broadcast(self, path: str, verb: Verb, call: Call) -> Reply:
        """Run one operation over all workers, and answer in the form of the router's broadcasts."""
        request = requests.read(verb, await call.fields())
        async with self._turn() if verb.locked else contextlib.nullcontext():
            operation = await requests.carry_out(call, request)
        return replies.of_router(operation, path, functools.partial(engine_urls.url_of, call))

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(LOCK_S):
                await self._lock.acquire()
        except TimeoutError:
            raise Reason.OPERATION_CONFLICT.error(f"another update has been going on for {LOCK_S:.0f} s") from None
        try:
            yield
        finally:
            self._lock.release()


async def _ask(verb: Verb, call: Call) -> Reply:
    """Run the operation for one engine, and answer in a worker's form."""
    operation = await requests.carry_out(call, requests.read(verb, await call.fields()))
    return replies.of_worker(operation, call.path[SLOT])


async def list_workers(call: Call) -> Reply:
    """List the workers."""
    return Reply({"status": "ok", **await _pool(call, await call.fleet.status(call.generation.settings.model))})


async def _pool(call: Call, fleet: Fleet) -> dict[str, Any]:
    workers = [replies.worker(stage, engine_urls.url_of(call, stage.registration.slot)) for stage in fleet.stages]
    return {
        "total_workers": len(workers),
        "routable_workers": sum(worker["routable"] for worker in workers),
        "disabled_workers": sum(worker["disabled"] for worker in workers),
        "dead_workers": sum(worker["is_dead"] for worker in workers),
        "workers": workers,
    }


async def live(call: Call) -> Reply:
    """Answer that the gateway runs."""
    del call
    return Reply({"status": "alive"})


async def ready(call: Call) -> Reply:
    """Return whether an engine is routable, with the counts of the engines."""
    pool = await _pool(call, await call.generation.fleet.status(call.generation.settings.model))
    del pool["workers"]  # callers need no token
    is_ready = pool["routable_workers"] > 0
    return Reply({"status": "ready" if is_ready else "not_ready", **pool}, 200 if is_ready else 503)


async def resolve_journal(call: Call) -> Reply:
    """Confirm that no journal blocks updates.

    The coordinator quarantines an engine with uncertain weights until a heal or an update.
    """
    if (await call.fields()).values.get("acknowledge") is not True:
        raise Reason.FIELD_INVALID.error(
            "acknowledge must be true",
            field="acknowledge",
            next_step="`rlctl heal` restores the weights of an engine that is quarantined.",
        )
    return Reply({"status": "ok", "journal_readable": True, "resolved_worker_ids": []})


async def post_worker(call: Call) -> Reply:
    """Enable an engine of the fleet by its engine URL. A repeat is harmless."""
    fields = await call.fields()
    fields.accept("capabilities", "model")  # reported by the stage server
    body_url = fields.take("url", str, None) or fields.take("worker_url", str, None)
    url = call.query.get("url") or call.query.get("worker_url") or body_url
    if not url:
        raise Reason.FIELD_REQUIRED.error("url is required", field="url")
    slot = engine_urls.slot_in(url)
    if not slot:
        raise engine_urls.foreign(url)
    return Reply({"status": "ok", "worker": await _enable(call, slot, True)})


async def delete_worker(call: Call) -> Reply:
    """Disable an engine: the engine gets no further requests. A repeat is harmless."""
    slot = engine_urls.slot_in(call.path["id"]) or call.path["id"]
    await _enable(call, slot, False)
    return Reply({"status": "ok", "worker_id": slot})


async def _enable(call: Call, slot: str, enabled: bool) -> dict[str, Any]:
    if (await engine_urls.find(call, slot, "id")).enabled != enabled:
        await call.fleet.set_enabled([slot], enabled)
    return replies.worker(await engine_urls.find(call, slot, "id"), engine_urls.url_of(call, slot))


async def get_worker(call: Call) -> Reply:
    """Return a worker."""
    slot = engine_urls.slot_in(call.path["id"]) or call.path["id"]
    return Reply(replies.worker(await engine_urls.find(call, slot, "id"), engine_urls.url_of(call, slot)))


async def put_worker(call: Call) -> Reply:
    """Enable or disable a worker."""
    slot = engine_urls.slot_in(call.path["id"]) or call.path["id"]
    fields = await call.fields()
    dead = fields.take("is_dead", bool, None)
    disabled = fields.take("disabled", bool, None)
    if dead is None and disabled is None and not fields.unknown:
        raise Reason.FIELD_REQUIRED.error("disabled is required", field="disabled")
    worker = replies.worker(await engine_urls.find(call, slot, "id"), engine_urls.url_of(call, slot))
    unknown = fields.unknown or (["is_dead"] if dead not in (None, worker["is_dead"]) else [])
    if unknown:
        raise Reason.UNSUPPORTED.error(
            "the stage server of a worker reports whether it lives and its capabilities",
            field=unknown[0],
            next_step='{"disabled": true} keeps requests away from it.',
        )
    if disabled is not None:
        worker = await _enable(call, slot, not disabled)
    return Reply({"status": "ok", **worker, "worker": worker})
