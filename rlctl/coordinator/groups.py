"""Which process groups an update needs: ranks and names assigned from the roster, kept while membership stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlctl.coordinator.roster import Slot
from rlctl.errors import Reason
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, GroupPlan
from rlctl.v1.verbs_pb2 import GroupMember, InitWeightsUpdateGroupRequest


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
        self, model: str, generation: int, trainer: str, targets: Sequence[Slot], *, sources: int, backend: str
    ) -> list[GroupPlan]:
        """Groups in the one order in which they are formed.

        While trainer process, targets, their incarnations, sources and backend are what they were and no group broke,
        the groups that stand are used again; otherwise they get ``generation``, which nobody has used before: members
        that are still in an older group of the same name would meet its traces.
        Source k is rank 0 of its group, the targets' ranks follow in slot order.
        """
        membership = (trainer, backend, sources, tuple((s.name, s.record.incarnation) for s in targets))
        groups = self._models.get(model)
        if groups is None or groups.membership != membership or groups.broken:
            groups = self._models[model] = _Groups(membership, generation)
        listed = members(targets)
        plans = []
        for source in range(sources):
            name = f"{model}-{groups.generation}-s{source}"
            plans.append(
                GroupPlan(
                    group_name=name,
                    generation=groups.generation,
                    source=source,
                    world_size=world_size(listed),
                    members=listed,
                    backend=backend,
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
        count = len(slot.record.registration.layout.workers)
        listed.append(GroupMember(slot=slot.name, rank_offset=offset, num_ranks=count))
        offset += count
    return listed


def world_size(listed: Sequence[GroupMember]) -> int:
    """Joining ranks, the source included."""
    return 1 + sum(member.num_ranks for member in listed)


def place(request: InitWeightsUpdateGroupRequest, targets: Sequence[Slot]) -> None:
    """Fill in who joins where. Raises FIELD_INVALID when the request says otherwise than the roster."""
    listed = members(targets)
    expected = world_size(listed)
    if request.world_size != expected:
        raise Reason.FIELD_INVALID.error(
            f"world_size is {request.world_size}; one source and the ranks of {len(targets)} stages make {expected}",
            field="world_size",
        )
    if request.members and [m.SerializeToString() for m in request.members] != [m.SerializeToString() for m in listed]:
        raise Reason.FIELD_INVALID.error("members differ from what the roster gives; leave them empty", field="members")
    del request.members[:]
    request.members.extend(listed)
