"""The interface of slime's router: a list of workers in front of SGLang's dialect.

SGLang's own router has a worker list at the same paths. The workers are the fleet's enabled engines, listed by engine
URL. A trainer that aborts at each worker therefore goes through the stages. An engine joins a fleet by its stage
server, never by its address alone; docs/decisions has the reason (dialects of routers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.dialects.sglang import dialect as sglang
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Dialect, Reply, Route, Scope
from rlctl.runtime.http_errors import headers_of
from rlctl.v1.common_pb2 import WORKER_TYPE_REGULAR, StageState, WorkerType
from rlctl.v1.fleet_pb2 import Stage


def dialect(generation: Generation) -> Dialect:
    rest = sglang.dialect(generation)
    rows = [
        Route("POST", "/add_worker", add_worker, doc="Enable an engine of the fleet; others are refused."),
        Route("GET", "/list_workers", list_workers, Scope.VIEWER, "The addresses of the enabled engines."),
        Route("POST", "/remove_worker", remove_worker, doc="Disable an engine: nothing more is sent to it."),
        Route("POST", "/workers", add_worker, doc="As /add_worker."),
        Route("GET", "/workers", workers, Scope.VIEWER, "The enabled engines."),
        Route("GET", "/workers/{id:.+}", worker, Scope.VIEWER, "One engine, by its slot or address."),
        Route("DELETE", "/workers/{id:.+}", remove_worker, doc="As /remove_worker."),
        Route("POST", "/retrieve_from_text", retrieve_from_text, Scope.ROLLOUT, "See the radix middleware."),
    ]
    rows = [replace(row, fail=_refused) for row in rows]
    overridden = {(route.methods, route.path) for route in rows}
    return Dialect(
        "slime",
        [*rows, *(route for route in rest.routes if (route.methods, route.path) not in overridden)],
        fail=rest.fail,
        admit=rest.admit,
        body_bytes=rest.body_bytes,
        any_model=rest.any_model,
    )


async def add_worker(call: Call) -> Reply:
    """Enable an engine of the fleet; by the gateway's own address, all engines. A repeat is harmless."""
    url = await _url(call)
    slots = await _slots(call, url)
    if not slots:
        raise engine_urls.foreign(url)
    await _enable(call, slots, True)
    enabled = [stage.registration.slot for stage in await _enabled(call)]
    urls = {engine_urls.url_of(call, slot): call.generation.inflight_at(slot) for slot in enabled}
    return Reply({"status": "success", "worker_urls": urls})


async def remove_worker(call: Call) -> Reply:
    """Disable an engine of the fleet; by the gateway's own address, all engines. A repeat is harmless."""
    name = call.path["id"] if "id" in call.path else await _url(call)
    slots = await _slots(call, name) or [_slot(name)]
    await _enable(call, slots, False)
    listed = ", ".join(slots)
    return Reply({"status": "success", "message": f"disabled: {listed}", "worker_id": listed})


async def list_workers(call: Call) -> Reply:
    """List the URLs of the enabled engines."""
    return Reply({"urls": [engine_urls.url_of(call, stage.registration.slot) for stage in await _enabled(call)]})


async def workers(call: Call) -> Reply:
    """List the enabled engines."""
    return Reply({"workers": [_described(call, stage) for stage in await _enabled(call)]})


async def worker(call: Call) -> Reply:
    """Return an engine."""
    return Reply(_described(call, await engine_urls.find(call, _slot(call.path["id"]), "id")))


async def retrieve_from_text(call: Call) -> Reply:
    """Return the generated output for a text. The radix middleware answers before this handler."""
    del call
    raise Reason.UNSUPPORTED.error(
        "this gateway keeps no trajectories",
        next_step="Start the gateway with --middleware-path rlctl.gateway.radix.middleware:RadixMiddleware.",
    )


async def _url(call: Call) -> str:
    for name in ("url", "worker_url"):
        if call.query.get(name):
            return call.query[name]
    fields = await call.fields()
    fields.accept("worker_type", "bootstrap_port")  # reported by the stage server
    url = fields.take("url", str, "") or fields.take("worker_url", str, "")
    if not url:
        raise Reason.FIELD_REQUIRED.error("worker_url is required (?url=... or a JSON body)", field="url")
    return url


def _slot(named: str) -> str:
    """Return the slot of an engine, from its id (the slot) or its engine URL."""
    return engine_urls.slot_in(named) or named


async def _enabled(call: Call) -> list[Stage]:
    return [stage for stage in await engine_urls.living(call) if stage.enabled]


async def _slots(call: Call, url: str) -> list[str]:
    """Return the slots of a URL of this gateway; empty for a URL of a different server."""
    if slot := engine_urls.slot_in(url):
        return [slot]
    if not await engine_urls.is_own(call, url):
        return []
    return [stage.registration.slot for stage in await engine_urls.living(call)]


async def _enable(call: Call, slots: Sequence[str], enabled: bool) -> None:
    stages = [await engine_urls.find(call, slot, "url") for slot in slots]
    changed = [stage.registration.slot for stage in stages if stage.enabled != enabled]
    if changed:
        await call.fleet.set_enabled(changed, enabled)


def _described(call: Call, stage: Stage) -> dict[str, Any]:
    registration = stage.registration
    return {
        "id": registration.slot,
        "url": engine_urls.url_of(call, registration.slot),
        "model_id": registration.model,
        "worker_type": WorkerType.Name(registration.worker_type or WORKER_TYPE_REGULAR).rpartition("_")[2].lower(),
        "connection_mode": "http",
        "is_healthy": stage.routable,
        "enabled": stage.enabled,
        "state": StageState.Name(stage.state).removeprefix("STAGE_STATE_"),
        "weight_version": stage.report.weight_version.label,
    }


def _refused(error: RlctlError) -> Reply:
    return Reply({**error.described(), "error": str(error)}, error.http_status, headers_of(error))
