"""A process with many stages without real ranks: ``python -m tools.benchmark.null_stages``.

Each stage is a stage server's own state machine behind its own gRPC server, as on a separate machine. In place of the
relay to the ranks, a null relay answers for all ranks at once. The remaining cost of an update is the control plane's.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from google.protobuf.message import Message

from rlctl.command_stream.executor import Executor
from rlctl.contract.verbs import Verb
from rlctl.engine import Call, EngineConfig
from rlctl.ports import SystemClock
from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, collect_seldom, end_with_parent, stop_event
from rlctl.stage.relay import Relay
from rlctl.stage.state_machine import Stage
from rlctl.testing.fake_engine import FakeEngine
from rlctl.transport.channel import open_channel
from rlctl.transport.handlers import generic_handler
from rlctl.transport.server import GrpcServer
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.unary_verbs import admin_methods
from rlctl.v1 import stage_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    VERIFICATION_LEVEL_REPLICA,
    WorkerCoordinates,
)
from rlctl.v1.coordinator_pb2 import RegisterStageRequest
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rlctl.v1.fleet_pb2 import Capabilities, RankStatus, StageLayout, StageRegistration
from rlctl.v1.results_pb2 import RankResult
from rlctl.version import CONTRACT_VERSION
from tools.benchmark.child import arguments


class NullRelay(Relay):
    """A relay to ranks that have applied everything already."""

    async def run(self, verb: Verb, request: Message, call: Call) -> list[RankResult]:  # noqa: ARG002
        """Return one result for each rank."""
        return [
            RankResult(coordinates=worker, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK) for worker in self._workers
        ]


async def _start_stage(slot: str, ranks: int, tls: Tls | None) -> tuple[GrpcServer, StageRegistration]:
    clock = SystemClock()
    engine = FakeEngine(EngineConfig("", tp_size=ranks), lambda _: None)
    workers = [WorkerCoordinates(rank=rank, tp=rank, node=slot, device="null") for rank in range(ranks)]
    registration = StageRegistration(
        slot=slot,
        model="actor",
        stage="main",
        boot_id=clock.new_id(),
        contract_version=CONTRACT_VERSION,
        capabilities=Capabilities(verbs=engine.verbs(), verification=[VERIFICATION_LEVEL_REPLICA], fenced=True),
        layout=StageLayout(tp_size=ranks, pp_size=1, dp_size=1, ep_size=1, workers=workers),
        engine="null",
        checkpoint="null",
    )
    stage = Stage(
        registration,
        engine,
        NullRelay(engine, [], workers, clock),
        [RankStatus(coordinates=worker, alive=True) for worker in workers],
        clock,
    )
    executor = Executor(stage, clock)
    methods = admin_methods("StageService", lambda: executor, clock, on_link_end=stage.detached)
    service = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
    server = GrpcServer([(service, generic_handler(service, methods))], token=None, tls=tls)
    registration.address = registration.rollout_address = await server.start("127.0.0.1:0")
    return server, registration


async def _register(coordinator: str, registration: StageRegistration, tls: Tls | None) -> None:
    async with open_channel(coordinator, tls) as channel:
        request = RegisterStageRequest(registration=registration)
        await CoordinatorServiceStub(channel).RegisterStage(request, timeout=120.0)


async def _serve(coordinator: str, first: int, stages: int, ranks: int, tls: str) -> None:
    """``tls``: directory of the CA that issues the stages' certificates; "": plain text."""
    stop = stop_event()
    servers, registering = [], []
    for slot in (f"actor-{number}" for number in range(first, first + stages)):
        own = Tls(Authority(Path(tls)).issue(f"stage/{slot}")) if tls else None
        server, registration = await _start_stage(slot, ranks, own)
        servers.append(server)
        registering.append(_register(coordinator, registration, own))
    await asyncio.gather(*registering)
    announce("null_stages", stages=stages, pid=os.getpid())
    await stop.wait()
    await asyncio.gather(*(server.stop(0.1) for server in servers))


if __name__ == "__main__":
    options = arguments(coordinator=str, first=int, stages=int, ranks=int, tls=str)
    end_with_parent()
    collect_seldom()  # as the real servers do
    event_loops.run(_serve(**vars(options)))
