"""The targets of an update that a request reaches, and the turns of writes. The plan's transports and groups decide."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import Message

from rlctl.contract.group_backends import BACKENDS
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.transaction.process_groups import ALONE
from rlctl.v1 import common_pb2
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse
from rlctl.v1.verbs_pb2 import (
    InitWeightsUpdateGroupRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

_FROM_MEMORY = (common_pb2.TRANSPORT_SHARED_MEMORY, common_pb2.TRANSPORT_CUDA_IPC)


class RequestTargets:
    """Matches requests to the targets of a plan, which may change meanwhile.

    A write takes its turns, so that several sources write one after the other. A turn belongs to a transport, or to a
    stage for transports that feed each stage alone. No target has two transports, so different transports never wait
    for each other.
    """

    def __init__(self, plan: BeginWeightUpdateResponse) -> None:
        self._plan = plan
        self._alone = {target.slot for target in plan.targets if target.transport in ALONE}
        turns = (*_FROM_MEMORY, *(transport for transport in BACKENDS if transport not in ALONE), *self._alone)
        self._turns: dict[object, asyncio.Lock] = {turn: asyncio.Lock() for turn in turns}

    def transports(self, targets: Sequence[Slot]) -> dict[str, common_pb2.Transport.ValueType]:
        """Return the transport of each target, by slot. A target of a heal counts as fed over a group."""
        planned = {target.slot: target.transport for target in self._plan.targets}
        return {slot.name: planned.get(slot.name, common_pb2.TRANSPORT_TORCH_GLOO) for slot in targets}

    def reached(self, request: Message, targets: Sequence[Slot]) -> list[Slot]:
        """Return the targets reached by the request's transport and groups."""
        transports = self._transports_of(request)
        planned, members = self.transports(targets), self._members_of(request)
        return [
            slot
            for slot in targets
            if (not transports or planned[slot.name] in transports) and (not members or slot.name in members)
        ]

    def turns(self, request: Message) -> list[asyncio.Lock]:
        """Return the turns to take before a write, in the same order for all requests."""
        transports = self._transports_of(request)
        alone = set() if ALONE.isdisjoint(transports) else self._alone & (self._members_of(request) or self._alone)
        return [
            self._turns[turn]
            for turn in (*(transport for transport in transports if transport not in ALONE), *sorted(alone))
        ]

    @contextlib.asynccontextmanager
    async def all_turns(self) -> AsyncIterator[None]:
        """Wait for the end of all running writes. No write starts inside the context."""
        async with contextlib.AsyncExitStack() as turns:
            for turn in self._turns.values():
                await turns.enter_async_context(turn)
            yield

    @property
    def is_written_to(self) -> bool:
        """Whether a write is running."""
        return any(turn.locked() for turn in self._turns.values())

    def _members_of(self, request: Message) -> set[str]:
        """Return the stages in the request's planned groups, or the readers of the request's segments.

        Empty: the request names no stage.
        """
        if isinstance(request, UpdateWeightsFromTensorRequest):
            return {segment.reader.slot for segment in request.segments} - {""}
        names = _group_names(request)
        return {m.slot for group in self._plan.groups if group.group_name in names for m in group.members}

    def _transports_of(self, request: Message) -> Sequence[common_pb2.Transport.ValueType]:
        """Return the transports of a request. Empty: the request depends on no transport.

        A client may name a group that is not in the plan. Such a group reaches every target that is fed over groups.
        """
        match request:
            case UpdateWeightsFromTensorRequest():
                return _FROM_MEMORY
            case InitWeightsUpdateGroupRequest() | UpdateWeightsFromDistributedRequest():
                names = _group_names(request)
            case _:
                return ()
        backends = {group.backend for group in self._plan.groups if group.group_name in names}
        return [transport for transport, backend in BACKENDS.items() if backend in backends or not backends]


def _group_names(request: Message) -> set[str]:
    match request:
        case InitWeightsUpdateGroupRequest():
            return {request.group_name}
        case UpdateWeightsFromDistributedRequest():
            return {bucket.group_name or request.group_name for bucket in request.buckets}
    return set()
