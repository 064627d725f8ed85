"""Requests to a gateway in tests."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from yarl import URL


async def post(
    http: aiohttp.ClientSession, body: Any, path: str | URL = "/generate", **headers: str
) -> tuple[int, Any]:
    """Return status and parsed answer."""
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


def events(text: str) -> list[Any]:
    """Return the events of a complete stream, without its end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def nested(levels: int) -> Any:
    """Return ``levels`` nested objects."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value
