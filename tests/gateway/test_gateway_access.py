"""Named tokens at a gateway: the fleet sees the gateway's caller, not the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Grant
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.auth import ON_BEHALF_OF
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role

TOKEN = "the fleet's own token"
SCOPES = {"watcher": "viewer", "sampler": "rollout", "trainer": "weights:actor", "front": "gateway"}


@pytest.fixture
def access(tmp_path: Path) -> Path:
    path = tmp_path / "access.json"
    entries = {
        name: Entry(name, (Grant.parse(scope),), (TokenHash(hash_of(name), 0.0),), (f"rlctl://lab/client/{name}",))
        for name, scope in SCOPES.items()
    }
    access_file.write(path, entries)
    return path


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any], access: Path) -> AsyncIterator[InProcessFleet]:
    async with make_fleet(token=TOKEN, access_file=str(access), a=1) as fleet:
        yield fleet


async def answer(http: Any, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    async with http.request(method, path, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None) if response.status != 200 else None


ROUTES = {
    "viewer": ("GET", "/get_model_info", None),
    "rollout": ("POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}}),
    "weights": ("POST", "/flush_cache", None),
}


async def test_a_caller_at_a_gateway_may_do_what_its_own_token_may(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    may = {"watcher": {"viewer"}, "sampler": {"viewer", "rollout"}, "trainer": {"viewer", "weights"}}
    async with make_gateway(fleet, token="front") as (_, http):
        for name, allowed in may.items():
            for scope, (method, path, body) in ROUTES.items():
                status, error = await answer(http, method, path, body, authorization=f"Bearer {name}")
                assert status == (200 if scope in allowed else 403), (name, path, error)
                if status == 403:
                    assert error["error"]["reason"] == "SCOPE_MISSING"
                    assert "rlctl tokens new" in error["error"]["next_step"]
        assert (await answer(http, "GET", "/get_model_info"))[0] == 401
        assert (await answer(http, "GET", "/get_model_info", authorization="Bearer other"))[0] == 401


async def test_an_operation_names_the_caller_of_the_gateway(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    async with (
        make_gateway(fleet, token="front") as (_, http),
        await aio.connect(fleet.server.address, token="watcher") as client,
    ):
        assert (await answer(http, "POST", "/flush_cache", authorization="Bearer trainer"))[0] == 200
        [operation] = await client.operations(verb="FlushCache")
        caller = operation.caller
        assert (caller.principal, caller.via, caller.client) == ("trainer", "", "gateway")


async def test_a_gateway_hands_on_the_certificate_of_its_caller(
    make_fleet: Callable[..., Any], access: Path, tmp_path: Path
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    async with make_fleet(access_file=str(access), authority=authority, a=1) as fleet:
        own = Tls(authority.ensured("gateway/front"))
        server = GatewayServer(GatewayConfig(fleet.server.address, access_file=str(access), tls=own))
        await server.start()

        reasons = []

        async def status(path: str, method: str, url: str, body: object = None) -> int:
            tls = Tls(authority.ensured(path))
            name = tls.peer_name(Role.GATEWAY)
            async with (
                aiohttp.ClientSession(f"https://{server.address}") as http,
                http.request(method, url, json=body, ssl=tls.client_context(), server_hostname=name) as response,
            ):
                if response.status != 200:
                    reasons.append((await response.json())["error"]["reason"])
                return int(response.status)

        assert await status("client/sampler", *ROUTES["rollout"]) == 200
        assert await status("client/watcher", *ROUTES["rollout"]) == 403
        assert await status("client/trainer", *ROUTES["weights"]) == 200
        assert await status("client/nobody", *ROUTES["weights"]) == 401
        for path in ("stage/a", "worker/a"):
            assert await status(path, *ROUTES["viewer"]) == 401
            assert reasons[-1] == "TOKEN_MISSING", "the gateway itself refuses a process that is no user of the fleet"
        async with await aio.connect(fleet.server.address, tls=Tls(authority.ensured("client/watcher"))) as client:
            [operation] = await client.operations(verb="FlushCache")
            assert (operation.caller.principal, operation.caller.via) == ("trainer", "gateway/front")
        await server.stop()


async def test_a_caller_of_a_gateway_speaks_for_nobody(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet, token="front") as (_, http):
        for name in ("watcher", "sampler"):
            headers = {"authorization": f"Bearer {name}", ON_BEHALF_OF: "trainer"}
            status, error = await answer(http, "POST", "/flush_cache", **headers)
            assert (status, error["error"]["reason"]) == (403, "SCOPE_MISSING")


async def test_a_gateway_with_an_access_file_refuses_a_coordinator_without_tokens(
    make_fleet: Callable[..., Any], access: Path
) -> None:
    async with make_fleet(a=1) as fleet:
        server = GatewayServer(GatewayConfig(fleet.server.address, access_file=str(access)))
        with pytest.raises(RlctlError) as caught:
            await server.start()
        await server.stop()
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_CONFLICT, "access_file")
    assert "--access-file" in caught.value.next_step


async def test_a_stream_of_a_gateway_ends_with_the_token_of_its_caller(
    make_fleet: Callable[..., Any], make_gateway: Callable[..., Any], access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    entries = access_file.read(access)
    options = {"pace": "0.02"}
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 1000}}
    async with (
        make_fleet(token=TOKEN, access_file=str(access), options=options, a=1) as fleet,
        make_gateway(fleet, token="front") as (_, http),
        http.post("/generate", json=body, headers={"authorization": "Bearer sampler"}) as response,
    ):
        assert (await response.content.readline()).startswith(b"data: ")
        access_file.write(access, {name: entry for name, entry in entries.items() if name != "sampler"})
        rest = await asyncio.wait_for(response.read(), 10)
        assert b"TOKEN_INVALID" in rest
        assert rest.count(b"data: ") < 900
