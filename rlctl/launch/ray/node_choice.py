"""The choice of a cluster's nodes for an engine. Pure.

An engine takes few nodes: one, or as many whole nodes as needed. Engines are spread over many nodes: the node with the
fewest ranks of the model, then with the fewest ranks of all. The loss of a node then affects little of a model.
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
        total: resources of the node, by name.
        free: free resources as reported by the cluster, possibly late.
        held: resources of the fleet on the node.
        ranks: the fleet's ranks on the node, by model.
    """

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    held: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def room(self, resource: str) -> float:
        """Return the available amount of a resource."""
        total = self.total.get(resource, 0.0)
        return min(self.free.get(resource, 0.0), total - self.held.get(resource, 0.0))

    def fits(self, need: Mapping[str, float]) -> bool:
        """Whether the need can be met now."""
        return all(self.room(resource) >= amount for resource, amount in need.items())

    def holds(self, need: Mapping[str, float]) -> int:
        """Return how often the need fits on the empty node."""
        return min(int(self.total.get(resource, 0.0) // amount) for resource, amount in need.items())


def choose(nodes: Sequence[Node], need: Mapping[str, float], parts: int, model: str) -> list[str] | None:
    """Return the ids of ``parts`` nodes with room for ``need`` each; None without enough nodes."""
    fitting = [node for node in nodes if node.fits(need)]
    if len(fitting) < parts:
        return None
    fitting.sort(key=lambda node: (node.ranks.get(model, 0), sum(node.ranks.values()), node.address, node.id))
    return [node.id for node in fitting[:parts]]


def shortage(nodes: Sequence[Node], need: Mapping[str, float], parts: int) -> str:
    """Return a text about the missing resources."""
    requirement = " and ".join(f"{amount:g} {resource}" for resource, amount in need.items())
    where = "no node has" if parts == 1 else f"fewer than {parts} nodes have"
    return f"{where} {requirement} free ({room(nodes, need)})"


def room(nodes: Sequence[Node], resources: Iterable[str]) -> str:
    """Return a text about the free resources of each node."""
    node_texts = (
        f"{node.address} has "
        + " and ".join(f"{max(node.room(name), 0):g} of {node.total.get(name, 0):g} {name}" for name in resources)
        for node in sorted(nodes, key=lambda node: node.address)
    )
    return "; ".join(node_texts) or "the cluster has no nodes"
