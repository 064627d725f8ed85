"""vLLM's control interface and SkyRL's router, from their documentation, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from http_trainer import Source, announced, chunks_of, digest_of, weights_of
from models import changed
from trainer_scripts import ended
from vllm_server import SLOTS, ask, each

from rlctl.contract.vllm_groups import group_name
from rlctl.demo.tiny import encode, save
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.common_pb2 import STAGE_STATE_READY
from rlctl.v1.verbs_pb2 import GetLoadsRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

PROMPT = encode("1+2=")
PACKED_BYTES = 1 << 14
"""Less than a chunk: it takes several broadcasts."""
NAMED = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4, "group_name": "own"}
PACKED = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "packed": True}


@pytest.fixture
async def http(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet, tiny: tuple[Any, Path]
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tiny[1])) as http:
        yield http
    await client.resume_memory(check=False)
    await client.continue_generation(check=False)


async def mapped(http: aiohttp.ClientSession, path: str, body: Any = None, **given: Any) -> list[Any]:
    """The servers' bodies, all well."""
    status, told = await ask(http, path, body, **given)
    assert status == 200, told
    assert [url.rpartition("/")[2] for url in told] == list(SLOTS)
    assert {answer["status"] for answer in told.values()} == {200}
    return [answer["body"] for answer in told.values()]


async def digests(client: AsyncFleet) -> set[str]:
    operation = await client.check_weights()
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


async def paused(client: AsyncFleet) -> list[bool]:
    return [stage.report.paused for stage in (await client.status()).stages]


async def generated(http: aiohttp.ClientSession, count: int = 4, **headers: str) -> Any:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "logprobs": 0},
        "model": "actor",
    }
    status, told = await ask(http, "/inference/v1/generate", body, headers=headers)
    assert status == 200, told
    return told


# Reads.


async def test_servers_and_their_worlds(http: aiohttp.ClientSession) -> None:
    status, told = await ask(http, "/servers", method="GET")
    assert status == 200
    servers = told["servers"]
    assert [url.rpartition("/engines/")[2] for url in servers] == list(SLOTS)
    assert [body["world_size"] for _, body in await each(http, "/get_world_size", method="GET")] == [2, 1]
    assert (await ask(http, "/get_world_size", method="GET"))[1] == {"world_size": 3}
    status, told = await ask(http, "/get_server_info", method="GET")
    assert {url: info["world_size"] for url, info in told.items()} == dict(zip(servers, [2, 1], strict=True))
    async with aiohttp.ClientSession() as outside, outside.get(f"{servers[0]}/get_server_info") as response:
        assert (await response.json())["tp_size"] == 2
    status, told = await ask(http, "/server_info", method="GET")
    assert {info["engine"] for info in told["servers"].values()} == {"torch"}
    assert told["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}
    assert (await ask(http, "/load", method="GET"))[1] == {"server_load": 0}


async def test_health_is_that_of_one_engine_at_least(http: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ping", "/engines/actor-0/health"):
        async with http.get(path) as response:
            assert (response.status, response.headers["Content-Length"]) == (200, "0")
    await ask(http, "/pause")
    async with http.get("/health") as response:
        assert response.status == 200, "paused is healthy"
    async with http.get("/engines/nobody/health") as response:
        assert response.status == 404


# Pause, sleep, caches.


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
@pytest.mark.parametrize("clear", ["true", "false"])
async def test_pause_and_resume(http: aiohttp.ClientSession, client: AsyncFleet, mode: str, clear: str) -> None:
    assert [body["status"] for body in await mapped(http, "/pause", params={"mode": mode, "clear_cache": clear})] == [
        "paused"
    ] * 2
    assert await mapped(http, "/is_paused", method="GET") == [{"is_paused": True}] * 2
    assert await paused(client) == [True, True]
    for _ in range(2):
        assert [body["status"] for body in await mapped(http, "/resume")] == ["resumed"] * 2
    assert await mapped(http, "/is_paused", method="GET") == [{"is_paused": False}] * 2


async def test_one_server_is_paused_at_its_own_address(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    status, told = await ask(http, "/engines/actor-1/pause", params={"mode": "keep", "clear_cache": "false"})
    assert (status, told["status"]) == (200, "paused")
    assert await paused(client) == [False, True]
    assert (await ask(http, "/engines/actor-1/is_paused", method="GET"))[1] == {"is_paused": True}


async def test_a_map_of_which_one_is_not_well_is_207(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    await client.pause_generation("in_place", slots=["actor-0"])
    status, told = await ask(http, "/pause", params={"mode": "abort", "clear_cache": "false"})
    assert status == 207
    assert {answer["status"] for answer in told.values()} != {200}
    assert all(set(answer) in ({"status", "body"}, {"status", "error"}) for answer in told.values())


async def test_sleep_releases_and_wake_up_goes_on(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    await mapped(http, "/sleep", params=[("level", "1"), ("tags", "kv_cache")])
    assert await mapped(http, "/is_sleeping", method="GET") == [{"is_sleeping": True}] * 2
    await mapped(http, "/wake_up", params=[("tags", "kv_cache")])
    assert await mapped(http, "/is_sleeping", method="GET") == [{"is_sleeping": False}] * 2
    assert await paused(client) == [False, False]
    assert len((await generated(http))["choices"][0]["token_ids"]) == 4


async def test_level_1_keeps_the_weights_so_that_wake_up_generates(
    http: aiohttp.ClientSession, client: AsyncFleet
) -> None:
    before = (await generated(http))["choices"][0]["token_ids"]
    await mapped(http, "/sleep", params={"level": "1"})
    asleep = [stage.report for stage in (await client.status()).stages]
    assert [bool(report.weight_version.sequence) for report in asleep] == [True, True]
    await mapped(http, "/wake_up", params={"tags": "weights"})
    assert await mapped(http, "/is_sleeping", method="GET") == [{"is_sleeping": True}] * 2
    await mapped(http, "/wake_up")
    assert {stage.report.state for stage in (await client.status()).stages} == {STAGE_STATE_READY}
    assert (await generated(http))["choices"][0]["token_ids"] == before


async def test_the_prefix_cache_is_reset(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    assert all(body["success"] for body in await mapped(http, "/reset_prefix_cache", {"reset_running_requests": False}))
    running = asyncio.create_task(generated(http, 200))
    while (await ask(http, "/load", method="GET"))[1] == {"server_load": 0}:
        pass
    told = await mapped(http, "/reset_prefix_cache", {"reset_running_requests": False})
    assert not all(body["success"] for body in told), "one is running"
    for paused_before in (False, True):
        if paused_before:
            await mapped(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
        told = await mapped(http, "/reset_prefix_cache", {"reset_running_requests": True})
        assert all(body["success"] for body in told)
        assert await paused(client) == [paused_before] * 2, "as it was before"
    await mapped(http, "/resume")
    assert len((await running)["choices"][0]["token_ids"]) == 200


# Weights.


async def world(http: aiohttp.ClientSession) -> list[int]:
    return [body["world_size"] for _, body in await each(http, "/get_world_size", method="GET")]


@pytest.mark.parametrize("packed", ["", "update_info", "init_info"])
async def test_four_phases_at_every_server(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path], packed: str
) -> None:
    """Packed as every update says, or, as from vLLM 0.28 on, as was agreed when the group was formed."""
    tensors, label = weights_of(tiny[0], 21 + len(packed)), f"vllm-{packed}"
    said: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES}
    at_init, at_update = (said if packed == where else {} for where in ("init_info", "update_info"))
    sizes = await world(http)
    async with Source(1 + sum(sizes), name=group_name(PACKED_BYTES if at_init else 0)) as source:
        offsets = [1, 1 + sizes[0]]
        inits = [
            ask(
                http,
                f"/engines/{slot}/init_weight_transfer_engine",
                {"init_info": {**source.where, **at_init, "rank_offset": offset}},
            )
            for slot, offset in zip(SLOTS, offsets, strict=True)
        ]
        assert [status for status, _ in await source.meet(*inits)] == [200, 200]
        assert [
            status for status, _ in await each(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
        ] == [
            200,
            200,
        ]
        assert [status for status, _ in await each(http, "/start_weight_update", {"is_checkpoint_format": True})] == [
            200,
            200,
        ]
        for chunk in chunks_of(tensors, 2):
            info = {**announced(chunk, "dtype_names"), **at_update}
            call = each(http, "/update_weights", {"update_info": info})
            [answers] = await (source.send_packed(chunk, PACKED_BYTES, call) if packed else source.send(chunk, call))
            assert [status for status, _ in answers] == [200, 200], answers
        assert label not in {stage.report.weight_version.label for stage in (await client.status()).stages}
        answers = await each(http, "/finish_weight_update", {"weight_version": label})
        assert [status for status, _ in answers] == [200, 200], answers
        assert [status for status, _ in await each(http, "/resume")] == [200, 200]
        assert await mapped(http, "/weight_info", method="GET") == [{"weight_version": label}] * 2
        assert await digests(client) == {digest_of(tensors)}
        told = await generated(http)
        assert told["choices"][0]["weight_versions"][-1]["version"] == label
        await mapped(http, "/shutdown_weight_transfer_engine")


@pytest.mark.parametrize("at_the_root", [False, True])
async def test_a_trainer_that_comes_again_has_its_group_formed_anew(
    http: aiohttp.ClientSession, at_the_root: bool
) -> None:
    path = "/init_weight_transfer_engine"
    for _ in range(2):
        async with Source(4, name="weight_transfer") as source:
            bodies = [{"init_info": {**source.where, "rank_offset": offset}} for offset in (1, 3)]
            if at_the_root:
                await source.meet(mapped(http, path, bodies[0]))
                continue
            calls = (ask(http, f"/engines/{slot}{path}", body) for slot, body in zip(SLOTS, bodies, strict=True))
            assert [status for status, _ in await source.meet(*calls)] == [200, 200]
    await mapped(http, "/shutdown_weight_transfer_engine")


async def test_an_update_through_the_root_that_ends_with_resume(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path]
) -> None:
    """SkyRL's first router: no start, no finish, its own names; what is open is committed by the resume."""
    tensors = weights_of(tiny[0], 31)
    async with Source(4, name="skyrl") as source:
        info = {
            "master_addr": "127.0.0.1",
            "master_port": source.port,
            "rank_offset": 1,
            "world_size": 4,
            "group_name": "skyrl",
            "backend": "gloo",
            "model_dtype_str": "float32",
            "override_existing_receiver": False,
        }
        [(status, told)] = await source.meet(ask(http, "/init_weight_transfer", info))
        assert status == 200, told
        await mapped(http, "/pause")
        for chunk in chunks_of(tensors, 3):
            [(status, told)] = await source.send(
                chunk, ask(http, "/update_weights", {**announced(chunk), "group_name": "skyrl"})
            )
            assert status == 200, told
        await mapped(http, "/resume")
        assert await digests(client) == {digest_of(tensors)}
        await mapped(http, "/shutdown_weight_transfer_engine", {"group_name": "skyrl"})


async def test_reload_weights_is_an_update_from_disk(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    save(tiny[0], tmp_path / "next")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "next")}}
    assert [body["results"] for body in await mapped(http, "/collective_rpc", rpc)] == [[None, None], [None]]
    assert await digests(client) == {digest_of(dict(tiny[0].named_parameters()))}
    before = (await client.status()).models[0].latest.sequence
    assert [status for status, _ in await each(http, "/collective_rpc", rpc)] == [200, 200]
    assert (await client.status()).models[0].latest.sequence == before + 1, "one update, asked of two servers"
    status, told = await ask(http, "/update_weight_version", {"new_version": "renamed"})
    assert status == 200, told
    assert await mapped(http, "/weight_info", method="GET") == [{"weight_version": "renamed"}] * 2


# Generation.


async def test_generate_from_token_ids(http: aiohttp.ClientSession) -> None:
    told = await generated(http, 5, **{"X-Session-ID": "s1"})
    [choice] = told["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 5)
    assert len(choice["logprobs"]["content"]) == 5
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    assert told["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 5, "total_tokens": len(PROMPT) + 5}
    status, text = await ask(http, "/detokenize", {"model": "actor", "tokens": PROMPT[1:]})
    assert (status, text) == (200, {"prompt": "1+2="})
    status, ids = await ask(http, "/tokenize", {"model": "actor", "prompt": "1+2=", "add_special_tokens": False})
    assert ids == {"tokens": PROMPT[1:], "count": len(PROMPT) - 1}
    assert await ask(http, "/finish_session", params={"session_id": "s1"}) == (200, {"status": "ok"})


async def test_what_is_generated_when_a_pause_aborts_comes_back(http: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(generated(http, 400))
    while (await ask(http, "/load", method="GET"))[1] == {"server_load": 0}:
        pass
    await mapped(http, "/pause")
    [choice] = (await running)["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len((choice["logprobs"] or {"content": []})["content"]) < 400


# What is wrong.


@pytest.mark.parametrize(
    ("path", "body", "params", "status", "field"),
    [
        ("/pause", None, {"mode": "sleepily"}, 400, "mode"),
        ("/pause", None, {"clear_cache": "perhaps"}, 400, "clear_cache"),
        ("/sleep", None, {"level": "3"}, 400, "level"),
        ("/sleep", None, {"tags": "brain"}, 400, "tags"),
        ("/collective_rpc", {}, {}, 400, "method"),
        ("/collective_rpc", {"method": "exec"}, {}, 501, "method"),
        ("/collective_rpc", {"method": "reload_weights"}, {}, 400, "kwargs.weights_path"),
        ("/init_weight_transfer_engine", {"init_info": {}}, {}, 400, "init_info.master_port"),
        ("/init_weight_transfer_engine", {"init_info": {"packed": True}}, {}, 400, "init_info.master_port"),
        ("/init_weight_transfer_engine", {"init_info": NAMED | {"packed": True}}, {}, 400, "init_info.packed"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"packed": True, "packed_buffer_size_bytes": 0}},
            {},
            400,
            "init_info.packed_buffer_size_bytes",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"nccl_unique_id_b64": "AAAA"}},
            {},
            501,
            "init_info.nccl_unique_id_b64",
        ),
        ("/update_weights", {"update_info": PACKED | {"packed_buffer_size_bytes": 0}}, {}, 400, None),
        ("/update_weights", {"update_info": PACKED | {"dtype_names": ["float9"]}}, {}, 400, None),
        ("/update_weights", {"update_info": {"names": ["a"]}}, {}, 400, "update_info.dtypes"),
        ("/update_weights", {"update_info": []}, {}, 400, "update_info"),
        (
            "/update_weights",
            {"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}},
            {},
            400,
            "update_info.dtype_names",
        ),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, {}, 501, None),
        ("/finish_weight_update", {}, {}, 404, ""),
        ("/finish_session", {}, {}, 400, "session_id"),
        ("/detokenize", {"tokens": [-1]}, {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, {}, 400, "tokens"),
        ("/inference/v1/generate", {"model": "actor"}, {}, 400, "token_ids"),
        ("/inference/v1/generate", {"model": "other", "token_ids": [1]}, {}, 404, "model"),
    ],
)
async def test_errors_have_a_message_and_change_nothing(
    http: aiohttp.ClientSession, client: AsyncFleet, path: str, body: Any, params: Any, status: int, field: str | None
) -> None:
    got, told = await ask(http, path, body, params=params)
    assert got == status, told
    assert told["error"]["message"]
    if field is not None:
        assert told["error"]["field"] == field
    assert [stage.routable for stage in (await client.status()).stages] == [True, True]


async def test_a_world_of_another_size_is_refused_at_every_server(http: aiohttp.ClientSession) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 9, "backend": "gloo"}
    for status, told in await each(http, "/init_weight_transfer_engine", {"init_info": info}):
        assert status == 400
        assert "world_size is 9" in told["error"]["message"]


@pytest.mark.parametrize("version", ["first", "present"])
async def test_skyrls_update_ends_in_equal_digests(
    torch_fleet: LaunchedFleet, http: aiohttp.ClientSession, tiny: tuple[Any, Path], version: str
) -> None:
    _, told = await ask(http, "/servers", method="GET")
    proxy = told["servers"][0].partition("/engines/")[0]
    script = await ended(
        Path(__file__).parents[2] / "examples" / "integrations" / "skyrl" / "update.py",
        f"--client={version}",
        f"--proxy={proxy}",
        f"--coordinator={torch_fleet.address}",
        f"--model={tiny[1]}",
    )
    assert script.returncode == 0, script.stderr
    steps = [json.loads(line) for line in script.stdout.splitlines()]
    assert len({step["model_digest"] for step in steps}) == 2
    assert all(step["tokens"] for step in steps)


async def test_skyrls_sleep_for_a_weight_sync_keeps_frozen_requests_and_the_pause(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """SkyRL a9564572, worker_dispatch.py: pause, sleep, wake the weights, send them, wake the KV cache, resume."""

    async def call(method: str, **kwargs: Any) -> None:
        await mapped(http, "/collective_rpc", {"method": method, "kwargs": kwargs})

    save(changed(tiny[0], seed=8, scale=0.3), tmp_path / "new")
    running = asyncio.create_task(generated(http, 300))
    await _running(client, 1)
    await mapped(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
    frozen = not running.done()
    await call("skyrl_sleep_for_weight_sync", offload_kv=True)
    assert await mapped(http, "/is_sleeping", method="GET") == [{"is_sleeping": True}] * 2
    await call("skyrl_wake_for_weight_sync", tags=["weights"])
    await call("reload_weights", weights_path=str(tmp_path / "new"))
    await call("skyrl_wake_for_weight_sync", tags=["kv_cache"])
    assert await mapped(http, "/is_paused", method="GET") == [{"is_paused": True}] * 2
    await mapped(http, "/resume")
    told = await running
    assert frozen, "the model is too fast for this test"
    assert (len(told["choices"][0]["token_ids"]), told["choices"][0]["finish_reason"]) == (300, "length")
    assert len({span["version"] for span in told["choices"][0]["weight_versions"]}) == 2


async def _running(client: AsyncFleet, count: int) -> None:
    """Until so many requests have come to the engines."""

    def requests(operation: Any) -> int:
        ranks = [rank.loads for stage in operation.stage_results for rank in stage.rank_results]
        return sum(load.running + load.waiting for load in ranks)

    while requests(await client.call(GetLoadsRequest())) < count:
        pass


async def test_one_model_is_retrieved_by_any_of_its_names(http: aiohttp.ClientSession, tiny: tuple[Any, Path]) -> None:
    for name in ("actor", "default", str(tiny[1])):
        status, card = await ask(http, f"/v1/models/{quote(name, safe='')}", method="GET")
        assert (status, card["id"], card["object"], card["parent"]) == (200, name, "model", None)
    status, told = await ask(http, "/v1/models/nobody", method="GET")
    assert (status, told["error"]["code"], told["error"]["param"]) == (404, 404, "model")
