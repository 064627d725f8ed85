"""Jobs on a thread that the end of the process does not wait for."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from rlctl.weights.ordered_thread import OrderedThread

WAITING = """
import threading
from rlctl.weights.ordered_thread import OrderedThread
OrderedThread("job").submit(threading.Event().wait)
"""


def test_the_end_of_a_process_does_not_wait_for_a_job() -> None:
    """A trainer that ends must not wait for ranks that do not come to its broadcast, or do not read its segments."""
    assert subprocess.run([sys.executable, "-c", WAITING], timeout=60, check=False).returncode == 0


def test_jobs_run_in_order_and_their_errors_are_raised_where_they_are_awaited() -> None:
    thread, ended = OrderedThread("jobs"), list[int]()
    jobs = [thread.submit(lambda number=number: ended.append(number)) for number in range(100)]  # type: ignore[misc]
    failing = thread.submit(lambda: [][0])
    after = thread.submit(lambda: ended.append(100))
    for job in jobs:
        job.result(10)
    with pytest.raises(IndexError):
        failing.result(10)
    after.result(10)
    assert ended == list(range(101))
    thread.shutdown()


def test_a_shutdown_waits_for_the_present_job_and_cancels_the_rest() -> None:
    thread, begun, may_end = OrderedThread("jobs"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)

    present, queued = thread.submit(work), thread.submit(lambda: None)
    begun.wait(10)
    threading.Timer(0.1, may_end.set).start()
    thread.shutdown()
    assert present.done()
    with pytest.raises(CancelledError):
        queued.result(0)
    OrderedThread("idle").shutdown()
