"""Placement groups on a Ray cluster: one for each engine, one for each placeholder.

An engine's group has one bundle for each node that it is on, and each bundle is bound to the node that
:func:`rlctl.launch.ray.node_choice.choose` has named: Ray by itself fills a node before it takes the next. A group ends
with its engine and is made anew for the next start, so an engine whose node is lost comes up on another one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.ray.node_choice import Node, choose, room, shortage

PLACE_S = 30.0
"""How long room is waited for that others hold: what has just been given back is free a moment later."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives every node."""


def need(device: str, ranks: int, cpus_per_rank: int = 0) -> dict[str, float]:
    """What so many ranks take: GPUs, and the cores they are to have; on a CPU a core each, or those."""
    cores = ranks * cpus_per_rank
    if device == "cuda":
        return {"GPU": float(ranks), **({"CPU": float(cores)} if cores else {})}
    return {"CPU": float(cores or ranks)}


@dataclass(eq=False)
class Placement:
    """Where an engine is, or is to be.

    Attributes:
        spec: the engine.
        parts: on how many nodes.
        group: Ray's placement group; None until there is room.
        bundles: of the group: one for each part, or one for each rank.
        nodes: where they are, ids.
        share: how much of a bundle a rank takes that has one to itself; 0: a bundle has a whole part.
        gpus: of bundles of ranks without a process of their own, by bundle.
        users: processes that have not ended.
        ready: the group stands.
    """

    spec: EngineSpec
    parts: int
    group: Any = None
    bundles: Sequence[int] = ()
    nodes: Sequence[str] = ()
    share: float = 0.0
    gpus: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    users: int = 0
    ready: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def ranks(self) -> int:
        """Ranks of each part."""
        return self.spec.ranks // self.parts

    @property
    def need(self) -> dict[str, float]:
        """What each part takes."""
        if self.spec.attached:
            return {"CPU": 1.0}  # its GPUs are others' business
        return need(self.spec.device, self.ranks, self.spec.cpus_per_rank)

    @property
    def takes(self) -> dict[str, float]:
        """What the actor of one of its processes takes of its bundle."""
        if self.share:
            one = need(self.spec.device, 1, self.spec.cpus_per_rank)
            return {name: amount * self.share for name, amount in one.items()}
        share = self.spec.ranks_each / self.ranks
        return {name: amount * share for name, amount in self.need.items()}

    def at(self, rank: int) -> int:
        """Where the bundle of a process is among its bundles."""
        return rank * self.spec.ranks_each * len(self.bundles) // self.spec.ranks

    def further_gpus(self, rank: int) -> tuple[str, ...]:
        """GPUs of a process beside that of its own bundle."""
        first = self.at(rank)
        further = self.bundles[first + 1 : first + self.spec.ranks_each] if self.share else ()
        return tuple(gpu for bundle in further for gpu in self.gpus.get(bundle, ()))


class Places:
    """All groups of a fleet, made by it: one for each engine, one for each placeholder."""

    def __init__(self, per_node: int) -> None:
        """``per_node``: ranks of an engine that go on one node."""
        self._per_node = per_node
        self._placements: dict[str, Placement] = {}
        self._reserved: dict[Reservation, Any] = {}

    def use(self, spec: EngineSpec) -> Placement:
        """The placement of an engine, for one more of its processes."""
        found = self._placements.get(spec.slot)
        if found is None:
            parts = 1 if spec.attached else math.ceil(spec.ranks / self._per_node)
            found = self._placements[spec.slot] = Placement(spec, parts)
        found.users += 1
        return found

    def leave(self, placement: Placement) -> None:
        """One of its processes has ended; with the last one the group is given back."""
        placement.users -= 1
        if placement.users == 0:
            del self._placements[placement.spec.slot]
            self._give_back(placement)

    def _give_back(self, placement: Placement) -> None:
        if placement.group is not None:
            remove_placement_group(placement.group)

    def stands(self, placement: Placement) -> bool:
        """Whether it can be used; takes a step towards it. Raises PLACE_UNAVAILABLE when there is no room."""
        if placement.ready:
            return True
        possible = True
        if placement.group is None:
            nodes = self._nodes()
            possible = sum(node.holds(placement.need) > 0 for node in nodes) >= placement.parts
            chosen = choose(nodes, placement.need, placement.parts, placement.spec.model)
            if chosen is not None:
                placement.nodes = chosen
                placement.bundles = range(placement.parts)
                placement.group = placement_group(
                    [placement.need] * placement.parts,
                    strategy="PACK" if placement.parts == 1 else "STRICT_SPREAD",
                    name=f"rlctl {placement.spec.slot}",
                    bundle_label_selector=[{NODE_ID: node} for node in chosen],
                )
        if placement.group is not None and placement.group.wait(0):
            placement.ready = True
        elif not possible or time.monotonic() - placement.since > PLACE_S:
            slot = placement.spec.slot
            raise Reason.PLACE_UNAVAILABLE.error(
                f"{slot}: {shortage(self._nodes(), placement.need, placement.parts)}", field=slot
            )
        return placement.ready

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Hold these places and no others. Raises PLACE_UNAVAILABLE: there is no room; then those before are held."""
        del engines  # each finds its room when it is started
        before = set(self._reserved)
        self._release(before - set(places))  # a place that grows needs its own room, too
        try:
            for place in places:
                self._reserve(place)
        except RlctlError:
            self._release(self._reserved.keys() - before)
            for place in before:
                with contextlib.suppress(RlctlError):  # somebody has been quicker
                    self._reserve(place)
            raise

    def _release(self, places: Iterable[Reservation]) -> None:
        for place in list(places):
            remove_placement_group(self._reserved.pop(place))

    def _reserve(self, place: Reservation) -> None:
        """Hold a place that is not held. Raises PLACE_UNAVAILABLE."""
        if place in self._reserved:
            return
        one = need(place.device, 1)
        if sum(node.holds(one) for node in self._nodes()) >= place.ranks:
            group = placement_group([one] * place.ranks, strategy="PACK", name=f"rlctl {place.name}")
            if group.wait(PLACE_S):
                self._reserved[place] = group
                return
            remove_placement_group(group)
        raise Reason.PLACE_UNAVAILABLE.error(
            f"{place.name}: {place.ranks} of these are to be kept free, and {room(self._nodes(), one)}",
            field=place.name,
        )

    def close(self) -> None:
        """Give everything back."""
        Places.make_room(self, (), ())
        for placement in self._placements.values():
            self._give_back(placement)
        self._placements.clear()

    def address(self, node: str) -> str:
        """A node's address, for people."""
        return next((str(known["NodeManagerAddress"]) for known in ray.nodes() if known["NodeID"] == node), node)

    def _nodes(self) -> list[Node]:
        """Nodes that are alive."""
        # ray.available_resources() sums over nodes; this is the one way to ask for each.
        from ray._private.state import available_resources_per_node

        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        held: dict[str, Counter[str]] = {}
        ranks: dict[str, Counter[str]] = {}
        for placement in self._placements.values():
            for node in placement.nodes:
                held.setdefault(node, Counter()).update(placement.need)
                ranks.setdefault(node, Counter())[placement.spec.model] += placement.ranks
        for place, group in self._reserved.items():
            for node in placement_group_table(group)["bundles_to_node_id"].values():
                held.setdefault(node, Counter()).update(need(place.device, 1))
        return [
            Node(id_, known["NodeManagerAddress"], known["Resources"], free.get(id_, {}),
                 held.get(id_, {}), ranks.get(id_, {}))
            for known in ray.nodes()
            if known["Alive"] and (id_ := known["NodeID"])
        ]  # fmt: skip
