"""Shields accepted work from the disconnect of its caller, and lets the work see the disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from rlctl.ports import CALLER, Caller

T = TypeVar("T")


async def answer(work: Coroutine[Any, Any, T], *, cancellable: bool = False) -> T:
    """Return the answer to one call.

    Cancelled when the caller disconnects: ``work`` then goes on, unless ``cancellable`` (generation). A deadline at the
    caller thus never leaves a half-applied command behind.
    """
    caller = Caller()
    CALLER.set(caller)
    task = asyncio.ensure_future(work)
    try:
        return await (task if cancellable else shielded(task))
    except asyncio.CancelledError:
        caller.left.set()
        raise


def shielded(task: asyncio.Task[T]) -> Awaitable[T]:
    """Await a task that goes on when the waiter is cancelled."""
    return asyncio.shield(task)
