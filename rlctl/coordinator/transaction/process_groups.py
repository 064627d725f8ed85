"""Process groups of an update: ranks and names from the roster, reused while the membership is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.contract.errors import Reason
from rlctl.contract.group_backends import BACKENDS
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1.common_pb2 import TRANSPORT_VLLM_NCCL, Transport
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, GroupPlan
from rlctl.v1.verbs_pb2 import GroupMember, InitWeightsUpdateGroupRequest

ALONE = {TRANSPORT_VLLM_NCCL}
"""Transports over which every stage has its own group. Ranks cannot leave a collective that ranks of a different stage
do not join."""

Circle = tuple[str, str]
"""Stages that share groups: by backend and, for transports in ``ALONE``, by slot; "" for all slots."""


def circle(slot: Slot, transport: Transport.ValueType) -> Circle:
    return BACKENDS[transport], slot.name if transport in ALONE else ""


@dataclass
class _Groups:
    membership: tuple[object, ...]
    generation: int
    formed: set[str] = field(default_factory=set)
    broken: bool = False


class GroupBook:
    """The groups of every model, by generation."""

    def __init__(self) -> None:
        self._models: dict[str, _Groups] = {}

    def plan(
        self, model: str, generation: int, trainer: str, targets: Mapping[Circle, Sequence[Slot]], *, sources: int
    ) -> list[GroupPlan]:
        """Return the groups in the order of their formation. ``targets``: by circle.

        Groups are reused while trainer process, sources, targets, incarnations and backends are the same and no group
        broke. Otherwise the groups get ``generation``, a number never used before. Members of an older group of the
        same name would otherwise meet remains of that group.

        Source k is rank 0 of a group for each circle. The targets' ranks follow in slot order.
        """
        placed = tuple(
            (shared, tuple((slot.name, slot.record.incarnation) for slot in slots)) for shared, slots in targets.items()
        )
        membership = (trainer, sources, placed)
        groups = self._models.get(model)
        if groups is None or groups.membership != membership or groups.broken:
            groups = self._models[model] = _Groups(membership, generation)
        plans = []
        for shared, slots in targets.items():
            listed, suffix = members(slots), "-".join(filter(None, ("", *shared)))
            for source in range(sources):
                name = f"{model}-{groups.generation}-s{source}" + (f"-{suffix}" if len(targets) > 1 else "")
                plans.append(
                    GroupPlan(
                        group_name=name,
                        generation=groups.generation,
                        source=source,
                        world_size=world_size(listed),
                        members=listed,
                        backend=shared[0],
                        formed=name in groups.formed,
                    )
                )
        return plans

    def formed(self, model: str, group_name: str) -> None:
        """Record that every rank has joined a group."""
        groups = self._models.get(model)
        if groups is not None:
            groups.formed.add(group_name)

    def unformed(self, plan: BeginWeightUpdateResponse) -> list[str]:
        """Return the groups of an update that not every rank has joined. Ranks may still wait in these groups."""
        formed = {name for groups in self._models.values() for name in groups.formed}
        return [group.group_name for group in plan.groups if group.group_name not in formed]

    def broke(self, model: str) -> None:
        """Record a failure in or during the formation of a group. The next update gets new groups."""
        groups = self._models.get(model)
        if groups is not None:
            groups.broken = True


def members(targets: Sequence[Slot]) -> list[GroupMember]:
    """Return the rank offset of each target in a group whose rank 0 is the source."""
    listed: list[GroupMember] = []
    offset = 1
    for slot in targets:
        count = len(slot.workers)
        listed.append(GroupMember(slot=slot.name, rank_offset=offset, num_ranks=count))
        offset += count
    return listed


def world_size(listed: Sequence[GroupMember]) -> int:
    """Return the number of ranks, with the source."""
    return 1 + sum(member.num_ranks for member in listed)


def refuse_world_size(request: InitWeightsUpdateGroupRequest, targets: Sequence[Slot]) -> None:
    """Raise FIELD_INVALID unless the world size is the number of the targets' ranks and a source."""
    expected = world_size(members(targets))
    if request.world_size != expected:
        raise Reason.FIELD_INVALID.error(
            f"world_size is {request.world_size}; one source and the ranks of {len(targets)} stages make {expected}",
            field="world_size",
        )


def place(request: InitWeightsUpdateGroupRequest, targets: Sequence[Slot]) -> None:
    """Set the members of a group, or check given members, in any order, against the roster.

    Raises FIELD_INVALID if the request contradicts the roster.
    """
    refuse_world_size(request, targets)
    if not request.members:
        request.members.extend(members(targets))
        return
    ranks = {member.slot: member.num_ranks for member in members(targets)}
    named_ranks = {member.slot: member.num_ranks for member in request.members}
    if named_ranks != ranks or len(request.members) != len(ranks):
        raise Reason.FIELD_INVALID.error(f"members are {named_ranks}; the roster has {ranks}", field="members")
    next_rank = 1
    for member in sorted(request.members, key=lambda member: member.rank_offset):
        if member.rank_offset != next_rank:
            raise Reason.FIELD_INVALID.error(
                f"{member.slot} begins at rank {member.rank_offset} of {request.group_name}; {next_rank} comes next",
                field="rank_offset",
            )
        next_rank += member.num_ranks
