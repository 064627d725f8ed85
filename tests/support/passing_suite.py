"""Requests to a real server, directly and through a data port, with equal answers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from client_bodies import SENT, streams
from server_stage import Driver
from yarl import URL

from rlctl.demo import tiny as tiny_
from rlctl.demo.task import CHARACTERS
from rlctl.engine import HttpRoute
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.ports import SystemClock
from rlctl.runtime.http_errors import REASON
from rlctl.runtime.http_forwarding import SEQUENCE, SLOT, VERSION
from rlctl.stage.data_port.server import DataPort
from rlctl.stage.serving_state import Serving
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import STAGE_STATE_READY, WeightVersion
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import UpdateWeightsFromDiskRequest

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
            loaded_adapters=frozenset(),
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


TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] | length }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
LABEL = "recorded"
PEAK = 1e5
"""Factor of the logits. Samples at temperature 1 are then those of the greedy choice."""
SPECIAL = len(tiny_.VOCABULARY) - len(CHARACTERS)
"""Tokens without a text, which are never chosen."""


def peaked(tiny: tuple[Any, Path], directory: Path) -> Path:
    """Write a checkpoint with repeatable samples and a chat template. Return its directory."""
    model = copy.deepcopy(tiny[0])
    with torch.no_grad():
        model.lm_head.weight.mul_(PEAK)
        model.lm_head.weight[:SPECIAL].zero_()
    tiny_.save(model, directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    return directory


def clients_bodies(dialect: str, checkpoint: Path) -> list[tuple[str, Any]]:
    """Return what other projects' clients send to generate, each client's body unchanged."""
    return [
        (each.path, {**each.body_for(checkpoint), **more})
        for listed, more in ((SENT, {}), (streams(), {"stream": True}))
        for each in listed
        if dialect in each.dialects
    ]


@dataclass(frozen=True)
class Passed:
    """A real engine that has been updated to version LABEL.

    Attributes:
        port: URL of its data port.
        gateway: URL of a gateway of its dialect.
        label: the server's own name of LABEL.
    """

    engine: Any
    port: str
    gateway: str
    label: str


@contextlib.asynccontextmanager
async def passed_on(engine: str, checkpoint: Path, place: Path) -> AsyncIterator[Passed]:
    """Start an engine server with a stage, a coordinator and a gateway."""
    async with InProcessFleet(place / "journal.db", [StageSpec("actor-0", str(checkpoint), engine=engine)]) as fleet:
        update = UpdateWeightsFromDiskRequest(model_path=str(checkpoint), weight_version=LABEL)
        operation = await fleet.stub.UpdateWeightsFromDisk(update)
        assert operation.state == OPERATION_STATE_OK, operation
        gateway = GatewayServer(GatewayConfig(fleet.server.address, engine))
        try:
            await gateway.start()
            stage = fleet.stages["actor-0"]
            label = stage._engine._stamps.label
            assert label != LABEL
            yield Passed(stage._engine, f"http://{stage.data_address}", f"http://{gateway.address}", label)
        finally:
            await gateway.stop()


async def compare(
    direct: str,
    passed: str,
    requests: Iterable[tuple[str, Any]],
    key: str = "",
    socket: str = "",
    renamed: Callable[[Any], tuple[Any, Mapping[bytes, bytes]]] = lambda body: (body, {}),
) -> list[str]:
    """Send every request to both in turn; return the differences.

    ``socket``: of the server, if not TCP. ``renamed``: returns the body with the server's own names, and what replaces
    these names in its answer.
    """
    differing = []
    # SGLang closes a connection silently after an answer with a failure.
    connector = aiohttp.UnixConnector(socket, force_close=True) if socket else aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as server, aiohttp.ClientSession() as session:
        for path, body in requests:
            method = "GET" if body is None else "POST"
            for _ in range(TRIES):
                own, names = renamed(body)
                there = await post(server, direct + path, own, key, method)
                for name, shown in names.items():
                    there = replace(there, body=there.body.replace(name, shown))
                here = await post(session, passed + path, body, method=method)
                assert REASON not in here.headers, f"{path} {body}: {here.body!r}"
                if alike(here.comparable, there.comparable):
                    break
            else:
                differing.append(f"{path} {body}\n  direct {there.comparable}\n  passed {here.comparable}")
    return differing
