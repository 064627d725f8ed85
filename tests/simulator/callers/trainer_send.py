"""An attempt of a trainer's sources: groups are formed, and every target gets every tensor as planned."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.v1 import update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import TRANSPORT_SHARED_MEMORY
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from tests.simulator.callers.operators_and_clients import Caller
from tests.simulator.ports.process_groups import Tensors

Writes = list[verbs_pb2.UpdateWeightsFromDistributedRequest]


class Sending:
    """The work of an attempt's sources, and the concurrent calls to the coordinator."""

    def __init__(
        self,
        caller: Caller,
        plan: update_pb2.BeginWeightUpdateResponse,
        sent: Tensors,
        sources: int,
        deadline: float,
        chance: random.Random,
    ) -> None:
        self._caller = caller
        self._sim = caller.sim
        self._node = caller.node
        self._plan = plan
        self._sent = sent
        self._shares = [list(sent)[source::sources] for source in range(sources)]
        self._deadline = deadline
        self._chance = chance

    async def run(self) -> None:
        """Run all sources. Raises the first failure; the other works are cancelled."""
        groups = {group.source: group for group in self._plan.groups}
        works = [self._source(source, groups) for source in range(len(self._shares))]
        if groups:
            works.append(self._drive(self._writes(groups), in_flight=self._chance.random() < 0.3))
        await all_of(*works)

    def _left(self) -> float:
        return max(0.5, self._deadline - self._node.loop.time())

    async def _source(self, source: int, groups: dict[int, update_pb2.GroupPlan]) -> None:
        if source:
            request = update_pb2.JoinWeightUpdateRequest(update_id=self._plan.update_id, source=source)
            await self._caller.call("JoinWeightUpdate", request, self._left())
        ways = [self._broadcast(groups[source])] if groups else []
        if any(target.transport == TRANSPORT_SHARED_MEMORY for target in self._plan.targets):
            ways.append(self._share(source))
        await all_of(*ways)

    async def _broadcast(self, group: update_pb2.GroupPlan) -> None:
        """Send a source's part over its group."""
        if not group.formed:
            await self._sim.fabric.join(self._node, group.group_name, 0, group.world_size, self._left())
        for name in self._shares[group.source]:
            await self._sim.fabric.send(self._node, group.group_name, {name: self._sent[name]}, self._left())

    async def _share(self, source: int) -> None:
        """Send a source's part through a segment, reused once every target has the tensors."""
        segment = f"{self._node.name}/{self._plan.update_id}/{self._plan.attempt}/{source}"
        for name in self._shares[source]:
            announced = self._sim.memory.write(self._node, segment, {name: self._sent[name]}, self._left())
            take = verbs_pb2.UpdateWeightsFromTensorRequest(segments=[announced])
            take.header.fence.update_id = self._plan.update_id
            _refuse_failed(await self._caller.verb(take, self._left()))

    async def _drive(self, writes: Writes, *, in_flight: bool) -> None:
        """Form the groups, and let the ranks receive; ``in_flight``: the calls overlap."""
        for group in self._plan.groups:
            if not group.formed:
                _refuse_failed(await self._caller.verb(_join(self._plan.update_id, group), self._left()))
        if in_flight:
            for answer in await asyncio.gather(*(self._caller.verb(write, self._left()) for write in writes)):
                _refuse_failed(answer)
        else:
            for write in writes:
                _refuse_failed(await self._caller.verb(write, self._left()))

    def _writes(self, groups: dict[int, update_pb2.GroupPlan]) -> Writes:
        """Return all buckets in one request, or one request for each round of buckets."""
        writes: Writes = []
        apart = self._chance.random() < 0.4
        for number in range(max(len(share) for share in self._shares)):
            if apart or not writes:
                writes.append(verbs_pb2.UpdateWeightsFromDistributedRequest())
                writes[-1].header.fence.update_id = self._plan.update_id
            for source, group in sorted(groups.items()):
                share = self._shares[source]
                if number < len(share):
                    bucket = writes[-1].buckets.add(sequence=number, group_name=group.group_name)
                    bucket.names.append(share[number])
                    bucket.dtypes.append("torch.float32")
                    bucket.shapes.add().dims.append(1)
        return writes


async def all_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Await all works; raise the first failure and cancel the other works."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refuse_failed(operation: Operation) -> None:
    if operation.state != OPERATION_STATE_OK:
        raise Reason.GROUP_FAILED.error(operation.error.message)


def _join(update_id: str, group: update_pb2.GroupPlan) -> verbs_pb2.InitWeightsUpdateGroupRequest:
    join = verbs_pb2.InitWeightsUpdateGroupRequest(
        master_address="trainer",
        master_port=1,
        world_size=group.world_size,
        group_name=group.group_name,
        backend=group.backend,
    )
    join.header.fence.update_id = update_id
    return join
