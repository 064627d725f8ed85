"""The data plane: process groups and their broadcasts, between a trainer's sources and the ranks of engines.

A collective needs every member: while a member is stopped, dead or gone, the other members wait until interrupted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from tests.simulator.ports.virtual_time import Node, World

Tensors = dict[str, str]
"""Contents by name."""


@dataclass
class _Wait:
    node: Node
    future: asyncio.Future[Tensors]

    def settle(self, delay: float, result: Tensors | RlctlError) -> None:
        self.node.later(delay, self._settle, result)

    def _settle(self, result: Tensors | RlctlError) -> None:
        if self.future.done():
            return
        if isinstance(result, RlctlError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass
class Group:
    """A process group."""

    name: str
    size: int
    members: dict[int, Node] = field(default_factory=dict)
    broken: bool = False
    stuck: bool = False
    sent: list[Tensors] = field(default_factory=list)
    waits: dict[tuple[int, int], _Wait] = field(default_factory=dict)
    """Waiting members, by broadcast index and rank; rank 0 waits for all receivers."""
    taking: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that have not received a broadcast yet, by its index."""
    joining: dict[int, _Wait] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    also: dict[int, list[int]] = field(default_factory=dict)
    """Further ranks of a member, by its first rank."""

    def taken(self, node: Node) -> int:
        """Return the number of broadcasts that a member has received."""
        return next(self.received.get(rank, 0) for rank, member in self.members.items() if member is node)


class Fabric:
    """Every group, by name."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.groups: dict[str, Group] = {}
        self.collectives = 0

    @staticmethod
    def _delay(node: Node) -> float:
        return node.random.expovariate(1 / 0.005)

    async def join(self, node: Node, name: str, rank: int, size: int, timeout_s: float, *, ranks: int = 1) -> None:
        """Join as one rank or several, and wait for all members. Raises GROUP_FAILED if members are missing."""
        group = self.groups.get(name)
        if group is None or (group.broken and not group.members):
            group = self.groups[name] = Group(name, size)
        if group.broken or group.size != size or group.members.get(rank, node) is not node:
            raise Reason.GROUP_FAILED.error(f"group {name} cannot be joined as rank {rank} of {size}")
        node.at_end.append(lambda: self._died(group, rank))
        wait = _Wait(node, node.loop.create_future())
        group.also[rank] = list(range(rank + 1, rank + ranks))
        for each in (rank, *group.also[rank]):
            group.members[each], group.joining[each] = node, wait
        if len(group.joining) == size:
            for met in group.joining.values():
                met.settle(self._delay(met.node), {})
        await self._await(wait, timeout_s, group)

    def _died(self, group: Group, rank: int) -> None:
        # A broken connection is noticed, unless no signal arrives.
        if self._world.chance(f"{group.name} {rank}").random() < 0.8:
            self.break_group(group)
        for each in (rank, *group.also[rank]):
            group.members.pop(each, None)

    def break_group(self, group: Group) -> None:
        """Break a group: all waiting members fail, each after a delay."""
        group.broken = True
        error = Reason.GROUP_FAILED.error(f"a member of {group.name} is gone", outcome=OUTCOME_DIRTY)
        for wait in (*group.waits.values(), *group.joining.values()):
            if not wait.future.done():
                wait.settle(self._delay(wait.node), error)
        group.waits.clear()

    def leave(self, node: Node, name: str) -> None:
        """Leave a group and interrupt its waits. Raises GROUP_NOT_FOUND."""
        group = self.groups.get(name)
        ranks = [rank for rank, member in group.members.items() if member is node] if group else []
        if group is None or not ranks:
            raise Reason.GROUP_NOT_FOUND.error(f"no group {name!r} stands", field="group_name")
        for rank in ranks:
            del group.members[rank]
        self.break_group(group)

    def joined(self, node: Node, name: str) -> Group:
        """Return the group. Raises GROUP_NOT_FOUND if the process is not a member."""
        group = self.groups.get(name)
        if group is None or node not in group.members.values() or len(group.joining) < group.size:
            raise Reason.GROUP_NOT_FOUND.error(f"no group {name!r} stands", field="group_name")
        return group

    async def send(self, node: Node, name: str, tensors: Tensors, timeout_s: float) -> None:
        """Broadcast a bucket as rank 0; return when every member has received it."""
        group = self.joined(node, name)
        if group.broken:
            raise Reason.GROUP_FAILED.error(f"{name} is broken", outcome=OUTCOME_DIRTY)
        index = len(group.sent)
        group.sent.append(dict(tensors))
        group.taking[index] = set(range(1, group.size))
        wait = group.waits[index, 0] = _Wait(node, node.loop.create_future())
        for rank in range(1, group.size):
            self._match(group, index, rank)
        await self._await(wait, timeout_s, group)

    async def receive(self, node: Node, name: str, index: int, timeout_s: float) -> Tensors:
        """Receive the ``index``-th broadcast of the group."""
        group = self.joined(node, name)
        if group.broken:
            raise Reason.GROUP_FAILED.error(f"{name} is broken", outcome=OUTCOME_DIRTY)
        rank = next(rank for rank, member in group.members.items() if member is node)
        wait = group.waits[index, rank] = _Wait(node, node.loop.create_future())
        self._match(group, index, rank)
        tensors = await self._await(wait, timeout_s, group)
        group.received[rank] = index + 1
        return tensors

    def _match(self, group: Group, index: int, rank: int) -> None:
        """Deliver a sent bucket to a waiting receiver; finish the sender's wait after the last receiver."""
        taking = group.waits.get((index, rank))
        if group.stuck or group.broken or index >= len(group.sent) or taking is None or not taking.node.alive:
            return
        self.collectives += 1
        taking.settle(self._delay(taking.node), dict(group.sent[index]))
        del group.waits[index, rank]
        group.taking[index].difference_update((rank, *group.also.get(rank, ())))
        if not group.taking[index]:
            told = group.waits.pop((index, 0))
            told.settle(self._delay(told.node), {})

    async def _await(self, wait: _Wait, timeout_s: float, group: Group) -> Tensors:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await wait.future
        except TimeoutError:
            raise Reason.GROUP_FAILED.error(
                f"{group.name} did not get on in {timeout_s:.1f} s", outcome=OUTCOME_DIRTY
            ) from None
