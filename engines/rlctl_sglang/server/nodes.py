"""One SGLang server over several nodes. The stage server launches the first node's part, followers the rest.

Only the first node is driven; the other nodes hold ranks, and serve nothing. So a follower only starts its part and
notices the end. A server that has lost a part does not come back from the next collective. So all parts end together,
and their launcher starts all again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import ClassVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import SETUP, Engine, EngineConfig, EngineInfo
from rlctl.runtime.addresses import split
from rlctl.v1 import common_pb2, fleet_pb2, rollout_pb2
from rlctl.weights.group.network_interfaces import address_of
from rlctl_sglang.options import parse_options
from rlctl_sglang.server.process import PROBE_S, Meeting, SGLangProcess, hold_port


class FirstNode:
    """The meeting point of a server's nodes: a TCP port of the first node, held until SGLang listens there."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ENGINE_FAILED for a node that is not this host."""
        host = address_of(config.node)
        try:
            self._port: socket.socket = hold_port(host)
        except OSError as error:
            raise Reason.ENGINE_FAILED.error(f"cannot listen on {host} ({config.node}): {error}") from error
        where = f"[{host}]" if ":" in host else host
        self.meeting = Meeting(config.nodes, 0, f"{where}:{self._port.getsockname()[1]}", host)
        self._config = config

    def setup(self) -> dict[str, str]:
        """Return the meeting point, and the settings that all parts share."""
        return {
            "nodes": str(self.meeting.nodes),
            "address": self.meeting.address,
            "tp_size": str(self._config.tp_size),
            "dtype": self._config.dtype,
        }

    def close(self) -> None:
        self._port.close()


class NodeProcess(SGLangProcess):
    """A server's part on a further node."""

    async def ready(self) -> bool:
        """Return whether the ranks of the part have loaded. SGLang answers nothing else there."""
        await asyncio.to_thread(self.scratch.note, self.pid)  # looks at every process
        try:
            return (await self.http.call("/health", timeout_s=PROBE_S)).status == 200
        except (TimeoutError, RlctlError):
            return False


class SGLangNode(Engine):
    """A further node's part, as a follower's engine. Its rank is the number of the node."""

    name: ClassVar[str] = "sglang"

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Check the settings. Raises FIELD_INVALID or FIELD_CONFLICT with the name of the setting."""
        self._options = parse_options(config.options)
        if self._options.url:
            raise Reason.FIELD_CONFLICT.error("a server that is attached to has its own nodes", field="options.url")
        self._config = config
        self._on_failure = on_failure
        self._process: NodeProcess | None = None

    def setup(self) -> dict[str, str]:
        """Return nothing, since no rank joins a further node."""
        return {}

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Start the part. Raises ENGINE_FAILED, DEADLINE_EXCEEDED, and FIELD_INVALID for an invalid setup."""
        try:
            nodes, tp_size = int(setup["nodes"]), int(setup["tp_size"])
            address, dtype = setup["address"], setup["dtype"]
        except (KeyError, ValueError):
            raise Reason.FIELD_INVALID.error("rank 0 sent no setup of a server", field=SETUP) from None
        if not self._config.rank < nodes:
            raise Reason.FIELD_INVALID.error(
                f"the server has {nodes} nodes, and this is number {self._config.rank}", field=SETUP
            )
        split(address, SETUP)
        meeting = Meeting(nodes, self._config.rank, address, address_of(self._config.node))
        config = dataclasses.replace(self._config, tp_size=tp_size, dtype=dtype)
        self._process = NodeProcess(config, self._options, meeting)
        await self._process.start(self._on_failure)
        places = [common_pb2.WorkerCoordinates(rank=node, node=self._config.node) for node in range(nodes)]
        return EngineInfo(fleet_pb2.StageLayout(workers=places), fleet_pb2.Capabilities())

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def generate(
        self,
        request: rollout_pb2.GenerateRequest,  # noqa: ARG002
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        """Raise NOT_RANK_ZERO: requests go to the first node."""
        raise Reason.NOT_RANK_ZERO.error()
        yield

    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:  # noqa: ARG002
        """Raise NOT_RANK_ZERO: requests go to the first node."""
        raise Reason.NOT_RANK_ZERO.error()
