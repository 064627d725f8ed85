"""Which process groups an update needs: ranks and names assigned from the roster, kept while membership stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.contract.errors import Reason
from rlctl.contract.vllm_groups import BACKEND
from rlctl.coordinator.fleet.roster import Slot
from rlctl.v1.common_pb2 import TRANSPORT_TORCH_GLOO, TRANSPORT_TORCH_NCCL, TRANSPORT_VLLM_NCCL, Transport
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, GroupPlan
from rlctl.v1.verbs_pb2 import GroupMember, InitWeightsUpdateGroupRequest

BACKENDS = {TRANSPORT_TORCH_GLOO: "gloo", TRANSPORT_TORCH_NCCL: "nccl", TRANSPORT_VLLM_NCCL: BACKEND}
"""What a process group of a transport is made with."""

ALONE = {TRANSPORT_VLLM_NCCL}
"""Transports over which every stage has a group of its own: nothing gets its ranks out of a collective that another
one's do not come to."""

Circle = tuple[str, str]
"""Who shares groups: those of a backend, and of these, where it is not "", one stage alone."""


def circle(slot: Slot, transport: Transport.ValueType) -> Circle:
    """The one that a stage is in."""
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
        """Groups in the one order in which they are formed; ``targets`` by who shares them.

        While trainer process, targets, their incarnations and backends and the sources are what they were and no group
        broke, the groups that stand are used again; otherwise they get ``generation``, which nobody has used before:
        members that are still in an older group of the same name would meet its traces.
        Source k is rank 0 of its groups, one for each circle; the targets' ranks follow in slot order.
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
            listed, apart = members(slots), "-".join(filter(None, ("", *shared)))
            for source in range(sources):
                name = f"{model}-{groups.generation}-s{source}" + (f"-{apart}" if len(targets) > 1 else "")
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
        """Every rank has joined."""
        groups = self._models.get(model)
        if groups is not None:
            groups.formed.add(group_name)

    def unformed(self, plan: BeginWeightUpdateResponse) -> list[str]:
        """Groups of an update that not every rank has joined: somebody may still wait in them."""
        formed = {name for groups in self._models.values() for name in groups.formed}
        return [group.group_name for group in plan.groups if group.group_name not in formed]

    def broke(self, model: str) -> None:
        """Something went wrong inside a group, or in forming one: the next update gets new ones."""
        groups = self._models.get(model)
        if groups is not None:
            groups.broken = True


def members(targets: Sequence[Slot]) -> list[GroupMember]:
    """Where each target's ranks stand in a group whose rank 0 is the source."""
    listed: list[GroupMember] = []
    offset = 1
    for slot in targets:
        count = len(slot.workers)
        listed.append(GroupMember(slot=slot.name, rank_offset=offset, num_ranks=count))
        offset += count
    return listed


def world_size(listed: Sequence[GroupMember]) -> int:
    """Joining ranks, the source included."""
    return 1 + sum(member.num_ranks for member in listed)


def refuse_world_size(request: InitWeightsUpdateGroupRequest, targets: Sequence[Slot]) -> None:
    """Raise FIELD_INVALID when a group has not as many members as there are ranks of the targets, and a source."""
    expected = world_size(members(targets))
    if request.world_size != expected:
        raise Reason.FIELD_INVALID.error(
            f"world_size is {request.world_size}; one source and the ranks of {len(targets)} stages make {expected}",
            field="world_size",
        )


def place(request: InitWeightsUpdateGroupRequest, targets: Sequence[Slot]) -> None:
    """Fill in who joins where; members that are given may come in any order, if they are the roster's.

    Raises FIELD_INVALID when the request says otherwise than the roster.
    """
    refuse_world_size(request, targets)
    if not request.members:
        request.members.extend(members(targets))
        return
    ranks = {member.slot: member.num_ranks for member in members(targets)}
    given = {member.slot: member.num_ranks for member in request.members}
    if given != ranks or len(request.members) != len(ranks):
        raise Reason.FIELD_INVALID.error(f"members are {given}; the roster has {ranks}", field="members")
    due = 1
    for member in sorted(request.members, key=lambda member: member.rank_offset):
        if member.rank_offset != due:
            raise Reason.FIELD_INVALID.error(
                f"{member.slot} begins at rank {member.rank_offset} of {request.group_name}; {due} comes next",
                field="rank_offset",
            )
        due += member.num_ranks
