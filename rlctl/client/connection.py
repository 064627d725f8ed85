"""A connection to a coordinator: calls with a deadline, safe retries, and typed errors."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import new_uuid7
from rlctl.traces.context import TRACEPARENT, current
from rlctl.transport import grpc
from rlctl.transport.channel import Credentials, LastingChannel, bearer, stated
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome, RequestHeader
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub

REPLY_S = 5.0
"""Wait beyond the operation's own timeout: the outcome, UNKNOWN included, then comes from the coordinator."""

RETRY_S = (0.1, 0.2, 0.5, 1.0)


class Connection:
    """Calls a coordinator, on a single event loop. After ``close``, calls raise CANCELLED."""

    def __init__(self, address: str, credentials: Credentials, tls: Tls | None = None, *, client: str = "sdk") -> None:
        """``client``: name of the calling program, for the records of the coordinator."""
        self._loop = asyncio.get_running_loop()
        self.address = address
        self.credentials = credentials
        self.tls = tls
        self._stated = stated(client)
        self._channel = LastingChannel(address, tls, Role.COORDINATOR, CoordinatorServiceStub)

    def on_behalf_of(self, credentials: Credentials) -> Connection:
        """Return the same connection with different credentials. Do not close the returned object."""
        connection = copy.copy(self)
        connection.credentials = credentials
        return connection

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        traceparent = current()
        traced = ((TRACEPARENT, traceparent),) if traceparent else ()
        return (*bearer(self.credentials), *self._stated, *traced)

    def check_loop(self) -> None:
        """Raise ILLEGAL_STATE on an event loop other than the connection's: an answer would wake no task there."""
        if asyncio.get_running_loop() is not self._loop:
            raise Reason.ILLEGAL_STATE.error(
                "this client of a fleet belongs to another event loop",
                next_step="Use a client in the event loop that connected it, or use rlctl.connect.",
            )

    async def ready(self, timeout_s: float) -> None:
        """Wait until the coordinator is reachable. Raises UNREACHABLE, TLS_FAILED."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.ready()
        except TimeoutError:
            raise Reason.UNREACHABLE.error(
                f"no coordinator answers at {self.address}", next_step="`rlctl up` starts a fleet."
            ) from None

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Make an RPC. A call that may have been lost on the way is repeated until the time is up.

        Repeats have the same request_id. A request with a header but no request_id gets a request_id, once. Reads may
        always be repeated.
        """
        self.check_loop()
        header: RequestHeader | None = getattr(request, "header", None)
        if header is not None and not header.request_id:
            header.request_id = new_uuid7()
        deadline = asyncio.get_running_loop().time() + timeout_s + REPLY_S
        tries = 0
        while True:
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                return await getattr(self._channel.stub, method)(request, timeout=remaining, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failure = from_grpc(error)
                if failure.reason is Reason.DEADLINE_EXCEEDED and failure.outcome == OUTCOME_UNKNOWN:
                    raise self._silent(method, header, timeout_s) from None
            except grpc.aio.UsageError:
                raise closed(OUTCOME_UNKNOWN if tries else OUTCOME_REJECTED) from None
            except asyncio.CancelledError:
                refuse_closed()
                raise
            pause = RETRY_S[min(tries, len(RETRY_S) - 1)]
            if tries >= len(RETRY_S) or remaining < pause:
                failure = await self._channel.explained(failure)  # no repeat would mend it
            if not _repeatable(failure) or remaining < pause:
                raise failure
            self._channel.failed()
            await asyncio.sleep(pause)
            tries += 1

    def _silent(self, method: str, header: RequestHeader | None, timeout_s: float) -> RlctlError:
        """Return the error for a time-out that the coordinator itself did not report."""
        error = (
            f"the coordinator at {self.address} gave no answer to {method} in {timeout_s:g} s, nor {REPLY_S:g} s later"
        )
        if header is None:
            return Reason.DEADLINE_EXCEEDED.error(error, outcome=OUTCOME_UNKNOWN)
        next_step = (
            f"The same call with request_id {header.request_id} tells how it ended; `rlctl operations` lists it."
        )
        return Reason.DEADLINE_EXCEEDED.error(error, next_step=next_step, outcome=OUTCOME_UNKNOWN)

    async def stream(self, method: str, request: Message) -> AsyncIterator[Any]:
        """Make a server-streaming RPC."""
        self.check_loop()
        call: Any = None
        try:
            call = getattr(self._channel.stub, method)(request, metadata=self._metadata)
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            self._channel.failed()
            raise from_grpc(error) from None
        except grpc.aio.UsageError:
            raise closed() from None
        except asyncio.CancelledError:
            refuse_closed()
            raise
        finally:
            if call is not None:
                call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def closed(outcome: Outcome.ValueType = OUTCOME_REJECTED) -> RlctlError:
    """Return the error of a call on a closed connection."""
    return Reason.CANCELLED.error("the connection to the fleet was closed", next_step="Connect anew.", outcome=outcome)


def refuse_closed() -> None:
    """Raise :func:`closed` if the end of the connection, not the caller, cut off the call.

    gRPC reports both by a CancelledError.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise closed(OUTCOME_UNKNOWN) from None


def _repeatable(error: RlctlError) -> bool:
    """Return whether a call failed on the way. Refusals by rlctl have a different outcome."""
    return error.reason is Reason.UNREACHABLE and error.outcome == OUTCOME_UNKNOWN
