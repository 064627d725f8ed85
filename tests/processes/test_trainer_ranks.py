"""Ranks of one trainer that do not come to the same update: every rank is told, and the next one is theirs again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import AsyncPublisher

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DEADLINE_S = 4.0
LATE_S = 8.0


class Group:
    """Stands for a process group of two ranks, both of them in this process."""

    def __init__(self, rank: int, meeting: list[asyncio.Future[str]]) -> None:
        self.rank = rank
        self.meeting = meeting


class Ranks:
    """A trainer's two ranks; the second one only goes through its weights, as gathering would have it.

    Attributes:
        BAD: with this label come weights that are none.
    """

    BAD = "bad"

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.publishers: list[AsyncPublisher] = fleet.loop.call(self._make())

    async def _make(self) -> list[AsyncPublisher]:
        meeting = [asyncio.get_running_loop().create_future()]
        groups: list[Any] = [Group(rank, meeting) for rank in range(2)]
        fleets = [self._fleet.aio, None]
        return [
            AsyncPublisher(fleet, "actor", trainer_group=group) for fleet, group in zip(fleets, groups, strict=True)
        ]

    def update(self, *labels: str | None, **settings: Any) -> list[Any]:
        """What becomes of one update at each rank, called with its label; None: the rank does not call it."""
        return self._fleet.loop.call(self._update(labels, settings))

    async def _update(self, labels: tuple[str | None, ...], settings: Any) -> list[Any]:
        calls = [
            self._one(publisher, label, settings) for publisher, label in zip(self.publishers, labels, strict=True)
        ]
        return await asyncio.gather(*calls)

    async def _one(self, publisher: AsyncPublisher, label: str | None, settings: Any) -> Any:
        if label is None:
            return None
        started = time.monotonic()
        try:
            weights: Any = [7] if label == self.BAD else tiny.make(seed=7)
            result = await publisher.update(weights, version=label, deadline_s=DEADLINE_S, **settings)
            return result.version.label
        except RlctlError as error:
            assert time.monotonic() - started < DEADLINE_S + LATE_S
            return error.reason

    def together(self, label: str) -> None:
        assert self.update(label, label) == [label, label]

    def close(self) -> None:
        async def close() -> None:
            for publisher in self.publishers:
                await publisher.close()

        self._fleet.loop.call(close())


@pytest.fixture
def ranks(torch_fleet: LaunchedFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    def share(group: Any, text: str) -> str:
        (met,) = group.meeting
        if group.rank == 0:
            met.get_loop().call_soon_threadsafe(met.set_result, text)

        async def wait() -> str:
            return await met

        return asyncio.run_coroutine_threadsafe(wait(), met.get_loop()).result(20)

    monkeypatch.setattr("rlctl.trainer.publisher.share", share)
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 1.0)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with torch_fleet.connect() as fleet:
        ranks = Ranks(fleet)
        yield ranks
        ranks.close()


@pytest.mark.parametrize("skips", [0, 1], ids=["lead", "member"])
def test_a_rank_that_skips_an_update_costs_that_update_only(ranks: Ranks, skips: int) -> None:
    ranks.together("before")
    labels = [None if rank == skips else "skipped" for rank in range(2)]
    expected = [None if rank == skips else Reason.DEADLINE_EXCEEDED for rank in range(2)]
    for _ in range(2):
        assert ranks.update(*labels) == expected
    ranks.together("after")
    ranks.together("after that")


@pytest.mark.parametrize("labels", [("early", "late"), ("late", "early")], ids=["lead", "member"])
def test_ranks_that_meet_at_different_updates_say_which(ranks: Ranks, labels: tuple[str, str]) -> None:
    assert ranks.update(*labels) == [Reason.FIELD_CONFLICT] * 2
    ranks.together("same")


def test_what_fails_at_one_rank_before_it_comes_fails_at_all_at_once(ranks: Ranks) -> None:
    ranks.together("first")
    started = time.monotonic()
    assert ranks.update("bad", "bad") == [Reason.FIELD_INVALID] * 2
    # Only the lead's settings count, and only the lead refuses these.
    assert ranks.update("conflict", "conflict", base="first", partial=True) == [Reason.FIELD_CONFLICT] * 2
    assert ranks.update("nothing", "nothing", pause="unheard of") == [Reason.FIELD_INVALID] * 2
    assert time.monotonic() - started < DEADLINE_S
    ranks.together("then")


def test_a_member_that_comes_too_late_is_told_how_the_update_ended(ranks: Ranks) -> None:
    ranks.together("in time")
    assert ranks.update("missed", None) == [Reason.DEADLINE_EXCEEDED, None]
    started = time.monotonic()
    assert ranks.update(None, "missed") == [None, Reason.CANCELLED]
    assert time.monotonic() - started < DEADLINE_S / 2
    ranks.together("once more")
