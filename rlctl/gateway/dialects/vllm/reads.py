"""Information about servers for vLLM and SkyRL's router: of one engine at its URL, at the root by engine URL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlctl.gateway.dialects.vllm import requests
from rlctl.gateway.dialects.vllm.control import excluded_engine, reply_by_engine
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import Call, confirmed
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.gateway.http.plain_json import plain
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.verbs_pb2 import GetLoadsRequest, GetServerInfoRequest
from rlctl.version import __version__


async def read(tell: Callable[[Call, Stage], dict[str, Any]], call: Call) -> Reply:
    """Return the information of the engine, or of each engine."""
    if engine_urls.slots_of(call):
        return Reply(tell(call, (await engine_urls.addressed(call))[0]))
    answers = {}
    for stage in await engine_urls.listed(call):
        slot = stage.registration.slot
        if stage.state in engine_urls.GONE:
            answers[engine_urls.url_of(call, slot)] = excluded_engine(slot, stage.state)
        elif tell is _info:
            answers[engine_urls.url_of(call, slot)] = tell(call, stage)
        else:
            answers[engine_urls.url_of(call, slot)] = {"status": 200, "body": tell(call, stage)}
    return reply_by_engine(answers)


def _info(call: Call, stage: Stage) -> dict[str, Any]:
    registration, layout = stage.registration, stage.registration.layout
    return {
        "url": engine_urls.url_of(call, registration.slot),
        "world_size": len(layout.workers),
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size or 1,
        "dp_size": layout.dp_size or 1,
        "model": registration.model,
        "engine": registration.engine,
        "weight_version": stage.report.weight_version.label,
    }


READS: Sequence[tuple[str, Callable[[Call, Stage], dict[str, Any]], str]] = (
    ("/is_paused", lambda _, stage: {"is_paused": stage.report.paused}, "Whether generation is paused."),
    ("/is_sleeping", lambda _, stage: {"is_sleeping": bool(stage.report.released)}, "Whether memory is released."),
    (
        "/weight_info",
        lambda _, stage: {"weight_version": stage.report.weight_version.label},
        "The label of the weights' version.",
    ),
    ("/get_server_info", _info, "Layout and version; at the root a map by address."),
)


async def servers(call: Call) -> Reply:
    """List the URLs of the engines, including unreachable engines."""
    return Reply(
        {"servers": [engine_urls.url_of(call, stage.registration.slot) for stage in await engine_urls.listed(call)]}
    )


async def world_size(call: Call) -> Reply:
    """Return the number of ranks of the engine; at the root, of all engines."""
    stages = await engine_urls.addressed(call)
    sizes = [len(stage.registration.layout.workers) for stage in stages]
    return Reply({"world_size": sum(sizes)})


async def load(call: Call) -> Reply:
    """Return the number of waiting and running requests."""
    operation = await call.operate(await engine_urls.aimed(call, GetLoadsRequest()), partly=True)
    loads = [rank.loads for result in operation.stage_results for rank in result.rank_results]
    return Reply({"server_load": sum(each.running + each.waiting for each in loads)})


async def server_info(call: Call) -> Reply:
    """Return the engine's start arguments; at the root, all engines' by URL. ``vllm_config`` has trainers' fields."""
    operation = await call.operate(await engine_urls.aimed(call, GetServerInfoRequest()), partly=True)
    infos: dict[str, Any] = {}
    for result in operation.stage_results:
        done = confirmed(result)
        infos[result.slot] = plain(result.rank_results[0].server_info) if done else {"error": result.error.message}
    for each in operation.excluded:
        infos[each.slot] = {"error": excluded_engine(each.slot, each.state, each.reason)["error"]}
    stages = await engine_urls.addressed(call)
    config = {
        "model_config": {"model": stages[0].registration.checkpoint if stages else ""},
        "parallel_config": {"world_size": sum(len(stage.registration.layout.workers) for stage in stages)},
        "weight_transfer_config": {"backend": await requests.backend(call)},
    }
    if engine_urls.slots_of(call):
        return Reply({**infos[engine_urls.slots_of(call)[0]], "vllm_config": config})
    return Reply(
        {"servers": {engine_urls.url_of(call, slot): info for slot, info in infos.items()}, "vllm_config": config}
    )


async def version(call: Call) -> Reply:
    """Return rlctl's version."""
    del call
    return Reply({"version": __version__})


ROUTES = (
    *(Route("GET", path, functools.partial(read, tell), Scope.VIEWER, doc) for path, tell, doc in READS),
    Route("GET", "/get_world_size", world_size, Scope.VIEWER),
    Route("GET", "/load", load, Scope.VIEWER),
    Route("GET", "/server_info", server_info, Scope.VIEWER),
    Route("GET", "/health", engine_urls.health, Scope.OPEN),
    Route("GET", "/ping", engine_urls.health, Scope.OPEN),
    Route("GET", "/version", version, Scope.OPEN),
)
