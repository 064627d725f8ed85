"""The suite of SGLang's interface against SGLang itself: what it asks of fleets is true of the original."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_stage import Driver
from sglang_server import at_the_checkpoint
from sglang_suite import *  # noqa: F403 - the tests themselves
from sglang_suite import Server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PLAIN = ("/generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/")
"""What the key for requests opens; the rest needs the admin key."""


@pytest.fixture(scope="module")
def own(one: Driver, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """The server of all modules, at the checkpoint; the plug-in does not know what goes past it."""
    at_the_checkpoint(one, tiny)
    yield one
    at_the_checkpoint(one, tiny)


@pytest.fixture
async def server(own: Driver, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    http = own.engine._server.http

    def key(path: str) -> str:
        return str(http._keys[not path.startswith(PLAIN)])

    async with Server.at([http.url], [1], tiny, key=key) as server:
        yield server
