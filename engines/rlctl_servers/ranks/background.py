"""A thread of a rank for work that must not delay the engine's steps: fill a shadow copy, digest it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from rlctl.contract.errors import RlctlError, without_frames

log = logging.getLogger(__name__)

Work = Callable[[], bytes]


class Background:
    """The thread, started with the first work. Work is done in the order of :meth:`submit`.

    All ranks of a server get their calls in the same order, so work may wait for the same work of the other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A rank has one mutating command at a time, and each submits a few works.
        self._queue: queue.SimpleQueue[tuple[Work, Future[bytes]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Future[bytes]:
        """Run work after all work that was submitted before."""
        future: Future[bytes] = Future()
        self._queue.put((work, future))
        if self._thread is None:
            # A daemon: a broadcast that never ends must not keep the engine's process.
            self._thread = threading.Thread(target=self._run, name="rlctl-background", daemon=True)
            self._thread.start()
        return future

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Copies would otherwise queue up between the kernels of the engine's steps.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        while True:
            work, future = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                if not isinstance(error, RlctlError):
                    log.exception("rlctl: work in the background")
                future.set_exception(without_frames(error))  # the frames refer to a shadow copy
            del work, future  # these refer to a shadow copy too
