"""Equal calls for single engines become one operation.

A client that addresses single engines calls each engine, although the weights belong to the model. The first call
starts the operation. Each call for a further engine gets the result once. A request id of the client identifies a
repeat exactly. Without a request id, an equal body for the same engine is a repeat until a caller has received the
result, or the acceptance of an operation that has ended since. A later call is a new operation. So is a call that comes
:data:`JOINED_S` after a result was delivered, or after the end of an operation whose callers have all disconnected or
received the acceptance.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason
from rlctl.coordinator.operations.operations import Operations, body_hash
from rlctl.coordinator.operations.run import Run
from rlctl.ports import CALLER, Clock

JOINED_S = 60.0


@dataclass(eq=False)
class _Shared:
    """An operation that several calls may share.

    Attributes:
        model: model of the calls.
        run: the operation, once accepted.
        called: engines with a call; "" for a call without an engine.
        unanswered: engines without an answer.
        accepted: engines whose caller has received the acceptance. It is their answer once the operation has ended.
        answered_at: time of the first answer, on the clock's ``now``.
    """

    model: str
    run: asyncio.Task[Run]
    unanswered: set[str]
    called: set[str] = field(default_factory=set)
    accepted: set[str] = field(default_factory=set)
    answered_at: float = float("inf")


@dataclass(frozen=True)
class Joined:
    """A call as a part of an operation.

    Attributes:
        run: the operation.
        replayed: the operation was accepted before this call.
        body: common content of the calls.
    """

    run: Run
    replayed: bool
    body: Message


class Joining:
    """The operations that a further call may still join."""

    def __init__(self, operations: Operations, clock: Clock) -> None:
        self._operations = operations
        self._clock = clock
        self._shared: dict[bytes, _Shared] = {}

    async def run(
        self, body: Message, model: str, engines: Iterable[str], start: Callable[[], Coroutine[Any, Any, Run]]
    ) -> Joined:
        """Return the operation of a call. Raises CANCELLED if the caller disconnects before acceptance.

        ``body``: the request, without content that differs between the calls for ``engines`` besides the header.
        ``start`` accepts the operation, and may take long; every call gets the error.
        """
        header = body.header  # type: ignore[attr-defined]
        existing = self.known(body)
        if existing is not None:
            return Joined(existing, True, body)
        self._drop_old()
        key = body_hash(body)
        shared = self._shared.get(key)
        joined = shared is not None and self._joins(shared, header.for_slot, unkeyed=header.unkeyed)
        if shared is None or not joined:
            callers = {*engines, header.for_slot} if header.for_slot else {""}
            shared = self._shared[key] = _Shared(model, asyncio.create_task(start()), callers)
            shared.run.add_done_callback(lambda _, shared=shared: self._drop_refused(key, shared))  # type: ignore[misc]
        shared.called.add(header.for_slot)
        try:
            await _started(shared.run)
            run = shared.run.result()
            await self._operations.join(run, body)
        except BaseException:
            shared.called.discard(header.for_slot)
            raise
        return Joined(run, joined, body)

    def known(self, body: Message) -> Run | None:
        """Return the operation of an earlier call with this request id. Raises REQUEST_ID_REUSED for a new body."""
        return self._operations.known(body.header.request_id, body)  # type: ignore[attr-defined]

    def _drop_refused(self, key: bytes, shared: _Shared) -> None:
        refused = shared.run.cancelled() or shared.run.exception() is not None
        if refused and self._shared.get(key) is shared:
            del self._shared[key]

    @staticmethod
    def _joins(shared: _Shared, engine: str, *, unkeyed: bool) -> bool:
        """Whether a call is part of an operation: the first call for its engine, or an unanswered unkeyed repeat."""
        return engine in shared.unanswered and (unkeyed or engine not in shared.called)

    def answered(self, joined: Joined) -> None:
        """Record that a call has an answer, unless the transport knows that the caller has disconnected.

        Before the end of the operation the answer is the acceptance.
        """
        body = joined.body
        caller, key = CALLER.get(), body_hash(body)
        shared = self._shared.get(key)
        if shared is None or not shared.run.done() or (caller is not None and caller.disconnected.is_set()):
            return
        refused = shared.run.cancelled() or shared.run.exception() is not None
        if refused or shared.run.result() is not joined.run:
            return  # a later operation has the same body
        engine = body.header.for_slot  # type: ignore[attr-defined]
        if not joined.run.ended.is_set():
            shared.accepted.add(engine)
            return
        shared.answered_at = min(shared.answered_at, self._clock.now())
        shared.unanswered.discard(engine)
        if not shared.unanswered:
            del self._shared[key]

    def forget(self, model: str) -> None:
        """Let no further call join ended operations of a model: a new update begins, or ranks leave groups of the
        model.
        """
        for key, shared in list(self._shared.items()):
            if shared.model == model and _ended_at(shared.run) < float("inf"):
                del self._shared[key]

    def _drop_old(self) -> None:
        old = self._clock.now() - JOINED_S
        for shared in self._shared.values():
            if _ended_at(shared.run) < float("inf"):
                shared.unanswered -= shared.accepted
        self._shared = {
            key: shared
            for key, shared in self._shared.items()
            if shared.unanswered and min(shared.answered_at, _ended_at(shared.run)) > old
        }


def _ended_at(run: asyncio.Task[Run]) -> float:
    accepted = run.done() and not run.cancelled() and run.exception() is None
    return run.result().ended_at if accepted else float("inf")


async def _started(run: asyncio.Task[Run]) -> None:
    """Wait until an operation is accepted or refused, or the caller disconnects."""
    caller = CALLER.get()
    if caller is None:
        await asyncio.wait({run})
        return
    disconnected = asyncio.create_task(caller.disconnected.wait())
    try:
        await asyncio.wait({run, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disconnected
    if not run.done():
        raise Reason.CANCELLED.error("the caller has disconnected")
