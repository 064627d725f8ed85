"""Work on the weights beside generation: it reads them on helper threads, while steps go on.

Every rank starts a piece of work at the same step, so that all do the same work in the same order; the ranks exchange
over a group that nothing else uses. Whatever is about to change the weights stops it first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from google.protobuf.message import Message

from rlctl.errors import Reason, RlctlError
from rlctl.weights.digest import Stop

log = logging.getLogger(__name__)

END_S = 30.0
"""How long memory that is to be freed waits for whoever still reads it."""


class Beside:
    """The pieces of work of one rank, one after the other. Its methods belong to the engine thread."""

    def __init__(self) -> None:
        self._jobs: dict[Future[Message | None], Stop] = {}
        self._last: Future[Message | None] | None = None

    def start(self, work: Callable[[], Message | None], stop: Stop) -> Future[Message | None]:
        """Do a piece of work once the earlier ones have ended; ``stop`` is what it heeds.

        The future has what the work returns or raises; ENGINE_FAILED for what is no RlctlError.
        """
        future: Future[Message | None] = Future()
        before, self._last = self._last, future
        self._jobs = {job: earlier for job, earlier in self._jobs.items() if not job.done()} | {future: stop}
        # A daemon: work that hangs keeps the interpreter from nothing.
        threading.Thread(target=_run, args=(work, future, before), name="rlctl beside", daemon=True).start()
        return future

    def stop(self, cause: RlctlError) -> None:
        """Let everything that is under way end with this; it may go on reading for a moment."""
        for stop in self._jobs.values():
            stop.set(cause)

    def end(self, cause: RlctlError) -> None:
        """As :meth:`stop`, and wait until nothing reads the weights any more. Raises ENGINE_WEDGED."""
        self.stop(cause)
        for job in self._jobs:
            try:
                job.exception(END_S)
            except TimeoutError:
                raise Reason.ENGINE_WEDGED.error("work on the weights did not end when it was told to") from None


def _run(
    work: Callable[[], Message | None], future: Future[Message | None], before: Future[Message | None] | None
) -> None:
    if before is not None:
        before.exception()
    try:
        future.set_result(work())
    except RlctlError as error:
        future.set_exception(error)
    except Exception as error:
        log.exception("work on the weights failed")
        future.set_exception(Reason.ENGINE_FAILED.error(f"{type(error).__name__}: {error}"))
