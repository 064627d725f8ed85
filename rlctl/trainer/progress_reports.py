"""Reports of an update's progress to a function of the trainer, or to the terminal.

The coordinator knows the phases and the answers of the stages, and this process its bytes. Both are read, and nothing
in the update waits for a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable

from rlctl.client.admin import AsyncAdmin
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged
from rlctl.runtime.progress_line import ProgressLine, at_terminal, size
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.update_progress import DONE, PhaseNow, UpdateProgress
from rlctl.trainer.weights_pass import in_thread
from rlctl.v1.results_pb2 import Operation

log = logging.getLogger(__name__)

OnProgress = Callable[[UpdateProgress], object]

EVERY_S = 0.25
"""Least time between two reports."""

READ_S = 0.5
"""Time between two reads of the operation at the coordinator."""

LAST_S = 2.0
"""Longest time for which an update that has ended waits for a call that has not returned."""


def refuse_unusable(progress: OnProgress | bool | None) -> None:
    """Raise FIELD_INVALID unless ``progress`` is a plain function, a bool or None."""
    if progress is None or isinstance(progress, bool):
        return
    if not callable(progress):
        raise Reason.FIELD_INVALID.error(f"progress is {progress!r}, neither a function nor a bool", field="progress")
    if inspect.iscoroutinefunction(progress):
        raise Reason.FIELD_INVALID.error(
            "progress is a coroutine function; it is called in a thread without an event loop",
            field="progress",
            next_step="Pass a plain function, which may call loop.call_soon_threadsafe.",
        )


@contextlib.asynccontextmanager
async def reporting(
    fleet: AsyncAdmin | None, progress: OnProgress | bool | None, state: UpdateState, *, model: str, version: str
) -> AsyncIterator[Callable[[Operation], None]]:
    """Report the progress of the update in the block. Yields the function for the operation of a served version.

    Trainer ranks other than 0 report nothing: ``fleet`` is None.
    """
    if fleet is None or not progress or (progress is True and not at_terminal()):
        yield lambda _: None
        return
    calls = _Calls(_Terminal() if progress is True else progress)
    reports = _Reports(fleet, calls, UpdateProgress("", model, version, "", 0.0, 0, 0, 0, 0, 1, 0), state)
    tasks = [asyncio.create_task(reports.read()), asyncio.create_task(reports.report(always=progress is True))]
    try:
        yield reports.end
    finally:
        for task in tasks:
            task.cancel()
        await calls.close()


class _Calls:
    """Calls a function in a thread, with the latest report only: reports that arrive during a call are replaced."""

    def __init__(self, call: OnProgress) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._report: UpdateProgress | None = None
        self._closed = False
        self._has_failed = False
        _, self._ended = in_thread(self._run, lambda: None, "rlctl progress")

    def put(self, report: UpdateProgress) -> None:
        with self._changed:
            self._report = report
            self._changed.notify()

    async def close(self) -> None:
        """End the calls after the last report. No call begins after the return."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.wait({self._ended}, timeout=LAST_S)
        with self._changed:
            self._report = None
        if not self._ended.done():
            log.warning("the progress function has not returned %g s after the end of the update", LAST_S)

    def _run(self) -> None:
        while (report := self._next()) is not None:
            try:
                self._call(report)
            except BaseException as error:  # the trainer's function does not disturb the update
                if not self._has_failed:
                    log.warning("the progress function has failed; further failures are not logged", exc_info=error)
                self._has_failed = True
        if isinstance(self._call, _Terminal):
            self._call.close()

    def _next(self) -> UpdateProgress | None:
        with self._changed:
            self._changed.wait_for(lambda: self._report is not None or self._closed)
            report, self._report = self._report, None
            return report


class _Reports:
    """Makes the reports of an update from the operation at the coordinator and the state at this rank."""

    def __init__(self, fleet: AsyncAdmin, calls: _Calls, last: UpdateProgress, state: UpdateState) -> None:
        self._fleet = fleet
        self._calls = calls
        self._last = last
        self._state = state
        self._started = time.monotonic()
        self._phase = PhaseNow()

    async def read(self) -> None:
        """Read the operation again and again."""
        while True:
            if self._state.update_id:
                with contextlib.suppress(RlctlError):  # not accepted yet, or unreachable
                    self._phase = PhaseNow.of(await self._fleet.operation(self._state.update_id))
            await asyncio.sleep(READ_S)

    async def report(self, *, always: bool) -> None:
        """Report each change, or always, at most every EVERY_S."""
        while True:
            report = self._now()
            if always or dataclasses.replace(report, elapsed_s=self._last.elapsed_s) != self._last:
                self._last = report
                self._calls.put(report)
            await asyncio.sleep(EVERY_S)

    def end(self, operation: Operation) -> None:
        """Report the operation of a served version."""
        results = operation.stage_results
        confirmed = sum(acknowledged(result, update=True) for result in results)
        self._phase = PhaseNow(DONE, confirmed, len(operation.targets))
        self._calls.put(self._now())

    def _now(self) -> UpdateProgress:
        phase, count = self._phase, self._state.count
        # A stage answers for each shared segment, and is done after the last.
        sending = phase.name == "transfer" and count.sent < count.total
        return dataclasses.replace(
            self._last,
            update_id=self._state.update_id,
            phase=phase.name,
            elapsed_s=time.monotonic() - self._started,
            stages_done=0 if sending else phase.done,
            stages_total=phase.total,
            bytes_sent=count.sent,
            bytes_total=count.total,
            attempt=self._state.attempt,
            batch=self._state.batch,
        )


class _Terminal:
    def __init__(self) -> None:
        self._line = ProgressLine()

    def __call__(self, report: UpdateProgress) -> None:
        if report.bytes_sent < report.bytes_total:
            self._line.show(text(report), report.bytes_sent, report.bytes_total)
        else:
            self._line.show(text(report), report.stages_done, report.stages_total)

    def close(self) -> None:
        self._line.close()


def text(report: UpdateProgress) -> str:
    """Return a text such as ``step-4: 12 s; transfer, 0 of 3 stages, 1.5 GB of 3 GB; attempt 2``."""
    parts = [f"{report.phase}, {report.stages_done} of {report.stages_total} stages"]
    if not report.stages_total:
        parts = [report.phase]
    if report.bytes_total:
        parts.append(f"{size(report.bytes_sent)} of {size(report.bytes_total)}")
    repeats = f"; attempt {report.attempt}" if report.attempt > 1 else ""
    batch = f"; batch {report.batch}" if report.batch else ""
    return f"{report.version}: {report.elapsed_s:.0f} s; {', '.join(parts)}{batch}{repeats}"
