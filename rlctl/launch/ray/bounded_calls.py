"""Calls to the head of a Ray cluster within a time limit. Ray itself waits for a head that does not answer for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rlctl.contract.errors import Reason

CALL_S = 30.0
"""Seconds for a call."""

T = TypeVar("T")


def bounded(
    what: str, call: Callable[[], T], *, limit_s: float | None = None, undo: Callable[[T], object] = lambda _: None
) -> T:
    """Return the result of a call, made in a thread of its own.

    A late call goes on by itself. ``what``: what the caller waits for. ``limit_s``: None: CALL_S. ``undo``: call for a
    result that comes too late. Raises UNREACHABLE, and the errors of the call.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    lock, ended = threading.Lock(), threading.Event()
    given_up = False

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            errors.append(error)
        else:
            with lock:
                if not given_up:
                    results.append(result)
            if not results:
                undo(result)
        ended.set()

    threading.Thread(target=work, name=f"Ray: {what}", daemon=True).start()
    limit_s = CALL_S if limit_s is None else limit_s
    try:
        ended.wait(limit_s)
    finally:  # a signal may end the wait
        with lock:
            given_up = not results and not errors
    if given_up:
        raise Reason.UNREACHABLE.error(
            f"Ray's head has not answered for {limit_s:g} s: {what}",
            field="fleet.ray.address",
            next_step="`ray status` on its node shows whether it answers.",
        )
    if errors:
        raise errors[0]
    return results[0]
