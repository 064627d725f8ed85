"""Picks stages for requests that the caller sends itself."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.dispatch import Attempt, Dispatch
from rlctl.rollout.picking.router import FAULTS, Wanted
from rlctl.rollout.running import Metadata, Running


class Forwarding(Running):
    """One request that its caller sends; made by :meth:`rlctl.rollout.rollout.AsyncRollout.forwarding`::

    while (attempt := await forwarding.attempt()) is not None:
        with attempt:
            try:
                answer = await send(attempt.stage, attempt.floor)
            except RlctlError as failure:
                if not forwarding.again(attempt, failure):
                    raise
            else:
                attempt.answered()
                return answer
    """

    def __init__(
        self,
        dispatch: Dispatch,
        wanting: Callable[[], Wanted],
        metadata: Metadata,
        *,
        rid: str,
        deadline: float,
        timeout_s: float,
        retries: int,
    ) -> None:
        super().__init__(metadata)
        self.deadline = deadline
        self._dispatch = dispatch
        self._wanting = wanting
        self._rid = rid
        self._timeout_s = timeout_s
        self._retries = retries
        self._faults = 0

    async def attempt(self) -> Attempt | None:
        """Return the attempt at the next stage, or None if the request was stopped.

        Raises as :meth:`rlctl.rollout.dispatch.Dispatch.attempt`.
        """
        if self.stopped:
            return None
        attempt = self._dispatch.at_once(self._wanting(), self.deadline) or await self.wait(
            self._dispatch.attempt(self._wanting, self.deadline, self._timeout_s)
        )
        if attempt is not None and self.stopped:  # at the moment that the stage was found
            with attempt:
                return None
        if attempt is not None and self._rid:
            self.running = attempt.line, self._rid
        return attempt

    def again(self, attempt: Attempt, failure: RlctlError) -> bool:
        """Record the failure of an attempt. Return True if a further attempt may be made.

        A refusal is repeated until the deadline, a fault ``retries`` times. A request that was aborted at the stage
        (CANCELLED) is not repeated.
        """
        self.running = None
        if failure.reason is Reason.CANCELLED:
            return False
        if failure.reason is Reason.RID_IN_USE and self._faults:
            # An engine whose connection broke may not have ended the request yet.
            failure = Reason.STAGE_NOT_SERVING.error(failure.message)
        self._faults += failure.reason in FAULTS
        return attempt.failed(failure) and self._faults <= self._retries and not self.stopped
