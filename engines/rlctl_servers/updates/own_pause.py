"""The pause of a server during an update."""

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
    """Pauses a server for an update, unless the fleet has paused it."""

    def __init__(
        self,
        state: Pausable,
        hold: Callable[[Call], Awaitable[None]],
        let_go: Callable[[Call], Awaitable[None]],
    ) -> None:
        """``hold`` pauses the server unless it is paused. ``let_go`` ends that pause unless it is still needed."""
        self._state = state
        self._hold = hold
        self._let_go = let_go

    async def begin(self, call: Call) -> None:
        """Pause until :meth:`end`, also past a resume of memory. Raises as ``hold``."""
        await self._hold(call)
        self._state.updating = True

    async def end(self, call: Call) -> None:
        """End the pause unless it is still needed. Raises as ``let_go``."""
        self._state.updating = False
        await self._let_go(call)
