"""SGLang's admin routes over fake engines: what reaches the coordinator, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from updating import unreachable
from waiting import eventually

from rlctl.gateway.http.call import UNKNOWN_FIELDS
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

BUCKET = {"names": ["w1"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "g", "flush_cache": False}


async def ask(http: aiohttp.ClientSession, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    async with http.request(method, path, json=body) as response:
        return response.status, await response.json(content_type=None)


async def form(http: aiohttp.ClientSession) -> None:
    group = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4, "group_name": "g", "backend": "gloo"}
    calls = [ask(http, f"/engines/{s}/init_weights_update_group", group | {"rank_offset": at}) for s, at in OFFSETS]
    assert {status for status, _ in await asyncio.gather(*calls)} == {200}


OFFSETS = (("b", 1), ("a", 3))


def runs(fleet: InProcessFleet, verb: str) -> list[Any]:
    return fleet.server.coordinator.operations.newest_first(verb, 0)


async def test_an_answer_that_did_not_get_through_is_given_to_the_repeat(
    fleet: InProcessFleet, http: aiohttp.ClientSession
) -> None:
    await form(http)
    assert (await ask(http, "/pause_generation", {}))[0] == 200
    held, entered = asyncio.Event(), asyncio.Event()
    take = fleet.stages["a"]._engine.update_weights_from_distributed

    async def slowly(*args: Any) -> Any:
        entered.set()
        await held.wait()
        return await take(*args)

    fleet.stages["a"]._engine.update_weights_from_distributed = slowly
    lost = asyncio.ensure_future(ask(http, "/engines/a/update_weights_from_distributed", BUCKET))
    await entered.wait()
    lost.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await lost
    joining = fleet.server.coordinator.implicit.joining
    held.set()
    [run] = runs(fleet, "UpdateWeightsFromDistributed")
    await run.ended.wait()
    [shared] = joining._shared.values()
    assert shared.unanswered == {"a", "b"}, "the coordinator knows that the client has left"
    for slot in "ab":
        assert (await ask(http, f"/engines/{slot}/update_weights_from_distributed", BUCKET))[0] == 200
    assert len(runs(fleet, "UpdateWeightsFromDistributed")) == 1
    assert (await ask(http, "/continue_generation", {}))[0] == 200
    assert (await ask(http, "/get_weight_version", method="GET"))[1]["weight_version_seq"] == 2


async def test_weights_that_differ_from_the_snapshot_have_a_reason(http: aiohttp.ClientSession) -> None:
    assert (await ask(http, "/pause_generation", {}))[0] == 200
    for action in ("snapshot", "reset_tensors"):
        assert (await ask(http, "/weights_checker", {"action": action}))[0] == 200
    status, told = await ask(http, "/weights_checker", {"action": "compare"})
    assert (status, told["success"], told["reason"]) == (400, False, "DIGEST_MISMATCH")
    assert told["message"].startswith("1 tensors differ from the snapshot")


async def test_a_field_may_be_called_anything(http: aiohttp.ClientSession) -> None:
    async with http.post("/continue_generation", json={"\u0000\r\né": 1}) as response:
        assert response.status == 200
        assert response.headers[UNKNOWN_FIELDS] == "\\x00\\r\\n\\xe9"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/update_weights_from_distributed", BUCKET | {"shapes": [[2, "x"]]}, "shapes.0[1]"),
        ("/update_weights_from_distributed", BUCKET | {"shapes": [[-1]]}, "shapes[0]"),
        ("/update_weights_from_distributed", BUCKET | {"load_format": "direct"}, "load_format"),
        ("/update_weights_from_tensor", {"segments": [{"bogus": 1}]}, "segments[0]"),
        ("/init_weights_update_group", {"master_address": "x"}, "master_port"),
        ("/release_memory_occupation", {"tags": ["kv_cache", "x"]}, "tags[1]"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
        ("/update_weights_from_disk", {"model_path": "x", "token_step": -1}, "token_step"),
        ("/weights_checker", {"skip_tensor_list": "x"}, "skip_tensor_list"),
    ],
)
async def test_a_bad_field_is_named(
    fleet: InProcessFleet, http: aiohttp.ClientSession, path: str, body: Any, field: str
) -> None:
    status, refused = await ask(http, path, body)
    assert (status, refused["error"]["field"]) == (400, field)
    assert not runs(fleet, "WeightUpdate")
    assert fleet.stage("a").state == common.STAGE_STATE_READY


async def test_an_error_says_what_became_of_every_engine(fleet: InProcessFleet, http: aiohttp.ClientSession) -> None:
    status, refused = await ask(http, "/destroy_weights_update_group", {"group_name": "none"})
    assert (status, refused["success"]) == (400, False)
    engines = refused["error"]["engines"]
    assert {slot: said["reason"] for slot, said in engines.items()} == {"a": "GROUP_NOT_FOUND", "b": "GROUP_NOT_FOUND"}
    assert refused["error"]["operation_id"] == runs(fleet, "DestroyWeightsUpdateGroup")[0].operation.operation_id


async def test_health_asks_for_the_engine_and_readiness_for_its_generation(
    fleet: InProcessFleet, http: aiohttp.ClientSession
) -> None:
    async def statuses(slot: str) -> list[int]:
        return [(await http.get(f"/engines/{slot}/{path}")).status for path in ("health", "ready")]

    assert await statuses("a") == [200, 200]
    await ask(http, "/engines/a/pause_generation", {})
    await eventually(lambda: fleet.stage("a").state == common.STAGE_STATE_PAUSED)
    assert await statuses("a") == [200, 503]
    assert (await http.get("/ready")).status == 200, "the fleet is, while one engine is"
    async with unreachable(fleet, "a"):
        assert await statuses("a") == [503, 503]


async def test_rows_of_a_tensor_come_from_every_rank_of_one_engine(
    fleet: InProcessFleet, http: aiohttp.ClientSession
) -> None:
    weights = [float(ord(character)) for character in fleet.stages["a"]._engine.weights]
    for path in ("/get_weights_by_name", "/engines/a/get_weights_by_name", "/engines/b/get_weights_by_name"):
        for method in ("GET", "POST"):
            assert await ask(http, path, {"name": "weights"}, method) == (200, weights[:100])
        assert await ask(http, path, {"name": "weights", "truncate_size": 2}) == (200, weights[:2])
        status, told = await ask(http, path, {"name": "other"})
        assert (status, told["error"]["reason"], told["error"]["field"]) == (400, "FIELD_INVALID", "name")
        for rows in (0, -1, 1 << 32):
            status, told = await ask(http, path, {"name": "weights", "truncate_size": rows})
            assert (status, told["error"]["field"]) == (400, "truncate_size")


async def test_at_the_root_an_engine_that_cannot_be_read_is_the_last_choice(
    tmp_path: Path, make_gateway: Any, checkpoint: Any
) -> None:
    path = checkpoint("one")
    specs = [StageSpec("a", path, options={"opaque": "said"}), StageSpec("b", path)]
    async with InProcessFleet(tmp_path / "journal", specs) as fleet, make_gateway(fleet) as (_, http):
        assert (await ask(http, "/get_weights_by_name", {"name": "weights"}))[0] == 200
        status, told = await ask(http, "/engines/a/get_weights_by_name", {"name": "weights"})
        assert (status, told["error"]["reason"]) == (400, "UNSUPPORTED")
        for slots in (["b"], []):
            await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header={"target": {"slots": slots}}))
            assert (await ask(http, "/get_weights_by_name", {"name": "weights"}))[0] == 200
