"""Engines that are gone: no list has them, and health is that of those that are left."""

from __future__ import annotations

from typing import Any

import aiohttp

from rlctl.gateway import engines
from rlctl.testing.fleet import InProcessFleet
from rlctl.testing.waiting import eventually


async def leave(fleet: InProcessFleet, slot: str) -> None:
    def there() -> bool:
        stages = fleet.server.coordinator.roster.fleet().stages
        return any(s.registration.slot == slot and s.state not in engines.GONE for s in stages)

    await fleet.stages.pop(slot).stop()
    await eventually(lambda: not there())


async def status(http: aiohttp.ClientSession, path: str) -> int:
    async with http.get(path) as response:
        return response.status


async def listed(http: aiohttp.ClientSession, path: str, key: str) -> list[str]:
    async with http.get(path) as response:
        return [url.rpartition("/")[2] for url in (await response.json())[key]]


async def test_servers_and_health(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        assert await listed(http, "/servers", "servers") == ["a", "b"]
        await leave(fleet, "b")
        assert await listed(http, "/servers", "servers") == ["a"]
        assert (await status(http, "/health"), await status(http, "/engines/b/health")) == (200, 404)
        await leave(fleet, "a")
        assert await status(http, "/health") == 503


async def test_workers_are_not_listed_for_ever(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "slime") as http:
        assert await listed(http, "/list_workers", "urls") == ["a", "b"]
        await leave(fleet, "b")
        assert await listed(http, "/list_workers", "urls") == ["a"]


async def test_the_router_says_who_is_dead(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "omni") as http:
        await leave(fleet, "b")
        async with http.get("/workers") as response:
            told = await response.json()
        assert told["total_workers"] - told["dead_workers"] == 1
        async with http.post("/pause_generation", json={}) as response:
            told = await response.json()
        assert (response.status, told["worker_count"]) == (200, 1), "the dead are not asked"
