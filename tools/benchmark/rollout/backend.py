"""An SGLang server that answers at once: the routes that sglang-router uses. Run as a process."""

from __future__ import annotations

import logging

import orjson
from aiohttp import web

from rlctl.runtime import event_loops
from tools.benchmark.child import serve
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


if __name__ == "__main__":
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # the router tries HTTP/2 first
    event_loops.run(serve("backend", application()))
