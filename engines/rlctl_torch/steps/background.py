"""Background work: the work of a command on a thread of its own, while the engine's steps continue.

A rank has one such thread. Commands reach the thread in the order of the step stream. So the threads of all ranks do
the same work in the same order and may wait for each other (:attr:`rlctl_torch.steps.collectives.Ranks.aside`). There
are two kinds of work: filling a shadow copy or an adapter, and reading the served weights, to digest or to send them. A
command that is about to change the served weights stops the second kind first.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.weights.tensor.work import Stop
from rlctl_torch.steps.collectives import Broken
from rlctl_torch.steps.heap import give_back

log = logging.getLogger(__name__)

REST_S = 1.0
"""Seconds before memory is freed. A gigabyte takes a tenth of a second of a core, which has more urgent work after a
swap: the pause of a fleet was ten times as long.
"""

END_S = 30.0
"""Seconds that a release of the weights waits for the end of reads of the weights."""

Settle = Callable[[Message | None, RlctlError | None], None]


@dataclass(frozen=True)
class Later:
    """Work of an action that continues in the background. The command is answered when the work has ended.

    Attributes:
        work: the work. An exception that is no error of the contract becomes ENGINE_FAILED.
        stop: stop flag, if the work reads the served weights.
    """

    work: Callable[[], Message | None]
    stop: Stop | None = None


class Beside:
    """Background thread, started with the first work. All methods belong to the engine thread, except :meth:`close`."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        # Each work belongs to a command under way, of which a coordinator has MOST_PENDING at most.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._spare: list[torch.Tensor] = []
        self._readers: list[tuple[Stop, threading.Event]] = []

    def do(self, later: Later, settle: Settle) -> None:
        """Queue work behind earlier work, and settle the command with the result."""
        ended = threading.Event()
        self._readers = [reader for reader in self._readers if not reader[1].is_set()]
        if later.stop is not None:
            self._readers.append((later.stop, ended))

        def work() -> None:
            try:
                answer, failure = later.work(), None
            except RlctlError as error:
                answer, failure = None, error
            except Broken as broken:
                answer, failure = None, broken.error
            except Exception as error:
                log.exception("work beside generation failed")
                answer = None
                failure = Reason.ENGINE_FAILED.error(f"{type(error).__name__}: {error}", outcome=OUTCOME_UNKNOWN)
            finally:
                ended.set()
            # The frames refer to a shadow copy, and to the error itself.
            settle(answer, None if failure is None else without_frames(failure))

        self._put(work)

    def stop(self, cause: RlctlError) -> None:
        """Stop reads of the served weights with this error. A read may continue for a moment."""
        for stop, _ in self._readers:
            stop.set(cause)

    def end(self, cause: RlctlError) -> None:
        """Stop reads of the served weights and wait for their end. Raises ENGINE_WEDGED."""
        self.stop(cause)
        for _, ended in self._readers:
            if not ended.wait(END_S):
                raise Reason.ENGINE_WEDGED.error("work on the weights did not end when it was told to")

    def let_go(self, memory: list[torch.Tensor]) -> None:
        """Take over tensors, to be freed a moment later or before the next work."""

        def take_over() -> None:
            self._spare.extend(memory)
            memory.clear()

        self._put(take_over)

    def close(self) -> None:
        """End the thread after its present and queued work; returns at once."""
        if self._thread is not None:
            self._queue.put(None)

    def _put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Copies would otherwise queue up between the kernels of the steps.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        while True:
            work: Callable[[], None] | None = self._free
            with contextlib.suppress(queue.Empty):
                work = self._queue.get(timeout=REST_S if self._spare else None)
            self._free()
            if work is None:
                return
            work()
            del work

    def _free(self) -> None:
        if self._spare:
            if self._device.type == "cuda":
                # The memory belongs to the stream of the steps: no enqueued work of this thread may still write there.
                torch.cuda.current_stream().synchronize()
            while self._spare:
                self._spare.pop()
            give_back(self._device)
