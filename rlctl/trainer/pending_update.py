"""An update that is under way while the trainer goes on: how far it has come, waiting for it, giving it up."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.event_loops import LoopThread
from rlctl.trainer.update_result import UpdateResult
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl.v1.results_pb2 import OPERATION_STATE_CANCELLED, OPERATION_STATE_FAILED, Operation
from rlctl.weights.tensor.cuda_ordering import Ordering


class Progress:
    """How far an update has come at this trainer rank. Belongs to the publisher's event loop.

    Attributes:
        ordering: after what on the trainer's stream the weights are read.
        begun: its first step was made; it has its number among the trainer's updates.
        sent: the tensors of this rank may be overwritten: they were read for the last time, whatever follows.
        decided: it can no longer be cancelled from here.
        told: how it has ended, by the coordinator, where it was given up.
        ended: set once it has ended, well or not.
        watched: whoever started it goes on, and may be told that the tensors were sent before it has ended.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, watched: bool = False) -> None:
        """``stream``: the trainer's. What it was given so far comes before the update. Raises FIELD_INVALID."""
        self.ordering = Ordering(stream)
        self.begun = False
        self.sent = asyncio.Event()
        self.decided = False
        self.told: Operation | None = None
        self.ended = asyncio.Event()
        self.watched = watched

    @property
    def outcome(self) -> Outcome.ValueType:
        """What its being given up means for the version, as far as this rank knows."""
        ended = self.told is not None and self.told.state in (OPERATION_STATE_FAILED, OPERATION_STATE_CANCELLED)
        return OUTCOME_UNKNOWN if self.decided and not ended else OUTCOME_REJECTED


class AsyncPending:
    """An update that :meth:`AsyncPublisher.update_async` has started.

    Attributes:
        ended: done once the update has ended, for whoever waits in another thread.
    """

    def __init__(self, update: Coroutine[Any, Any, UpdateResult], progress: Progress) -> None:
        """Starts it. Use :meth:`AsyncPublisher.update_async`."""
        self._task = asyncio.create_task(update)
        self._task.add_done_callback(lambda _: progress.ended.set())
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._task.add_done_callback(lambda _: self.ended.set_result(None))
        self._progress = progress

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task.done()

    async def wait_sent(self) -> None:
        """Return as soon as this rank's tensors may be overwritten: device work is done, not merely enqueued.

        The version is not served yet. With ``retries`` that is when every target has taken the weights in, since
        sources may have to go through them again until then. Raises what the update has failed with.
        """
        sent = asyncio.create_task(self._progress.sent.wait())
        try:
            await asyncio.wait({sent, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()
        if self._task.done():
            self.outcome()

    async def wait(self) -> UpdateResult:
        """The published update; raises what it failed with. Cancelling the wait leaves the update alone."""
        await asyncio.wait({self._task})
        return self.outcome()

    def cancel(self) -> bool:
        """Give the update up: it is aborted, and the waits raise CANCELLED, on every rank of the trainer.

        False: it has ended, or is being committed, or (at ranks other than 0) this rank has sent all that it has; it
        goes on, and :meth:`wait` says how it ends.
        """
        if self._task.done() or self._progress.decided:
            return False
        if not self._progress.begun:
            # The other ranks wait for this one, and count this update: they are told by its own first step.
            asyncio.get_running_loop().call_soon(self._task.cancel)
            return True
        return self._task.cancel()

    async def close(self) -> None:
        """Give it up, or see it to its end where it is too late for that; never longer than its deadline."""
        self.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # retrieved: whoever closes does not ask

    def outcome(self) -> UpdateResult:
        """What :meth:`wait` says, of an update that has ended."""
        if self._task.cancelled():
            raise Reason.CANCELLED.error("the update was cancelled", outcome=self._progress.outcome)
        return self._task.result()


class Pending:
    """:class:`AsyncPending` for blocking code, from any thread."""

    def __init__(self, pending: AsyncPending, loop: LoopThread) -> None:
        self.aio = pending
        self._loop = loop

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.aio.done()

    def wait_sent(self) -> None:
        """Return as soon as this rank's tensors may be overwritten; see :meth:`AsyncPending.wait_sent`."""
        if not self.aio.done():
            try:
                self._loop.call(self.aio.wait_sent())
            except RlctlError:
                self._loop.wait(self.aio.ended)  # where its fleet is closed, this wait ends before the update has
        if self.aio.done():
            self.aio.outcome()

    def wait(self) -> UpdateResult:
        """The published update; raises what it failed with. An interrupt leaves the update alone."""
        self._loop.wait(self.aio.ended)
        return self.aio.outcome()

    def cancel(self) -> bool:
        """Give the update up; see :meth:`AsyncPending.cancel`."""
        return not self.aio.done() and self._loop.call(_cancel(self.aio))


async def _cancel(pending: AsyncPending) -> bool:
    return pending.cancel()
