"""Engine URLs: the routes of an engine below ``/engines/SLOT`` of a gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route
from rlctl.gateway.http.placeholders import ANY, SLOT
from rlctl.gateway.http.table import ENGINE
from rlctl.runtime.addresses import split
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.common_pb2 import (
    STAGE_STATE_FAILED,
    STAGE_STATE_JOINING,
    STAGE_STATE_RETIRED,
    STAGE_STATE_UNREACHABLE,
    StageState,
)
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from rlctl.v1.verbs_pb2 import (
    InitWeightsUpdateGroupRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

_OF_ONE_MODEL = (BeginWeightUpdateRequest, CommitWeightUpdateRequest, InitWeightsUpdateGroupRequest)
"""The coordinator finds the model for the other requests."""

_OF_THE_MODEL = (
    *_OF_ONE_MODEL,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

GONE = (STAGE_STATE_UNREACHABLE, STAGE_STATE_RETIRED, STAGE_STATE_FAILED)
_ADDRESS = re.compile(r"/engines/([^/?#]+)/?$")


def with_engines(routes: Iterable[Route]) -> list[Route]:
    """Return the routes for the whole fleet and for each engine URL; :func:`slots_of` distinguishes the two."""
    rows = list(routes)
    return [*rows, *(dataclasses.replace(route, path=ENGINE + route.path, doc=route.about) for route in rows)]


def slots_of(call: Call) -> list[str]:
    """Return the slot of the engine URL of a call; empty for the fleet, or for any engine."""
    return [call.path[SLOT]] if call.path.get(SLOT, ANY) != ANY else []


def url_of(call: Call, slot: str) -> str:
    """Return an engine's URL as this caller reaches it."""
    scheme = call.headers.get("X-Forwarded-Proto", "http")
    return f"{scheme}://{call.headers.get('Host', '')}{ENGINE.format(**{SLOT: quote(slot, safe='')})}"


def slot_in(url: str) -> str:
    """Return the slot of an engine URL, or "" for any other URL."""
    match = _ADDRESS.search(url)
    return unquote(match[1]) if match else ""


async def is_own(call: Call, url: str) -> bool:
    """Return whether a URL without a path is this gateway's: same TCP port, and an address of the caller's Host."""
    try:
        parsed = urlsplit(url if "://" in url else f"http://{url}")
        call_host, call_port = split(call.headers.get("Host", ""), "Host")
        port = parsed.port or 80
    except (RlctlError, ValueError):
        return False
    if not parsed.hostname or parsed.path not in ("", "/") or port != call_port:
        return False
    if parsed.hostname == call_host:
        return True
    of_url, of_call = await asyncio.gather(_addresses(parsed.hostname), _addresses(call_host))
    return bool(of_url & of_call)


async def _addresses(host: str) -> set[str]:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: the text is no host name
        return set()
    return {str(address[0]) for *_, address in infos}


def foreign(url: str) -> RlctlError:
    """Return the error for a URL without an engine of the fleet."""
    return Reason.UNSUPPORTED.error(
        f"{url} is not an engine of this fleet: an engine joins by its stage server",
        field="url",
        next_step="Attach to a server that runs with `rlctl stage --engine sglang --option url=URL --slot NAME"
        " --model-path DIR --coordinator ADDRESS`, or by `external: [HOST:PORT]` in the topology.",
    )


async def listed(call: Call) -> list[Stage]:
    """Return the stages of the gateway's model, or of the fleet, in slot order, without retired stages.

    An unreachable stage is listed with its state.
    """
    return await _stages(call, call.fleet)


async def living(call: Call) -> list[Stage]:
    """Return the reachable stages of :func:`listed`."""
    return [stage for stage in await listed(call) if stage.state not in GONE]


async def find(call: Call, slot: str, field: str) -> Stage:
    """Return a stage of :func:`listed`. Raises STAGE_NOT_FOUND."""
    return _named(await listed(call), slot, field)


async def addressed(call: Call, *, openly: bool = False) -> list[Stage]:
    """Return the reachable stages that a call addresses. ``openly``: the caller needs no token.

    Raises STAGE_NOT_FOUND, and UNREACHABLE for an engine URL.
    """
    stages = await _stages(call, call.generation.fleet if openly else call.fleet)
    targets = [_named(stages, slot, SLOT) for slot in slots_of(call)]
    for stage in targets:
        if stage.state in GONE:
            raise unreachable(stage.registration.slot, stage.state)
    return targets or [stage for stage in stages if stage.state not in GONE]


def unreachable(slot: str, state: StageState.ValueType, reason: str = "") -> RlctlError:
    """Return the error for an unreachable engine, or for an engine excluded for ``reason``."""
    name = StageState.Name(state).removeprefix("STAGE_STATE_")
    cause = Reason.UNREACHABLE if state in GONE else Reason.STAGE_NOT_SERVING
    return cause.error(f"{slot} is {name}{f': {reason}' if reason else ''}")


async def health(call: Call) -> Reply:
    """Return 200 if the engine lives, also paused or asleep; at the root if any engine lives.

    Generates nothing. Raises NO_ROUTABLE_STAGE, STAGE_NOT_FOUND, UNREACHABLE.
    """
    for stage in await addressed(call, openly=True):
        if stage.state != STAGE_STATE_JOINING and not stage.quarantine.reason:
            return Reply(b"")
    raise Reason.NO_ROUTABLE_STAGE.error("no engine is healthy")


async def _stages(call: Call, fleet: AsyncFleet) -> list[Stage]:
    status = await fleet.status(call.generation.settings.model)
    return [stage for stage in status.stages if stage.state != STAGE_STATE_RETIRED]


def _named(stages: Sequence[Stage], slot: str, field: str) -> Stage:
    for stage in stages:
        if stage.registration.slot == slot:
            return stage
    raise Reason.STAGE_NOT_FOUND.error(f"there is no engine {slot!r}", field=field)


async def updatable(call: Call) -> str:
    """Return the model to update: the gateway's, else the only updatable model. Raises FIELD_REQUIRED."""
    names = [model.name for model in await call.fleet.models() if model.updatable]
    if call.generation.settings.model or len(names) == 1:
        return call.generation.settings.model or names[0]
    raise Reason.FIELD_REQUIRED.error(
        f"model is required; models of the fleet: {', '.join(names) or 'none'}",
        field="model",
        next_step="Name a model, or start the gateway with --model.",
    )


async def aimed(call: Call, request: Any, step: str = "") -> Any:
    """Set request id and target of a request: the call's model, or the engine of its URL.

    ``step`` distinguishes the requests of a call. Weights belong to a model. Some trainers know engines only; their
    calls for each engine become one operation. Raises as :func:`updatable`, and FIELD_INVALID for a group of the whole
    fleet with ranks that do not follow the source's.
    """
    header = request.header
    header.request_id, header.unkeyed = await call.request_id(step), not call.keyed
    header.target.model = call.generation.settings.model
    slots = slots_of(call)
    if slots and isinstance(request, _OF_THE_MODEL):
        header.for_slot = slots[0]
        return request
    header.target.slots.extend(slots)
    if not slots and isinstance(request, _OF_ONE_MODEL):
        header.target.model = await updatable(call)
    if isinstance(request, InitWeightsUpdateGroupRequest) and request.rank_offset not in (0, 1):
        raise Reason.FIELD_INVALID.error(
            f"the engines' ranks follow the source's, so theirs begin at 1, not at {request.rank_offset}",
            field="rank_offset",
        )
    return request
