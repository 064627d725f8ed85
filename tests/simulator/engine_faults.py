"""What befalls a rank now and then: it refuses, hangs, fails at the disk, forgets a tensor or damages it."""

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
    """How likely each of them is: not at all, until :mod:`tests.simulator.faults.faults` has drawn it.

    Attributes:
        cut_off: called with the rank and its update when it is to be cut off as soon as it has said what it holds: what
            it is told then does not reach it.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.cut_off: Callable[[Node, str], None] = lambda *_: None
        self.stop()

    def stop(self) -> None:
        """From here on none of it happens."""
        self.refusals = self.hangs = self.forgotten = self.damage = self.disk_errors = 0.0

    def at(self, node: Node, verb: str) -> Awaitable[None] | None:
        """What befalls a verb at one rank, or None."""
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
        """Whether a block cannot be read."""
        return node.random.random() < self.disk_errors

    def forgets(self, node: Node, slot: SimSlot, holding: Holding) -> bool:
        """Whether a rank silently forgets a tensor: of a full update, which counts, or where stages are compared."""
        if not self.forgotten or node.random.random() >= self.forgotten:
            return False
        return holding.full or (slot.digests and holding.update_id in self._observer.compared)

    def damaged(self, node: Node, slot: SimSlot, holding: Holding, content: str) -> str:
        """What a rank really writes. It is damaged only where somebody has said which digest is right: without that
        nothing could show it.
        """
        update_id = holding.update_id
        known = update_id in self._observer.digested or "/heal/" in update_id
        if not slot.digests:  # then what comes may be digested, in a trainer's update
            known = update_id in self._observer.digested and holding.received is not None
        if not self.damage or not known or node.random.random() >= self.damage:
            return content
        self._observer.note(f"FAULT {content} comes damaged to {node.name}")
        if node.random.random() < 0.5:
            self.cut_off(node, update_id)
        return f"{content}, damaged at {node.name}"
