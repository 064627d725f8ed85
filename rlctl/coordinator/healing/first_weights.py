"""Compares the first weights of a stage with a version that has a keyed digest.

An engine digests its first weights by SHA-256, or not at all. On request the stage computes the digest by the key of
the version, so that weights with the contents of the version are adopted and not healed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rlctl.contract.digests import key_of
from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import adoptable, needs_keyed_digest
from rlctl.coordinator.operations.context import Context
from rlctl.v1.common_pb2 import OUTCOME_APPLIED
from rlctl.v1.verbs_pb2 import CheckWeightsRequest

log = logging.getLogger(__name__)

DIGEST_S = 300.0
"""Seconds for the digest. After them the stage is healed."""


class FirstWeights:
    """Computes keyed digests of first weights, with a task for each stage."""

    def __init__(self, context: Context, heal: Callable[[Slot], None]) -> None:
        """``heal``: called for a stage with other weights than those of the version."""
        self._roster = context.roster
        self._peers = context.peers
        self._fanout = context.fanout
        self._clock = context.clock
        self._heal = heal
        self._tasks: dict[Slot, asyncio.Task[None]] = {}

    def look(self, slot: Slot) -> None:
        """Start the digest if only this digest can show that a stage has the latest version.

        No digest begins during an update: the update reaches the stage, or publishes another digest.
        """
        updating = self._roster.models[slot.model].update_id
        if slot in self._tasks or updating or not slot.linked or not needs_keyed_digest(self._roster, slot):
            return
        task = self._tasks[slot] = asyncio.create_task(self._compare(slot))
        task.add_done_callback(lambda _: self._tasks.pop(slot, None))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compare(self, slot: Slot) -> None:
        key = key_of(self._roster.models[slot.model].record.model_digest)
        slot.keyed_digests = {key: await self._digest(slot, key)}
        if self._roster.slots.get(slot.name) is not slot:
            return
        if adoptable(self._roster, slot):
            self._peers.grant(slot, adopt=True)
        else:
            self._heal(slot)

    async def _digest(self, slot: Slot, key: bytes) -> str:
        """Return the model digest of a stage's weights, or "" if the stage does not compute it."""
        try:
            [result] = await self._fanout.run(
                CheckWeightsRequest(digest_key=key),
                [slot],
                operation_id="first-weights",
                step=f"{self._roster.epoch}-{key.hex()}",
                deadline=self._clock.now() + DIGEST_S,
            )
        except RlctlError as error:
            log.warning("%s: its first weights could not be digested: %s", slot.name, error)
            return ""
        digests = {rank.check.model_digest for rank in result.rank_results}
        if result.outcome != OUTCOME_APPLIED or len(digests) != 1:
            log.warning("%s: its first weights could not be digested: %s", slot.name, result.error.message)
            return ""
        return digests.pop()
