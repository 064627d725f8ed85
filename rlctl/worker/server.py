"""A follower rank as a process: the WorkerService that rank 0 dials. The process ends when rank 0 is gone."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from rlctl.command_stream.executor import Executor
from rlctl.engine import EngineConfig, follower_class
from rlctl.ports import Link, SystemClock
from rlctl.transport.handlers import generic_handler
from rlctl.transport.links import ServedLink
from rlctl.transport.server import GrpcServer
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.transport.unary_verbs import admin_methods
from rlctl.v1 import worker_pb2
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.control_pb2 import ControlRequest, ControlResponse
from rlctl.worker.follower import Follower


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a follower. Fields without an explanation are options of ``rlctl worker``.

    Attributes:
        engine_config: configuration of the rank, 1 or higher.
        token: bearer token that guards every service.
        tls: certificate of a worker; None for plain text.
    """

    engine: str
    engine_config: EngineConfig
    listen: str = "127.0.0.1:0"
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    tls: Tls | None = None


class WorkerServer:
    """A follower rank with its server."""

    def __init__(self, config: WorkerConfig) -> None:
        if config.tls is not None:
            config.tls.require(Role.WORKER)
        self.config = config
        self.abandoned = asyncio.Event()
        self._clock = SystemClock()
        engine_config = config.engine_config
        coordinates = WorkerCoordinates(
            rank=engine_config.rank, tp=engine_config.rank, node=engine_config.node, device=engine_config.device
        )
        self._follower = Follower(
            lambda on_failure: follower_class(config.engine)(engine_config, on_failure),
            coordinates,
            os.getpid(),
            self._clock,
        )
        self._executor = Executor(self._follower, self._clock)
        methods = admin_methods("WorkerService", lambda: self._executor, self._clock, on_link_end=self._link_ended)
        service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        self._server = GrpcServer(
            [(service, generic_handler(service, methods))],
            token=config.token,
            insecure=config.insecure,
            tls=config.tls,
        )

    async def start(self) -> str:
        """Bind and return the address. The engine starts when rank 0 attaches."""
        return await self._server.start(self.config.listen)

    async def stop(self) -> None:
        await self._follower.stop()
        await self._server.stop(0.5)

    def _link_ended(self, link: Link[ControlResponse, ControlRequest] | ServedLink) -> None:
        # Without rank 0 this rank is useless: its engine cannot join a new rank 0.
        if self._follower.obeys(link):
            self.abandoned.set()
