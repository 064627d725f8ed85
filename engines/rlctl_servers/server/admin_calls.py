"""Admin calls to a server: their time limits, and the outcome of a call that exceeds its limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl_servers.server.http import Answer, Http

WEDGED_S = 5.0
"""Seconds past the deadline of a changing call after which a silent server counts as wedged."""

LEAVING_S = 0.5
"""Seconds by which a question ends before its caller's deadline, so that the caller learns that nothing was changed."""


class Control:
    """Sends questions and commands to the server."""

    def __init__(self, http: Http, on_wedged: Callable[[RlctlError], None]) -> None:
        """``on_wedged`` is called when the server is stuck inside its own code."""
        self.http = http
        self._on_wedged = on_wedged

    async def ask(self, path: str, body: dict[str, Any] | None = None, *, call: Call, admin: bool = True) -> Any:
        """Return the server's answer to a question. Raises DEADLINE_EXCEEDED, ENGINE_FAILED, UNREACHABLE, LINK_LOST."""
        try:
            remaining = _remaining(call)
            timeout_s = remaining - min(LEAVING_S, remaining / 10)
            answer = await self.http.call(path, body, timeout_s=timeout_s, admin=admin)
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(f"{self.http.product} did not answer {path} in time") from None
        if not answer.ok:
            raise Reason.ENGINE_FAILED.error(f"{self.http.product} refused {path}: {answer.message}")
        return answer.body

    async def tell(self, path: str, body: dict[str, Any], *, call: Call, admin: bool = True) -> Answer:
        """Send a command to the server; the answer may be a refusal. ``admin``: use the admin key.

        A cleanup after the call's deadline still has WEDGED_S.

        Raises ENGINE_WEDGED (UNKNOWN) without an answer WEDGED_S past the call's deadline; UNREACHABLE, LINK_LOST.
        """
        try:
            return await self.http.call(path, body, timeout_s=max(_remaining(call), 0.0) + WEDGED_S, admin=admin)
        except TimeoutError:
            raise self.wedged(path) from None

    async def must(
        self,
        path: str,
        body: dict[str, Any],
        *,
        call: Call,
        reason: Reason = Reason.ENGINE_FAILED,
        outcome: Outcome.ValueType = OUTCOME_REJECTED,
        admin: bool = True,
    ) -> Answer:
        """Do as :meth:`tell`, but raise ``reason`` with ``outcome`` for a refusal."""
        answer = await self.tell(path, body, call=call, admin=admin)
        if not answer.ok:
            raise reason.error(f"{self.http.product}: {answer.message}", outcome=outcome)
        return answer

    def wedged(self, what: str) -> RlctlError:
        """Report that the server is stuck, and return the error to raise."""
        error = Reason.ENGINE_WEDGED.error(
            f"{self.http.product} did not come back from {what} in time",
            outcome=OUTCOME_UNKNOWN,
            next_step="rlctl ends a server that it has launched; end an attached server yourself.",
        )
        return self.lost(error)

    def lost(self, error: RlctlError) -> RlctlError:
        """Report that the server can no longer be driven, and return the error to raise."""
        self._on_wedged(error)
        return error


def touched(error: RlctlError) -> RlctlError:
    """Return the error of a call that writes weights. A rejection becomes DIRTY unless the server was unreachable."""
    if error.outcome == OUTCOME_REJECTED and error.reason is not Reason.UNREACHABLE:
        error.outcome = OUTCOME_DIRTY
    return error


def time_left(call: Call, what: str) -> float:
    """Return the seconds until the call's deadline. Raises DEADLINE_EXCEEDED if no time remains."""
    remaining = _remaining(call)
    if remaining <= 0:
        raise Reason.DEADLINE_EXCEEDED.error(f"no time is left for {what}")
    return remaining


def _remaining(call: Call) -> float:
    return call.deadline - asyncio.get_running_loop().time()
