"""Work beside generation: what a command leaves to a thread of its own, so that the engine's steps go on meanwhile.

A rank has one such thread. Commands reach it when the step stream does, so the threads of all ranks do the same things
in the same order and may wait for each other (:attr:`rlctl_torch.steps.collectives.Ranks.aside`). Two kinds of work
come here: what fills a shadow copy, and what reads the weights that serve, to digest or to send them. Whatever is about
to change those weights stops the second kind first.
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

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.weights.tensor.work import Stop
from rlctl_torch.steps.collectives import Broken
from rlctl_torch.steps.heap import give_back

log = logging.getLogger(__name__)

REST_S = 1.0
"""How long memory rests before it is freed. A gigabyte takes a tenth of a second of a core, which after a swap has more
urgent things to do: the pause of a fleet was ten times as long."""

END_S = 30.0
"""How long memory that is to be freed waits for whoever still reads it."""

Settle = Callable[[Message | None, RlctlError | None], None]


@dataclass(frozen=True)
class Later:
    """What an action returns whose work goes on beside generation. Its command is answered when the work has ended.

    Attributes:
        work: what is to be done; ENGINE_FAILED answers for what raises no RlctlError.
        stop: what it heeds, if it reads the weights that serve.
    """

    work: Callable[[], Message | None]
    stop: Stop | None = None


class Beside:
    """The thread, which starts with the first work. Its methods belong to the engine thread, :meth:`close` to any."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._spare: list[torch.Tensor] = []
        self._readers: list[tuple[Stop, threading.Event]] = []

    def do(self, later: Later, settle: Settle) -> None:
        """Do some work once what was asked for earlier is done, and answer with what comes of it."""
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
            settle(answer, failure)

        self._put(work)

    def stop(self, cause: RlctlError) -> None:
        """Let whatever reads the weights that serve end with this; it may go on reading for a moment."""
        for stop, _ in self._readers:
            stop.set(cause)

    def end(self, cause: RlctlError) -> None:
        """As :meth:`stop`, and wait until nothing reads the weights that serve any more. Raises ENGINE_WEDGED."""
        self.stop(cause)
        for _, ended in self._readers:
            if not ended.wait(END_S):
                raise Reason.ENGINE_WEDGED.error("work on the weights did not end when it was told to")

    def let_go(self, memory: list[torch.Tensor]) -> None:
        """Take tensors over and free them: in a moment, or before the next work."""

        def take_over() -> None:
            self._spare.extend(memory)
            memory.clear()

        self._put(take_over)

    def close(self) -> None:
        """End the thread after what it is at and what waits; returns at once."""
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
                # It belongs to the stream of the steps: nothing that this thread has enqueued may still write into it.
                torch.cuda.current_stream().synchronize()
            while self._spare:
                self._spare.pop()
            give_back(self._device)
