"""The tensors that one rank receives in an update: from disk, over groups, from memory shared with the trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as verbs
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, Outcome
from tests.simulator.context import Simulation
from tests.simulator.model.profiles import SimSlot
from tests.simulator.model.rank_weights import Holding
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.virtual_time import Node

Reading = tuple[verbs.TensorSegment, float]
"""A mapped segment, and the local end of its lease."""


class Intake:
    """Receives tensors one by one, unchanged or changed by a fault."""

    def __init__(self, sim: Simulation, slot: SimSlot, node: Node, holding: Holding) -> None:
        self._sim = sim
        self._slot = slot
        self._node = node
        self._holding = holding
        self._interrupts: set[asyncio.Event] = set()

    def interrupt(self) -> None:
        """End all waiting receives."""
        for event in self._interrupts:
            event.set()

    def write(self, name: str, content: str) -> None:
        """Write a tensor, unchanged or damaged."""
        faults = self._sim.engine_faults
        self._holding.write(name, faults.damaged(self._node, self._slot, self._holding, content))

    async def from_disk(self, tensors: Tensors) -> None:
        """Read a checkpoint, tensor by tensor."""
        for name, content in tensors.items():
            self.write(name, content)
            await asyncio.sleep(self._node.random.expovariate(1 / 0.01))
            if self._sim.engine_faults.at_disk(self._node):
                raise Reason.CHECKPOINT_MISMATCH.error("a block cannot be read", outcome=self._outcome())

    # Over groups.

    def refuse_unformed(self, request: verbs.UpdateWeightsFromDistributedRequest) -> None:
        """Raise GROUP_NOT_FOUND if this rank is not in a group of the request."""
        for bucket in request.buckets:
            self._sim.fabric.joined(self._node, bucket.group_name or request.group_name)

    async def from_groups(self, request: verbs.UpdateWeightsFromDistributedRequest, call: Call) -> None:
        """Receive buckets, in their order."""
        for bucket in request.buckets:
            with self._truthful():
                await self._take(bucket, bucket.group_name or request.group_name, call)

    async def _take(self, bucket: verbs.TensorBucket, group: str, call: Call) -> None:
        self._holding.next_bucket(bucket, group)
        tensors = await self._interruptible(group, call)
        for name, content in zip(bucket.names, tensors.values(), strict=True):
            self._keep(name, content)

    async def _interruptible(self, group: str, call: Call) -> Tensors:
        left = call.deadline - self._node.loop.time() - 0.1
        interrupted = asyncio.Event()
        self._interrupts.add(interrupted)
        index = self._sim.fabric.joined(self._node, group).taken(self._node)
        receiving = asyncio.ensure_future(self._sim.fabric.receive(self._node, group, index, left))
        breaking = asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait({receiving, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return receiving.result()
            raise Reason.GROUP_FAILED.error("the receive was interrupted", outcome=OUTCOME_DIRTY)
        finally:
            self._interrupts.discard(interrupted)
            receiving.cancel()
            breaking.cancel()
            await asyncio.gather(receiving, breaking, return_exceptions=True)

    # From memory.

    def found(self, request: verbs.UpdateWeightsFromTensorRequest) -> list[Reading]:
        """Return the announced segments. Raises if a segment cannot be mapped here, or has been reused."""
        for segment in request.segments:
            self._sim.memory.read(segment, self._slot.host)
        now = self._node.loop.time()
        return [(segment, now + seconds(segment.lease)) for segment in request.segments]

    async def from_memory(self, readings: list[Reading]) -> int:
        """Copy tensors from segments under lease; return the number of tensors."""
        tensors = [(segment, until, each.name) for segment, until in readings for each in segment.tensors]
        for segment, until, name in tensors:
            with self._truthful():
                if self._node.loop.time() > until:
                    raise Reason.SEGMENT_EXPIRED.error(f"the lease on {segment.shared_memory} is over")
                self._keep(name, self._sim.memory.read(segment, self._slot.host, name))
                await asyncio.sleep(self._node.random.expovariate(1 / 0.005))
                self._sim.memory.read(segment, self._slot.host)  # still valid after the copy
        return len(tensors)

    # Common parts.

    def _keep(self, name: str, content: str) -> None:
        if not self._sim.engine_faults.forgets(self._node, self._slot, self._holding):
            self.write(name, content)

    def _outcome(self) -> Outcome.ValueType:
        return OUTCOME_DIRTY if self._holding.written else OUTCOME_REJECTED

    @contextlib.contextmanager
    def _truthful(self) -> Iterator[None]:
        """Set an error's outcome: DIRTY if a byte has reached the served weights."""
        try:
            yield
        except RlctlError as error:
            error.outcome = self._outcome()
            raise
