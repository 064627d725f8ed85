"""Engines that are gone, and engines that cannot: no answer drops them, or calls it a success."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import EXCLUDED
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1.common_pb2 import OUTCOME_SKIPPED, STAGE_STATE_UNREACHABLE


async def leave(fleet: InProcessFleet, slot: str) -> None:
    def there() -> bool:
        stages = fleet.server.coordinator.roster.fleet().stages
        return any(s.registration.slot == slot and s.state not in engine_urls.GONE for s in stages)

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


async def die(fleet: InProcessFleet, slot: str) -> None:
    """Without a word to the coordinator, as after SIGKILL."""
    stage = fleet.stages.pop(slot)
    stage._deregister = silence  # type: ignore[method-assign]
    await stage.stop()
    await fleet.until(lambda stages: {s.registration.slot: s.state for s in stages}[slot] == STAGE_STATE_UNREACHABLE)


async def silence() -> None:
    pass


async def ask(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any, str]:
    async with http.request(method, path, json=body) as response:
        text = await response.text()
        told = json.loads(text) if response.content_type == "application/json" else text
        return response.status, told, response.headers.get(EXCLUDED, "")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/pause", None),
        ("POST", "/resume", None),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/sleep?level=1", None),
        ("POST", "/start_weight_update", {}),
        ("POST", "/collective_rpc", {"method": "reset_prefix_cache"}),
        ("GET", "/is_paused", None),
        ("GET", "/is_sleeping", None),
        ("GET", "/weight_info", None),
        ("GET", "/get_server_info", None),
    ],
)
async def test_a_dead_engine_has_its_entry_in_every_map(
    fleet: InProcessFleet, open_gateway: Any, method: str, path: str, body: Any
) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        await die(fleet, "b")
        status, told, _ = await ask(http, method, path, body)
        answers = {url.rpartition("/")[2]: answer for url, answer in told.items()}
        assert (status, list(answers)) == (207, ["a", "b"]), told
        assert answers["a"].get("status", 200) == 200
        assert answers["b"]["status"] == 503
        assert "UNREACHABLE" in answers["b"]["error"]
        status, told, _ = await ask(http, method, f"/engines/b{path}", body)
        if path != "/start_weight_update":  # of the model, whichever engine is asked
            assert (status, told["error"]["reason"]) == (503, "UNREACHABLE"), told


async def test_a_dead_engine_is_a_server_still(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        await die(fleet, "b")
        assert await listed(http, "/servers", "servers") == ["a", "b"]
        assert (await status(http, "/health"), await status(http, "/engines/b/health")) == (200, 503)
        _, told, excluded = await ask(http, "GET", "/server_info")
        assert {url.rpartition("/")[2]: "error" in info for url, info in told["servers"].items()} == {
            "a": False,
            "b": True,
        }
        assert excluded == "b=unreachable"


@pytest.mark.parametrize("dialect", ["sglang", "slime"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/pause_generation", {}),
        ("POST", "/continue_generation", {}),
        ("POST", "/flush_cache", None),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/weights_checker", {"action": "checksum"}),
        ("GET", "/v1/loads", None),
        ("GET", "/get_model_info", None),
    ],
)
async def test_one_answer_for_all_says_whom_it_leaves_out(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, method: str, path: str, body: Any
) -> None:
    async with open_gateway(fleet.server.address, dialect) as http:
        assert (await ask(http, method, path, body))[::2] == (200, "")
        await die(fleet, "b")
        assert (await ask(http, method, path, body))[::2] == (200, "b=unreachable")


async def test_omnis_router_says_which_workers_it_did_not_ask(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "omni") as http:
        await die(fleet, "b")
        status, told, excluded = await ask(http, "POST", "/pause_generation", {})
        assert (status, told["worker_count"], excluded) == (200, 1, "b=unreachable")
        assert [(each["worker"].rpartition("/")[2], each["state"]) for each in told["excluded"]] == [
            ("b", "unreachable")
        ]
        status, told, _ = await ask(http, "GET", "/workers/b")
        assert (status, told["is_dead"]) == (200, True)


# Engines that cannot do what they are asked for.


@pytest.fixture
def incapable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages find out that they cannot do it when they are asked; the coordinator does not know before."""

    async def cannot(self: FakeEngine, request: Any, call: Any) -> None:
        raise Reason.UNSUPPORTED.error("it is not driven to this", field="action", outcome=OUTCOME_SKIPPED)

    for verb in ("check_weights", "flush_cache", "pause_generation"):
        monkeypatch.setattr(FakeEngine, verb, cannot)


@pytest.mark.usefixtures("incapable")
@pytest.mark.parametrize("at", ["", "/engines/a"])
@pytest.mark.parametrize(
    ("dialect", "path", "body"),
    [
        *[("sglang", "/weights_checker", {"action": a}) for a in ("checksum", "snapshot", "compare", "reset_tensors")],
        ("sglang", "/pause_generation", {}),
        ("sglang", "/flush_cache", None),
        ("slime", "/weights_checker", {"action": "compare"}),
        ("omni", "/weights_checker", {"action": "compare"}),
        ("omni", "/pause_generation", {}),
        ("vllm", "/pause?clear_cache=false", None),
        ("vllm", "/reset_prefix_cache", None),
        ("vllm", "/collective_rpc", {"method": "reset_prefix_cache"}),
        ("vllm", "/sleep?level=1", None),
    ],
)
async def test_what_engines_skip_is_no_success(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, path: str, body: Any, at: str
) -> None:
    async with open_gateway(fleet.server.address, dialect) as http:
        code, told, _ = await ask(http, "POST", at + path, body)
        assert code in ((207,) if dialect == "vllm" and not at else (400, 501, 502)), told
        assert "it is not driven to this" in json.dumps(told)
        assert '"success": true' not in json.dumps(told)
