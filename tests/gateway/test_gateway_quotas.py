"""Quotas of the callers of a gateway, in every form of generation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scraping import scrape
from waiting import eventually

from rlctl.contract.scopes import Grant
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role

TOKEN = "the fleet's own token"
SCOPES = {"sampler": "rollout", "other": "rollout", "boss": "admin", "front": "gateway"}
LONG = {"text": "x", "sampling_params": {"max_new_tokens": 100_000}}
SHORT = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
REFUSED = "sampler has 1 requests in flight at this server, and this call has 2; the quota is 2"
CHAT = {"model": "actor", "prompt": "x", "max_tokens": 1}


def write(path: Path, **limits: int) -> None:
    entries = {
        name: Entry(
            name,
            (Grant.parse(scope),),
            (TokenHash(hash_of(name), 0.0),),
            (f"rlctl://lab/client/{name}",),
            limits.get(name),
        )
        for name, scope in SCOPES.items()
    }
    access_file.write(path, entries)


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    path = tmp_path / "access.json"
    write(path, sampler=2, other=2, front=1)
    return path


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any], access: Path) -> AsyncIterator[InProcessFleet]:
    async with make_fleet(token=TOKEN, access_file=str(access), a=1) as fleet:
        yield fleet


def of(caller: str) -> dict[str, str]:
    return {"authorization": f"Bearer {caller}"}


async def post(http: Any, path: str, body: Any, caller: str) -> tuple[int, Any, Any]:
    async with http.post(path, json=body, headers=of(caller)) as response:
        is_json = response.content_type == "application/json"
        return response.status, response.headers, await response.json() if is_json else await response.read()


def counted(server: GatewayServer) -> dict[str, int]:
    return dict(server.generation.quotas._in_flight)


def at_stage(fleet: InProcessFleet) -> dict[str, int]:
    stage_quotas = fleet.stages["a"]._quotas
    assert stage_quotas is not None
    return dict(stage_quotas._in_flight)


def running(fleet: InProcessFleet) -> int:
    return len(fleet.stages["a"]._engine._running)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def held(
    fleet: InProcessFleet, http: Any, number: int, caller: str, path: str = "/generate", body: Any = LONG
) -> AsyncIterator[None]:
    """Requests of a caller that run at the engine; they end as their caller leaves."""
    before = running(fleet)
    tasks = [asyncio.create_task(post(http, path, body, caller)) for _ in range(number)]
    await eventually(lambda: running(fleet) == before + number)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("dialect", "path", "body"),
    [
        ("sglang", "/generate", SHORT),
        ("sglang", "/generate", {**SHORT, "stream": True}),
        ("sglang", "/v1/completions", CHAT),
        ("slime", "/generate", SHORT),
        ("vllm", "/v1/completions", CHAT),
        ("vllm", "/v1/completions", {**CHAT, "stream": True}),
        ("omni", "/generate", SHORT),
    ],
)
async def test_a_third_request_is_429_in_each_dialect(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], dialect: str, path: str, body: Any
) -> None:
    async with (
        make_gateway(fleet, token="front", dialect=dialect) as (server, http),
        make_gateway(fleet, token="front") as (_, other_gateway),
    ):
        long = {**body, "stream": False, **({"max_tokens": 100_000} if "prompt" in body else LONG)}
        async with held(fleet, http, 2, "sampler", path, long):
            assert counted(server) == {"sampler": 2}
            status, headers, answer = await post(http, path, body, "sampler")
            assert (status, headers["Retry-After"]) == (429, "1"), answer
            text = str(answer)
            assert "sampler has 2 requests in flight at this server; the quota is 2" in text
            assert "rlctl tokens limit" in text
            # The stage counts the same requests, whichever gateway sends them.
            assert at_stage(fleet) == {"sampler": 2}
            status, _, answer = await post(other_gateway, "/generate", SHORT, "sampler")
            assert (status, answer["error"]["reason"]) == (429, "QUOTA_EXCEEDED")
            assert (await post(http, path, body, "other"))[0] == 200, "quotas are separate"
        await eventually(lambda: counted(server) == {} == at_stage(fleet))
        assert (await post(http, path, body, "sampler"))[0] == 200


async def test_two_callers_of_a_gateway_have_their_own_places_and_none_of_the_gateways(
    make_fleet: Callable[..., Any], access: Path, tmp_path: Path
) -> None:
    """Callers with certificates: the gateway calls with its own, and names the principal."""
    authority = Authority.init(tmp_path / "tls", "lab")
    async with (
        make_fleet(access_file=str(access), authority=authority, a=1) as fleet,
        contextlib.AsyncExitStack() as on,
    ):
        server = GatewayServer(
            GatewayConfig(fleet.server.address, access_file=str(access), tls=Tls(authority.ensured("gateway/front")))
        )
        await server.start()
        on.push_async_callback(server.stop)
        http = await on.enter_async_context(aiohttp.ClientSession(f"https://{server.address}"))

        async def generate(caller: str, body: Any) -> int:
            tls = Tls(authority.ensured(f"client/{caller}"))
            name = tls.peer_name(Role.GATEWAY)
            async with http.post("/generate", json=body, ssl=tls.client_context(), server_hostname=name) as response:
                await response.read()
                return int(response.status)

        tasks = [asyncio.create_task(generate(caller, LONG)) for caller in ("sampler", "sampler", "other", "other")]
        await eventually(lambda: running(fleet) == 4)
        assert counted(server) == at_stage(fleet) == {"sampler": 2, "other": 2}
        assert [await generate(caller, SHORT) for caller in ("sampler", "other")] == [429, 429]
        for task in tasks[:2]:
            task.cancel()
        await eventually(lambda: at_stage(fleet) == {"other": 2})
        assert [await generate(caller, SHORT) for caller in ("sampler", "other")] == [200, 429]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_every_end_frees_the_places_of_a_gateway(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet, token="front", timeout_s=0.3) as (server, http):
        stream = {**LONG, "stream": True}
        async with http.post("/generate", json=stream, headers=of("sampler")) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            assert counted(server) == {"sampler": 1}
        await eventually(lambda: counted(server) == {} == at_stage(fleet))  # the client left a stream
        for body, status in (
            (SHORT, 200),
            ({**SHORT, "stream": True}, 200),
            ({**SHORT, "lora_path": "absent"}, 404),  # an error of the engine
            (LONG, 200),  # the gateway's time limit cuts the sample
        ):
            assert (await post(http, "/generate", body, "sampler"))[0] == status, body
            assert counted(server) == {}
        await eventually(lambda: at_stage(fleet) == {})
        aborted = asyncio.create_task(post(http, "/generate", {**LONG, "rid": "mine"}, "sampler"))
        await eventually(lambda: running(fleet) == 1)
        assert (await post(http, "/abort_request", {"rid": "mine"}, "sampler"))[0] == 200
        assert (await aborted)[0] == 200
        await eventually(lambda: counted(server) == {} == at_stage(fleet))


async def test_admin_routes_go_on_while_the_quota_is_used(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], access: Path
) -> None:
    write(access, boss=1)
    async with make_gateway(fleet, token="front") as (_, http), held(fleet, http, 1, "boss"):
        assert (await post(http, "/generate", SHORT, "boss"))[0] == 429
        for path, body in (
            ("/pause_generation", {"mode": "in_place"}),
            ("/continue_generation", {}),
            ("/abort_request", {"rid": "absent"}),
            ("/pause_generation", {"mode": "retract"}),
            ("/release_memory_occupation", {"tags": ["kv_cache"]}),
            ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
            ("/continue_generation", {}),
        ):
            status, _, answer = await post(http, path, body, "boss")
            assert status == 200, (path, answer)


async def test_the_samples_of_a_call_are_admitted_together_or_not_at_all(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    async with make_gateway(fleet, token="front") as (server, http), held(fleet, http, 1, "sampler"):
        two = {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 1}}
        status, _, answer = await post(http, "/generate", two, "sampler")
        assert (status, answer["error"]["reason"]) == (429, "QUOTA_EXCEEDED")
        assert REFUSED in str(answer)
        assert counted(server) == at_stage(fleet) == {"sampler": 1}
        many = {"text": "x", "sampling_params": {"max_new_tokens": 1, "n": 3}}
        status, _, answer = await post(http, "/generate", many, "sampler")
        assert (status, answer["error"]["reason"]) == (400, "FIELD_INVALID"), "no repeat could succeed"
        assert "3 samples are more than sampler may have in flight, 2" in str(answer)


async def test_refusals_of_a_gateway_are_counted(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with (
        make_gateway(fleet, token="front", metrics="127.0.0.1:0") as (server, http),
        held(fleet, http, 2, "sampler"),
    ):
        assert (await post(http, "/generate", SHORT, "sampler"))[0] == 429
        metrics = await scrape(server.metrics_address)
        assert metrics.value("rlctl_quota_refusals_total", principal="sampler") == 1
        assert metrics.value("rlctl_gateway_requests_total", status="429") == 1
