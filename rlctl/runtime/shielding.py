"""Shields accepted work from the disconnect of its caller, and lets the work see the disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from rlctl.contract.errors import RlctlError
from rlctl.ports import CALLER, Caller

log = logging.getLogger(__name__)

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
        caller.disconnected.set()
        raise


def shielded(task: asyncio.Task[T]) -> Awaitable[T]:
    """Await a task that goes on when the waiter is cancelled.

    A refusal that nobody awaits any more is dropped, any other error is logged.
    """
    waiter = asyncio.shield(task)
    waiter.add_done_callback(lambda waiter: task.add_done_callback(_retrieve) if waiter.cancelled() else None)
    return waiter


def _retrieve(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, RlctlError):
        log.error("a call failed after its caller had disconnected", exc_info=error)
