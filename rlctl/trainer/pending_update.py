"""An update that runs while the trainer continues: its state, waits and cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.event_loops import LoopThread
from rlctl.trainer.update_progress import ByteCount
from rlctl.trainer.update_result import UpdateResult
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl.v1.results_pb2 import OPERATION_STATE_CANCELLED, OPERATION_STATE_FAILED, Operation
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse
from rlctl.weights.tensor.cuda_ordering import Ordering


class UpdateState:
    """State of an update at this trainer rank. Belongs to the publisher's event loop.

    Attributes:
        ordering: work of the trainer's stream that precedes the reads of the weights.
        begun: the first step was made, and the update has a number at the trainer.
        sent: set after the last read of this rank's tensors, which may then be overwritten.
        decided: the update can no longer be cancelled from this rank.
        ended_operation: the coordinator's operation after an abort.
        ended: set after the update has ended, with any result.
        watched: the caller continues, and may learn that the tensors were sent before the update has ended.
        update_id: id of the update at the coordinator; "" before the begin.
        attempt: number of the attempt, from 1.
        batch: number of the batch of a rolling update in place; 0: no batches.
        count: bytes of the present pass at this rank.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, watched: bool = False) -> None:
        """``stream``: the trainer's stream. Work queued so far precedes the update. Raises FIELD_INVALID."""
        self.ordering = Ordering(stream)
        self.begun = False
        self.sent = asyncio.Event()
        self.decided = False
        self.ended_operation: Operation | None = None
        self.ended = asyncio.Event()
        self.watched = watched
        self.update_id = ""
        self.attempt = 1
        self.batch = 0
        self.count = ByteCount()

    def follow(self, plan: BeginWeightUpdateResponse) -> None:
        """Take in the plan of the next attempt or batch."""
        self.update_id, self.attempt, self.batch = plan.update_id, plan.attempt, plan.batch.number

    def count_to(self, total: int) -> ByteCount:
        """Begin to count the bytes of a pass."""
        self.count = ByteCount(total)
        return self.count

    @property
    def outcome(self) -> Outcome.ValueType:
        """Outcome of a cancelled update for the version, as far as this rank knows."""
        ended = self.ended_operation is not None and self.ended_operation.state in (
            OPERATION_STATE_FAILED,
            OPERATION_STATE_CANCELLED,
        )
        return OUTCOME_UNKNOWN if self.decided and not ended else OUTCOME_REJECTED


class AsyncPending:
    """An update started by :meth:`AsyncPublisher.update_async`.

    Attributes:
        ended: done once the update has ended, for waits in other threads.
    """

    def __init__(self, update: Coroutine[Any, Any, UpdateResult], state: UpdateState) -> None:
        """Start the update. Use :meth:`AsyncPublisher.update_async`."""
        self._task = asyncio.create_task(update)
        self._task.add_done_callback(lambda _: state.ended.set())
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._task.add_done_callback(lambda _: self.ended.set_result(None))
        self._state = state

    def done(self) -> bool:
        """Return whether the update has ended, with any result."""
        return self._task.done()

    async def wait_sent(self) -> None:
        """Return as soon as this rank's tensors may be overwritten: device work is done, not merely enqueued.

        The version is not served yet. With ``retries``, this waits until every target has received the weights, since
        sources may have to repeat the pass until then. Raises the error of the update.
        """
        sent_task = asyncio.create_task(self._state.sent.wait())
        try:
            await asyncio.wait({sent_task, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent_task.cancel()
        if self._task.done():
            self.outcome()

    async def wait(self) -> UpdateResult:
        """Return the published update, or raise the error. Cancelling the wait does not affect the update."""
        await asyncio.wait({self._task})
        return self.outcome()

    def cancel(self) -> bool:
        """Abort the update. The waits raise CANCELLED on every rank of the trainer.

        Returns False if the update has ended, is being committed, or (at ranks other than 0) this rank has sent
        everything. The update then continues, and :meth:`wait` gives the result.
        """
        if self._task.done() or self._state.decided:
            return False
        if not self._state.begun:
            # The other ranks wait for this rank and count this update: the first step here must tell all ranks.
            asyncio.get_running_loop().call_soon(self._task.cancel)
            return True
        return self._task.cancel()

    async def close(self) -> None:
        """Cancel the update, or wait for the end if too late; never longer than the deadline."""
        self.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # marks the error as retrieved: a caller of close does not ask

    def outcome(self) -> UpdateResult:
        """Return the result of :meth:`wait` for an update that has ended."""
        if self._task.cancelled():
            raise Reason.CANCELLED.error("the update was cancelled", outcome=self._state.outcome)
        return self._task.result()


class Pending:
    """:class:`AsyncPending` for blocking code, from any thread."""

    def __init__(self, pending: AsyncPending, loop: LoopThread) -> None:
        self.aio = pending
        self._loop = loop

    def done(self) -> bool:
        """Return whether the update has ended, with any result."""
        return self.aio.done()

    def wait_sent(self) -> None:
        """Return as soon as this rank's tensors may be overwritten; see :meth:`AsyncPending.wait_sent`."""
        if not self.aio.done():
            try:
                self._loop.call(self.aio.wait_sent())
            except RlctlError:
                self._loop.wait(self.aio.ended)  # after the fleet was closed, this wait ends before the update does
        if self.aio.done():
            self.aio.outcome()

    def wait(self) -> UpdateResult:
        """Return the published update, or raise the error. An interrupt does not affect the update."""
        self._loop.wait(self.aio.ended)
        return self.aio.outcome()

    def cancel(self) -> bool:
        """Abort the update; see :meth:`AsyncPending.cancel`."""
        return not self.aio.done() and self._loop.call(_cancel(self.aio))


async def _cancel(pending: AsyncPending) -> bool:
    return pending.cancel()
