"""A stage's processes around their state machines, on the simulation's network instead of gRPC as in ``rlctl/stage``
and ``rlctl/worker``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from rlctl.command_stream.commander import Commander
from rlctl.command_stream.executor import Executor
from rlctl.contract.errors import Reason, RlctlError
from rlctl.stage.generation.service import Generation
from rlctl.stage.relay import LocalRank, Rank, Relay, RemoteRank
from rlctl.stage.serving_state import Serving
from rlctl.stage.state_machine import Stage
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.coordinator_pb2 import DeregisterStageRequest, RegisterStageRequest
from rlctl.v1.fleet_pb2 import RankStatus, StageRegistration, StageReport
from rlctl.v1.rollout_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateRequest, GenerateResponse
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.follower import Follower
from rlctl.worker.worker import Worker
from tests.simulator.context import Simulation
from tests.simulator.engine.engine import Machine, SimEngine
from tests.simulator.model.profiles import SimSlot
from tests.simulator.ports.network import End
from tests.simulator.ports.virtual_time import Node, SimClock
from tests.simulator.processes.coordinator import COORDINATOR

REGISTER_S = 10.0
REGISTER_AGAIN_S = 1.0
ATTACHED_WITHIN_S = 15.0

_VERBS = SimEngine.verbs()


class StageHost:
    """A stage in a slot: rank 0's process with the stage server, and a process for each follower.

    ``again`` is called if the stage could not start.
    """

    def __init__(
        self, sim: Simulation, slot: SimSlot, boot: int, again: Callable[[StageHost], None], place: str = ""
    ) -> None:
        """``place``: the host for partitions; "": the host named after the slot. With fixed addresses, the stage there
        listens at its predecessor's address.
        """
        self.sim = sim
        self.slot = slot.name
        self.model = slot.model
        self.name = f"{slot.name}.{boot}"
        self.at_home = not place
        self.stage: Stage | None = None
        processes = 1 if slot.speaker else slot.ranks
        self.nodes = [sim.world.spawn(f"{place or slot.name}/{boot}.{rank}") for rank in range(processes)]
        self.clock = SimClock(self.node)
        self.machine = Machine(sim, slot, self.nodes)
        self._again = again
        self._address = slot.name if sim.fixed_addresses and not place else f"{slot.name}-{boot}"
        self._engine: SimEngine | None = None
        self._registering: asyncio.Task[None] | None = None
        self._restarting = False
        self.executors: dict[int, Executor] = {}
        self._generation: Generation | None = None
        for rank in range(1, processes):
            self.nodes[rank].start(self._follow(rank))
        self.node.start(self._start())
        # Followers end with rank 0.
        self.node.at_end.append(self._end_followers)

    def _end_followers(self) -> None:
        for node in self.nodes[1:]:
            node.later(0.5, node.kill)

    @property
    def node(self) -> Node:
        return self.nodes[0]

    @property
    def alive(self) -> bool:
        return self.node.alive

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def answer_slowly(self, chance: random.Random) -> None:
        """Delay the messages of a rank for a while."""
        node = chance.choice(self.nodes)
        node.slow = chance.choice((0.05, 0.5))
        self.sim.observer.note(f"FAULT what {node.name} sends is slow")
        self.sim.world.timer.later(chance.uniform(1, 5), setattr, node, "slow", 0.0)

    # Followers.

    def address(self, rank: int) -> str:
        """Return the command address of a rank."""
        return f"{self._address}-{rank}:1"

    async def _follow(self, rank: int) -> None:
        node = self.nodes[rank]
        clock = SimClock(node)
        follower = Follower(
            lambda on_failure: SimEngine(self.machine, rank, on_failure),
            WorkerCoordinates(rank=rank, tp=rank, node=self.machine.slot.host, device="cpu"),
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
            self.sim.world.timer.later(1.0, self._again, self)
            self.kill()

    async def _run(self) -> None:
        sim, node, clock = self.sim, self.node, self.clock
        engine = SimEngine(self.machine, 0, lambda error: node.later(0.0, self._failed, engine, error))
        commanders = [await self._dial(rank) for rank in range(1, len(self.nodes))]
        attach = Attach(slot=self.slot, contract_version=CONTRACT_VERSION)
        joining = asyncio.gather(*(commander.attach(attach) for commander in commanders))
        info, _ = await asyncio.gather(engine.start({}), joining)
        workers = list(info.layout.workers)
        self._worker = Worker(engine, workers[0], clock, others=workers[len(self.nodes) :])
        ranks: list[Rank] = [LocalRank(self._worker, clock), *map(RemoteRank, workers[1:], commanders)]
        info.capabilities.verbs.extend(verb for verb in _VERBS if verb not in info.capabilities.unsupported)
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
        self._engine = engine
        self.stage = Stage(registration, engine, Relay(engine, ranks, workers, clock), statuses, clock)
        for rank, commander in enumerate(commanders, start=1):
            if commander.lost:
                self.stage.rank_lost(rank, Reason.LINK_LOST.error("its process is gone"))
        if self._generation is None:
            self._generation = Generation(self._present_engine, self._serving, clock)
        executor = Executor(self.stage, clock)
        sim.network.listen(node, self.address(0), lambda end: _obey(executor, end, self._link_ended))
        if self._registering is not None:
            self._registering.cancel()
        self._registering = node.start(self._stay_registered(self.stage))

    async def restart(self) -> None:
        """Restart the engine in the existing process, like an able stage server."""
        former = self.stage
        if former is None or self._restarting:
            return
        self._restarting = True
        self.machine = Machine(self.sim, self.machine.slot, self.nodes)
        await self._present_engine().stop()
        await self._start()
        await former.leave()
        self._restarting = False

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

    def _failed(self, engine: SimEngine, error: RlctlError) -> None:
        if self.stage is not None and engine is self._engine:
            self._worker.failure = error
            self.stage.rank_lost(0, error)

    def _present_engine(self) -> SimEngine:
        assert self._engine is not None
        return self._engine

    def _serving(self) -> Serving:
        assert self.stage is not None
        return self.stage.serving

    def _link_ended(self, link: End) -> None:
        if self.stage is not None:
            self.stage.detached(link)

    async def _stay_registered(self, stage: Stage) -> None:
        while True:
            try:
                request = RegisterStageRequest(registration=stage.registration)
                answer = await self.sim.network.call(self.node, COORDINATOR, "RegisterStage", request, REGISTER_S)
                stage.home_epoch = answer.header.fleet_epoch
                async with asyncio.timeout(ATTACHED_WITHIN_S):
                    await stage.attached.wait()
                await stage.unattached.wait()
            except (TimeoutError, RlctlError):
                pass
            await asyncio.sleep(REGISTER_AGAIN_S)

    async def leave(self) -> None:
        if self.stage is not None and self.stage.incarnation:
            request = DeregisterStageRequest(
                slot=self.slot, boot_id=self.stage.registration.boot_id, force=True, leaves=True
            )
            with contextlib.suppress(RlctlError):
                await self.sim.network.call(self.node, COORDINATOR, "DeregisterStage", request, 2.0)
        self.kill()

    async def generate(self, request: GenerateRequest, remaining_s: float) -> AsyncGenerator[GenerateResponse, None]:
        """Yield the responses to a client of the rollout port."""
        async with contextlib.aclosing(self._rollouts.stream(request, remaining_s)) as parts:
            async for part in parts:
                self.sim.observer.served(self.name, self.model, part)
                yield part

    async def generate_many(
        self, requests: AsyncIterator[GenerateManyRequest]
    ) -> AsyncGenerator[GenerateManyResponse, None]:
        """Yield the messages to a client that sends many requests over one stream."""
        async with contextlib.aclosing(self._rollouts.many(requests)) as messages:
            async for message in messages:
                for part in message.parts:
                    if part.HasField("response"):
                        self.sim.observer.served(self.name, self.model, part.response)
                yield message

    async def call(self, method: str, request: Any) -> Any:
        """Make a unary call of the rollout port."""
        return await getattr(self._rollouts, method)(request, 30.0)

    @property
    def _rollouts(self) -> Generation:
        if self._generation is None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is still loading")
        return self._generation


async def _obey(executor: Executor, end: End, ended: Any = lambda _: None) -> None:
    try:
        await executor.serve(end)
    finally:
        await end.close()
        ended(end)
