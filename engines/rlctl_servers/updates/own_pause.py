"""The plug-in's own pause of a server, for an update or a release of memory, unless the fleet has paused the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rlctl.contract.errors import RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_servers.server.state import ServerState


class OwnPause:
    """Pauses and continues one server."""

    def __init__(
        self,
        state: ServerState,
        pause: Callable[[Call], Awaitable[object]],
        go_on: Callable[[Call], Awaitable[object]],
    ) -> None:
        """``pause`` and ``go_on``: calls to the server. Requests of any sender wait during the pause."""
        self._state = state
        self._pause = pause
        self._go_on = go_on

    async def begin(self, call: Call) -> None:
        """Pause until :meth:`end`, also past a resume of memory. Raises as :meth:`hold`."""
        await self.hold(call)
        self._state.updating = True

    async def end(self, call: Call, cause: RlctlError | None = None) -> None:
        """End the pause unless it is still needed. ``cause`` and errors as in :meth:`let_go`."""
        self._state.updating = False
        await self.let_go(call, cause)

    async def hold(self, call: Call) -> None:
        """Pause the server unless it is paused."""
        if not self._state.stopped:
            self._state.holding = True
            try:
                await self._pause(call)
            except RlctlError as error:
                self._state.holding = error.outcome == OUTCOME_UNKNOWN
                raise

    async def let_go(self, call: Call, cause: RlctlError | None = None) -> None:
        """End the own pause, unless the fleet has paused the server, memory is released or an update is open.

        Raises as ``go_on``. With ``cause``, the error that ends the work under the pause, a failure is not raised but
        added to the cause: the outcome becomes UNKNOWN, because the server remains paused.
        """
        if self._state.holding and not self._state.released and not self._state.updating:
            try:
                if not self._state.paused:
                    await self._go_on(call)
            except RlctlError as failure:
                if cause is None:
                    raise
                cause.message += f"; the server remains paused: {failure.message}"
                cause.outcome = OUTCOME_UNKNOWN
            else:
                self._state.holding = False
