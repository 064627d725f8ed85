"""Requests to stages, without a proxy: waits for one that may take the request, and keeps book of how it fared."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import grpc.aio

from rlctl.client.connection import Connection
from rlctl.client.view import FleetView
from rlctl.errors import Reason, RlctlError
from rlctl.rollout.router import Picked, Router, Wanted, obstacles
from rlctl.transport.channel import bearer, open_channel
from rlctl.v1.coordinator_pb2 import GetFleetRequest
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

log = logging.getLogger(__name__)

TELL_S = 1.0
"""Without a routable stage, what is waited for is logged after so long."""

LEFT_S = 5.0
"""How long a call may go on over a channel that nobody needs any more: an abort that was sent last, say."""


class Lines:
    """What all callers of one fleet share: the view of it, and a channel to every stage that there is."""

    def __init__(self, connection: Connection) -> None:
        self.view = FleetView(connection)
        self.metadata = bearer(connection.token)
        self._connection = connection
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, address: str) -> Any:
        """The RolloutService at an address, whose channel is kept until :meth:`give_back` at least."""
        self._used[address] += 1
        if address not in self._channels:
            # Stages come back at other ports, or not at all: those that have gone make way for those that come.
            self._close_left()
            self._channels[address] = open_channel(address)
        return RolloutServiceStub(self._channels[address])

    def give_back(self, address: str) -> None:
        """One who took it needs it no more."""
        self._used[address] -= 1

    def _close_left(self) -> None:
        needed = {stage.registration.rollout_address for stage in self.view.stages} | set(+self._used)
        for address in self._channels.keys() - needed:
            del self._used[address]
            task = asyncio.create_task(self._channels.pop(address).close(LEFT_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def on_behalf_of(self, token: str | None) -> Lines:
        """The same view and channels with another caller's token."""
        other = copy.copy(self)
        other.metadata = bearer(token)
        return other

    async def check_model(self, model: str, timeout_s: float) -> None:
        """Raise MODEL_NOT_FOUND for a model that the fleet does not have."""
        if self.view.lacks(model):
            # The view may lag behind; the coordinator says whether that is so.
            await self._connection.call("GetFleet", GetFleetRequest(model=model), timeout_s)

    async def close(self) -> None:
        """Stop watching, close the channels."""
        await self.view.close()
        for channel in self._channels.values():
            await channel.close()
        await asyncio.gather(*self._closing)


class Attempt:
    """A request at one stage, from ``with`` to its end."""

    def __init__(self, picked: Picked, floor: int, lines: Lines, router: Router) -> None:
        """``floor``: the least version that was wanted when it was picked."""
        self.stage = picked.stage
        self.floor = floor
        self.stub = lines.take(picked.stage.registration.rollout_address)
        self._picked = picked
        self._lines = lines
        self._router = router

    def __enter__(self) -> Self:
        """It is under way since it was picked."""
        return self

    def __exit__(self, *_: object) -> None:
        """It has ended there, however it did."""
        self._lines.give_back(self.stage.registration.rollout_address)
        self._router.end(self._picked)

    def answered(self) -> None:
        """The stage took it."""
        self._router.answered(self._picked)

    def failed(self, failure: RlctlError) -> bool:
        """It met a failure; returns whether that was the stage's, so that another one may be asked."""
        return self._router.failed(self._picked, failure, asyncio.get_running_loop().time())


class Dispatch:
    """Finds stages for the requests of one router."""

    def __init__(self, lines: Lines, router: Router) -> None:
        self.lines = lines
        self.router = router
        self._told: str | None = None

    async def attempt(self, wanting: Callable[[], Wanted], deadline: float, timeout_s: float) -> Attempt:
        """A stage that may take the request, waited for until ``deadline`` on the loop's clock; ``timeout_s`` is named
        when none did. What is wanted is asked for anew at every look. Raises MODEL_NOT_FOUND, NO_ROUTABLE_STAGE, and as
        :meth:`rlctl.client.view.FleetView.check`.
        """
        picked, floor = await self._pick(wanting, deadline, timeout_s)
        return Attempt(picked, floor, self.lines, self.router)

    async def _pick(self, wanting: Callable[[], Wanted], deadline: float, timeout_s: float) -> tuple[Picked, int]:
        view, loop = self.lines.view, asyncio.get_running_loop()
        wanted = wanting()
        while (remaining := deadline - (now := loop.time())) > 0:
            wanted = wanting()
            view.check()
            await self.lines.check_model(wanted.model, remaining)
            picked = self.router.pick(view.stages, wanted, now)
            if picked is not None:
                self._told = None
                return picked, wanted.floor
            try:
                async with asyncio.timeout(min(remaining, TELL_S, self.router.again_s(now))):
                    await view.changed()
            except TimeoutError:
                if loop.time() - now >= TELL_S:
                    self._tell(obstacles(view.stages, wanted))
        whose = f"of {wanted.model} " if wanted.model else ""
        named = obstacles(view.stages, wanted)
        why = f": {named}" if named else ""
        raise Reason.NO_ROUTABLE_STAGE.error(f"no stage {whose}took the request within {timeout_s:g} s{why}")

    def _tell(self, named: str) -> None:
        """Log what is waited for, once however many requests wait for it."""
        if named != self._told:
            log.info("waiting for a routable stage: %s", named or "none is known")
        self._told = named
