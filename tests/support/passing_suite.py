"""Requests to a real server, directly and through a data port, with equal answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from server_stage import Driver
from yarl import URL

from rlctl.engine import HttpRoute
from rlctl.ports import SystemClock
from rlctl.runtime.http_errors import REASON
from rlctl.runtime.http_forwarding import SEQUENCE, SLOT, VERSION
from rlctl.stage.data_port.server import DataPort
from rlctl.stage.serving_state import Serving
from rlctl.v1.common_pb2 import STAGE_STATE_READY, WeightVersion

OWN = (SLOT, VERSION, SEQUENCE)
TRIES = 4
"""Tries of a comparison. SGLang sometimes loses a field of an event when it merges two, so two direct answers may
differ too.
"""

_VARIES = {
    "id",
    "created",
    "e2e_latency",
    "request_id",
    "decode_throughput",
    "response_sent_to_client_ts",
    "tool_call_id",
}
_TIMES = ("_time", "_ts", "_latency", "latency")


@dataclass
class Answer:
    """An unchanged answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def comparable(self) -> tuple[int, str, list[Any]]:
        """Return status, content type and documents, without ids and times.

        Events are merged: the tokens per event, and the order of several prompts' events, are random.
        """
        kind = self.headers.get("Content-Type", "")
        documents: list[Any] = [self.body.decode()]
        if kind.startswith("application/json"):
            documents = [_stripped(json.loads(self.body))]
        elif kind.startswith("text/event-stream"):
            lines = [line for line in self.body.decode().splitlines() if line]
            assert all(line.startswith("data: ") for line in lines)
            whole: dict[str, Any] = {"done": lines[-1] == "data: [DONE]"}
            for line in lines:
                if line != "data: [DONE]":
                    event = _stripped(json.loads(line.removeprefix("data: ")))
                    _fold(whole.setdefault(str(event.get("index")), {}), event)
            documents = [whole]
        return self.status, kind, documents


def alike(one: Any, other: Any) -> bool:
    """Return True if two answers are equal: a number's last bits depend on the server's concurrent work."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(each, other[name]) for name, each in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name not in _VARIES and not name.endswith(_TIMES)}
        return {name: _stripped(each) for name, each in kept.items()}
    return [_stripped(each) for each in value] if isinstance(value, list) else value


def _fold(whole: dict[str, Any], event: Mapping[str, Any]) -> None:
    for name, value in event.items():
        if isinstance(value, dict):
            if not isinstance(whole.get(name), dict):
                whole[name] = {}
            _fold(whole[name], value)
        elif name == "choices":
            for each in value:
                _fold(whole.setdefault("choices", {}).setdefault(each["index"], {}), each)
        elif name in ("text", "content", "arguments") and isinstance(value, str):
            whole[name] = (whole.get(name) or "") + value
        elif isinstance(value, list) and name != "weight_versions":
            whole[name] = [*(whole.get(name) or ()), *value]
        elif value is not None or name not in whole:
            whole[name] = value


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, key: str = "", method: str = "POST", **headers: str
) -> Answer:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {}), **headers}
    async with session.request(method, URL(url, encoded=True), data=data, headers=given) as response:
        parts = b""
        try:
            async for part in response.content.iter_any():
                parts += part
        except aiohttp.ClientPayloadError as error:
            raise aiohttp.ClientPayloadError(f"{url} {body!r}: {parts!r}") from error
        return Answer(response.status, response.headers.copy(), parts)


class Gate:
    """The state of a stage, set by a test."""

    def __init__(self, label: str, sequence: int) -> None:
        self.serving = Serving(
            slot="actor-0",
            model="actor",
            incarnation=1,
            state=STAGE_STATE_READY,
            version=WeightVersion(label=label, sequence=sequence),
            vouched=True,
            lease_until=float("inf"),
            obstacle=None,
            adapters={},
            held=frozenset(),
            awaited=frozenset(),
            spoiling="",
        )

    def put(self, **fields: Any) -> None:
        self.serving = self.serving._replace(**fields)


def open_gate(driver: Driver) -> Gate:
    """Return a gate at version 1, with the label of the server's start."""
    label = driver.engine._stamps.label
    driver.engine.set_version(WeightVersion(label=label, sequence=1))
    return Gate(label, 1)


@contextlib.asynccontextmanager
async def port(driver: Driver, gate: Gate, routes: Iterable[HttpRoute], token: str | None = None) -> AsyncIterator[str]:
    """Yield the URL of a data port in front of an engine, on the event loop of the engine's requests."""
    made = DataPort(lambda: driver.engine, lambda: gate.serving, SystemClock(), token=token)
    address = await driver.rollout.acall(made.start("127.0.0.1:0", routes))
    try:
        yield f"http://{address}"
    finally:
        await driver.rollout.acall(made.stop())


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, 30 s at most."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def compare(
    direct: str, passed: str, requests: Iterable[tuple[str, Any]], key: str = "", socket: str = ""
) -> list[str]:
    """Send every request to both in turn; return the differences. ``socket``: of the server, if not TCP."""
    differing = []
    # SGLang closes a connection silently after an answer with a failure.
    connector = aiohttp.UnixConnector(socket, force_close=True) if socket else aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as server, aiohttp.ClientSession() as session:
        for path, body in requests:
            method = "GET" if body is None else "POST"
            for _ in range(TRIES):
                there = await post(server, direct + path, body, key, method)
                here = await post(session, passed + path, body, method=method)
                assert REASON not in here.headers, f"{path} {body}: {here.body!r}"
                if alike(here.comparable, there.comparable):
                    break
            else:
                differing.append(f"{path} {body}\n  direct {there.comparable}\n  passed {here.comparable}")
    return differing
