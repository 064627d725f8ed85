"""A progress line on the terminal while a command waits for an operation."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlctl.cli.app.settings import Settings
from rlctl.cli.render import timeline, values
from rlctl.contract.errors import RlctlError
from rlctl.runtime.progress_line import SILENT_S, ProgressLine, at_terminal
from rlctl.v1.common_pb2 import StageState
from rlctl.v1.fleet_pb2 import Fleet as FleetMessage
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import Operation

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet

EVERY_S = 0.5


@contextlib.contextmanager
def progress(settings: Settings, fleet: Fleet, operation_id: str) -> Iterator[None]:
    """Show the time of an operation, the number of answered stages and the states of the stages.

    The line goes to stderr and disappears at the end. No line is shown with --quiet, or if stderr is no terminal.
    """
    if settings.quiet or not at_terminal():
        yield
        return
    ended = threading.Event()
    started = time.monotonic()
    shown = ProgressLine(color=settings.color != "never")
    reading: list[concurrent.futures.Future[tuple[Operation, FleetMessage]]] = []

    async def read() -> tuple[Operation, FleetMessage]:
        return await fleet.aio.operation(operation_id), await fleet.aio.status()

    def show() -> None:
        if ended.wait(SILENT_S):
            return
        with contextlib.closing(shown):
            while True:
                with contextlib.suppress(RlctlError):  # not accepted yet, or unreachable: shown at the end
                    reading[:] = [fleet.loop.submit(read())]
                    if ended.is_set():
                        reading[0].cancel()
                    operation, status = fleet.loop.wait(reading[0])
                    words = line(operation, status.stages, time.monotonic() - started)
                    shown.show(words, *timeline.answered(operation))
                if ended.wait(EVERY_S):
                    return

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        for future in reading:
            future.cancel()  # a silent coordinator answers late
        thread.join()


def line(operation: Operation, stages: Iterable[Stage], waited_s: float) -> str:
    """Return a line such as ``WeightUpdate: 12 s, 0 of 3 stages answered; transfer 8.0s; READY 1, UPDATING 2``."""
    answer_count, targets = len(operation.stage_results), len(operation.targets)
    parts = [f"{operation.verb}: {waited_s:.0f} s, {answer_count} of {targets} stages answered"]
    return "; ".join([*parts, *timeline.running(operation), states(operation, stages)])


def states(operation: Operation, stages: Iterable[Stage]) -> str:
    """Return the states of the targets: ``READY 1, UPDATING 2``."""
    targets = set(operation.targets)
    counts = collections.Counter(
        values.name_of(StageState.DESCRIPTOR, stage.state) for stage in stages if stage.registration.slot in targets
    )
    return ", ".join(f"{state} {count}" for state, count in sorted(counts.items()))
