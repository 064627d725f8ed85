"""Virtual time, and processes that can be killed and stopped: an event loop for each, run one round at a time.

A process that is killed simply never runs again: nothing of it is cleaned up, as with SIGKILL. One that is stopped runs
what is due when it is let go on, as with SIGSTOP. Which of several processes that could run goes first is drawn from
the seed. Each process counts its monotonic time from a zero of its own.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import traceback
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

CLOSING_ROUNDS = 20

EPOCH_S = 1_800_000_000
"""Wall time at which every simulation starts."""


class _Nothing:
    """A selector without files."""

    def select(self, timeout: float | None) -> list[Any]:
        """Nothing is ever ready."""
        del timeout
        return []


class NodeLoop(asyncio.BaseEventLoop):
    """An event loop on the world's time. It rests on three private members of CPython's BaseEventLoop, ``_ready``,
    ``_scheduled`` and ``_run_once``, which have been the same since 3.4.
    """

    _ready: Any
    _scheduled: Any
    _run_once: Any
    _timer_cancelled_count: int

    def __init__(self, world: World, offset: float) -> None:
        super().__init__()
        self._world = world
        self._offset = offset
        self._selector = _Nothing()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """This process's monotonic clock, seconds."""
        return self._world.now + self._offset

    def due(self) -> float:
        """When there is something to do, in the world's time; infinity: never."""
        if self._ready:
            return self._world.now
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        return self._scheduled[0]._when - self._offset if self._scheduled else float("inf")

    def turn(self) -> None:
        """Run what is due once."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Node:
    """A process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.stopped = False
        self.stops = 0
        self.loop = NodeLoop(world, world.random.uniform(1.0, 1e6))
        self.loop.set_exception_handler(self._defect)
        self.at_end: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process."""
        task = self.loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def later(self, delay: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the process, some seconds from now; it never happens if the process is gone by then."""
        self.loop.call_at(self.loop.time() + delay, function, *arguments)

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.alive = False
            for function in self.at_end:
                function()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.stops += 1

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False

    def _defect(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.alive:
            error = context.get("exception")
            where = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
            lines = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(where))
            what = error or context.get("task")
            self.world.defects.append(f"{self.name}: {context['message']}: {what!r} at {lines}")


class World:
    """Everything that one seed consists of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.nodes: list[Node] = []
        self.turns = 0
        self.defects: list[str] = []
        """Exceptions that nobody caught."""
        self._ids = 0

    def spawn(self, name: str) -> Node:
        """Start a process."""
        node = Node(self, name)
        self.nodes.append(node)
        return node

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let the processes run until a time, or until ``stop()``."""
        while not stop():
            due, ready = float("inf"), []
            for node in self.nodes:
                if node.alive and not node.stopped:
                    at = node.loop.due()
                    if at < due - 1e-12:
                        due, ready = at, [node]
                    elif at <= due + 1e-12 and at != float("inf"):
                        ready.append(node)
            if due > until or not ready:
                break
            self.now = max(self.now, due)
            node = ready[0] if len(ready) == 1 else self.random.choice(ready)
            self.turns += 1
            node.loop.turn()
        if not stop():
            self.now = max(self.now, until)

    def new_id(self) -> str:
        """A UUIDv7 from the virtual wall clock."""
        self._ids += 1
        value = int((EPOCH_S + self.now) * 1000) << 80 | self._ids << 40 | self.random.getrandbits(30)
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        return str(uuid.UUID(int=value))

    def close(self) -> None:
        """Let everything go. What is left of each process is cancelled first: no coroutine may be torn down by the
        garbage collector, outside of its loop.
        """
        for node in self.nodes:
            node.alive = False
        for _ in range(CLOSING_ROUNDS):
            pending = [node for node in self.nodes if any(not task.done() for task in asyncio.all_tasks(node.loop))]
            if not pending:
                break
            for node in pending:
                for task in asyncio.all_tasks(node.loop):
                    task.cancel()
                for _ in range(3):
                    node.loop.call_soon(lambda: None)
                    node.loop.turn()
        for node in self.nodes:
            node.loop.close()


class SimClock:
    """The Clock port in a process."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def now(self) -> float:
        """The process's monotonic seconds."""
        return self._node.loop.time()

    def wall(self) -> Timestamp:
        """The virtual wall time."""
        stamp = Timestamp()
        stamp.FromNanoseconds(int((EPOCH_S + self._node.world.now) * 1e9))
        return stamp

    def new_id(self) -> str:
        """A fresh UUIDv7."""
        return self._node.world.new_id()
