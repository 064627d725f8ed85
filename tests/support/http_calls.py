"""Requests to a gateway in tests."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from yarl import URL


async def post(
    http: aiohttp.ClientSession, body: Any, path: str | URL = "/generate", **headers: str
) -> tuple[int, Any]:
    """Status and parsed answer."""
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


def events(text: str) -> list[Any]:
    """Those of a stream that came to its end, without that."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def nested(levels: int) -> Any:
    """So many objects within each other."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value
