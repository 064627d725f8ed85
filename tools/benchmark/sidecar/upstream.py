"""A vLLM server that answers at once: the routes that the sidecar uses, without computation. Run as a process."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from rlctl.runtime import event_loops
from tools.benchmark.child import serve

VOCABULARY = 32000
CONTEXT = 8192


def _answer(body: dict[str, Any]) -> bytes:
    count = body["sampling_params"]["max_tokens"]
    ids = [7 + i % 100 for i in range(count)]
    content = [{"token": "t", "logprob": -0.5 - i % 7, "top_logprobs": []} for i in range(count)]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "text": "t" * count,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "1", "start": 0, "end": count}],
    }
    usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": count}
    return json.dumps({"request_id": body["request_id"], "choices": [choice], "usage": usage}).encode()


async def _generate(request: web.Request) -> web.Response:
    return web.Response(body=_answer(json.loads(await request.read())), content_type="application/json")


def _told(value: Any) -> Any:
    async def tell(request: web.Request) -> web.Response:
        del request
        return web.json_response(value)

    return tell


def application() -> web.Application:
    """Return the application with its routes."""
    app = web.Application(client_max_size=1 << 30)
    paths = ["/inference/v1/generate", "/v1/completions", "/abort_requests"]
    app.router.add_post("/inference/v1/generate", _generate)
    app.router.add_get("/openapi.json", _told({"paths": {path: {} for path in paths}}))
    app.router.add_get("/v1/models", _told({"data": [{"id": "fake", "root": "/nowhere", "max_model_len": CONTEXT}]}))
    app.router.add_get("/version", _told({"version": "0"}))
    app.router.add_get("/weight_info", _told({"weight_version": "1"}))
    config = {"model_config": {"max_model_len": CONTEXT, "max_logprobs": 20, "logprobs_mode": "processed_logprobs"}}
    app.router.add_get("/server_info", _told({"vllm_config": config}))
    return app


if __name__ == "__main__":
    event_loops.run(serve("upstream", application()))
