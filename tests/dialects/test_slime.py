"""The interface of slime's router, from its documentation, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from rlctl.demo.tiny import encode
from rlctl.gateway.radix.middleware import CUTS
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.verbs_pb2 import GetLoadsRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture
async def http(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, "slime") as http:
        yield http
    await client.set_enabled(["actor-0", "actor-1"], True)


async def ask(http: aiohttp.ClientSession, method: str, path: str, **given: Any) -> tuple[int, Any]:
    async with http.request(method, path, **given) as response:
        return response.status, await response.json()


async def urls(http: aiohttp.ClientSession) -> list[str]:
    status, body = await ask(http, "GET", "/list_workers")
    assert status == 200
    assert list(body) == ["urls"]
    listed: list[str] = body["urls"]
    return listed


async def test_the_workers_are_the_fleets_engines(http: aiohttp.ClientSession) -> None:
    listed = await urls(http)
    assert [url.rpartition("/engines/")[2] for url in listed] == ["actor-0", "actor-1"]
    status, body = await ask(http, "GET", "/workers")
    assert status == 200
    assert [(worker["id"], worker["url"], worker["is_healthy"]) for worker in body["workers"]] == [
        ("actor-0", listed[0], True),
        ("actor-1", listed[1], True),
    ]
    assert {worker["worker_type"] for worker in body["workers"]} == {"regular"}


@pytest.mark.parametrize("way", ["query", "worker_url", "body", "worker_url in the body", "workers"])
async def test_a_worker_is_removed_and_added_again_and_repeats_are_harmless(
    http: aiohttp.ClientSession, client: AsyncFleet, way: str
) -> None:
    first, second = await urls(http)
    path, given = {
        "query": ("/add_worker", {"params": {"url": first}}),
        "worker_url": ("/add_worker", {"params": {"worker_url": first}}),
        "body": ("/add_worker", {"json": {"url": first}}),
        "worker_url in the body": ("/add_worker", {"json": {"worker_url": first}}),
        "workers": ("/workers", {"json": {"url": first, "worker_type": "regular"}}),
    }[way]
    for _ in range(2):
        status, body = await ask(http, "POST", "/remove_worker", params={"url": first})
        assert (status, body["status"]) == (200, "success")
        assert await urls(http) == [second]
        assert [stage.enabled for stage in (await client.status()).stages] == [False, True]
    for _ in range(2):
        status, body = await ask(http, "POST", path, **given)
        assert (status, body["status"]) == (200, "success")
        assert body["worker_urls"] == {first: 0, second: 0}
    assert await urls(http) == [first, second]


@pytest.mark.parametrize("address", [False, True])
async def test_a_worker_is_deleted_by_its_id_or_its_address(http: aiohttp.ClientSession, address: bool) -> None:
    first, second = await urls(http)
    named = quote(second, safe="") if address else "actor-1"
    assert (await ask(http, "GET", f"/workers/{named}"))[1]["id"] == "actor-1"
    assert (await ask(http, "DELETE", f"/workers/{named}"))[0] == 200
    assert await urls(http) == [first]


async def test_an_engine_of_somebody_elses_is_refused_with_what_to_do(
    http: aiohttp.ClientSession, client: AsyncFleet
) -> None:
    status, body = await ask(http, "POST", "/add_worker", params={"url": "http://127.0.0.1:10090"})
    assert status == 501
    assert body["reason"] == "UNSUPPORTED"
    assert "rlctl stage --engine sglang --option url=" in body["error"]
    assert len((await client.status()).stages) == 2


@pytest.mark.parametrize(
    ("path", "given", "status", "field"),
    [
        ("/add_worker", {}, 400, "url"),
        ("/add_worker", {"json": {}}, 400, "url"),
        ("/add_worker", {"data": b"{"}, 400, "body"),
        ("/add_worker", {"json": {"url": 3}}, 400, "url"),
        ("/add_worker", {"params": {"url": "http://x/engines/nobody"}}, 404, "url"),
        ("/remove_worker", {"params": {"url": "http://127.0.0.1:1"}}, 404, "url"),
        ("/remove_worker", {"params": {"url": "http://[x"}}, 404, "url"),
        ("/add_worker", {"json": {"url": "http://[x"}}, 501, "url"),
        ("/add_worker", {"json": {"url": "http://" + "x" * 64}}, 501, "url"),
        ("/retrieve_from_text", {"json": {"text": "1+2="}}, 501, ""),
    ],
)
async def test_what_is_wrong_is_said_as_the_router_says_it(
    http: aiohttp.ClientSession, path: str, given: Any, status: int, field: str
) -> None:
    before = await urls(http)
    got, body = await ask(http, "POST", path, **given)
    assert (got, body["field"]) == (status, field)
    assert isinstance(body["error"], str)
    assert await urls(http) == before


async def test_everything_is_aborted_by_way_of_the_worker_list(http: aiohttp.ClientSession, client: AsyncFleet) -> None:
    """As slime ends a round: each worker is told, then asked until nothing runs there."""
    body = {"input_ids": encode("8"), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    running = [asyncio.create_task(ask(http, "POST", "/generate", json=body)) for _ in range(4)]
    await _running(client, 4)
    async with aiohttp.ClientSession() as outside:
        for url in await urls(http):
            async with outside.post(f"{url}/abort_request", json={"abort_all": True}) as response:
                assert response.status == 200
        for url in await urls(http):
            while True:
                async with outside.get(f"{url}/v1/loads", params={"include": "core"}) as response:
                    loads = (await response.json())["loads"]
                if not sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                    break
    ended = []
    for status, told in await asyncio.gather(*running):
        ended.append(told["meta_info"]["finish_reason"]["type"])
        assert (status, ended[-1] == "abort") == (200, len(told["output_ids"]) < 400)
    assert "abort" in ended, "on a busy machine the first may have all tokens by then"


# The radix middleware.

RADIX = ("rlctl.gateway.radix.middleware:RadixMiddleware",)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
async def radix(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet, tiny: tuple[Any, Path]
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, "slime", RADIX, tokenizer=str(tiny[1])) as http:
        yield http
    await client.continue_generation(check=False)


async def generate(http: aiohttp.ClientSession, count: int = 6, **prompt: Any) -> Any:
    body = {**prompt, "sampling_params": {"max_new_tokens": count, **GREEDY}}
    status, told = await ask(http, "POST", "/generate", json=body)
    assert status == 200, told
    return told


async def test_a_text_is_known_by_the_tokens_that_were_generated(radix: aiohttp.ClientSession) -> None:
    first = await generate(radix, text="1+2=")
    text = "1+2=" + first["text"]
    status, known = await ask(radix, "POST", "/retrieve_from_text", json={"text": text, "return_logp": True})
    assert status == 200, known
    logprobs = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    prompt = encode("1+2=")[1:]
    assert known["response"] == text
    assert known["tokens"][-6:] == first["output_ids"]
    assert known["tokens"][: len(prompt)] == prompt
    assert known["loss_mask"] == [0] * len(prompt) + [1] * 6
    assert known["rollout_logp"] == [0.0] * len(prompt) + logprobs
    assert (known["token_length"], known["loss_mask_length"]) == (len(prompt) + 6, len(prompt) + 6)
    assert set(known["weight_versions"][-6:]) == {first["meta_info"]["weight_version"]}


async def test_the_next_turn_goes_on_from_the_tokens_of_the_last(radix: aiohttp.ClientSession) -> None:
    first = await generate(radix, text="3+4=")
    asked = "3+4=" + first["text"] + "5+"
    second = await generate(radix, text=asked)
    prompt = encode("3+4=")[1:]
    assert second["meta_info"]["prompt_tokens"] == len(prompt) + 6 + 2
    _, known = await ask(radix, "POST", "/retrieve_from_text", json={"text": asked + second["text"]})
    assert known["tokens"] == [*prompt, *first["output_ids"], *encode("5+")[1:], *second["output_ids"]]
    assert known["loss_mask"] == [0] * len(prompt) + [1] * 6 + [0] * 2 + [1] * 6
    ids = await generate(radix, input_ids=known["tokens"][: len(prompt) + 6])
    assert len(ids["output_ids"]) == 6
    again = await ask(radix, "POST", "/retrieve_from_text", json={"text": asked + second["text"]})
    assert again == (200, known), "found by ids too, and nothing is lost by it"


async def test_a_request_that_a_pause_cuts_goes_on_from_its_tokens(
    radix: aiohttp.ClientSession, client: AsyncFleet
) -> None:
    whole = await generate(radix, 300, input_ids=encode("7"))
    for _ in range(5):  # it may be done before the pause has come
        running = asyncio.create_task(generate(radix, 300, input_ids=encode("7")))
        await _generating(client)
        await client.pause_generation("abort")
        cut = not running.done()
        await client.continue_generation()
        told = await running
        if cut:
            break
    assert cut
    assert told["meta_info"]["finish_reason"]["type"] == "length"
    assert told["output_ids"] == whole["output_ids"]
    assert len(told["meta_info"]["output_token_logprobs"]) == 300


async def test_it_goes_on_so_and_so_often(
    radix: aiohttp.ClientSession, client: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):  # it may be done before so many pauses have come
        running = asyncio.create_task(generate(radix, 400, input_ids=encode("9")))
        pauses = 0
        while not running.done():
            await client.pause_generation("abort")
            await client.continue_generation()
            pauses += 1
        told = await running
        if told["meta_info"]["finish_reason"]["type"] == "abort":
            break
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(told["output_ids"]) < 400
    assert pauses >= (CUTS + 1) // 2, "one pause may cut it at one engine, and then at the other one"


async def test_what_it_does_not_keep_passes_by(radix: aiohttp.ClientSession) -> None:
    several = {"max_new_tokens": 2, "n": 2, **GREEDY}
    status, told = await ask(radix, "POST", "/generate", json={"text": "1", "sampling_params": several})
    assert (status, len(told)) == (200, 2)
    sampling = {"max_new_tokens": 2, **GREEDY}
    status, told = await ask(radix, "POST", "/generate", json={"text": ["1", "2"], "sampling_params": sampling})
    assert (status, len(told)) == (200, 2)
    async with radix.post("/generate", json={"text": "1", "stream": True, "sampling_params": sampling}) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    status, told = await ask(radix, "POST", "/generate", json={"text": "1", "input_ids": [2]})
    assert status == 400
    status, told = await ask(radix, "POST", "/retrieve_from_text", json={})
    assert status == 400


async def test_slimes_own_name_of_it_means_this_one(torch_fleet: LaunchedFleet, open_gateway: Any) -> None:
    path = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
    async with open_gateway(torch_fleet.address, "slime", (path,)) as http:
        status, told = await ask(http, "POST", "/retrieve_from_text", json={"text": "1+1="})
        assert (status, told["loss_mask"]) == (200, [0, 0, 0, 0])


async def _running(client: AsyncFleet, count: int) -> None:
    """Until so many requests have come to the engines."""

    def requests(operation: Any) -> int:
        ranks = [rank.loads for stage in operation.stage_results for rank in stage.rank_results]
        return sum(load.running + load.waiting for load in ranks)

    while requests(await client.call(GetLoadsRequest())) < count:
        pass


async def _generating(client: AsyncFleet) -> None:
    def tokens(operation: Any) -> int:
        return sum(rank.loads.generated_tokens for stage in operation.stage_results for rank in stage.rank_results)

    before = tokens(await client.call(GetLoadsRequest()))
    while tokens(await client.call(GetLoadsRequest())) < before + 5:
        pass
