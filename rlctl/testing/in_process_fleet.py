"""A whole fleet inside one event loop: real servers on loopback ports, by default with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.coordinator.updates.manager import Graces
from rlctl.engine import EngineConfig, brings_ranks
from rlctl.stage.server import StageConfig, StageServer
from rlctl.transport import grpc
from rlctl.transport.channel import open_channel
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rlctl.v1.fleet_pb2 import Stage
from rlctl.worker.server import WorkerConfig, WorkerServer


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """A stage of an in-process fleet."""

    slot: str
    model_path: str
    tp_size: int = 1
    model: str = "actor"
    engine: str = "fake"
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    frozen: bool = False
    worker_type: str = "regular"


class InProcessFleet:
    """``async with InProcessFleet(journal, [StageSpec(...)]) as fleet``: started, every stage routable."""

    def __init__(
        self,
        journal: Path,
        stages: Sequence[StageSpec],
        *,
        token: str | None = None,
        access_file: str = "",
        lease_s: float = 10.0,
        heal: bool = True,
        graces: Graces | None = None,
        authority: Authority | None = None,
        metrics: str = "",
    ) -> None:
        """``heal``: late joiners and restarted engines of model "actor" are healed automatically; ``graces``: waits for
        silent trainers; ``authority``: CA that issues the certificates of every process, None for plain text;
        ``metrics``: address of every server's metrics.
        """
        self.authority = authority
        self.journal = journal
        self.specs = list(stages)
        self.token = token
        self.access_file = access_file
        self.lease_s = lease_s
        self.heal = heal
        self.graces = graces or Graces()
        self.metrics = metrics
        self.stages: dict[str, StageServer] = {}
        self.workers: dict[tuple[str, int], WorkerServer] = {}

    async def __aenter__(self) -> Self:
        await self.start_coordinator()
        await asyncio.gather(*(self.start_stage(spec) for spec in self.specs))
        await self.until(lambda stages: all(stage.routable for stage in stages))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await asyncio.gather(*(stage.stop() for stage in self.stages.values()))
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await self.server.stop()

    def tls(self, path: str) -> Tls | None:
        """Return the credentials of an identity, "stage/a"; None for plain text."""
        return None if self.authority is None else Tls(self.authority.ensured(path))

    async def start_coordinator(self, listen: str = "127.0.0.1:0") -> None:
        """Start a coordinator on the fleet's journal."""
        config = CoordinatorConfig(
            self.journal,
            listen,
            token=self.token,
            access_file=self.access_file,
            serving_lease_s=self.lease_s,
            heal_by_hand=() if self.heal else ("actor",),
            graces=self.graces,
            tls=self.tls("coordinator"),
            metrics=self.metrics,
        )
        self.server = CoordinatorServer(config)
        await self.server.start()
        self.channel: grpc.aio.Channel = open_channel(self.server.address, self.tls("client/test"))
        self.stub = CoordinatorServiceStub(self.channel)

    async def start_stage(self, spec: StageSpec) -> StageServer:
        """Start a stage with its followers and register it."""
        config = EngineConfig(spec.model_path, tp_size=spec.tp_size, options=spec.options)
        followers = []
        for rank in range(1, 1 if brings_ranks(spec.engine) else spec.tp_size):
            rank_config = dataclasses.replace(config, rank=rank)
            tls = self.tls(f"worker/{spec.slot}")
            worker = WorkerServer(WorkerConfig(spec.engine, rank_config, token=self.token, tls=tls))
            followers.append(await worker.start())
            self.workers[spec.slot, rank] = worker
        stage = StageServer(
            StageConfig(
                slot=spec.slot,
                model=spec.model,
                engine=spec.engine,
                engine_config=config,
                followers=followers,
                coordinator=self.server.address,
                frozen=spec.frozen,
                worker_type=spec.worker_type,
                token=self.token,
                tls=self.tls(f"stage/{spec.slot}"),
                metrics=self.metrics,
                access_file=self.access_file,
            )
        )
        await stage.start()
        self.stages[spec.slot] = stage
        return stage

    async def until(self, condition: object, timeout_s: float = 10.0) -> list[Stage]:
        """Wait until the coordinator's view of the stages satisfies ``condition(stages)``."""
        assert callable(condition)
        async with (
            asyncio.timeout(timeout_s),
            contextlib.aclosing(self.server.coordinator.roster.watch()) as events,
        ):
            async for _ in events:
                stages = list(self.server.coordinator.roster.fleet().stages)
                if len(stages) >= len(self.specs) and condition(stages):
                    return stages
        raise AssertionError("the watch ended")

    def stage(self, slot: str) -> Stage:
        """Return the coordinator's view of a stage."""
        stages = self.server.coordinator.roster.fleet().stages
        return next(stage for stage in stages if stage.registration.slot == slot)
