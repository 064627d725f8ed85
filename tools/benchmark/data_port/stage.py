"""``rlctl`` with a fake engine whose HTTP interface is an upstream: ``python -m ... UPSTREAM stage ...``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import cache

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps
from rlctl_vllm.requests import passing
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.requests.requests import TokensInOut

from rlctl.cli.main import main
from rlctl.engine import EngineInfo, HttpExchange, HttpRequest
from rlctl.testing.fake_engine import FakeEngine
from tools.benchmark.sidecar.upstream import CONTEXT, VOCABULARY

UPSTREAM = sys.argv.pop(1) if __name__ == "__main__" else ""

_start = FakeEngine.start


async def start(self: FakeEngine, setup: Mapping[str, str]) -> EngineInfo:
    """Start the fake engine, with vLLM's routes."""
    return dataclasses.replace(await _start(self, setup), http_routes=passing.routes())


async def exchange(self: FakeEngine, request: HttpRequest) -> HttpExchange:
    """Read a request as vLLM's plug-in does."""
    return _passing(self).read(request)


@cache
def _passing(engine: FakeEngine) -> Passing:
    http, stamps, table = Http("vLLM", UPSTREAM), Stamps("1"), LoraTable()
    stamps.bind(engine._version)
    limits = Limits(VOCABULARY, CONTEXT, CONTEXT)
    requests = Requests(TokensInOut(http, limits, stamps, table))
    return Passing(http, passing.Reader(limits, "fake", tuple, table), requests, stamps, table)


if __name__ == "__main__":
    FakeEngine.start = start  # type: ignore[method-assign]
    FakeEngine.exchange = exchange  # type: ignore[assignment, method-assign]
    main()
