"""Generation without a proxy: the SDK picks a routable stage, round robin, and talks to it directly."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from rlctl.client.connection import Connection
from rlctl.errors import Reason, RlctlError
from rlctl.transport.channel import bearer, open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1.coordinator_pb2 import GetFleetRequest, WatchFleetRequest
from rlctl.v1.fleet_pb2 import FLEET_EVENT_KIND_SNAPSHOT, Stage
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse, SamplingParams, TokenIds
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

log = logging.getLogger(__name__)

AGAIN_S = 0.02
TELL_S = 1.0
"""Without a routable stage, what is waited for is logged after so long."""

ELSEWHERE = (Reason.STAGE_NOT_SERVING, Reason.VERSION_TOO_OLD, Reason.UNREACHABLE)
"""Refusals after which another stage, or the same one a little later, is asked."""


class FleetView:
    """The stages as the coordinator last told them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stages: dict[str, Stage] = {}
        self._models: set[str] | None = None
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def routable(self, model: str, adapter: str = "", slot: str = "") -> list[Stage]:
        """The stages that generation may go to now, in slot order; those with the adapter, if there are any."""
        stages = [
            stage
            for name, stage in sorted(self._stages.items())
            if stage.routable and model in ("", stage.registration.model) and slot in ("", name)
        ]
        holders = [stage for stage in stages if adapter in {held.name for held in stage.report.adapters}]
        return holders or stages

    def lacks(self, model: str) -> bool:
        """Whether the coordinator has told of its models, and this was not among them."""
        return bool(model) and self._models is not None and model not in self._models

    def obstacles(self, model: str) -> str:
        """Why generation may go to none of the stages: "actor-0 PAUSED, actor-1 disabled"."""
        return ", ".join(
            f"{slot} {stage.not_routable}"
            for slot, stage in sorted(self._stages.items())
            if not stage.routable and model in ("", stage.registration.model)
        )

    async def changed(self) -> None:
        """Wait for news."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                async for event in self._connection.stream("WatchFleet", WatchFleetRequest()):
                    if event.kind == FLEET_EVENT_KIND_SNAPSHOT:
                        self._stages.clear()
                        self._models = set()
                    self._models = {*(self._models or ()), *(known.name for known in event.fleet.models)}
                    self._stages |= {stage.registration.slot: stage for stage in event.fleet.stages}
                    self._changed.set()
            except RlctlError:
                pass  # the coordinator is away: stages that hold their lease go on serving
            await asyncio.sleep(AGAIN_S)


class Generator:
    """Sends requests to routable stages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._token = connection.token
        self._view = FleetView(connection)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns: Iterator[int] = itertools.count()
        self._told: str | None = None

    async def generate(self, request: GenerateRequest, timeout_s: float, *, slot: str = "") -> GenerateResponse:
        """The samples of one prompt. Waits for a routable stage (for this one) no longer than ``timeout_s``.

        Raises MODEL_NOT_FOUND, NO_ROUTABLE_STAGE, and what the stage refuses with.
        """
        async for stub, remaining in self._attempts(request, timeout_s, slot):
            try:
                response: GenerateResponse = await stub.Generate(
                    request, timeout=remaining, metadata=bearer(self._token)
                )
            except grpc.aio.AioRpcError as error:
                _again(from_grpc(error))
            else:
                return response
        raise self._nobody(request.model, timeout_s)

    async def stream(
        self, request: GenerateRequest, timeout_s: float, *, slot: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """What is new, as it comes. Once something came, a failure is raised, not repeated elsewhere."""
        async for stub, remaining in self._attempts(request, timeout_s, slot):
            begun = False
            call = stub.GenerateStream(request, timeout=remaining, metadata=bearer(self._token))
            try:
                async for response in call:
                    begun = True
                    yield response
            except grpc.aio.AioRpcError as error:
                failure = from_grpc(error)
                if begun:
                    raise failure from None
                _again(failure)
            else:
                return
            finally:
                call.cancel()
        raise self._nobody(request.model, timeout_s)

    async def close(self) -> None:
        """Stop watching, close the channels."""
        await self._view.close()
        for channel in self._channels.values():
            await channel.close()

    async def _attempts(
        self, request: GenerateRequest, timeout_s: float, slot: str
    ) -> AsyncGenerator[tuple[Any, float], None]:
        """(stub, time left) of one routable stage after another, until the time is up."""
        model, adapter = request.model, request.adapter
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        first = True
        while (remaining := deadline - loop.time()) > 0:
            if self._view.lacks(model):
                # The view may lag behind; the coordinator says MODEL_NOT_FOUND if that is not so.
                await self._connection.call("GetFleet", GetFleetRequest(model=model), remaining)
            stages = self._view.routable(model, adapter, slot)
            if not stages or not first:
                try:
                    async with asyncio.timeout(min(remaining, AGAIN_S if stages else TELL_S)):
                        await self._view.changed()
                except TimeoutError:
                    if not stages:
                        self._tell(self._view.obstacles(model))
                stages = self._view.routable(model, adapter, slot)
            if stages:
                first = False
                self._told = None
                stage = stages[next(self._turns) % len(stages)]
                yield RolloutServiceStub(self._channel(stage)), deadline - loop.time()

    def _tell(self, obstacles: str) -> None:
        """Log what is waited for, once however many requests wait for it."""
        if obstacles != self._told:
            log.info("waiting for a routable stage: %s", obstacles or "none is known")
        self._told = obstacles

    def _channel(self, stage: Stage) -> grpc.aio.Channel:
        address = stage.registration.rollout_address
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    def _nobody(self, model: str, timeout_s: float) -> RlctlError:
        whose = f"of {model} " if model else ""
        obstacles = self._view.obstacles(model)
        why = f": {obstacles}" if obstacles else ""
        return Reason.NO_ROUTABLE_STAGE.error(f"no stage {whose}took the request within {timeout_s:g} s{why}")


def build_request(
    prompt: str | Sequence[int],
    sampling: Mapping[str, Any],
    **fields: Any,
) -> GenerateRequest:
    """A request from Python values. Raises FIELD_INVALID for a sampling parameter that does not exist or fit."""
    known = SamplingParams.DESCRIPTOR.fields_by_name
    for name in sampling:
        if name not in known:
            raise Reason.FIELD_INVALID.error(
                f"there is no sampling parameter {name!r}; there are: {', '.join(known)}",
                field=f"sampling_params.{name}",
            )
    try:
        params = SamplingParams(**sampling)
        request = GenerateRequest(sampling_params=params, **{k: v for k, v in fields.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise Reason.FIELD_INVALID.error(str(error), field="sampling_params") from None
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.input_ids.CopyFrom(TokenIds(ids=prompt))
    return request


def _again(failure: RlctlError) -> None:
    if failure.reason not in ELSEWHERE:
        raise failure
