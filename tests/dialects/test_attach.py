"""slime's and Miles's attach to engines that run already, as their code goes about it.

slime 624b824a: slime/backends/sglang_utils/external.py and sglang_engine.py. Miles 31f1ca96:
miles/backends/sglang_utils/sglang_engine.py. A trainer has the host and port of an engine, and no path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_calls import post

from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

SLIME_EXPECTS = {"enable_memory_saver": False}
MILES_EXPECTS = {
    **SLIME_EXPECTS,
    "nnodes": 1,
    "node_rank": 0,
    "gpu_id_step": 1,
    "base_gpu_id": 0,
    "tp_size": 3,
    "dp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
}
"""What they compare, by ==, for a fleet of three ranks as one engine of three GPUs."""


@pytest.fixture(params=["sglang", "slime"])
async def http(
    request: pytest.FixtureRequest, torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, request.param) as http:
        yield http
    await client.set_enabled(["actor-0", "actor-1"], True)


async def server_info(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path) as response:
        assert response.status == 200
        info: dict[str, Any] = await response.json()
        return info


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_the_fleet_passes_their_sanity_checks(http: aiohttp.ClientSession, path: str) -> None:
    info = await server_info(http, path)
    authority = http._base_url
    assert authority is not None
    expected = {**MILES_EXPECTS, "host": authority.host, "port": authority.port}
    assert {name: info.get(name) for name in expected} == expected
    assert {name: type(info[name]) for name in expected} == {name: type(value) for name, value in expected.items()}


async def test_slime_counts_the_ranks_and_finds_the_kind_of_worker(http: aiohttp.ClientSession) -> None:
    for path, ranks, tp_size in (("", 3, 3), ("/engines/actor-0", 2, 2), ("/engines/actor-1", 1, 1)):
        info = await server_info(http, f"{path}/server_info")
        assert int(info.get("num_gpus") or info["tp_size"] * info["pp_size"]) == ranks
        assert (info["tp_size"], info["pp_size"]) == (tp_size, 1)
        assert info["disaggregation_mode"] == "null"
        assert not info.get("encoder_only")
        assert info.get("disaggregation_bootstrap_port") is None


async def test_slime_registers_the_gateways_own_address(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet
) -> None:
    async with open_gateway(torch_fleet.address, "slime") as http:
        port = http._base_url.port
        for host in ("127.0.0.1", "localhost"):
            await client.set_enabled(["actor-0", "actor-1"], False)
            status, told = await post(http, {"url": f"http://{host}:{port}", "worker_type": "regular"}, "/workers")
            assert (status, told["status"], len(told["worker_urls"])) == (200, "success", 2)
            assert [stage.enabled for stage in (await client.status()).stages] == [True, True]
        async with http.get("/workers") as response:
            listed = (await response.json())["workers"]
        for worker in listed:
            async with http.delete(f"/workers/{worker['id']}") as response:
                assert response.status == 200
        assert [stage.enabled for stage in (await client.status()).stages] == [False, False]
        for other in (f"http://127.0.0.1:{port + 1}", f"http://192.0.2.1:{port}", f"http://127.0.0.1:{port}/elsewhere"):
            status, told = await post(http, {"url": other, "worker_type": "regular"}, "/workers")
            assert (status, told["reason"]) == (501, "UNSUPPORTED"), other
    await client.set_enabled(["actor-0", "actor-1"], True)
