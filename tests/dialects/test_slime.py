"""The interface of slime's router, from its documentation, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from rlctl.client.aio import AsyncFleet
from rlctl.launch.local import LocalFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
async def http(torch_fleet: LocalFleet, open_gateway: Any, client: AsyncFleet) -> AsyncIterator[aiohttp.ClientSession]:
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
