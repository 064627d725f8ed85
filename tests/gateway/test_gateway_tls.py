"""A gateway over HTTPS: its certificate, its callers with and without one, and a router that cannot be before it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role


@asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[GatewayServer]:
    server = GatewayServer(config)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def test_a_gateway_serves_https_and_reaches_its_fleet_over_mtls(make_fleet: Callable, tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    gateway = Tls(authority.ensured("gateway/g"))
    async with (
        make_fleet(authority=authority, a=1) as fleet,
        running(GatewayConfig(fleet.server.address, tls=gateway)) as server,
    ):
        # A program that knows the CA, its own certificate and the host.
        context = ssl.create_default_context(cafile=str(authority.certificate))
        own = authority.ensured("client/alice")
        context.load_cert_chain(own.cert, own.key)
        url = f"https://{server.address}"
        http = openai.DefaultAsyncHttpxClient(verify=context)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
            assert [model.id async for model in client.models.list()] == ["actor"]
        async with aiohttp.ClientSession(url) as session:
            body: Any = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            async with session.post("/generate", json=body, ssl=context) as answer:
                assert answer.status == 200
            alice = Tls(authority.ensured("client/alice"))
            options: Any = {"ssl": alice.client_context(), "server_hostname": alice.peer_name(Role.GATEWAY)}
            async with session.get("/v1/models", **options) as answer:
                assert answer.status == 200
            for role in ("", "stage/a"):
                bare = ssl.create_default_context(cafile=str(authority.certificate))
                if role:
                    bare.load_cert_chain(authority.ensured(role).cert, authority.ensured(role).key)
                async with session.get("/v1/models", ssl=bare) as answer:
                    assert answer.status == 403, role
                    assert (await answer.json())["error"]["reason"] == "PEER_NOT_ALLOWED"
                async with session.get("/health", ssl=bare) as answer:
                    assert answer.status == 200
            stranger = Tls(Authority.init(tmp_path / "other", "lab").ensured("client/alice"))
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get("/v1/models", ssl=stranger.client_context())
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{server.address}/v1/models")


async def test_a_token_or_insecure_admits_callers_without_a_certificate(make_fleet: Callable, tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    bare = ssl.create_default_context(cafile=str(authority.certificate))
    gateway = Tls(authority.ensured("gateway/g"))

    async def status(server: GatewayServer, **headers: str) -> int:
        async with (
            aiohttp.ClientSession(f"https://{server.address}", headers=headers) as session,
            session.get("/v1/models", ssl=bare) as answer,
        ):
            return int(answer.status)

    async with (
        make_fleet(authority=authority, token="secret", a=1) as fleet,
        running(GatewayConfig(fleet.server.address, tls=gateway, token="secret")) as server,
    ):
        assert await status(server) == 401
        assert await status(server, authorization="Bearer secret") == 200
    async with (
        make_fleet(authority=authority, a=1) as fleet,
        running(GatewayConfig(fleet.server.address, tls=gateway, insecure=True)) as server,
    ):
        assert await status(server) == 200


async def test_a_gateway_refuses_a_certificate_of_another_role_and_a_router(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path, "lab")
    with pytest.raises(RlctlError, match="this process needs gateway"):
        await GatewayServer(GatewayConfig("127.0.0.1:1", tls=Tls(authority.ensured("client/alice")))).start()
    router: Any = object()
    config = GatewayConfig("127.0.0.1:1", tls=Tls(authority.ensured("gateway/g")), router=router)
    with pytest.raises(RlctlError) as caught:
        await GatewayServer(config).start()
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_CONFLICT, "router_backend")
