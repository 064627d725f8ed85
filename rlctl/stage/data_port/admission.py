"""Requests that wait for the gate: one poll of the state serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving

LOOK_S = 0.02
"""How often the state of the stage is read while requests wait. It changes on another event loop."""


class Admission:
    """Lets requests in when the gate opens. For one event loop."""

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._changed: asyncio.Future[None] | None = None
        self._seen: Serving | None = None
        self._leased = False

    async def admit(self, wait_s: float, *, model: str, min_version_seq: int, adapter: str) -> Serving:
        """The state at which a request is let in.

        Raises as :meth:`Serving.refuse`: STAGE_NOT_SERVING and VERSION_TOO_OLD after ``wait_s`` seconds, others at
        once.
        """
        until = self._clock.now() + wait_s
        while True:
            serving, now = self._serving(), self._clock.now()
            try:
                serving.refuse(now, model=model, min_version_seq=min_version_seq, adapter=adapter)
            except RlctlError as refusal:
                if refusal.reason not in (Reason.STAGE_NOT_SERVING, Reason.VERSION_TOO_OLD) or now >= until:
                    raise
            else:
                return serving
            await self._change(serving, until - now)

    async def _change(self, seen: Serving, within_s: float) -> None:
        """Return when the state of the stage is another one than ``seen``, or the time is up."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            self._seen, self._leased = seen, seen.lease_until > self._clock.now()
            self._look_later()
        elif seen != self._seen:
            return  # it has changed since the others looked
        await asyncio.wait([self._changed], timeout=within_s)

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        changed = self._changed
        assert changed is not None
        serving = self._serving()
        if serving == self._seen and self._leased == (serving.lease_until > self._clock.now()):
            self._look_later()
            return
        self._changed = None
        changed.set_result(None)
