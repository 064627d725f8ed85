"""A process with many echoing peers: ``python -m tools.benchmark.fanout.echoes --count N``.

Each peer is a bare grpc.aio server with one bidirectional method of bytes, and an aiohttp site, each with its own
address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from aiohttp import web

from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, end_with_parent, stop_event
from tools.benchmark.child import arguments

METHOD = "/rlctl.bench.Echo/Stream"
PATH = "/admin"


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(_stream) if details.method == METHOD else None


async def _stream(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message


async def _post(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), content_type="application/json")


async def _serve(count: int) -> None:
    stop = stop_event()
    application = web.Application()
    application.router.add_post(PATH, _post)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    servers, ports = [], []
    for _ in range(count):
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Echo(),))
        grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        ports.append((grpc_port, listener.getsockname()[1]))
    announce("echoes", grpc=",".join(str(port) for port, _ in ports), http=",".join(str(port) for _, port in ports))
    await stop.wait()
    await runner.cleanup()
    await asyncio.gather(*(server.stop(0.1) for server in servers))


if __name__ == "__main__":
    options = arguments(count=int)
    end_with_parent()
    event_loops.run(_serve(options.count))
