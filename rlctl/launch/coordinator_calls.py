"""Calls of a supervisor to its coordinator, each with a limit, and the silence of a coordinator that does not answer.

The next step of the supervisor repeats a call without an answer, so no call raises for a missing answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.launcher import Launched
from rlctl.sdk.aio import AsyncFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1.fleet_pb2 import Fleet as FleetMessage

CALL_S = 5.0
"""Seconds for a call to the coordinator. The next step repeats the call."""
BUSY_S = 10.0
"""Seconds for the load of a stage, which the coordinator asks for."""
REPORT_S = 10.0
"""Seconds of waits in a row without an answer of the coordinator, after which the silence is reported: a lease."""
SILENT_S = 60.0
"""Seconds of such waits, after which a change fails."""


class CoordinatorCalls:
    """The connection to the coordinator, and how long the coordinator has not answered."""

    def __init__(
        self, connect: Callable[[], Fleet], process: Callable[[], Launched | None], say: Callable[[str], None]
    ) -> None:
        """``process`` returns the coordinator's process, which may be a new one at each call."""
        self._connect = connect
        self._process = process
        self._say = say
        self._client: Fleet | None = None
        self._silent_s = 0.0
        """Waits for the coordinator since its last answer."""
        self._is_silent = False
        """Whether the coordinator has not answered in this step. It is asked again in the next one."""
        self._silence_reported = False

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def begin_step(self) -> None:
        """Ask a silent coordinator again from now on."""
        self._is_silent = False

    def forgive(self) -> None:
        """Forget the silence of an earlier coordinator process."""
        self._silent_s, self._silence_reported = 0.0, False

    def call(self, ask: Callable[[AsyncFleet], Awaitable[object]], limit_s: float = CALL_S) -> bool:
        """Call the coordinator. Returns False without an answer within the limit; the next step calls again.

        An ended coordinator is not called: the SDK would wait, and the supervisor must restart the coordinator. Nor is
        a killed coordinator that has not ended.
        """
        process = self._process()
        if process is not None and (process.returncode is not None or not process.serves):
            return False
        if self._is_silent:
            return False

        async def limited(client: AsyncFleet) -> None:
            async with asyncio.timeout(limit_s):
                await ask(client)

        began = time.monotonic()
        try:
            if self._client is None:
                self._client = self._connect()
            self._client.loop.call(limited(self._client.aio))
        except (RlctlError, TimeoutError) as error:
            reason = error.reason if isinstance(error, RlctlError) else Reason.DEADLINE_EXCEEDED
            if reason in (Reason.TOKEN_INVALID, Reason.TOKEN_MISSING):
                raise
            self._is_silent = reason in (Reason.DEADLINE_EXCEEDED, Reason.UNREACHABLE)
            self._silent_s = self._silent_s + time.monotonic() - began if self._is_silent else 0.0
            return False
        self._silent_s = 0.0
        return True

    def status(self) -> FleetMessage | None:
        """Return the fleet, or None without an answer."""
        statuses: list[FleetMessage] = []

        async def ask(client: AsyncFleet) -> None:
            statuses.append(await client.status())

        self.call(ask)
        return statuses[0] if statuses else None

    def is_idle(self, slot: str) -> bool:
        """Whether the slot has no running requests and no update."""
        answers: list[dict[str, str]] = []

        async def ask(client: AsyncFleet) -> None:
            answers.append(await client.busy([slot]))

        return self.call(ask, BUSY_S) and not answers[0]

    def report_silence(self, address: str) -> None:
        """Report that the coordinator does not answer, once, and that it answers again."""
        process = self._process()
        if self._silence_reported and not self._silent_s:
            self._silence_reported = False
            self._say(f"coordinator at {address} answers again")
        elif not self._silence_reported and self._silent_s >= REPORT_S and process is not None:
            self._silence_reported = True
            self._say(f"Warning: {self._silence(process)}")

    def refuse_silent(self) -> None:
        """Raise UNREACHABLE for a coordinator that has not answered for :data:`SILENT_S`."""
        process = self._process()
        if process is not None and self._silent_s > SILENT_S:
            raise self._silence(process)

    def _silence(self, process: Launched) -> RlctlError:
        pid = process.pid
        return Reason.UNREACHABLE.error(
            f"the coordinator (pid {pid}) has not answered for {self._silent_s:.0f} s",
            next_step=f"Continue it (`kill -CONT {pid}`), or end it (`kill -9 {pid}`).",
        )
