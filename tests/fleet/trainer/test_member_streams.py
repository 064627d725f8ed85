"""Which calls of a trainer's other ranks are parts in an update of its lead, whatever is still on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.testing.loopback_links import MemoryLink
from rlctl.trainer.member_streams import Lead, Members
from rlctl.trainer.pending_update import UpdateState
from rlctl.v1.trainer_pb2 import JoinRequest, JoinResponse, Offer


class SlowLink(MemoryLink[JoinRequest, JoinResponse]):
    """A member's end; what it says can be held on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[JoinRequest] | None = None

    def send(self, message: JoinRequest) -> None:
        if self.held is None:
            super().send(message)
        else:
            self.held.append(message)

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for message in held:
            self.send(message)


class Trainer:
    """A lead and its members, in one loop."""

    def __init__(self, size: int) -> None:
        self.members = Members(size)
        self.links: dict[int, SlowLink] = {}
        self.ranks: dict[int, Lead] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        for rank in range(1, size):
            theirs: Any = SlowLink()
            ours: Any = MemoryLink()
            theirs.peer, ours.peer = ours, theirs
            self.links[rank] = theirs
            self._tasks.append(asyncio.create_task(self.members.listen(ours)))
            self.ranks[rank] = Lead(rank, theirs)

    def come(self, rank: int, version: str) -> asyncio.Task[JoinResponse]:
        """A member's call of update, up to the first thing that it hears."""
        task = asyncio.create_task(self._come(rank, version))
        self._tasks.append(task)
        return task

    async def _come(self, rank: int, version: str) -> JoinResponse:
        lead = self.ranks[rank]
        with lead.update(version) as number:
            lead.say(number, 0, offer=Offer(version=version))
            heard = await lead.hear(number)
            if heard.HasField("failed"):
                raise from_detail(heard.failed)
            return heard

    async def lead(self, version: str) -> dict[int, str]:
        """The lead's call of update, up to the offers: what each member has come to."""
        with self.members.update(version, UpdateState()):
            return {rank: offer.version for rank, offer in (await self.members.offers()).items()}

    async def give_up(self, call: asyncio.Task[JoinResponse]) -> None:
        call.cancel()
        await asyncio.wait({call})

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for lead in self.ranks.values():
            lead._listening.cancel()


@pytest.fixture(params=[2, 3])
async def trainer(request: pytest.FixtureRequest) -> AsyncIterator[Trainer]:
    trainer = Trainer(request.param)
    yield trainer
    trainer.close()


async def reason(call: asyncio.Task[Any]) -> Reason:
    with pytest.raises(RlctlError) as caught:
        await call
    return caught.value.reason


@pytest.mark.timeout(10)
async def test_that_a_member_has_given_up_may_come_after_the_lead_has_begun_its_next_update(trainer: Trainer) -> None:
    skipped = trainer.come(1, "skipped")
    await eventually(lambda: bool(trainer.members._waiting[1]))
    trainer.links[1].held = []
    await trainer.give_up(skipped)
    leading = asyncio.create_task(trainer.lead("next"))
    await asyncio.sleep(0)
    for rank in trainer.ranks:
        trainer.come(rank, "next")
        await asyncio.sleep(0.01)
        trainer.links[rank].let_go()
    assert await leading == dict.fromkeys(trainer.ranks, "next")


@pytest.mark.timeout(10)
async def test_a_member_that_waits_in_another_update_ends_both_without_the_others(trainer: Trainer) -> None:
    other = trainer.come(1, "other")
    leading = asyncio.create_task(trainer.lead("this"))
    assert (await reason(other), await reason(leading)) == (Reason.FIELD_CONFLICT, Reason.FIELD_CONFLICT)
    if late := trainer.ranks.keys() - {1}:
        assert await reason(trainer.come(late.pop(), "this")) is Reason.FIELD_CONFLICT
    again = asyncio.create_task(trainer.lead("again"))
    for rank in trainer.ranks:
        trainer.come(rank, "again")
    assert await again == dict.fromkeys(trainer.ranks, "again")
