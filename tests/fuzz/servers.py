"""Servers of a world beside its fleet: data ports, a sidecar, a trainer's lead, and stages without a coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.version_labels import Stamps
from rlctl_sglang.requests import passing as of_sglang
from rlctl_sglang.requests.bodies import Limits as SglangLimits
from rlctl_vllm.requests import passing as of_vllm
from rlctl_vllm.requests.bodies import Limits as VllmLimits
from rlctl_vllm.sidecar.server import SidecarConfig, SidecarServer

from rlctl.engine import EngineConfig, HttpExchange, HttpRequest, HttpRoute
from rlctl.ports import SystemClock
from rlctl.runtime.http_client import Response
from rlctl.stage.data_port.server import DataPort
from rlctl.stage.server import StageConfig, StageServer
from rlctl.stage.serving_state import Serving
from rlctl.trainer.member_streams import Members
from rlctl.v1.common_pb2 import STAGE_STATE_READY, WeightVersion
from rlctl.worker.server import WorkerConfig, WorkerServer
from tools.benchmark.sidecar.upstream import application

T = TypeVar("T")


class _Upstream:
    """An engine server with one answer."""

    async def forward(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        connection: Any = None
        response = Response(connection, "POST")
        response.feed(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"text":"x"}')
        return response


class _EndsNothing:
    product = "fake"

    def admit_passed(self, *, prepared: bool) -> None:
        pass

    def ends(self, *, heard: bool) -> bool:
        return heard

    async def end(self, rids: Collection[str]) -> None:
        pass


class _Engine:
    def __init__(self, reader: Any, adapters: LoraTable) -> None:
        requests: Any = Requests(_EndsNothing())  # type: ignore[arg-type]
        self._passing = Passing(_Upstream(), reader, requests, Stamps("default"), adapters)  # type: ignore[arg-type]

    async def exchange(self, request: HttpRequest) -> HttpExchange:
        return self._passing.read(request)


def _returning(value: T) -> Callable[[], T]:
    return lambda: value


@contextlib.asynccontextmanager
async def data_ports(token: str | None, access_file: str) -> AsyncIterator[list[tuple[str, str, list[HttpRoute]]]]:
    """Yield name, address and routes of the data ports of an SGLang and of a vLLM stage."""
    serving = Serving(
        slot="a",
        model="actor",
        incarnation=1,
        state=STAGE_STATE_READY,
        version=WeightVersion(label="v1", sequence=1),
        vouched=True,
        lease_until=float("inf"),
        obstacle=None,
        adapters={},
        loaded_adapters=frozenset(),
        awaited=frozenset(),
        spoiling="",
    )
    adapters = LoraTable()
    kinds: list[tuple[str, Any, list[HttpRoute]]] = [
        ("data-sglang", of_sglang.Reader(SglangLimits(100, 512, 500), "base"), of_sglang.routes(metrics=True)),
        ("data-vllm", of_vllm.Reader(VllmLimits(100, 512, 500), "base", list, adapters), of_vllm.routes()),
    ]
    async with contextlib.AsyncExitStack() as stack:
        ports = []
        for name, reader, routes in kinds:
            engine: Any = _Engine(reader, adapters)
            port = DataPort(
                _returning(engine), _returning(serving), SystemClock(), token=token, access_file=access_file
            )
            stack.push_async_callback(port.stop)
            health = [HttpRoute("GET", path) for path in ("/health", "/health_generate", "/ready")]
            ports.append((name, await port.start("127.0.0.1:0", routes), [*routes, *health]))
        yield ports


async def _done(request: web.Request) -> web.Response:
    return web.json_response({"success": True})


@contextlib.asynccontextmanager
async def sidecar() -> AsyncIterator[tuple[str, list[tuple[str, str]]]]:
    """Yield address and routes of a sidecar in front of a vLLM that answers at once."""
    app = application()
    for path in ("/reset_prefix_cache", "/abort_requests"):
        app.router.add_post(path, _done)
    upstream = web.AppRunner(app, access_log=None)
    await upstream.setup()
    try:
        await web.TCPSite(upstream, "127.0.0.1", 0).start()
        server = SidecarServer(SidecarConfig(upstream=f"http://127.0.0.1:{upstream.addresses[0][1]}"))
        try:
            await server.start()
            served: Any = server._runner
            routes = [(route.method, route.resource.canonical) for route in served.app.router.routes()]
            yield server.url.removeprefix("http://"), [route for route in routes if route[0] != "HEAD"]
        finally:
            await server.stop()
    finally:
        await upstream.cleanup()


@contextlib.asynccontextmanager
async def lead(ranks: int) -> AsyncIterator[tuple[str, str]]:
    """Yield address and token of a trainer's lead."""
    members = Members(ranks)
    yield await members.start("127.0.0.1")
    await members.close()


@dataclass
class Lone:
    """A stage of one rank and a worker of rank 1, without a coordinator: commanders of any epoch may attach."""

    checkpoint: str

    async def start(self) -> None:
        """Start both at fresh addresses."""
        self.stage = StageServer(StageConfig("c", "actor", "fake", EngineConfig(self.checkpoint)))
        self.worker = WorkerServer(WorkerConfig("fake", EngineConfig(self.checkpoint, tp_size=2, rank=1)))
        await self.stage.start()
        self.worker_address = await self.worker.start()

    async def stop(self) -> None:
        """Stop both."""
        await self.stage.stop()
        await self.worker.stop()
