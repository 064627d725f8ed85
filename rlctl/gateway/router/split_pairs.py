"""Requests to pairs, of which sglang-router sends both halves: one to a prefill worker and one to a decode worker.

To rlctl a request to a pair is one: the SDK asks both stages, and again others when one of them dies. So the decode
half is carried out, with the stage that the router has picked for the prompt, and the prefill half waits for its end.
The router draws a number for each request (``bootstrap_room``), by which the two are found.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.placeholders import ANY, PREFILL

MEET_S = 1.0
"""For the prefill half to come, which says where the prompt is to be computed; after that any stage may do it."""
KEPT_S = 60.0
"""A half whose other one has not come is remembered for so long, and waits no longer."""
_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class _Request:
    """One request: which stage is to compute its prompt, once that is known, and whether it has been answered.

    Attributes:
        begun: its decode half has come.
        forgetting: will forget it, if it is to be forgotten before both halves have come.
    """

    def __init__(self, forgetting: asyncio.TimerHandle) -> None:
        self.prefill: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answered = asyncio.Event()
        self.begun = False
        self.forgetting = forgetting


class Halves:
    """Of the requests of one router."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    async def prompt(self, call: Call) -> Reply:
        """The prefill half: nothing is in its answer, as the decode half has everything."""
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
        """The handler of decode halves, made of one that generates."""

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
        if room not in self._requests:
            self._requests[room] = _Request(asyncio.get_running_loop().call_later(KEPT_S, self._forget, room))
        return self._requests[room]

    def _forget(self, room: int) -> None:
        """Both halves have it, or the other one does not come."""
        request = self._requests.pop(room, None)
        if request is None:
            return
        request.forgetting.cancel()
        if not request.begun:
            request.answered.set()


async def _taken(call: Call) -> tuple[int | None, dict[str, Any]]:
    """The number of a half, None for what is none, and its body without what the router has added."""
    body = await call.json()
    if not isinstance(body, dict):
        return None, {}
    room = body.get(_FIELDS[-1])
    if isinstance(room, list):  # of a batch, one for each prompt
        room = room[0] if room else None
    if not isinstance(room, int):
        return None, {}
    return room, {name: value for name, value in body.items() if name not in _FIELDS}
