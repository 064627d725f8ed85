"""Principals of one model in a fleet with two: no field of a request opens the other model to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from rlctl.contract.access import COORDINATOR_RPCS
from rlctl.contract.errors import Reason
from rlctl.contract.scopes import Grant, Scope
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.channel import bearer
from rlctl.transport.status import from_grpc
from rlctl.v1 import coordinator_pb2, update_pb2
from rlctl.v1 import verbs_pb2 as v

TOKEN = "the fleet's own token"
UNKNOWN = "0198c0de-0000-7000-8000-000000000000"
SUBJECTED = sorted(
    name
    for name, scopes in COORDINATOR_RPCS.items()
    if {Scope.WEIGHTS, Scope.ADAPTERS} & set(scopes) and name != "ReserveRequestId"  # which has no target
)
SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]


@dataclass
class Ids:
    """Operations of principals that may change actor only, and an open update of critic."""

    paused: str
    ended: str
    opened: str
    adapter: str
    critic: str


@pytest.fixture
async def fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> AsyncIterator[InProcessFleet]:
    path = tmp_path / "access.json"
    scopes = {"trainer": "weights:actor", "lora": "adapters:math"}
    entries = {
        name: Entry(name, (Grant.parse(scope),), (TokenHash(hash_of(name), 0.0),)) for name, scope in scopes.items()
    }
    await asyncio.to_thread(access_file.write, path, entries)
    specs = [StageSpec(slot, checkpoint("one"), model=model) for slot, model in (("a", "actor"), ("c", "critic"))]
    async with InProcessFleet(tmp_path / "j.db", specs, token=TOKEN, access_file=str(path)) as fleet:
        yield fleet


def begin(model: str, **fields: Any) -> update_pb2.BeginWeightUpdateRequest:
    fields = {"kind": v.UPDATE_KIND_FULL, **fields}
    return update_pb2.BeginWeightUpdateRequest(
        model=model, version="step-1", path=update_pb2.DATA_PATH_BROADCAST, **fields
    )


async def reason_of(call: Awaitable[Any]) -> Reason | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_grpc(error).reason
    return None


async def ids_in(fleet: InProcessFleet) -> Ids:
    trainer = bearer("trainer")
    pause = v.PauseGenerationRequest()
    pause.header.target.model = "actor"
    paused = await fleet.stub.PauseGeneration(pause, metadata=trainer)
    go_on = v.ContinueGenerationRequest()
    go_on.header.target.model = "actor"
    await fleet.stub.ContinueGeneration(go_on, metadata=trainer)
    ended = await fleet.stub.BeginWeightUpdate(begin("actor"), metadata=trainer)
    abort = update_pb2.AbortWeightUpdateRequest(update_id=ended.update_id)
    await fleet.stub.AbortWeightUpdate(abort, metadata=trainer)
    load = v.LoadAdapterRequest(name="math", path="/none")
    load.header.target.model = "actor"
    with suppress(grpc.aio.AioRpcError):
        await fleet.stub.LoadAdapter(load, metadata=bearer("lora"))
    [adapter] = [
        each.operation_id
        for each in (
            await fleet.stub.ListOperations(coordinator_pb2.ListOperationsRequest(), metadata=trainer)
        ).operations
        if each.adapter == "math"
    ]
    opened = await fleet.stub.BeginWeightUpdate(begin("actor"), metadata=trainer)
    critic = await fleet.stub.BeginWeightUpdate(begin("critic"), metadata=bearer(TOKEN))
    return Ids(paused.operation_id, ended.update_id, opened.update_id, adapter, critic.update_id)


def requests_of(name: str, ids: Ids) -> Iterator[Any]:
    """Requests about critic, one for each way to name it, and with every other field that could name actor."""
    descriptor = SERVICE.methods_by_name[name].input_type
    kind = getattr(v, descriptor.name, None) or getattr(update_pb2, descriptor.name, None)
    kind = kind or getattr(coordinator_pb2, descriptor.name)
    fields = descriptor.fields_by_name
    for field in ("update_id", "operation_id"):
        if field in fields:
            yield kind(**{field: ids.critic})
    if "model" in fields:
        yield kind(model="critic")
    elif "header" in fields and not {"update_id", "operation_id"} & set(fields):
        for target in (
            {"model": "critic"},
            {"slots": ["c"]},
            {"slots": ["a", "c"]},
            {"model": "actor", "slots": ["c"]},
        ):
            request = kind()
            request.header.target.CopyFrom(type(request.header.target)(**target))
            yield request


async def test_no_id_in_a_request_about_another_model_opens_it(fleet: InProcessFleet) -> None:
    ids = await ids_in(fleet)
    fences = ["", UNKNOWN, *vars(ids).values()]
    tried = 0
    for name in SUBJECTED:
        for request in requests_of(name, ids):
            for fence in fences if hasattr(request, "header") else [""]:
                if fence:
                    request.header.fence.update_id = fence
                    request.header.for_slot = "a"
                for principal in ("trainer", "lora"):
                    call = getattr(fleet.stub, name)(request, metadata=bearer(principal))
                    assert await reason_of(call) is Reason.SCOPE_MISSING, (principal, name, request)
                    tried += 1
    assert tried > 200
    assert {name for name in SUBJECTED if any(True for _ in requests_of(name, ids))} == set(SUBJECTED)
    abort = update_pb2.AbortWeightUpdateRequest(update_id=ids.critic)
    assert (await fleet.stub.AbortWeightUpdate(abort, metadata=bearer(TOKEN))).operation_id == ids.critic


async def test_a_request_that_opens_an_update_takes_no_fence(fleet: InProcessFleet) -> None:
    ids = await ids_in(fleet)
    disk, load = v.UpdateWeightsFromDiskRequest(model_path="/none"), v.LoadAdapterRequest(name="math", path="/none")
    for request in (disk, load, begin("actor")):
        if not isinstance(request, update_pb2.BeginWeightUpdateRequest):
            request.header.target.model = "actor"
        request.header.fence.update_id = ids.opened
        name = request.DESCRIPTOR.name.removesuffix("Request")
        call = getattr(fleet.stub, name)(request, metadata=bearer("trainer"))
        assert await reason_of(call) is Reason.FIELD_CONFLICT, name


async def test_a_field_that_a_verb_does_not_read_gives_no_right(fleet: InProcessFleet) -> None:
    ids = await ids_in(fleet)
    pause = v.PauseGenerationRequest()
    pause.header.for_slot = "a"  # the pause is about all stages
    implicit = begin("", implicit=True)
    implicit.header.target.model = "actor"
    write = v.UpdateWeightsFromTensorRequest()
    write.header.target.slots.append("a")  # the write is about the one model that takes weights
    commit = update_pb2.CommitWeightUpdateRequest()
    commit.header.target.slots.append("a")
    go_on = v.ContinueGenerationRequest(adapter="math")  # ends pauses of math at all models
    go_on.header.fence.update_id = ids.opened
    for request in (pause, implicit, write, commit, go_on):
        name = request.DESCRIPTOR.name.removesuffix("Request")
        call = getattr(fleet.stub, name)(request, metadata=bearer("trainer"))
        assert await reason_of(call) is Reason.SCOPE_MISSING, name


async def test_an_update_of_an_adapter_unloads_no_other(fleet: InProcessFleet) -> None:
    ids = await ids_in(fleet)
    unload = v.UnloadAdapterRequest(name="code")
    unload.header.fence.update_id = ids.adapter
    assert await reason_of(fleet.stub.UnloadAdapter(unload, metadata=bearer("lora"))) is Reason.SCOPE_MISSING


async def test_an_update_that_has_ended_is_named_as_the_reason(fleet: InProcessFleet) -> None:
    ids = await ids_in(fleet)
    flush = v.FlushCacheRequest()
    flush.header.fence.update_id = ids.ended
    call = fleet.stub.FlushCache(flush, metadata=bearer("trainer"))
    assert await reason_of(call) is Reason.UPDATE_NOT_FOUND
