"""Heals a stage from another stage, over a group of both. The sending stage continues to generate.

Stages whose ranks hold the same parts form a pair for each rank, and every rank sends its own parts. Otherwise the
sender's ranks gather full tensors at rank 0, and rank 0 broadcasts to all ranks of the receiver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.outcomes import acknowledged, blame
from rlctl.coordinator.fleet.model_state import ModelState, model_put
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.collective_fanout import Together, has_left
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.transaction.update import Update
from rlctl.v1.journal_pb2 import ModelRecord
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import (
    BUCKET_FORMAT_PARTS,
    BUCKET_FORMAT_TENSORS,
    DestroyWeightsUpdateGroupRequest,
    GetModelInfoRequest,
    GroupMember,
    InitWeightsUpdateGroupRequest,
    SendWeightsRequest,
    TensorBucket,
    UpdateWeightsFromDistributedRequest,
)

ANSWER_S = 30.0
SEND_S = 24 * 3600.0
"""No limit besides the update's deadline."""


def alike(one: Slot, other: Slot) -> bool:
    """Whether the ranks of two stages hold the same parts."""
    shards = one.record.registration.layout.shards_sha256
    return bool(shards) and shards == other.record.registration.layout.shards_sha256


def refuse_failed(results: Sequence[StageResult]) -> None:
    """Raise the error of the first target that did not confirm."""
    for result in results:
        if not acknowledged(result, update=True):
            raise blame(result)


class FromPeer:
    """Sends the weights of a stage to the target of an update."""

    def __init__(self, update: Update, peer: Slot, context: Context) -> None:
        self._update = update
        self._peer = peer
        (self._slot,) = update.targets
        self._roster = context.roster
        self._fanout = context.fanout
        self._journal = context.journal
        self._clock = context.clock
        self._adapter = "" if update.adapter is None else update.adapter.name
        self._paired = not self._adapter and alike(peer, self._slot)

    async def receive(self) -> list[StageResult]:
        """Transfer the weights. Returns the target's results. Raises an earlier failure, or a failure of the sender."""
        group = await self._new_group(self._update.model)
        pair = [self._peer, self._slot]
        try:
            fanout = Together(self._fanout, self._clock, pair, self._update.update_id, [group])
            await fanout.join(self._joining(group), self._update.deadline - self._clock.now())
            fanout.refuse_failed()
            buckets = await self._buckets()
            await self._update.ready()
            send = SendWeightsRequest(group_name=group, buckets=buckets, adapter=self._adapter)
            receive = UpdateWeightsFromDistributedRequest(group_name=group, buckets=buckets)
            sending = asyncio.create_task(self.ask(send, [self._peer], "send", SEND_S))
            receiving = asyncio.create_task(self._update.step(receive, self._update.targets))
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    # The receiver would wait for a failed sender until the deadline.
                    refuse_failed(sending.result())
                return await receiving
            finally:
                sending.cancel()
                receiving.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)
        finally:
            await asyncio.shield(self._leave(group, pair))

    async def _leave(self, group: str, slots: Sequence[Slot]) -> None:
        """Destroy the group. A group that a rank may still be in stays on record for the next update to destroy."""
        results = await self.ask(DestroyWeightsUpdateGroupRequest(group_name=group), slots, "leave", ANSWER_S)
        groups = self._update.model.record.groups
        if group in groups and all(has_left(result) for result in results):
            groups.remove(group)

    def _joining(self, group: str) -> InitWeightsUpdateGroupRequest:
        layout = self._peer.record.registration.layout
        ranks = len(self._slot.workers)
        return InitWeightsUpdateGroupRequest(
            master_address=layout.store_host,
            master_port=layout.store_port,
            world_size=2 if self._paired else 1 + ranks,
            group_name=group,
            backend="gloo",
            members=[
                GroupMember(slot=self._peer.name, rank_offset=0, num_ranks=ranks if self._paired else 1),
                GroupMember(slot=self._slot.name, rank_offset=1, num_ranks=ranks),
            ],
            group_timeout=duration(self._update.deadline - self._clock.now()),
            paired=self._paired,
        )

    async def _new_group(self, model: ModelState) -> str:
        async with self._roster.publishing:
            record = ModelRecord()
            record.CopyFrom(model.record)
            record.group_generation += 1
            name = f"{record.name}-{record.group_generation}-heal"
            record.groups.append(name)
            await self._journal.write([model_put(record)])
            model.record = record
        return name

    async def _buckets(self) -> list[TensorBucket]:
        """Return a bucket with every tensor of the model or the adapter, with a broadcast for each tensor."""
        reference = GetModelInfoRequest(reference=True, adapter=self._adapter)
        results = await self.ask(reference, [self._peer], "reference", ANSWER_S)
        refuse_failed(results)
        listed = results[0].rank_results[0].model_info.reference
        return [
            TensorBucket(
                sequence=0,
                names=[tensor.name for tensor in listed],
                dtypes=[tensor.dtype for tensor in listed],
                shapes=[tensor.shape for tensor in listed],
                format=BUCKET_FORMAT_PARTS if self._paired else BUCKET_FORMAT_TENSORS,
            )
        ]

    async def ask(self, request: Message, slots: Sequence[Slot], step: str, limit_s: float) -> list[StageResult]:
        """Send a verb to stages that need not be targets of the update."""
        return await self._fanout.run(
            request,
            slots,
            operation_id=self._update.update_id,
            step=step,
            deadline=min(self._update.deadline, self._clock.now() + limit_s),
        )
