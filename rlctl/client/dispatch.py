"""Requests to stages, without a proxy: waits for one that may take the request, and keeps book of how it fared."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc.aio

from rlctl.client import pairing
from rlctl.client.connection import Connection
from rlctl.client.view import FleetView
from rlctl.errors import Reason, RlctlError
from rlctl.merging import merge
from rlctl.rollout.router import Picked, Router, Wanted, obstacles
from rlctl.transport.channel import bearer, open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1.coordinator_pb2 import GetFleetRequest
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]

TELL_S = 1.0
"""Without a routable stage, what is waited for is logged after so long."""


class Lines:
    """What all callers of one fleet share: the view of it, and a channel to every stage."""

    def __init__(self, connection: Connection) -> None:
        self.view = FleetView(connection)
        self.metadata = bearer(connection.token)
        self._connection = connection
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, address: str) -> Any:
        """The RolloutService at an address."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return RolloutServiceStub(self._channels[address])

    async def stream(
        self, stage: Stage, request: GenerateRequest, deadline: float, metadata: Metadata
    ) -> AsyncGenerator[GenerateResponse, None]:
        """What one stage generates, until ``deadline`` on the loop's clock; closing it ends it at the engine. Raises
        RlctlError: also when the coordinator says that the stage is gone, which its connection may not tell for long.
        """
        slot = stage.registration.slot
        left = max(deadline - asyncio.get_running_loop().time(), 0.0)
        call = self.stub(stage.registration.rollout_address).GenerateStream(request, timeout=left, metadata=metadata)
        gone = Reason.UNREACHABLE.error(f"{slot} is gone, says the coordinator")
        lost: list[RlctlError] = []

        def lose() -> None:
            lost.append(gone)
            call.cancel()

        try:
            with self.view.on_loss(stage, lose):
                async for response in call:
                    yield response
        except grpc.aio.AioRpcError as error:
            raise (lost[0] if lost else from_grpc(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not lost or (task is not None and task.cancelling()):
                raise
            raise gone from None
        finally:
            call.cancel()

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


class Attempt:
    """A request at one stage, or at a pair."""

    def __init__(self, picked: Picked, floor: int, lines: Lines, router: Router) -> None:
        """``floor``: the least version that was wanted when it was picked."""
        self.stage = picked.stage
        self.floor = floor
        self._lines = lines
        self._picked = picked
        self._router = router
        self._met_at: Stage | None = None

    @property
    def stub(self) -> Any:
        """RolloutService of the stage that generates."""
        return self._lines.stub(self.stage.registration.rollout_address)

    async def whole(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> GenerateResponse:
        """All that is generated. Raises RlctlError."""
        answer = GenerateResponse()
        if self._picked.prefill is None:
            try:
                left = max(deadline - asyncio.get_running_loop().time(), 0.0)
                answer = await self.stub.Generate(request, timeout=left, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise from_grpc(error) from None
        else:
            async with aclosing(self.stream(request, deadline, metadata)) as parts:
                async for part in parts:
                    merge(answer, part)
        self.answered()
        return answer

    def stream(
        self, request: GenerateRequest, deadline: float, metadata: Metadata
    ) -> AsyncGenerator[GenerateResponse, None]:
        """What is generated, message by message; as :meth:`Lines.stream`."""
        prefill = self._picked.prefill
        if prefill is None:
            return self._lines.stream(self.stage, request, deadline, metadata)
        asked = pairing.halves(request, prefill, self.stage)
        first, second = (self._lines.stream(each, asked, deadline, metadata) for each in (prefill, self.stage))
        return pairing.together(asked, first, second, lambda: self._meet(prefill))

    def _meet(self, stage: Stage) -> None:
        self._met_at = stage

    def answered(self) -> None:
        """It was taken."""
        self._router.answered(self._picked)

    def failed(self, failure: RlctlError) -> bool:
        """It met a failure; returns whether that was the stage's, so that another one may be asked."""
        return self._router.failed(self._picked, failure, asyncio.get_running_loop().time(), at=self._met_at)


class Dispatch:
    """Finds stages for the requests of one router."""

    def __init__(self, lines: Lines, router: Router) -> None:
        self.lines = lines
        self.router = router
        self._told: str | None = None

    @asynccontextmanager
    async def attempt(self, wanting: Callable[[], Wanted], deadline: float, timeout_s: float) -> AsyncIterator[Attempt]:
        """A stage that may take the request, waited for until ``deadline`` on the loop's clock; ``timeout_s`` is named
        when none did. What is wanted is asked for anew at every look. Raises MODEL_NOT_FOUND, NO_ROUTABLE_STAGE.
        """
        picked, floor = await self._pick(wanting, deadline, timeout_s)
        try:
            yield Attempt(picked, floor, self.lines, self.router)
        finally:
            self.router.end(picked)

    async def _pick(self, wanting: Callable[[], Wanted], deadline: float, timeout_s: float) -> tuple[Picked, int]:
        view, loop = self.lines.view, asyncio.get_running_loop()
        wanted = wanting()
        while (remaining := deadline - (now := loop.time())) > 0:
            wanted = wanting()
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
