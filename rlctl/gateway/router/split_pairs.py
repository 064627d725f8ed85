"""Joins the two halves of requests to pairs. sglang-router sends a half to a prefill and a half to a decode worker.

In rlctl a request to a pair is a single request: the SDK calls both stages, and a further pair when a stage dies. So
the decode half is carried out, with the router's prefill stage for the prompt, and the prefill half waits for the end.
The router draws a number for each request (``bootstrap_room``) that identifies both halves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.placeholders import ANY, PREFILL

MEET_S = 1.0
"""Seconds to wait for the prefill half, which names the prefill stage. After that any prefill stage may be used."""
KEPT_S = 60.0
"""Seconds until a single half is forgotten, and its wait ends."""
MOST = 65_536
"""Requests with a missing half, or under way without their first half."""
_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class _Request:
    """A request: its prefill stage, once known, and whether the request has been answered.

    Attributes:
        begun: the decode half has arrived.
        forgetting: timer that forgets the request if a half is missing.
    """

    def __init__(self, forgetting: asyncio.TimerHandle) -> None:
        self.prefill: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answered = asyncio.Event()
        self.begun = False
        self.forgetting = forgetting


class Halves:
    """Halves of the requests of a router."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    async def prompt(self, call: Call) -> Reply:
        """Answer the prefill half with an empty reply after the decode half, which has all output."""
        room, _ = await _taken(call)
        call.forget()
        if room is not None:
            request = self._of(room)
            if not request.prefill.done():
                request.prefill.set_result(call.path[PREFILL])
            if request.begun:
                self._forget(room)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request.answered.wait(), call.generation.settings.timeout_s)
        return Reply({})

    def whole(self, handler: Callable[[Call], Awaitable[Any]]) -> Callable[[Call], Awaitable[Any]]:
        """Return the handler of decode halves, from a generating handler."""

        async def generate(call: Call) -> Any:
            room, body = await _taken(call)
            if room is None:
                return await handler(call)
            call.replace_json(body)
            request = self._of(room)
            request.begun = True
            if request.prefill.done():
                self._forget(room)
            try:
                await asyncio.wait([request.prefill], timeout=MEET_S)
                if request.prefill.done() and request.prefill.result() != ANY:
                    call.path = {**call.path, PREFILL: request.prefill.result()}
                return await handler(call)
            finally:
                request.answered.set()

        return generate

    def _of(self, room: int) -> _Request:
        """Return the request of a room. Raises TOO_MANY_REQUESTS."""
        if room not in self._requests:
            if len(self._requests) >= MOST:
                raise Reason.TOO_MANY_REQUESTS.error(f"{MOST} requests to pairs lack a half in this gateway")
            self._requests[room] = _Request(asyncio.get_running_loop().call_later(KEPT_S, self._forget, room))
        return self._requests[room]

    def _forget(self, room: int) -> None:
        """Forget a request that has both halves, or only one half after ``KEPT_S``."""
        request = self._requests.pop(room, None)
        if request is None:
            return
        request.forgetting.cancel()
        if not request.begun:
            request.answered.set()


async def _taken(call: Call) -> tuple[int | None, dict[str, Any]]:
    """Return the room of a half, or None, and the body without the router's fields."""
    body = await call.json()
    if not isinstance(body, dict):
        return None, {}
    room = body.get(_FIELDS[-1])
    if isinstance(room, list):  # a batch has a room for each prompt
        room = room[0] if room else None
    if not isinstance(room, int):
        return None, {}
    return room, {name: value for name, value in body.items() if name not in _FIELDS}
