"""The OpenAPI document is the dialect's, and nothing that it allows, or forbids, makes the gateway fail."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from rlctl.gateway.http.openapi import PATH
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.runtime.event_loops import LoopThread
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec

CHECKED_IN = Path(__file__).parents[2] / "docs" / "reference" / "openapi-sglang.json"
EXAMPLES = 8
CALL_S = 3.0

WAITS = "/init_weights_update_group"
"""It may wait for calls for other engines that nobody makes."""


async def test_the_served_document_is_the_one_that_is_checked_in(http: aiohttp.ClientSession) -> None:
    async with http.get(PATH) as response:
        assert response.status == 200
        assert await response.json() == json.loads(CHECKED_IN.read_text())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in front of fake engines, on a loop of its own: what asks it blocks."""
    directory = tmp_path_factory.mktemp("fleet")
    (directory / "weights.txt").write_text("one")
    loop, stack = LoopThread("gateway"), AsyncExitStack()

    async def start() -> str:
        specs = [StageSpec("a", str(directory)), StageSpec("b", str(directory), tp_size=2)]
        fleet = await stack.enter_async_context(InProcessFleet(directory / "journal.db", specs))
        server = GatewayServer(GatewayConfig(fleet.server.address, dialect="sglang", drain_s=0.1))
        stack.push_async_callback(server.stop)
        await server.start()
        return server.address

    try:
        yield loop.call(start())
    finally:
        loop.call(stack.aclose())
        loop.stop()


def operations() -> list[Any]:
    schema = schemathesis.openapi.from_dict(json.loads(CHECKED_IN.read_text()))
    return [operation.ok() for operation in schema.get_all_operations()]


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
def test_every_answer_is_one_that_is_documented(address: str, operation: Any) -> None:
    documented = {int(status) for status in operation.definition.raw["responses"]}
    fixed = {"path_parameters": {"slot": "a"}} if "{slot}" in operation.path else {}
    for mode in GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode, **fixed))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            try:
                response = case.call(base_url=f"http://{address}", timeout=CALL_S)
            except requests.Timeout:
                assert operation.path.endswith(WAITS), case.as_curl_command()
                return
            assert response.status_code in documented, (case.as_curl_command(), response.text)

        # Where everything may be left out, and nothing is forbidden, nothing can be asked wrongly.
        with contextlib.suppress(Unsatisfiable) if mode.is_negative else contextlib.nullcontext():
            ask()
