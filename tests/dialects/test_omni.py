"""SGLang-Omni's RL admin interface, from its documentation, over real HTTP against engines of different TP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google.protobuf.json_format import MessageToDict
from http_trainer import Source, announced, chunks_of, digest_of, weights_of

from rlctl.demo.tiny import save
from rlctl.gateway.dialects.omni import dialect
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.digest import combine
from rlctl.weights.tensor.source import as_source

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

ADMIN = [
    ("GET", "/model_info"),
    ("POST", "/model_info"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/destroy_weights_update_group"),
    ("POST", "/update_weights_from_distributed"),
    ("GET", "/weights_checker"),
    ("POST", "/weights_checker"),
]
ROUTER = [
    ("POST", "/workers"),
    ("PUT", "/workers/actor-0"),
    ("DELETE", "/workers/actor-0"),
    ("POST", "/weight_update_journal/resolve"),
]
"""What a router has and a worker has not."""


@pytest.fixture
async def http(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, "omni") as http:
        yield http
    await client.set_enabled(["actor-0", "actor-1"], True)
    await client.continue_generation(check=False)


async def ask(http: aiohttp.ClientSession, path: str, body: Any = None, method: str = "POST", **given: Any) -> Any:
    async with http.request(method, path, json=body, **given) as response:
        return response.status, await response.json()


async def states(client: AsyncFleet) -> list[tuple[bool, bool]]:
    return [(stage.enabled, stage.report.paused) for stage in (await client.status()).stages]


async def checked(http: aiohttp.ClientSession, **body: Any) -> list[Any]:
    """The checker's result of every worker."""
    status, told = await ask(http, "/weights_checker", body)
    assert status == 200, told
    return [worker["body"]["results"][0]["data"] for worker in told["results"]]


async def everywhere(http: aiohttp.ClientSession, digest: str) -> None:
    data = await checked(http)
    assert {rank["data"]["model_digest"] for stage in data for rank in stage["rank_results"]} == {digest}


# Authentication.


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("by", ["argument", "environment"])
async def test_with_a_key_admin_requests_need_it(
    torch_fleet: LaunchedFleet, open_gateway: Any, monkeypatch: pytest.MonkeyPatch, by: str, scheme: str
) -> None:
    monkeypatch.setenv(dialect.KEY, "the key" if by == "environment" else "another")
    key = "the key" if by == "argument" else ""
    async with open_gateway(torch_fleet.address, "omni", admin_api_key=key) as http:
        for method, path in [*ADMIN, *ROUTER]:
            for prefix in ("", "/engines/actor-0") if (method, path) in ADMIN else ("",):
                for headers in ({}, {"Authorization": "the key"}, {"Authorization": "Basic dGhl"}):
                    async with http.request(method, prefix + path, json={}, headers=headers) as response:
                        assert response.status == 401, path
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                async with http.request(
                    method, prefix + path, json={}, headers={"Authorization": f"{scheme} wrong"}
                ) as response:
                    assert response.status == 403, path
        status, body = await ask(http, "/model_info", method="GET", headers={"Authorization": f"{scheme} the key"})
        assert (status, body["success"]) == (200, True)


# Reads, pauses, and who is routed to.


async def test_model_info_of_the_router_and_of_a_worker(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    stages = (await client.status()).stages
    label = stages[0].report.weight_version.label
    status, told = await ask(http, "/model_info", method="GET")
    assert status == 200
    assert (told["success"], told["path"], told["worker_count"]) == (True, "/model_info", 2)
    assert [(worker["success"], worker["status_code"]) for worker in told["results"]] == [(True, 200)] * 2
    assert told["weight_version"] == label
    address = told["results"][0]["worker"]
    async with aiohttp.ClientSession() as outside, outside.get(f"{address}/model_info") as response:
        worker = await response.json()
    assert (worker["success"], worker["weight_version"]) == (True, label)
    data = worker["stages"][0]["data"]
    assert data["tp_size"] == 2
    assert [rank["rank"] for rank in data["rank_results"]] == [0, 1]
    assert worker["model_path"] == data["rank_results"][0]["data"]["model_path"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_and_continue(http: aiohttp.ClientSession, client: AsyncFleet, mode: str) -> None:
    status, told = await ask(http, "/pause_generation", {"mode": mode, "timeout_s": 20})
    assert (status, told["success"]) == (200, True)
    assert await states(client) == [(True, True)] * 2
    status, told = await ask(http, "/continue_generation", {})
    assert (status, told["success"]) == (200, True)
    assert await states(client) == [(True, False)] * 2


async def test_a_worker_alone_is_paused(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    status, told = await ask(http, "/engines/actor-1/pause_generation", {})
    assert (status, told["success"], len(told["results"])) == (200, True, 1)
    assert await states(client) == [(True, False), (True, True)]


async def test_a_broadcast_reaches_disabled_workers_and_leaves_them_disabled(
    http: aiohttp.ClientSession, client: AsyncFleet
) -> None:
    status, told = await ask(http, "/workers/actor-1", {"disabled": True}, method="PUT")
    assert (status, told["disabled"]) == (200, True)
    await ask(http, "/pause_generation", {})
    assert await states(client) == [(True, True), (False, True)]
    await ask(http, "/continue_generation", {})
    assert await states(client) == [(True, False), (False, False)]
    status, told = await ask(http, "/workers", method="GET")
    assert (told["total_workers"], told["disabled_workers"], told["routable_workers"]) == (2, 1, 1)
    status, told = await ask(http, "/workers/actor-1", {"disabled": False}, method="PUT")
    assert (status, told["disabled"]) == (200, False)


async def test_stages_are_named_or_unknown(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    assert (await ask(http, "/pause_generation", {"stages": ["main"]}))[0] == 200
    status, told = await ask(http, "/continue_generation", {"stages": ["talker"]})
    assert 400 <= status < 500, told
    assert "talker" in told["error"]["message"]
    assert await states(client) == [(True, True)] * 2


# What is wrong is said, and disables nobody.


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause_generation", {"mode": "sleepily"}, 422),
        ("/pause_generation", {"mode": 3}, 422),
        ("/pause_generation", {"timeout_s": -1}, 422),
        ("/pause_generation", {"stages": []}, 422),
        ("/update_weights_from_disk", {}, 422),
        ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}, (422, 502)),
        ("/update_weights_from_disk", {"model_path": "x", "manifest": {}}, 501),
        ("/update_weights_from_disk", {"model_path": "x", "token_step": -1}, 422),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}, 422),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": [[1]]}, 422),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, 422),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [["x"]]}, 422),
        ("/update_weights_from_tensor", {}, 422),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 501),
        ("/weights_checker", {"action": "guess"}, 422),
        ("/destroy_weights_update_group", {"group_name": "never"}, 502),
    ],
)
async def test_a_typo_disables_nobody(
    http: aiohttp.ClientSession, client: AsyncFleet, path: str, body: Any, status: Any
) -> None:
    before = await states(client)
    got, told = await ask(http, path, body)
    assert got in (status if isinstance(status, tuple) else (status,)), told
    assert told.get("success") is not True
    assert await states(client) == before
    assert [stage.routable for stage in (await client.status()).stages] == [True, True]


async def test_a_group_that_nobody_comes_to_fails_in_time_and_disables_nobody(
    http: aiohttp.ClientSession, client: AsyncFleet
) -> None:
    async with Source(4) as source:
        body = {**source.where, "group_name": source.name, "rank_offset": 1, "backend": "gloo", "timeout_s": 2}
        began = time.monotonic()
        status, told = await ask(http, "/init_weights_update_group", body)
        assert (status, told["success"]) == (502, False)
        assert time.monotonic() - began < 20
        assert await states(client) == [(True, False)] * 2
        assert [stage.routable for stage in (await client.status()).stages] == [True, True]


async def test_malformed_json_is_400(http: aiohttp.ClientSession) -> None:
    for data in (b"{", b"[1]", b'"text"'):
        async with http.post("/pause_generation", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"


async def test_a_group_of_another_size_is_refused_with_both_numbers(http: aiohttp.ClientSession) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 3, "rank_offset": 1, "backend": "gloo"}
    status, told = await ask(http, "/init_weights_update_group", body)
    assert (status, told["success"]) == (502, False)
    assert "world_size is 3" in told["message"]
    assert "make 4" in told["message"]
    status, told = await ask(http, "/init_weights_update_group", {**body, "world_size": 4, "rank_offset": 2})
    assert (status, told["error"]["param"]) == (422, "rank_offset")


async def test_updates_take_turns_and_one_that_waits_too_long_is_told_503(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "LOCK_S", 0.2)
    async with Source(4) as source:
        body = {**source.where, "group_name": source.name, "rank_offset": 1, "backend": "gloo"}
        joining = asyncio.create_task(ask(http, "/init_weights_update_group", body))
        refused = asyncio.create_task(ask(http, "/pause_generation", {}))
        done, _ = await asyncio.wait([joining, refused], return_when=asyncio.FIRST_COMPLETED)
        assert done == {refused}
        status, told = await refused
        assert status == 503, told
        await source.meet()
        status, told = await joining
        assert (status, told["success"]) == (200, True)
        await ask(http, "/destroy_weights_update_group", {"group_name": source.name})


# Weights.


async def test_an_update_over_a_group_of_the_trainers_own(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path]
) -> None:
    tensors = weights_of(tiny[0], 11)
    async with Source(4) as source:
        assert (await ask(http, "/pause_generation", {"mode": "retract"}))[0] == 200
        group = {**source.where, "group_name": source.name, "rank_offset": 1, "backend": "gloo"}
        [(status, told)] = await source.meet(ask(http, "/init_weights_update_group", group))
        assert (status, told["success"], len(told["results"])) == (200, True, 2)
        for chunk in chunks_of(tensors, 3):
            body = {**announced(chunk), "group_name": source.name, "weight_version": "omni-11", "flush_cache": False}
            [(status, told)] = await source.send(chunk, ask(http, "/update_weights_from_distributed", body))
            assert (status, told["success"]) == (200, True), told
        status, told = await ask(http, "/model_info", method="GET")
        assert told["weight_version"] != "omni-11", "it is published last"
        assert (await ask(http, "/continue_generation", {}))[0] == 200
        status, told = await ask(http, "/model_info", method="GET")
        assert (status, told["weight_version"]) == (200, "omni-11")
        await everywhere(http, digest_of(tensors))
        status, told = await ask(http, "/destroy_weights_update_group", {"group_name": source.name})
        assert (status, told["success"]) == (200, True)


async def test_an_update_from_disk(http: aiohttp.ClientSession, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = tiny[0]
    save(model, tmp_path / "next")
    status, told = await ask(
        http, "/update_weights_from_disk", {"model_path": str(tmp_path / "next"), "weight_version": "omni-disk"}
    )
    assert (status, told["success"]) == (200, True), told
    assert all(rank["success"] for worker in told["results"] for rank in _ranks(worker))
    status, told = await ask(http, "/model_info", method="GET")
    assert told["weight_version"] == "omni-disk"
    await everywhere(http, digest_of(dict(model.named_parameters())))


async def test_an_update_of_every_worker_by_itself_is_one(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    save(tiny[0], tmp_path / "next")
    body = {"model_path": str(tmp_path / "next"), "weight_version": "omni-each"}
    before = (await client.status()).models[0].latest.sequence
    answers = await asyncio.gather(
        *(ask(http, f"/engines/{slot}/update_weights_from_disk", body) for slot in ("actor-0", "actor-1"))
    )
    assert [(status, told["success"]) for status, told in answers] == [(200, True)] * 2
    assert (await client.status()).models[0].latest.sequence == before + 1


def _ranks(worker: Any) -> Any:
    return worker["body"]["results"][0]["data"]["rank_results"]


# The checker.


async def test_the_checkers_digests_are_those_of_the_documentation(http: aiohttp.ClientSession) -> None:
    """Every digest is over what the answer itself says, and the rank's over the sorted names."""
    for stage in await checked(http, action="checksum"):
        for rank in stage["rank_results"]:
            data = rank["data"]
            assert data["action"] == "checksum"
            assert data["tensor_count"] == len(data["checksums"]) == len(data["tensor_metadata"])
            assert combine(data["checksums"]) == data["per_gpu_checksum"]
            for name, metadata in data["tensor_metadata"].items():
                assert metadata["sha256"] == data["checksums"][name]
                assert metadata["dtype"] == "torch.float32"


async def test_reset_tensors_proves_that_every_tensor_is_written(
    http: aiohttp.ClientSession, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    save(tiny[0], tmp_path / "next")
    await ask(http, "/update_weights_from_disk", {"model_path": str(tmp_path / "next"), "weight_version": "checked"})
    await checked(http, action="snapshot")
    before = await checked(http)
    await checked(http, action="reset_tensors")
    for stage, earlier in zip(await checked(http, action="compare"), before, strict=True):
        for rank, was in zip(stage["rank_results"], earlier["rank_results"], strict=True):
            parameters = {name for name in was["data"]["checksums"] if name.endswith(".weight")}
            assert set(rank["data"]["changed"]) == parameters
            assert rank["data"]["matched"] is False
    status, told = await ask(http, "/continue_generation", {})
    assert status == 502, "scrambled weights are not served"
    status, told = await ask(
        http, "/update_weights_from_disk", {"model_path": str(tmp_path / "next"), "weight_version": "again"}
    )
    assert status == 200, told
    for stage in await checked(http, action="compare"):
        for rank in stage["rank_results"]:
            assert (rank["data"]["missing"], rank["data"]["unexpected"], rank["data"]["changed"]) == ([], [], [])
            assert rank["data"]["matched"] is True


@pytest.mark.parametrize("paused", [False, True])
async def test_an_update_from_shared_memory_works(
    http: aiohttp.ClientSession, tiny: tuple[Any, Path], paused: bool
) -> None:
    """It answers 501 in SGLang-Omni."""
    tensors = weights_of(tiny[0], 12 + paused)
    label = f"omni-tensor-{paused}"
    with contextlib.closing(SegmentSender()) as sender:
        source = as_source(list(tensors.items()))
        [sent] = sender.write(source, list(source.metas()))
        segments = [MessageToDict(message, preserving_proto_field_name=True) for message in sent.messages]
        if paused:
            await ask(http, "/pause_generation", {"mode": "retract"})
        status, told = await ask(http, "/update_weights_from_tensor", {"segments": segments, "weight_version": label})
        sent.release()
    assert (status, told["success"]) == (200, True), told
    if paused:
        assert (await ask(http, "/continue_generation", {}))[0] == 200
    assert (await ask(http, "/model_info"))[1]["weight_version"] == label
    await everywhere(http, digest_of(tensors))


# The router's list of workers, and its probes.


async def test_a_worker_is_removed_and_added_again(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    url = (await ask(http, "/workers/actor-1", method="GET"))[1]["url"]
    for _ in range(2):
        assert await ask(http, "/workers/actor-1", method="DELETE") == (200, {"status": "ok", "worker_id": "actor-1"})
        assert [enabled for enabled, _ in await states(client)] == [True, False]
    for body in ({"url": url}, {"worker_url": url, "model": "actor", "capabilities": ["chat"]}):
        status, told = await ask(http, "/workers", body)
        assert (status, told["status"], told["worker"]["worker_id"]) == (200, "ok", "actor-1")
        assert [enabled for enabled, _ in await states(client)] == [True, True]
    assert (await ask(http, "/workers", {}))[0] == 422
    assert (await ask(http, "/workers", {"url": "http://127.0.0.1:1"}))[0] == 501
    assert (await ask(http, "/workers/nobody", method="DELETE"))[0] == 404


async def test_a_workers_life_is_confirmed_and_not_set(http: aiohttp.ClientSession) -> None:
    status, told = await ask(http, "/workers/actor-0", {"is_dead": False}, method="PUT")
    assert (status, told["worker"]["worker_id"]) == (200, "actor-0")
    status, told = await ask(http, "/workers/actor-0", {"is_dead": True}, method="PUT")
    assert (status, told["error"]["param"]) == (501, "is_dead")
    assert (await ask(http, "/workers/actor-0", {}, method="PUT"))[0] == 422


async def test_the_routers_probes(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    assert await ask(http, "/live", method="GET") == (200, {"status": "alive"})
    status, told = await ask(http, "/ready", method="GET")
    assert (status, told["status"], told["routable_workers"], "workers" in told) == (200, "ready", 2, False)
    await client.set_enabled(["actor-0", "actor-1"], False)
    status, told = await ask(http, "/ready", method="GET")
    assert (status, told["status"], told["disabled_workers"]) == (503, "not_ready", 2)


async def test_a_journal_that_blocks_nothing_is_resolved_by_name(http: aiohttp.ClientSession) -> None:
    status, told = await ask(http, "/weight_update_journal/resolve", {"acknowledge": True})
    assert (status, told["status"], told["resolved_worker_ids"]) == (200, "ok", [])
    assert (await ask(http, "/weight_update_journal/resolve", {}))[0] == 422
