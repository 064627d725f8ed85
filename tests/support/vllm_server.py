"""Requests to a gateway in the form of vLLM's clients."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

SLOTS = ("actor-0", "actor-1")


async def ask(http: aiohttp.ClientSession, path: str, body: Any = None, method: str = "POST", **given: Any) -> Any:
    """Return status and body of an answer; SkyRL reads only answers with a Content-Length."""
    async with http.request(method, path, json=body, **given) as response:
        raw = await response.read()
        assert response.headers.get("Content-Length") == str(len(raw))
        return response.status, await (response.text() if response.content_type == "text/plain" else response.json())


async def each(http: aiohttp.ClientSession, path: str, body: Any = None, **given: Any) -> list[Any]:
    """Call every server separately, like SkyRL's client."""
    return await asyncio.gather(*(ask(http, f"/engines/{slot}{path}", body, **given) for slot in SLOTS))
