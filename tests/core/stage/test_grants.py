"""Serving grants: whatever waits in a buffer or comes late, nothing serves longer than the coordinator counts on."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl import ports
from rlctl.contract.durations import duration
from rlctl.contract.errors import RlctlError
from rlctl.stage.state_machine import Stage
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.control_pb2 import Attach, Attached, ServingGrant
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.version import CONTRACT_VERSION

OLD, NEW = WeightVersion(label="old", sequence=1), WeightVersion(label="new", sequence=2)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.suspended_s = 0.0

    def now(self) -> float:
        return self.time

    def uptime(self) -> float:
        return self.time + self.suspended_s

    def new_key(self) -> bytes:
        raise AssertionError("nothing needs a key")

    def wall(self) -> Timestamp:
        return Timestamp()

    def new_id(self) -> str:
        raise AssertionError("nothing needs an id")


class Link:
    """The coordinator's end is not looked at."""

    def send(self, message: object) -> None:
        pass

    async def close(self) -> None:
        pass


class Versioned:
    """As much of an engine as grants reach."""

    def set_version(self, version: WeightVersion) -> None:
        self.version = version


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def stage(clock: Clock) -> Stage:
    registration = StageRegistration(slot="actor-0", model="actor")
    stage = Stage(registration, cast(Any, Versioned()), cast(Any, None), [], clock)
    await attach(stage, 7)
    return stage


def attaching(epoch: int) -> Attach:
    return Attach(fleet_epoch=epoch, slot="actor-0", incarnation=1, contract_version=CONTRACT_VERSION)


async def attach(stage: Stage, epoch: int) -> Attached:
    return await stage.attach(attaching(epoch), cast(Any, Link()))


def grant(
    number: int, *, echo: float = 1000.0, version: WeightVersion = OLD, epoch: int = 7, **more: Any
) -> ServingGrant:
    return ServingGrant(
        fleet_epoch=epoch, admitted=[version], lease=duration(10.0), number=number, echo=int(echo * 1e6), **more
    )


def refusal(stage: Stage, clock: Clock) -> str:
    """Why nothing is generated, or ""."""
    try:
        stage.serving.refuse(clock)
    except RlctlError as error:
        return error.message
    return ""


async def test_a_lease_runs_from_what_the_stage_said_last_not_from_when_the_grant_was_read(
    stage: Stage, clock: Clock
) -> None:
    stage.grant(grant(1, adopt=OLD))
    assert not refusal(stage, clock)
    clock.time = 1020.0  # stopped for 20 s, with this one in the buffer
    stage.grant(grant(2, echo=1000.5))
    assert "no serving lease" in refusal(stage, clock)
    stage.grant(grant(3, echo=1020.0))
    assert not refusal(stage, clock)
    clock.time = 1030.0
    assert "no serving lease" in refusal(stage, clock)


async def test_the_time_of_a_suspended_host_counts_for_the_lease(stage: Stage, clock: Clock) -> None:
    """The monotonic clock of Linux stands still while the host is suspended."""
    stage.grant(grant(1, adopt=OLD))
    assert stage.report().lease_held
    clock.suspended_s = 10.0
    assert "no serving lease" in refusal(stage, clock)
    with pytest.raises(RlctlError, match="no serving lease"):
        stage.serving.refuse_ongoing(clock)
    assert not stage.report().lease_held
    stage.grant(grant(2, echo=1010.0))
    assert not refusal(stage, clock)


def test_the_clock_of_leases_counts_the_time_of_a_suspended_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5000.0}.__getitem__)
    assert ports.SystemClock().uptime() == 5000.0
    monkeypatch.setattr(ports, "_UPTIME", None)  # a system without such a clock
    before = time.monotonic()
    assert before <= ports.SystemClock().uptime() <= time.monotonic()


async def test_without_an_echo_there_is_no_lease(stage: Stage, clock: Clock) -> None:
    late = grant(1, adopt=OLD)
    late.echo = 0
    stage.grant(late)
    assert "no serving lease" in refusal(stage, clock)


async def test_a_grant_that_a_later_one_has_overtaken_is_ignored(stage: Stage, clock: Clock) -> None:
    stage.grant(grant(1, adopt=OLD))
    stage.grant(grant(3, version=NEW))
    assert "STALE" in refusal(stage, clock)
    stage.grant(grant(2, version=OLD))
    assert "STALE" in refusal(stage, clock)


async def test_every_coordinator_counts_its_own_grants_and_the_earlier_ones_are_over(
    stage: Stage, clock: Clock
) -> None:
    stage.grant(grant(50, adopt=OLD))
    await attach(stage, 8)
    stage.grant(grant(1, epoch=8, version=NEW))
    assert "STALE" in refusal(stage, clock)
    stage.grant(grant(51, epoch=7, version=OLD))
    assert "STALE" in refusal(stage, clock)


async def test_a_stage_says_which_grant_it_was_asked_to_confirm(stage: Stage) -> None:
    stage.grant(grant(4))
    assert stage.report().grant_number == 0
    stage.grant(grant(5, confirm=True))
    stage.grant(grant(6))
    assert stage.report().grant_number == 5


async def test_whoever_waits_hears_of_a_coordinator_that_left_as_soon_as_it_had_come(clock: Clock) -> None:
    registration = StageRegistration(slot="actor-0", model="actor")
    stage = Stage(registration, cast(Any, Versioned()), cast(Any, None), [], clock)
    waiting = asyncio.create_task(stage.attached.wait())
    await asyncio.sleep(0)
    link = cast(Any, Link())
    await stage.attach(attaching(7), link)
    stage.detached(link)
    await waiting  # it has been there
    async with asyncio.timeout(1):
        await stage.unattached.wait()


async def test_the_end_of_a_link_that_was_replaced_is_not_the_coordinators(stage: Stage) -> None:
    former, present = cast(Any, Link()), cast(Any, Link())
    for link in (former, present):
        await stage.attach(attaching(7), link)
    stage.detached(former)
    assert stage.attached.is_set()
    assert not stage.unattached.is_set()


async def test_of_two_coordinators_that_attach_at_once_the_later_holds_the_stage(stage: Stage) -> None:
    closing, closed = asyncio.Event(), asyncio.Event()

    class Slow(Link):
        async def close(self) -> None:
            closing.set()
            await closed.wait()

    await stage.attach(attaching(8), cast(Any, Slow()))
    ninth = asyncio.create_task(attach(stage, 9))
    await closing.wait()
    await attach(stage, 10)
    closed.set()
    await ninth
    assert stage.facts.fleet_epoch == 10
    assert (await attach(stage, 9)).error.reason == "EPOCH_FENCED"
