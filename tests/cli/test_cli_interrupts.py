"""What an interrupt leaves behind must not block what comes after it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from rlctl.cli.app.connection import interruptible
from rlctl.contract.errors import DeadlineExceeded, Reason, RlctlError
from rlctl.runtime import event_loops, terminal
from rlctl.runtime.event_loops import LoopThread
from rlctl.runtime.terminal import time_limit
from rlctl.sdk.blocking import _Items


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("client under test")
    yield thread
    thread.stop()


def test_an_iteration_can_be_closed_while_a_step_that_was_interrupted_still_runs(loop: LoopThread) -> None:
    waiting, closed = threading.Event(), threading.Event()

    async def forever() -> AsyncIterator[int]:
        try:
            yield 1
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    items: _Items[int] = _Items(forever())
    assert loop.call(items.step()) == 1
    left_behind = loop.submit(items.step())
    assert waiting.wait(10)
    loop.submit(items.close()).result(10)
    assert closed.is_set()
    assert left_behind.cancelled()


def test_a_wait_in_pieces_ends_with_what_the_work_ends_with(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loops, "WAKE_S", 0.01)

    async def end(with_error: bool) -> str:
        await asyncio.sleep(0.1)
        if with_error:
            raise TimeoutError("its own")
        return "done"

    assert loop.call(end(False)) == "done"
    with pytest.raises(TimeoutError, match="its own"):
        loop.call(end(True))


@pytest.mark.usefixtures("default_signals")
def test_an_interrupt_says_farewell_once_and_restores_the_handlers() -> None:
    said = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible(lambda: said.append("farewell")):
        signal.raise_signal(signal.SIGINT)
    assert said == ["farewell"]
    assert signal.getsignal(signal.SIGINT) is before


def test_termination_exits_with_143_after_the_farewell() -> None:
    said = []
    with pytest.raises(SystemExit) as end, interruptible(lambda: said.append("farewell")):
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143
    assert said == ["farewell"]


def test_a_time_limit_ends_what_blocks_and_leaves_the_timer_as_it_was() -> None:
    handler, (remaining, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(DeadlineExceeded, match=r"waiting took longer than 0.05 s"), time_limit(0.05, "waiting"):
        threading.Event().wait(10)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(remaining, abs=5)
    with time_limit(None, "nothing"):
        assert signal.getsignal(signal.SIGALRM) is handler


def test_a_time_limit_that_is_caught_inside_is_raised_again() -> None:
    """A call to the coordinator that fails is tried again, and the limit may have been its error."""

    def wait_twice() -> None:
        with contextlib.suppress(RlctlError):
            threading.Event().wait(10)
        threading.Event().wait(10)

    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"waiting took longer than 0.05 s"), time_limit(0.05, "waiting"):
        wait_twice()
    assert time.monotonic() - began < 9


def test_a_time_limit_does_not_interrupt_what_ends_after_it() -> None:
    ended = []

    def wait() -> None:
        try:
            threading.Event().wait(10)
        finally:
            ended.append(threading.Event().wait(3 * terminal.AGAIN_S))

    with pytest.raises(DeadlineExceeded), time_limit(0.05, "waiting"):
        wait()
    assert ended == [False]


def test_what_is_interrupted_has_ended_when_the_interrupt_is_raised(loop: LoopThread) -> None:
    began, ended = threading.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)  # an update that is given up tells the coordinator so
            ended.append(True)

    def interrupt() -> None:
        assert began.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            loop.call(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_nobody_waits_for_a_loop_that_has_ended(loop: LoopThread) -> None:
    async def nothing() -> None: ...

    loop.loop.call_soon_threadsafe(loop.loop.stop)  # as when another thread stops it meanwhile
    for _ in range(2):
        with pytest.raises(RlctlError) as caught:
            loop.call(nothing())
        assert caught.value.reason is Reason.CANCELLED
        loop._thread.join()
    loop.finish(nothing())


def test_an_iteration_may_be_collected_on_the_loops_own_thread(loop: LoopThread) -> None:
    ended = threading.Event()

    async def close() -> None:
        ended.set()

    async def collect() -> None:
        loop.finish(close())  # would wait for itself

    loop.submit(collect()).result(10)
    assert ended.wait(10)


def test_a_loop_that_was_stopped_may_still_be_told_of_what_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC does, which logs an error where it is closed; it is closed once others are stopped later."""
    first = LoopThread("first")
    first.stop()
    first.loop.call_soon_threadsafe(lambda: None)
    with pytest.raises(RlctlError):
        first.call(asyncio.sleep(0))
    monkeypatch.setattr(event_loops, "CLOSED_AFTER_S", 0.0)
    LoopThread("second").stop()
    assert first.loop.is_closed()
