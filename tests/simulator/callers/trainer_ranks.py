"""The processes of a trainer in the attempts of an update: simulated sources below the production lead and members."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, cast

from rlctl.contract.durations import seconds
from rlctl.contract.errors import RlctlError
from rlctl.trainer.member import follow
from rlctl.trainer.member_streams import Lead
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.source_rank import Ship
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.trainer_pb2 import Attempt, Offer, Sent
from rlctl.v1.update_pb2 import GroupPlan
from rlctl.weights.tensor.source import WeightSource
from rlctl.weights.tensor.tensors import TensorMeta, parse_dtype, to_proto
from tests.simulator.context import Simulation
from tests.simulator.model.rank_weights import digests
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.shared_memory import TRAINERS_HOST
from tests.simulator.ports.virtual_time import Node

FAILS = 0.02
"""Share of attempts in which a source raises."""


class SourceError(Exception):
    """The error of a source, as a trainer's own code raises it."""


class SimSource:
    """The weights of a simulated source."""

    def __init__(self, contents: Tensors) -> None:
        self.contents = contents

    def metas(self) -> list[TensorMeta]:
        """Return the description of each tensor."""
        return [TensorMeta(name, parse_dtype("torch.float32"), (1,)) for name in self.contents]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield nothing: a simulated tensor is its content."""
        return iter(())


class SimStore:
    """A store that is always reachable: the fabric is the meeting place of groups."""

    def __init__(self, host: str) -> None:
        del host

    def address(self, host: str) -> tuple[str, int]:
        """Return an address."""
        return host, 1

    def close(self) -> None:
        """Do nothing."""


class SimPart:
    """A trainer process in the attempts: groups of the fabric, and segments of the simulated memory."""

    def __init__(self, sim: Simulation, node: Node, source: int | None) -> None:
        self.source = source
        self._sim = sim
        self._node = node
        self._groups: set[str] = set()
        self._segments = 0

    @property
    def host_id(self) -> str:
        """Return the host of all trainers."""
        return TRAINERS_HOST

    @property
    def room(self) -> int | None:
        """Return that shared memory is unlimited."""
        return None

    def describe(self, weights: WeightSource, version: str, source: int) -> Offer:
        """Return this process's offer."""
        tensors = [to_proto(meta) for meta in weights.metas()]
        return Offer(version=version, source=source, host_id=self.host_id, tensors=tensors)

    async def attempt(self, weights: WeightSource, attempt: Attempt, ship: Ship, state: UpdateState) -> Sent:
        """Send and digest this source's tensors. A failure leaves the groups."""
        assert isinstance(weights, SimSource)
        try:
            sent = await self._attempt(weights.contents, attempt, ship)
        except BaseException:
            self._leave()
            self._segments += 1  # ranks may still read the last one
            raise
        if attempt.last:
            state.sent.set()
        return sent

    async def _attempt(self, contents: Tensors, attempt: Attempt, ship: Ship) -> Sent:
        sent = Sent()
        if self.source is None or attempt.parts:
            return sent
        announced = {name for bucket in attempt.buckets for name in bucket.names}
        tensors = {name: content for name, content in contents.items() if name in announced}
        groups = [group for group in attempt.groups if group.source == self.source]
        if (groups or attempt.shared_devices) and self._node.random.random() < FAILS:
            raise SourceError(f"source {self.source} fails")
        deadline = self._node.loop.time() + seconds(attempt.timeout)
        works = [self._broadcast(group, tensors, attempt, deadline) for group in groups]
        if attempt.shared_devices:
            works.append(self._share(tensors, attempt, ship))
        await all_of(*works)
        if not attempt.without_digests:
            for name, digest in digests(tensors, attempt.digest_key).items():
                sent.digests.add(name=name, sha256=digest)
        return sent

    async def _broadcast(self, group: GroupPlan, tensors: Tensors, attempt: Attempt, deadline: float) -> None:
        """Send this source's buckets over a group."""
        fabric, loop, name = self._sim.fabric, self._node.loop, group.group_name
        if not group.formed or name not in self._groups:
            self._groups.add(name)
            await fabric.join(self._node, name, 0, group.world_size, deadline - loop.time())
        for bucket in attempt.buckets:
            if bucket.group_name == name:
                await fabric.send(
                    self._node, name, {each: tensors[each] for each in bucket.names}, deadline - loop.time()
                )

    async def _share(self, tensors: Tensors, attempt: Attempt, ship: Ship) -> None:
        """Send tensors one by one through a segment, which is reused once every rank has read it."""
        segment = f"{self._node.name}/{self._segments}"
        for name, content in tensors.items():
            await ship([self._sim.memory.write(self._node, segment, {name: content}, seconds(attempt.timeout))])

    def _leave(self) -> None:
        for name in sorted(self._groups):
            with contextlib.suppress(RlctlError):
                self._sim.fabric.leave(self._node, name)
        self._groups.clear()


@dataclass(frozen=True)
class Run:
    """One call of update at a trainer process.

    Attributes:
        lead: name of the process of rank 0.
        refusable: an error without the outcome UNKNOWN means that the version is not served. The error of a rolling
            update in place may come after the first batch.
    """

    sim: Simulation
    lead: str
    version: str
    timeout_s: float
    refusable: bool

    async def watch(self, who: str, state: UpdateState, call: Awaitable[tuple[Operation, Sent]]) -> Operation | None:
        """Return the operation of an update that is served, and report every end to the observer.

        Returns None if the time is up. Raises the error of the update.
        """
        observer = self.sim.observer
        try:
            async with asyncio.timeout(self.timeout_s):
                operation, _ = await call
        except (RlctlError, SourceError, TimeoutError) as error:
            observer.note(f"{who}: {self.version} failed: {error}")
            outcome = error.outcome if isinstance(error, RlctlError) else OUTCOME_REJECTED
            if isinstance(error, TimeoutError):
                outcome = state.outcome
            if self.refusable and outcome != OUTCOME_UNKNOWN:
                observer.reported_refused(who, self.lead, self.version)
            if isinstance(error, TimeoutError):
                return None
            raise
        observer.reported_served(who, self.lead, self.version)
        return operation


class Following:
    """A trainer process other than rank 0.

    Attributes:
        node: the process.
    """

    def __init__(self, sim: Simulation, node: Node, rank: int, part: SimPart, address: str) -> None:
        """``address``: where the lead listens."""
        self.node = node
        self.part = part
        self._sim = sim
        self._rank = rank
        self._calls: asyncio.Queue[tuple[Run, SimSource]] = asyncio.Queue()
        node.start(self._run(address))

    def update(self, run: Run, source: SimSource) -> None:
        """Call update in this process, as the training loop of every rank does."""
        self.node.later(self.node.random.expovariate(20.0), self._calls.put_nowait, (run, source))

    async def _run(self, address: str) -> None:
        try:
            link = await self._sim.network.connect(self.node, address)
        except RlctlError as error:
            self._sim.observer.note(f"{self.node.name} does not meet its lead: {error}")
            return
        lead = Lead(self._rank, cast(Any, link))
        while True:
            run, source = await self._calls.get()
            state = UpdateState()
            with contextlib.suppress(RlctlError, SourceError):
                await run.watch(self.node.name, state, self._follow(lead, run.version, source, state))

    async def _follow(self, lead: Lead, version: str, source: SimSource, state: UpdateState) -> tuple[Operation, Sent]:
        with lead.update(version) as number:
            return await follow(lead, self.part, source, version, number, state)


async def all_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Await all works; raise the first failure and cancel the other works."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
