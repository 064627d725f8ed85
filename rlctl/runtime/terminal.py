"""Commands at a terminal: a time limit for blocking code, and output to a stream that has been closed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN


@contextlib.contextmanager
def time_limit(seconds: float | None, doing: str) -> Iterator[None]:
    """Raise DEADLINE_EXCEEDED in the block after ``seconds``. No limit if None, or outside of the main thread."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Reason.DEADLINE_EXCEEDED.error(
            f"{doing} took longer than {seconds:g} s",
            outcome=OUTCOME_UNKNOWN,
            next_step="Give a longer --timeout. `rlctl doctor` shows what does not answer.",
        )

    handler = signal.signal(signal.SIGALRM, expired)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def discard_unwritten(stream: TextIO) -> None:
    """Discard output that a closed stream refuses. Otherwise Python repeats the write at exit, and exits with 120."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as null_device:
            os.dup2(null_device.fileno(), stream.fileno())
