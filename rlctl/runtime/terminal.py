"""Commands at a terminal: a time limit for blocking code, and output to a stream that has been closed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

AGAIN_S = 0.5
"""Seconds until a time limit is raised again in a block that has caught it, for example as the error of a call."""


@contextlib.contextmanager
def time_limit(seconds: float | None, doing: str) -> Iterator[None]:
    """Raise DEADLINE_EXCEEDED in the block after ``seconds``. No limit if None, or outside of the main thread.

    The error is raised again until it leaves the block, but not in the handlers that it runs there.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: RlctlError | None = None
    over = False

    def expired(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        del number, frame
        if over or (raised is not None and _is_handled(raised)):
            return
        raised = Reason.DEADLINE_EXCEEDED.error(
            f"{doing} took longer than {seconds:g} s",
            outcome=OUTCOME_UNKNOWN,
            next_step="Give a longer --timeout. `rlctl doctor` shows what does not answer.",
        )
        raise raised

    handler = signal.signal(signal.SIGALRM, expired)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _is_handled(error: BaseException) -> bool:
    """Return True while a handler of the error runs, or of an error in such a handler."""
    current = sys.exc_info()[1]
    while current is not None and current is not error:
        current = current.__context__
    return current is not None


def discard_unwritten(stream: TextIO) -> None:
    """Discard output that a closed stream refuses. Otherwise Python repeats the write at exit, and exits with 120."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as null_device:
            os.dup2(null_device.fileno(), stream.fileno())
