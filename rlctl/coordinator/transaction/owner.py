"""The owner of an update: its lease, and its decision for or against the version."""

from __future__ import annotations

import asyncio
import contextlib

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.transaction.verification_levels import NOTHING, Expected


class Owner:
    """The lease and the decision of the owner of one update. Times are of the clock's ``now``, in seconds.

    Attributes:
        lease_until: end of the lease.
        decided: set once the owner, an operator or the clock has decided the update, batch by batch.
        expected: the digests that the sources state, after a decision for the version.
        verdict: the reason of a decision against the version.
        stopped: a verdict that came after a decision for the present batch; it decides the batches after it.
    """

    def __init__(
        self, model: ModelState, deadline: float, lease_ttl_s: float, lease_until: float, *, grace_s: float = 0.0
    ) -> None:
        """``grace_s``: longest silence of a living owner after a failed write; 0: no shorter than the lease."""
        self._model = model
        self._deadline = deadline
        self.lease_ttl_s = lease_ttl_s
        self.lease_until = lease_until
        self._grace_s = grace_s
        self._silence_s = 0.0
        self._limit: asyncio.Timeout | None = None
        self.decided = asyncio.Event()
        self.expected: Expected = NOTHING
        self.verdict: RlctlError | None = None
        self.stopped: RlctlError | None = None
        model.lease_until = lease_until

    def renew(self, now: float) -> None:
        """Let the lease run for its full time from ``now``."""
        self._run_until(now + self.lease_ttl_s, self.lease_ttl_s, now)

    def shorten(self, now: float) -> None:
        """End the lease after the grace, if that is earlier: a write has failed.

        A living owner retries, aborts or renews. A silent owner counts as dead: the death of a source is the most
        frequent cause of a broken group.
        """
        if self._grace_s and now + self._grace_s < self.lease_until:
            self._run_until(now + self._grace_s, self._grace_s, now)

    def _run_until(self, until: float, silence_s: float, now: float) -> None:
        self.lease_until = self._model.lease_until = until
        self._silence_s = silence_s
        if self._limit is not None and not self._limit.expired():
            limit = min(until, self._deadline) - now
            self._limit.reschedule(asyncio.get_running_loop().time() + max(0.0, limit))

    async def wait_decided(self, now: float) -> None:
        """Return once the update is decided, the lease has run out or the update's deadline has passed."""
        until = min(self.lease_until, self._deadline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - now) as self._limit:
                await self.decided.wait()
        self._limit = None

    @property
    def silence(self) -> str:
        """The owner's silence in words, once the lease has run out."""
        if 0 < self._silence_s < self.lease_ttl_s:
            return f"was not heard for {self._silence_s:g} s after a write had failed"
        return f"did not renew the lease for {self.lease_ttl_s:g} s"

    def decide(self, *, expected: Expected = NOTHING, verdict: RlctlError | None = None) -> None:
        """Decide for the version, or with ``verdict`` against it. The first decision about a batch counts."""
        if not self.decided.is_set():
            self.expected, self.verdict = expected, verdict
            self.decided.set()
        elif self.stopped is None:
            self.stopped = verdict

    def next_batch(self) -> None:
        """Open the decision about the next batch."""
        self.decided, self.expected = asyncio.Event(), NOTHING
        if self.stopped is not None:
            self.decide(verdict=self.stopped)
