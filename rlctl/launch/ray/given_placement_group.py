"""A placement group made by a different program, such as a trainer, and shared with a fleet.

The n-th place of the plan is the n-th bundle, and a rank has one bundle. So the maker of the group can compute the
place of each engine and of each placeholder. rlctl never makes or removes such a group. If the group is gone, the start
of an engine fails with this cause until a group of the same name exists.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.ray.actor import BundleActor
from rlctl.launch.ray.bounded_calls import CALL_S, bounded
from rlctl.launch.ray.placement_groups import PLACE_S, Placement, Places, need, nodes

LOOK_S = 0.1
TAKEN_S = 10.0
"""Seconds to wait for a bundle that is taken: resources just given back become free a moment later."""
CREATED, REMOVED = "CREATED", "REMOVED"
"""States of a placement group in Ray; a group in any other state waits for nodes."""
_FIELD = "fleet.ray.placement_group"


@dataclass(frozen=True)
class _Group:
    """Ray's present data of the group."""

    id: str
    state: str
    bundles: Mapping[int, Mapping[str, float]]
    nodes: Mapping[int, str]
    """Ids of nodes, by bundle."""


class GivenGroup(Places):
    """The usable bundles of the group."""

    def __init__(self, per_node: int, named: str, bundles: Sequence[int] = (), share: float = 1.0) -> None:
        """``named``: name or id of the group.

        ``bundles``: usable bundles, in order; empty: all, ordered by node. ``share``: part of its bundle that a rank
        takes, so that other programs may have the rest.
        """
        super().__init__(per_node)
        self._named = named
        self._given = tuple(bundles)
        self._share = share
        self._by_node: dict[str, Sequence[int]] = {}
        """Bundles in the order of the nodes at the first look, by group id."""
        self._held: dict[int, Placement] = {}
        self._holders: dict[Placement, list[tuple[int, Any, Any]]] = {}
        """For bundles without a process: (bundle, actor, future of the actor's GPUs)."""

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Check that every engine fits into the bundles. The maker of the group keeps the room of placeholders.

        Raises FIELD_INVALID without such a group, or for bundles that are too few, too small, or on other nodes. Raises
        PLACE_UNAVAILABLE if the group was removed or waits for nodes.
        """
        deadline = time.monotonic() + PLACE_S
        while (group := self._group()).state != CREATED:
            if time.monotonic() > deadline:
                raise self._waits(group)
            time.sleep(LOOK_S)
        order = self._order(group)
        required = max([place for spec in engines for place in spec.gpus]
                     + [place for reservation in places for place in reservation.places], default=-1) + 1  # fmt: skip
        if required > len(order):
            raise Reason.FIELD_INVALID.error(
                f"{len(order)} bundles of placement group {self._named!r} may be used, and the plan has places for "
                f"{required}",
                field="fleet.ray.bundles" if self._given else _FIELD,
                next_step="`rlctl plan` shows the places; no engine crosses the end of a node of num_gpus_per_node.",
            )
        for spec in engines:
            if not spec.attached:
                self._fits(spec, group, order)

    def stands(self, placement: Placement) -> bool:
        """Whether the bundles of a placement can be used.

        Raises as :meth:`make_room`, and PLACE_UNAVAILABLE if a different program has the bundles.
        """
        if placement.ready or placement.spec.attached:
            return super().stands(placement)
        if placement.group is None:
            group = self._group()
            if group.state != CREATED:
                return self._wait(placement, self._waits(group))
            bundles = self._fits(placement.spec, group, self._order(group))
            if any(self._held.get(bundle, placement) is not placement for bundle in bundles):
                placement.since = time.monotonic()  # an engine of this fleet is ending
                return False
            if conflict := self._taken(placement, group, bundles):
                return self._wait(placement, conflict)
            self._hold(placement, group, bundles)
        holders = self._holders.get(placement, [])
        try:
            if any(not ray.wait([gpus], timeout=0)[0] for _, _, gpus in holders):
                return self._wait(placement, self._late(placement), PLACE_S)
            placement.gpus = {bundle: ray.get(gpus, timeout=CALL_S) for bundle, _, gpus in holders}
        except ray.exceptions.RayError:
            raise self._late(placement) from None
        placement.ready = True
        return True

    def _give_back(self, placement: Placement) -> None:
        if placement.spec.attached:
            super()._give_back(placement)
            return
        self._held = {bundle: holder for bundle, holder in self._held.items() if holder is not placement}
        for _, holder, _ in self._holders.pop(placement, ()):
            ray.kill(holder)

    def _hold(self, placement: Placement, group: _Group, bundles: Sequence[int]) -> None:
        placement.share = self._share
        placement.bundles = bundles
        placement.nodes = [group.nodes[bundle] for bundle in bundles]
        placement.group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.id)))
        self._held.update(dict.fromkeys(bundles, placement))
        resources = placement.takes
        for index, bundle in enumerate(bundles):
            if index % placement.spec.ranks_each == 0:
                continue  # the process is in this bundle
            holder: Any = (
                ray.remote(BundleActor)
                .options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, bundle),
                )
                .remote()
            )
            self._holders.setdefault(placement, []).append((bundle, holder, holder.gpus.remote()))

    def _group(self) -> _Group:
        """Return the group. Raises FIELD_INVALID for no group or two, PLACE_UNAVAILABLE for a removed group."""
        table: Mapping[str, Mapping[str, Any]] = bounded(f"placement group {self._named!r}", placement_group_table)
        matching = {id_: about for id_, about in table.items() if self._named in (id_, about["name"])}
        existing = {id_: about for id_, about in matching.items() if about["state"] != REMOVED}
        if len(existing) == 1:
            ((id_, about),) = existing.items()
            return _Group(id_, about["state"], about["bundles"], about["bundles_to_node_id"])
        if existing:
            raise Reason.FIELD_INVALID.error(
                f"{len(existing)} placement groups are called {self._named!r}: {', '.join(sorted(existing))}",
                field=_FIELD, next_step="Name the placement group by its id.",
            )  # fmt: skip
        if matching:
            raise Reason.PLACE_UNAVAILABLE.error(
                f"placement group {self._named!r} was removed, by its owner or with its job",
                field=_FIELD, next_step="Engines start again once a placement group of that name exists.",
            )  # fmt: skip
        group_names = sorted(about["name"] or id_ for id_, about in table.items() if about["state"] != REMOVED)
        raise Reason.FIELD_INVALID.error(
            f"there is no placement group {self._named!r}; there are: {', '.join(group_names) or 'none'}", field=_FIELD
        )

    def _order(self, group: _Group) -> Sequence[int]:
        """Return the bundles in the order of the plan's places. Raises FIELD_INVALID."""
        if not self._given:
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}
            by_node = sorted(group.bundles, key=lambda bundle: (_number(addresses[group.nodes[bundle]]), bundle))
            # A bundle keeps the place when it moves to a different node, since the other bundles are in use.
            return self._by_node.setdefault(group.id, by_node)
        if unknown := sorted(set(self._given) - group.bundles.keys()):
            raise Reason.FIELD_INVALID.error(
                f"placement group {self._named!r} has no bundle {', '.join(map(str, unknown))}; it has 0 to "
                f"{len(group.bundles) - 1}",
                field="fleet.ray.bundles",
            )
        if len(set(self._given)) < len(self._given):
            raise Reason.FIELD_INVALID.error("a bundle is there twice", field="fleet.ray.bundles")
        return self._given

    def _fits(self, spec: EngineSpec, group: _Group, order: Sequence[int]) -> Sequence[int]:
        """Return the bundles of an engine's ranks. Raises FIELD_INVALID for too few, too small, or spread bundles."""
        if len(spec.gpus) != spec.ranks or max(spec.gpus) >= len(order):
            raise Reason.FIELD_INVALID.error(
                f"{spec.slot} has {spec.ranks} ranks and places {list(spec.gpus)} of {len(order)}",
                field="fleet.ray.bundles",
            )
        bundles = [order[place] for place in spec.gpus]
        least = {name: amount * self._share for name, amount in need(spec.device, 1, spec.cpus_per_rank).items()}
        if "GPU" in least:
            least["GPU"] = 1.0  # a rank has one GPU, and in a bundle of several GPUs the GPU would be ambiguous
        for bundle in bundles:
            resources = group.bundles[bundle]
            if any(resources.get(name, 0.0) < amount for name, amount in least.items()) or (
                "GPU" in least and resources["GPU"] != 1
            ):
                raise Reason.FIELD_INVALID.error(
                    f"bundle {bundle} of placement group {self._named!r} has {_words(resources)}, and a rank of "
                    f"{spec.slot} needs one with {_words(least)}",
                    field=_FIELD,
                )
        for first in range(0, spec.ranks, self._per_node):
            part = bundles[first : first + self._per_node]
            if len({group.nodes[bundle] for bundle in part}) > 1:
                where = ", ".join(f"{bundle} on {self.address(group.nodes[bundle])}" for bundle in part)
                raise Reason.FIELD_INVALID.error(
                    f"the bundles of {spec.slot} are on several nodes: {where}", field="fleet.ray.bundles",
                    next_step="List the bundles of an engine on one node, or set num_gpus_per_node.",
                )  # fmt: skip
        return bundles

    def _taken(self, placement: Placement, group: _Group, bundles: Sequence[int]) -> RlctlError | None:
        """Return the error for bundles whose resources are taken by a different program, or None."""
        free: Mapping[str, float] = bounded("the free resources of the bundles", ray.available_resources)
        spec = placement.spec
        for bundle in bundles:
            for name, amount in need(spec.device, 1, spec.cpus_per_rank).items():
                # A bundle has a separate resource name.
                free_amount = free.get(f"{name}_group_{bundle}_{group.id}", 0.0)
                if free_amount < amount * self._share:
                    return Reason.PLACE_UNAVAILABLE.error(
                        f"{spec.slot}: bundle {bundle} of placement group {self._named!r} has {free_amount:g} of "
                        f"{group.bundles[bundle][name]:g} {name} free, and a rank takes {amount * self._share:g}",
                        field=spec.slot, next_step="bundle_share says how much of its bundle a rank takes.",
                    )  # fmt: skip
        return None

    def _wait(self, placement: Placement, error: RlctlError, most_s: float = TAKEN_S) -> bool:
        """Return False for ``most_s`` seconds, then raise the error."""
        if time.monotonic() - placement.since > most_s:
            raise error
        return False

    def _waits(self, group: _Group) -> RlctlError:
        return Reason.PLACE_UNAVAILABLE.error(
            f"placement group {self._named!r} is {group.state}: its cluster has no room for it", field=_FIELD
        )

    def _late(self, placement: Placement) -> RlctlError:
        return Reason.PLACE_UNAVAILABLE.error(
            f"{placement.spec.slot}: its bundles {list(placement.bundles)} of placement group {self._named!r} do not "
            "answer",
            field=placement.spec.slot,
        )


def _number(address: str) -> tuple[int, str]:
    """Order addresses by number, as slime does."""
    try:
        return int(ipaddress.ip_address(address)), address
    except ValueError:
        return 0, address


def _words(resources: Mapping[str, float]) -> str:
    """Return text such as "1 GPU and 2 CPU"."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
