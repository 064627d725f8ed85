"""The pause of a server that an update needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from rlctl.engine import Call


class Pausable(Protocol):
    """The state of a server.

    Attributes:
        updating: an update is open.
    """

    updating: bool


class OwnPause:
    """Pauses a server for an update, where the fleet has not paused it."""

    def __init__(
        self,
        state: Pausable,
        hold: Callable[[Call], Awaitable[None]],
        let_go: Callable[[Call], Awaitable[None]],
    ) -> None:
        """``hold``: pause the server unless it is paused. ``let_go``: end that pause unless something else needs it."""
        self._state = state
        self._hold = hold
        self._let_go = let_go

    async def begin(self, call: Call) -> None:
        """Pause, and keep the pause until :meth:`end`, also past a resume of memory. Raises what ``hold`` raises."""
        await self._hold(call)
        self._state.updating = True

    async def end(self, call: Call) -> None:
        """End the pause, unless something else needs it. Raises what ``let_go`` raises."""
        self._state.updating = False
        await self._let_go(call)
