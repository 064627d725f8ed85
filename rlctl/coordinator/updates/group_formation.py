"""Forms a group from calls for single engines, each with its own rank offset.

No call alone lists all members, so each call waits for the other calls. Then the group is one operation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.call_coalescing import Joined, Joining
from rlctl.coordinator.operations.operations import body_hash
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction import process_groups
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT
from rlctl.v1.verbs_pb2 import GroupMember, InitWeightsUpdateGroupRequest

Start = Callable[[InitWeightsUpdateGroupRequest], Awaitable[Run]]


@dataclass(eq=False)
class _Pending:
    """A group that is not complete.

    Attributes:
        ranks: number of ranks of each engine of the model at the first call.
        offsets: rank offset of each called engine.
        callers: number of waiting calls for each engine.
        now: names of the model's engines, once they differ from the engines of the first call.
    """

    body: InitWeightsUpdateGroupRequest
    ranks: dict[str, int]
    offsets: dict[str, int] = field(default_factory=dict)
    callers: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    now: str = ""


class Gathering:
    """Groups that wait for the calls of further engines."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._pending: dict[tuple[str, str], _Pending] = {}

    async def run(
        self,
        request: InitWeightsUpdateGroupRequest,
        engine: Slot,
        targets: Callable[[str], Sequence[Slot]],
        start: Start,
        timeout_s: float,
    ) -> Joined:
        """Return the operation in which the engines of a model join a group, once all were called.

        A group of a single engine and a source waits for no call.

        Raises:
            FIELD_INVALID: the world size or offset contradicts the roster.
            UNREACHABLE: an engine is absent.
            GROUP_EXISTS: calls of the same group contradict each other.
            GROUP_FAILED: an engine was not called in time, or the model's engines differ from the first call.
        """
        body = InitWeightsUpdateGroupRequest()
        body.CopyFrom(request)
        body.ClearField("rank_offset")
        body.header.unkeyed = True  # a repeat waits with the first call under any key
        [engine_member] = process_groups.members([engine])
        if request.world_size == 1 + engine_member.num_ranks:
            body.header.target.slots[:] = [engine.name]
            engine_member.rank_offset = request.rank_offset or 1
            return await self._joining.run(
                body, engine.model, [engine.name], lambda: _begin(body, [engine_member], start)
            )
        existing = self._joining.known(body)
        if existing is not None:
            return Joined(existing, True, body)
        slots = targets(engine.model)
        process_groups.refuse_world_size(request, slots)
        place = (engine.model, request.group_name)
        ranks = {member.slot: member.num_ranks for member in process_groups.members(slots)}
        if engine.name not in ranks:
            raise Reason.UNREACHABLE.error(f"there is no link to {engine.name}", outcome=OUTCOME_NOT_SENT)
        pending = self._pending.get(place)
        if pending is not None and pending.ranks != ranks:
            pending.now = ", ".join(sorted(ranks))
            pending.changed.set()
            pending = None
        if pending is None:
            pending = self._pending[place] = _Pending(body, ranks)
        self._refuse_contradiction(pending, request, body, engine)
        pending.offsets[engine.name] = request.rank_offset
        pending.callers[engine.name] += 1
        pending.changed.set()

        async def gather() -> Run:
            try:
                members = await _gathered(pending, timeout_s)
            finally:
                if self._pending.get(place) is pending:
                    del self._pending[place]
            return await _begin(body, members, start)

        try:
            joined = await self._joining.run(body, engine.model, [slot.name for slot in slots], gather)
        except BaseException:
            # An engine whose caller has disconnected joins nothing, unless a repeat of the call still waits.
            pending.callers[engine.name] -= 1
            if not pending.callers[engine.name]:
                del pending.offsets[engine.name]
            pending.changed.set()
            if not pending.offsets and self._pending.get(place) is pending:
                del self._pending[place]  # this call had joined an ended call, so no task may gather this group
            raise
        if self._pending.get(place) is pending:
            del self._pending[place]  # a repeat of a call whose group was complete: no task gathers this group
        return joined

    @staticmethod
    def _refuse_contradiction(
        pending: _Pending, request: InitWeightsUpdateGroupRequest, body: InitWeightsUpdateGroupRequest, engine: Slot
    ) -> None:
        offset = pending.offsets.get(engine.name, request.rank_offset)
        if offset != request.rank_offset:
            raise Reason.GROUP_EXISTS.error(
                f"{engine.name} joins {request.group_name} at rank {offset}, not {request.rank_offset}",
                field="rank_offset",
            )
        if body_hash(pending.body) == body_hash(body):
            return
        for name in ("master_address", "master_port", "backend", "world_size"):
            first, present = getattr(pending.body, name), getattr(body, name)
            if first != present:
                joined = ", ".join(sorted(pending.offsets))
                raise Reason.GROUP_EXISTS.error(
                    f"{name} is {present!r}; {joined} joins {request.group_name} with {first!r}",
                    field=name,
                )
        raise Reason.GROUP_EXISTS.error(
            f"another call describes group {request.group_name} differently", field="group_name"
        )


async def _gathered(pending: _Pending, timeout_s: float) -> list[GroupMember]:
    """Wait until every engine was called. Returns the members."""
    ranks = pending.ranks
    try:
        async with asyncio.timeout(timeout_s):
            while pending.offsets.keys() < ranks.keys():
                if not pending.offsets:
                    raise Reason.CANCELLED.error("every caller has disconnected")
                if pending.now:
                    raise Reason.GROUP_FAILED.error(
                        f"group {pending.body.group_name}: the model's engines are {pending.now} now, and were "
                        f"{', '.join(sorted(ranks))} at the first call",
                        field="world_size",
                        next_step="Call every engine of the model again, with the present world size.",
                    )
                pending.changed.clear()
                await pending.changed.wait()
    except TimeoutError:
        missing = ", ".join(sorted(ranks.keys() - pending.offsets.keys()))
        raise Reason.GROUP_FAILED.error(
            f"group {pending.body.group_name}: no call for {missing} within {timeout_s:g} s",
            field="world_size",
            next_step="Call every engine of the model, at the same time.",
        ) from None
    return [
        GroupMember(slot=name, rank_offset=offset, num_ranks=ranks[name]) for name, offset in pending.offsets.items()
    ]


async def _begin(body: InitWeightsUpdateGroupRequest, members: Sequence[GroupMember], start: Start) -> Run:
    whole = InitWeightsUpdateGroupRequest()
    whole.CopyFrom(body)
    whole.members.extend(members)
    return await start(whole)
