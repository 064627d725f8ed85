"""A data port with an open gate, in front of an upstream with vLLM's interface. Run as a process."""

from __future__ import annotations

import sys
from typing import Any

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps
from rlctl_vllm.requests import passing
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.requests.requests import TokensInOut

from rlctl.engine import HttpExchange, HttpRequest
from rlctl.ports import SystemClock
from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, end_with_parent, stop_event
from rlctl.stage.data_port.server import DataPort
from rlctl.stage.serving_state import Serving
from rlctl.v1.common_pb2 import STAGE_STATE_READY, WeightVersion
from tools.benchmark.sidecar.upstream import CONTEXT, VOCABULARY

SERVING = Serving(
    slot="actor-0",
    model="actor",
    incarnation=1,
    state=STAGE_STATE_READY,
    version=WeightVersion(label="1", sequence=1),
    vouched=True,
    lease_until=float("inf"),
    obstacle=None,
    adapters={},
    held=frozenset(),
    awaited=frozenset(),
    spoiling="",
)


class _Engine:
    """The part of an engine that the data port uses."""

    def __init__(self, upstream: str) -> None:
        http, stamps, table = Http("vLLM", upstream), Stamps("1"), LoraTable()
        stamps.bind(SERVING.version)
        limits = Limits(VOCABULARY, CONTEXT, CONTEXT)
        requests = Requests(TokensInOut(http, limits, stamps, table))
        self._passing = Passing(http, passing.Reader(limits, "fake", tuple, table), requests, stamps, table)

    async def exchange(self, request: HttpRequest) -> HttpExchange:
        return self._passing.read(request)


async def _main() -> None:
    end_with_parent()
    stop = stop_event()
    engine: Any = _Engine(sys.argv[1])
    port = DataPort(lambda: engine, lambda: SERVING, SystemClock())
    announce("port", address=f"http://{await port.start('127.0.0.1:0', passing.routes())}")
    await stop.wait()
    await port.stop()


if __name__ == "__main__":
    sys.exit(event_loops.run(_main()))
