"""Random faults of a rank: a refusal, a hang, a disk error, a forgotten or damaged tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from tests.simulator.model.profiles import SimSlot
from tests.simulator.model.rank_weights import Holding
from tests.simulator.oracle import Observer
from tests.simulator.ports.virtual_time import Node


class EngineFaults:
    """The rates of these faults: zero, until :mod:`tests.simulator.faults.faults` draws them.

    Attributes:
        cut_off: called with the rank and its update to cut the rank off after a report of weights: the rank's
            next commands are lost.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.cut_off: Callable[[Node, str], None] = lambda *_: None
        self.stop()

    def stop(self) -> None:
        self.refusals = self.hangs = self.forgotten = self.damage = self.disk_errors = 0.0

    def at(self, node: Node, verb: str) -> Awaitable[None] | None:
        """Return the fault of a verb at a rank, or None."""
        if not self.refusals and not self.hangs:
            return None
        draw = node.random.random()
        if draw < self.refusals:
            return self._refusing(node, verb)
        if draw < self.refusals + self.hangs:
            self._observer.note(f"{verb} hangs at {node.name}")
            return asyncio.sleep(node.random.uniform(5, 40))
        return None

    async def _refusing(self, node: Node, verb: str) -> None:
        outcome = node.random.choice((OUTCOME_REJECTED, OUTCOME_REJECTED, OUTCOME_DIRTY))
        if node.random.random() < 0.1:
            raise RuntimeError(f"{verb} has a defect")
        raise Reason.ENGINE_FAILED.error(f"{verb} failed", outcome=outcome)

    def at_disk(self, node: Node) -> bool:
        """Return True if a block cannot be read."""
        return node.random.random() < self.disk_errors

    def forgets(self, node: Node, slot: SimSlot, holding: Holding) -> bool:
        """Return True if a rank silently omits a tensor: in a full update, or where stages are compared."""
        if not self.forgotten or node.random.random() >= self.forgotten:
            return False
        return holding.full or (slot.digests and holding.update_id in self._observer.compared)

    def damaged(self, node: Node, slot: SimSlot, holding: Holding, content: str) -> str:
        """Return the content that a rank writes; damaged only if a known digest lets a check find the damage."""
        update_id = holding.update_id
        known = update_id in self._observer.digested or "/heal/" in update_id
        if not slot.digests:  # then the trainer's update digests the received tensors
            known = update_id in self._observer.digested and holding.received is not None
        if not self.damage or not known or node.random.random() >= self.damage:
            return content
        self._observer.note(f"FAULT {content} comes damaged to {node.name}")
        if node.random.random() < 0.5:
            self.cut_off(node, update_id)
        return f"{content}, damaged at {node.name}"
