"""An SGLang server that answers at once: the routes that sglang-router uses. Run as a process."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
from aiohttp import web

from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, end_with_parent, stop_event
from tools.benchmark.rollout.reply import EVENTS, REPLY


async def _generate(request: web.Request) -> web.StreamResponse:
    if not orjson.loads(await request.read()).get("stream"):
        return web.Response(body=REPLY, content_type="application/json")
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in EVENTS:
        await answer.write(event)
    return answer


async def _told(request: web.Request) -> web.Response:
    del request
    return web.json_response({"model_path": "", "status": "ready", "is_generation": True})


def application() -> web.Application:
    """Return the application with its routes."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", _generate)
    app.router.add_get("/{anything:.*}", _told)
    return app


async def _main() -> None:
    end_with_parent()
    stop: Any = stop_event()
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # the router tries HTTP/2 first
    runner = web.AppRunner(application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    announce("backend", address=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(event_loops.run(_main()))
