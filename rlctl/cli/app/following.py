"""Commands that follow a fleet through restarts of the coordinator, and end by Ctrl-C or --timeout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, TypeVar

from rlctl.cli.app.connection import connected
from rlctl.cli.app.settings import Settings
from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.terminal import time_limit

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet

T = TypeVar("T")

AGAIN_S = 0.5


def follow(
    settings: Settings, read: Callable[[Fleet], Generator[T, None, None]], lost: Callable[[RlctlError], None]
) -> Generator[T, None, None]:
    """Yield the items of ``read``, which starts again after each loss of the coordinator.

    ``lost`` is called once for each loss. Before the first item all errors of ``read`` and the connection are raised,
    later every error but UNREACHABLE.
    """
    yielded, reported_loss = False, ""
    while True:
        try:
            with connected(settings) as fleet, contextlib.closing(read(fleet)) as items:
                for item in items:
                    yielded, reported_loss = True, ""
                    yield item
        except RlctlError as error:
            if not yielded or error.reason is not Reason.UNREACHABLE:
                raise
            if not reported_loss:
                lost(error)
            reported_loss = error.message
        time.sleep(AGAIN_S)


@contextlib.contextmanager
def watching(settings: Settings) -> Iterator[threading.Event]:
    """Let --timeout end the block: without an error if the event was set in the block."""
    deadline = None if settings.timeout_s is None else time.monotonic() + settings.timeout_s
    displayed = threading.Event()
    try:
        with time_limit(settings.timeout_s, "watching"):
            yield displayed
    except RlctlError as error:
        timed_out = error.reason is Reason.DEADLINE_EXCEEDED and deadline is not None and time.monotonic() >= deadline
        if not (timed_out and displayed.is_set()):
            raise
