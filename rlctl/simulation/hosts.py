"""The processes of a fleet around the state machines: what ``rlctl/*/server.py`` does with gRPC, done with the
simulation's network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from rlctl.control.commander import Commander
from rlctl.control.executor import Executor
from rlctl.coordinator.core import Coordinator
from rlctl.engine import EngineConfig
from rlctl.errors import Reason, RlctlError
from rlctl.simulation.engine import Machine, SimEngine
from rlctl.simulation.journal import SimJournal
from rlctl.simulation.network import End
from rlctl.simulation.world import Node, SimClock
from rlctl.stage.core import Serving, Stage
from rlctl.stage.generation import Generation
from rlctl.stage.relay import LocalRank, Rank, Relay, RemoteRank
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.coordinator_pb2 import DeregisterStageRequest, RegisterStageRequest
from rlctl.v1.fleet_pb2 import RankStatus, StageRegistration, StageReport
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.core import Worker
from rlctl.worker.follower import Follower

if TYPE_CHECKING:
    from rlctl.simulation.fleet import Simulation

COORDINATOR = "coordinator:1"
FOREIGN_TOKEN = 1
"""A fencing token that no update has."""
REGISTER_S = 10.0
REGISTER_AGAIN_S = 1.0
ATTACHED_WITHIN_S = 15.0

_VERBS = SimEngine.verbs()

_PLAIN = {
    "BeginWeightUpdate": "begin_weight_update",
    "JoinWeightUpdate": "join_weight_update",
    "RetryWeightUpdate": "retry_weight_update",
    "CommitBatch": "commit_batch",
    "CommitWeightUpdate": "commit_weight_update",
    "AbortWeightUpdate": "abort_weight_update",
    "RenewLease": "renew_lease",
    "ReserveRequestId": "reserve_request_id",
    "RegisterStage": "register_stage",
    "DeregisterStage": "deregister_stage",
    "GetOperation": "get_operation",
    "CancelOperation": "cancel_operation",
    "SetStageEnabled": "set_stage_enabled",
    "HealStage": "heal_stage",
    "ConfirmFleet": "confirm_fleet",
    "GetFleet": "get_fleet",
    "ListOperations": "list_operations",
}


_WATCHES = {"WatchFleet": "watch_fleet", "WatchOperation": "watch_operation"}

WATCH_S = 5.0


async def _watched(events: AsyncGenerator[Any, None]) -> list[Any]:
    """What a watch tells in some seconds."""
    told: list[Any] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WATCH_S), contextlib.aclosing(events):
            async for event in events:
                told.append(event)  # noqa: PERF401 - what came before the time was up counts
    return told


class CoordinatorHost:
    """A coordinator's process."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.node = sim.world.spawn(name)
        self.coordinator: Coordinator | None = None
        self.node.start(self._run())

    async def _run(self) -> None:
        sim, node = self.sim, self.node
        journal = SimJournal(sim.store, node)
        coordinator = Coordinator(
            journal, sim.network.dialer(node), SimClock(node), lease_s=sim.lease_s, retained=sim.retained
        )
        try:
            await coordinator.start()
        except RlctlError as error:
            sim.observer.note(f"{node.name} cannot start: {error}")
            sim.timer.later(1.0, self._again)
            node.kill()
            return
        self.coordinator = coordinator
        sim.network.answer(node, COORDINATOR, self._answer)

    async def end(self) -> None:
        """SIGTERM: it stops by itself."""
        if self.coordinator is not None:
            await self.coordinator.stop()
        self.node.kill()

    def _again(self) -> None:
        """What supervises it starts it again."""
        if self.sim.coordinator is self:
            self.sim.start_coordinator()

    async def _answer(self, method: str, request: Message, remaining_s: float) -> Any:
        assert self.coordinator is not None
        if method == "Verb":
            return await self.coordinator.verb(request, remaining_s)
        if method == "Adopt":
            return await self.coordinator.adopt(request.registration.address)  # type: ignore[attr-defined]
        if method in _WATCHES:
            return await _watched(getattr(self.coordinator, _WATCHES[method])(request))
        fenced = self._fenced(request)
        answer = await getattr(self.coordinator, _PLAIN[method])(request)
        if fenced:
            self.sim.observer.broken("I5", f"{method} was not refused: {request}")
        if isinstance(request, BeginWeightUpdateRequest) and not request.implicit:
            self.sim.observer.began(request.model, request.trainer.incarnation)
        return answer

    def _fenced(self, request: Message) -> bool:
        """Whether somebody decides an open update who is not its owner. What has become of one that has ended may be
        asked by anybody.
        """
        assert self.coordinator is not None
        return (
            isinstance(request, CommitWeightUpdateRequest)
            and request.fencing_token == FOREIGN_TOKEN
            and self.coordinator.updates.is_open(request.update_id)
        )


class StageHost:
    """What fills a slot: rank 0's process with the stage server, and a process for each follower."""

    def __init__(self, sim: Simulation, slot: str, model: str, tp_size: int, checkpoint: str, boot: int) -> None:
        self.sim = sim
        self.slot = slot
        self.model = model
        self.tp_size = tp_size
        self.name = f"{slot}.{boot}"
        self.stage: Stage | None = None
        kind = sim.kinds[slot]
        processes = 1 if kind == "speaker" else tp_size
        self.nodes = [sim.world.spawn(f"{slot}/{boot}.{rank}") for rank in range(processes)]
        self.machine = Machine(sim, self.nodes, checkpoint, kind, tp_size // processes)
        self.executors: dict[int, Executor] = {}
        self._left = asyncio.Event()
        self._generation: Generation | None = None
        for rank in range(1, processes):
            self.nodes[rank].start(self._follow(rank))
        self.node.start(self._start())
        # Without rank 0 its followers end.
        self.node.at_end.append(self._end_followers)

    def _end_followers(self) -> None:
        for node in self.nodes[1:]:
            node.later(0.5, node.kill)

    @property
    def node(self) -> Node:
        """Rank 0's process."""
        return self.nodes[0]

    @property
    def alive(self) -> bool:
        """Whether rank 0 runs."""
        return self.node.alive

    def now(self) -> float:
        """Rank 0's monotonic seconds."""
        return self.node.loop.time()

    def kill(self) -> None:
        """SIGKILL of all its processes."""
        for node in self.nodes:
            node.kill()

    # Followers.

    def address(self, rank: int) -> str:
        """Where a rank is commanded."""
        return f"{self.slot}-{self.name.rpartition('.')[2]}-{rank}:1"

    async def _follow(self, rank: int) -> None:
        node = self.nodes[rank]
        clock = SimClock(node)
        config = EngineConfig(self.machine.checkpoint, rank=rank, tp_size=self.tp_size)
        follower = Follower(
            lambda on_failure: SimEngine(self.machine, config, on_failure),
            WorkerCoordinates(rank=rank, tp=rank, node="host", device="cpu"),
            1000 + rank,
            clock,
        )
        executor = self.executors[rank] = Executor(follower, clock)
        self.sim.network.listen(node, self.address(rank), lambda end: _obey(executor, end))

    # Rank 0.

    async def _start(self) -> None:
        try:
            await self._run()
        except RlctlError as error:
            self.sim.observer.note(f"{self.name} cannot start: {error}")
            self.sim.timer.later(1.0, self._again)
            self.kill()

    def _again(self) -> None:
        """What supervises it starts it again."""
        if self.sim.stages.get(self.slot) is self:
            self.sim.start_stage(self.slot)

    async def _run(self) -> None:
        sim, node = self.sim, self.node
        clock = SimClock(node)
        config = EngineConfig(self.machine.checkpoint, tp_size=self.tp_size)
        engine = SimEngine(self.machine, config, lambda error: node.later(0.0, self._failed, error))
        commanders = [await self._dial(rank) for rank in range(1, len(self.nodes))]
        attach = Attach(slot=self.slot, contract_version=CONTRACT_VERSION)
        joining = asyncio.gather(*(commander.attach(attach) for commander in commanders))
        info, _ = await asyncio.gather(engine.start({}), joining)
        workers = list(info.layout.workers)
        self._worker = Worker(engine, workers[0], clock, others=workers[len(self.nodes) :])
        ranks: list[Rank] = [LocalRank(self._worker), *map(RemoteRank, workers[1:], commanders)]
        info.capabilities.verbs.extend(_VERBS)
        info.capabilities.fenced = True
        registration = StageRegistration(
            slot=self.slot,
            model=self.model,
            stage="main",
            address=self.address(0),
            rollout_address=self.address(0),
            boot_id=sim.world.new_id(),
            contract_version=CONTRACT_VERSION,
            capabilities=info.capabilities,
            layout=info.layout,
            engine="simulated",
            checkpoint=info.checkpoint,
            model_digest=info.model_digest,
        )
        statuses = [RankStatus(coordinates=worker, alive=True, pid=1) for worker in workers]
        self.stage = Stage(registration, engine, Relay(engine, ranks, workers, clock), statuses, clock)
        for rank, commander in enumerate(commanders, start=1):
            if commander.lost:
                self.stage.rank_lost(rank, Reason.LINK_LOST.error("its process is gone"))
        self._generation = Generation(lambda: engine, self._serving, clock)
        executor = Executor(self.stage, clock)
        sim.network.listen(node, self.address(0), lambda end: _obey(executor, end, self._link_ended))
        node.start(self._stay_registered(self.stage))

    async def _dial(self, rank: int) -> Commander:
        while True:
            with contextlib.suppress(RlctlError):
                link = await self.sim.network.dialer(self.node).dial(self.address(rank))
                break
            await asyncio.sleep(0.1)
        commander = Commander(link, SimClock(self.node), on_report=lambda report: self._follower_reported(rank, report))

        async def keep() -> None:
            await commander.run()
            if self.stage is not None:
                self.stage.rank_lost(rank, Reason.LINK_LOST.error("its process is gone"))

        self.node.start(keep())
        return commander

    def _follower_reported(self, rank: int, report: StageReport) -> None:
        status = report.ranks[0]
        if self.stage is not None and not status.alive:
            self.stage.rank_lost(rank, Reason.ENGINE_FAILED.error(status.reason))

    def _failed(self, error: RlctlError) -> None:
        if self.stage is not None:
            self._worker.failure = error
            self.stage.rank_lost(0, error)

    def _serving(self) -> Serving:
        assert self.stage is not None
        return self.stage.serving

    def _link_ended(self, link: End) -> None:
        if self.stage is not None and self.stage.detached(link):
            self._left.set()

    async def _stay_registered(self, stage: Stage) -> None:
        while True:
            try:
                request = RegisterStageRequest(registration=stage.registration)
                await self.sim.network.call(self.node, COORDINATOR, "RegisterStage", request, REGISTER_S)
                async with asyncio.timeout(ATTACHED_WITHIN_S):
                    await stage.attached.wait()
                self._left.clear()
                await self._left.wait()
            except (TimeoutError, RlctlError):
                pass
            await asyncio.sleep(REGISTER_AGAIN_S)

    async def leave(self) -> None:
        """Deregister and end."""
        if self.stage is not None and self.stage.incarnation:
            request = DeregisterStageRequest(slot=self.slot, boot_id=self.stage.registration.boot_id, force=True)
            with contextlib.suppress(RlctlError):
                await self.sim.network.call(self.node, COORDINATOR, "DeregisterStage", request, 2.0)
        self.kill()

    async def generate(self, request: GenerateRequest, remaining_s: float) -> AsyncGenerator[GenerateResponse, None]:
        """What a client of the rollout port gets."""
        if self._generation is None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is still loading")
        async with contextlib.aclosing(self._generation.stream(request, remaining_s)) as parts:
            async for part in parts:
                self.sim.observer.served(self, part)
                yield part

    async def call(self, method: str, request: Any) -> Any:
        """A unary call of the rollout port."""
        if self._generation is None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is still loading")
        return await getattr(self._generation, method)(request, 30.0)


async def _obey(executor: Executor, end: End, ended: Any = lambda _: None) -> None:
    try:
        await executor.serve(end)
    finally:
        await end.close()
        ended(end)
