"""What keeps a router's list of workers, before a router that is made up."""

from __future__ import annotations

import http.client
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlctl.gateway.router import worker_list
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing.in_process_fleet import InProcessFleet


class Router:
    """Has at once what it is to have, but for the first time."""

    pairs = False
    ended = False

    def __init__(self) -> None:
        self.workers: Mapping[str, str] = {}
        self.asked = 0

    def start(self) -> None:
        pass

    def stop(self, drain_s: float = 0.0) -> None:
        pass

    def towards(self, wanted: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
        self.asked += 1
        if self.asked == 1:
            raise http.client.IncompleteRead(b"")
        self.workers = wanted
        return frozenset(wanted), frozenset()


@asynccontextmanager
async def kept(fleet: InProcessFleet) -> AsyncIterator[Mapping[str, str]]:
    """The workers of the router before a gateway, which is there as long."""
    router: Any = Router()
    server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
    try:
        await server.start()
        yield router.workers
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_list, "START_S", 5.0)
    monkeypatch.setattr(worker_list, "AGAIN_S", 0.01)


async def test_an_answer_that_breaks_off_is_asked_for_again(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(fleet) as workers:
        assert sorted(url.rpartition("/routed/")[2] for url in workers) == ["a", "b"]
    assert "IncompleteRead" in caplog.text
