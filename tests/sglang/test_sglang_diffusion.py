"""SGLang-Diffusion is told from SGLang, by what the installed version's own source says that its server answers."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from aiohttp import web
from rlctl_servers.server.argparse_source import installed, parsed
from rlctl_sglang.options import Options
from rlctl_sglang.server.server import Server

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig


def told(python: str) -> tuple[set[str], dict[str, Any]]:
    """Its front's routes, and what its /model_info answers, as far as that does not depend on the model."""
    (front,) = installed(python, "sglang/multimodal_gen/runtime/entrypoints")
    tree = parsed(front / "http_server.py")
    assert tree is not None
    routes, answer = set(), {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        paths = [call.args[0] for call in node.decorator_list if isinstance(call, ast.Call) and call.args]
        found = {path.value for path in paths if isinstance(path, ast.Constant)}
        routes |= found
        if "/model_info" in found:
            (given,) = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
            assert isinstance(given, ast.Dict)
            pairs = zip(given.keys, given.values, strict=True)
            answer = {
                key.value: value.value
                for key, value in pairs
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
            }
    return routes, answer


async def test_it_is_not_attached_to_and_the_reason_is_said(sglang: str) -> None:
    routes, answer = told(sglang)
    assert "/ready" not in routes, "what SGLang is asked first"
    app = web.Application()

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app.router.add_get("/model_info", model_info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = Server(EngineConfig("m"), Options(url=f"http://127.0.0.1:{runner.addresses[0][1]}"), pytest.fail)
    try:
        with pytest.raises(RlctlError) as refused:
            await server.start()
    finally:
        await server.stop()
        await runner.cleanup()
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "options.url")
    assert "SGLang-Diffusion" in refused.value.message
