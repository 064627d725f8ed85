"""On which nodes of a cluster an engine goes. Pure.

Inside an engine nodes are few: one, or as many whole ones as it needs. Between engines they are many: the node that has
the fewest ranks of its model, then the fewest of all, so that the loss of one takes as little of a model as it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        id: unique.
        address: for people.
        total: what it has, by resource.
        free: what nobody holds, as its cluster says; that may lag behind.
        held: what the fleet holds there.
        ranks: the fleet's ranks there, by model.
    """

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    held: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def room(self, resource: str) -> float:
        """How much of a resource can be had there."""
        total = self.total.get(resource, 0.0)
        return min(self.free.get(resource, 0.0), total - self.held.get(resource, 0.0))

    def fits(self, need: Mapping[str, float]) -> bool:
        """Whether it can be had now."""
        return all(self.room(resource) >= amount for resource, amount in need.items())

    def holds(self, need: Mapping[str, float]) -> int:
        """How often it can be had once nobody else is there."""
        return min(int(self.total.get(resource, 0.0) // amount) for resource, amount in need.items())


def choose(nodes: Sequence[Node], need: Mapping[str, float], parts: int, model: str) -> list[str] | None:
    """Ids of as many nodes as there are parts, with room for ``need`` each; None: there are not so many."""
    fitting = [node for node in nodes if node.fits(need)]
    if len(fitting) < parts:
        return None
    fitting.sort(key=lambda node: (node.ranks.get(model, 0), sum(node.ranks.values()), node.address, node.id))
    return [node.id for node in fitting[:parts]]


def shortage(nodes: Sequence[Node], need: Mapping[str, float], parts: int) -> str:
    """What there is too little of, in words."""
    wanted = " and ".join(f"{amount:g} {resource}" for resource, amount in need.items())
    where = "no node has" if parts == 1 else f"fewer than {parts} nodes have"
    return f"{where} {wanted} free ({room(nodes, need)})"


def room(nodes: Sequence[Node], resources: Iterable[str]) -> str:
    """What each node has free of what, in words."""
    there = (
        f"{node.address} has "
        + " and ".join(f"{max(node.room(name), 0):g} of {node.total.get(name, 0):g} {name}" for name in resources)
        for node in sorted(nodes, key=lambda node: node.address)
    )
    return "; ".join(there) or "the cluster has no nodes"
