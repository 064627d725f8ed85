"""Requests that wait for the gate. A poll of the state serves all waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving

LOOK_S = 0.02
"""Seconds between reads of the stage's state while requests wait. The state changes on a different event loop."""


class Admission:
    """Admits requests when the gate opens. For one event loop."""

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._changed: asyncio.Future[None] | None = None
        self._seen: Serving | None = None
        self._leased = False

    async def admit(self, wait_s: float, *, model: str, min_version_seq: int, adapter: str) -> Serving:
        """Wait for the gate and return the state at the admission of a request.

        Raises as :meth:`Serving.refuse`: STAGE_NOT_SERVING and VERSION_TOO_OLD after ``wait_s`` seconds, other reasons
        at once.
        """
        until = self._clock.now() + wait_s
        while True:
            serving, now = self._serving(), self._clock.now()
            try:
                serving.refuse(self._clock, model=model, min_version_seq=min_version_seq, adapter=adapter)
            except RlctlError as refusal:
                if refusal.reason not in (Reason.STAGE_NOT_SERVING, Reason.VERSION_TOO_OLD) or now >= until:
                    raise
            else:
                return serving
            await self._change(serving, until - now)

    async def _change(self, seen: Serving, within_s: float) -> None:
        """Return when the state of the stage differs from ``seen``, or after ``within_s`` seconds."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            self._seen, self._leased = seen, seen.has_lease(self._clock)
            self._look_later()
        elif seen != self._seen:
            # Changed since the last poll. The state may return to that of the poll, which then announces no change.
            within_s = min(within_s, LOOK_S)
        await asyncio.wait([self._changed], timeout=within_s)

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        changed = self._changed
        assert changed is not None
        serving = self._serving()
        if serving == self._seen and self._leased == serving.has_lease(self._clock):
            self._look_later()
            return
        self._changed = None
        changed.set_result(None)
