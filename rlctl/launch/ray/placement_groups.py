"""Placement groups on a Ray cluster: a group for each engine and each placeholder.

An engine's group has one bundle per node. Each bundle is bound to the node chosen by
:func:`rlctl.launch.ray.node_choice.choose`, because Ray itself fills a node before the next. A group ends with the
engine, and the next start makes a new group. An engine of a lost node therefore starts on a different node.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.ray.bounded_calls import CALL_S, bounded
from rlctl.launch.ray.node_choice import Node, choose, room, shortage

log = logging.getLogger(__name__)

PLACE_S = 30.0
"""Seconds to wait for room that is taken: resources just given back become free a moment later."""
REMOVE_S = 3.0
"""Seconds to wait for the removal of a group, which nothing depends on."""
NODE_ID = "ray.io/node-id"
"""Label of every node in Ray."""


def need(device: str, ranks: int, cpus_per_rank: int = 0) -> dict[str, float]:
    """Return the resources of a number of ranks: GPUs and reserved cores; on a CPU, reserved cores or one core per
    rank.
    """
    cores = ranks * cpus_per_rank
    if device == "cuda":
        return {"GPU": float(ranks), **({"CPU": float(cores)} if cores else {})}
    return {"CPU": float(cores or ranks)}


@dataclass(eq=False)
class Placement:
    """Present or future place of an engine.

    Attributes:
        spec: the engine.
        parts: number of nodes.
        group: Ray's placement group; None until there is room.
        bundles: bundles of the group: one for each part, or one for each rank.
        nodes: ids of the bundles' nodes.
        share: part that a rank takes of its own bundle; 0: a bundle is for a whole part.
        gpus: GPUs of the bundles of ranks without a process, by bundle.
        users: number of running processes.
        ready: the group exists.
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
        """Number of ranks per part."""
        return self.spec.ranks // self.parts

    @property
    def need(self) -> dict[str, float]:
        """Resources per part."""
        if self.spec.attached:
            return {"CPU": 1.0}  # the GPUs of an attached server are not managed here
        return need(self.spec.device, self.ranks, self.spec.cpus_per_rank)

    @property
    def takes(self) -> dict[str, float]:
        """Resources that the actor of a process takes from the bundle."""
        if self.share:
            rank_need = need(self.spec.device, 1, self.spec.cpus_per_rank)
            return {name: amount * self.share for name, amount in rank_need.items()}
        share = self.spec.ranks_each / self.ranks
        return {name: amount * share for name, amount in self.need.items()}

    def at(self, rank: int) -> int:
        """Return the index of a process's bundle in ``bundles``."""
        return rank * self.spec.ranks_each * len(self.bundles) // self.spec.ranks

    def further_gpus(self, rank: int) -> tuple[str, ...]:
        """Return the GPUs of a process beyond the GPU of the first bundle."""
        first = self.at(rank)
        bundles = self.bundles[first + 1 : first + self.spec.ranks_each] if self.share else ()
        return tuple(gpu for bundle in bundles for gpu in self.gpus.get(bundle, ()))


class Places:
    """All groups made by a fleet: a group for each engine and each placeholder."""

    def __init__(self, per_node: int) -> None:
        """``per_node``: ranks of an engine on one node."""
        self._per_node = per_node
        self._placements: dict[str, Placement] = {}
        self._reserved: dict[Reservation, Any] = {}

    def use(self, spec: EngineSpec) -> Placement:
        """Return the placement of an engine for one more process."""
        placement = self._placements.get(spec.slot)
        if placement is None:
            parts = 1 if spec.attached else math.ceil(spec.ranks / self._per_node)
            placement = self._placements[spec.slot] = Placement(spec, parts)
        placement.users += 1
        return placement

    def leave(self, placement: Placement) -> None:
        """Count the end of a process; the last end gives the group back."""
        placement.users -= 1
        if placement.users == 0:
            del self._placements[placement.spec.slot]
            self._give_back(placement)

    def _give_back(self, placement: Placement) -> None:
        if placement.group is not None:
            _remove(placement.group, placement.spec.slot)

    def stands(self, placement: Placement) -> bool:
        """Take a step towards the group, and return whether it is usable. Raises PLACE_UNAVAILABLE without room."""
        if placement.ready:
            return True
        has_room = True
        if placement.group is None:
            nodes = self._nodes()
            has_room = sum(node.holds(placement.need) > 0 for node in nodes) >= placement.parts
            chosen_nodes = choose(nodes, placement.need, placement.parts, placement.spec.model)
            if chosen_nodes is not None:
                placement.group = _made(
                    placement.spec.slot,
                    [placement.need] * placement.parts,
                    strategy="PACK" if placement.parts == 1 else "STRICT_SPREAD",
                    bundle_label_selector=[{NODE_ID: node} for node in chosen_nodes],
                )
                placement.nodes = chosen_nodes
                placement.bundles = range(placement.parts)
        if placement.group is not None and _waited(placement.group, placement.spec.slot, 0):
            placement.ready = True
        elif not has_room or time.monotonic() - placement.since > PLACE_S:
            slot = placement.spec.slot
            raise Reason.PLACE_UNAVAILABLE.error(
                f"{slot}: {shortage(self._nodes(), placement.need, placement.parts)}", field=slot
            )
        return placement.ready

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Reserve exactly these places.

        Raises PLACE_UNAVAILABLE without room; the earlier places are then reserved again, if still free.
        """
        del engines  # each engine gets room at its start
        before = set(self._reserved)
        self._release(before - set(places))  # a place that grows needs the old room too
        try:
            for place in places:
                self._reserve(place)
        except RlctlError:
            self._release(self._reserved.keys() - before)
            for place in before:
                with contextlib.suppress(RlctlError):  # a different program was faster
                    self._reserve(place)
            raise

    def _release(self, places: Iterable[Reservation]) -> None:
        for place in list(places):
            _remove(self._reserved.pop(place), place.name)

    def _reserve(self, place: Reservation) -> None:
        """Reserve a place. Raises PLACE_UNAVAILABLE."""
        if place in self._reserved:
            return
        bundle = need(place.device, 1)
        if sum(node.holds(bundle) for node in self._nodes()) >= place.ranks:
            group = _made(place.name, [bundle] * place.ranks, strategy="PACK")
            try:
                if _waited(group, place.name, PLACE_S):
                    self._reserved[place] = group
                    return
            finally:
                if place not in self._reserved:
                    _remove(group, place.name)
        raise Reason.PLACE_UNAVAILABLE.error(
            f"{place.name}: {place.ranks} of these are to be kept free, and {room(self._nodes(), bundle)}",
            field=place.name,
        )

    def close(self) -> None:
        Places.make_room(self, (), ())
        for placement in self._placements.values():
            self._give_back(placement)
        self._placements.clear()

    def address(self, node: str) -> str:
        """Return a node's address, for people."""
        return next(
            (str(node_info["NodeManagerAddress"]) for node_info in nodes() if node_info["NodeID"] == node), node
        )

    def _nodes(self) -> list[Node]:
        # ray.available_resources() sums over nodes; only this function reports each node.
        from ray._private.state import available_resources_per_node

        free: Mapping[str, Mapping[str, float]] = bounded(
            "the free resources of the nodes", available_resources_per_node
        )
        reserved: dict[str, Counter[str]] = {}
        ranks: dict[str, Counter[str]] = {}
        for placement in self._placements.values():
            for node in placement.nodes:
                reserved.setdefault(node, Counter()).update(placement.need)
                ranks.setdefault(node, Counter())[placement.spec.model] += placement.ranks
        for place, group in self._reserved.items():
            about = bounded(f"the placement group of {place.name}", partial(placement_group_table, group))
            for node in about["bundles_to_node_id"].values():
                reserved.setdefault(node, Counter()).update(need(place.device, 1))
        return [
            Node(id_, node_info["NodeManagerAddress"], node_info["Resources"], free.get(id_, {}),
                 reserved.get(id_, {}), ranks.get(id_, {}))
            for node_info in nodes()
            if node_info["Alive"] and (id_ := node_info["NodeID"])
        ]  # fmt: skip


def nodes() -> Sequence[Mapping[str, Any]]:
    """Return Ray's data of the nodes. Raises UNREACHABLE."""
    return bounded("the nodes of the cluster", ray.nodes)


def _made(name: str, bundles: Sequence[dict[str, float]], **settings: Any) -> Any:
    """Make a placement group. Raises UNREACHABLE; a group that is made later is removed."""
    return bounded(
        f"the placement group of {name}",
        lambda: placement_group(bundles, name=f"rlctl {name}", **settings),
        undo=lambda group: remove_placement_group(group),
    )


def _waited(group: Any, name: str, timeout_s: float) -> bool:
    """Return whether a placement group has its room within the time. Raises UNREACHABLE."""
    what = f"the room of the placement group of {name}"
    return bounded(what, lambda: bool(group.wait(timeout_s)), limit_s=CALL_S + timeout_s)


def _remove(group: Any, name: str) -> None:
    """Remove a placement group. If the head does not answer, the group is removed once it does."""
    try:
        bounded(f"the end of the placement group of {name}", lambda: remove_placement_group(group), limit_s=REMOVE_S)
    except RlctlError as error:
        log.warning("%s", error)
