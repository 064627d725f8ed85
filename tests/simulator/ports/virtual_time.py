"""Virtual time, and processes that can be killed and stopped: an event loop for each, run one round at a time.

A killed process never runs again, without any cleanup, as with SIGKILL. A stopped process runs its due calls when it
continues, as with SIGSTOP. Each process counts its monotonic time from its own zero, and has its own source of
randomness. A request to one process therefore does not change the draws of other processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import random
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import RlctlError

T = TypeVar("T")

CLOSING_ROUNDS = 20

MOST_CALLS = 1000
"""Most calls of one turn, so that an endless process does not stop time."""

KEPT = 1000
"""Ended tasks that are kept before a cleanup."""

EPOCH_S = 1_800_000_000
"""Wall time at the start of every simulation."""

SUSPENDED_S = 1e6
"""Time that each host was suspended before the start. A comparison of ``uptime`` with ``now`` is then wrong by days."""

ROUND_S = 1e-7
"""Duration of one round of an event loop, so that waits within a rounding error of now end."""


class Handle:
    """A call that is due at some time, or now; cancellable until then."""

    __slots__ = ("arguments", "context", "function")

    def __init__(
        self,
        function: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.context = context

    def cancel(self) -> None:
        self.function = None
        self.arguments = ()


_Call = tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]
"""A call that is never cancelled, like most: the steps of tasks, and the messages."""

_Due = Handle | _Call
_Timer = tuple[float, int, "NodeLoop", _Due]
"""Time, number, loop, call."""


class NodeLoop(asyncio.AbstractEventLoop):
    """An event loop on the world's time, for tasks, futures, timeouts, locks and queues only.

    All timers of the world are in one heap, so that the next timer is found without asking every process.
    """

    def __init__(self, world: World, node: Node, offset: float) -> None:
        self._world = world
        self._node = node
        self._offset = offset
        self.ready: deque[_Due] = deque()
        self.queued = False
        """Whether this loop is in the world's queue, or has its turn."""
        self.missed: list[_Timer] = []
        """Timers that ran out while the process was stopped."""

    def time(self) -> float:
        """Return this process's monotonic clock, seconds."""
        return self._world.now + self._offset

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle | None:
        """Call in the next round. With a context, passed only by tasks and futures, there is nothing to cancel."""
        if context is None:
            handle = Handle(callback, args, None)
            self.put(handle)
            return handle
        self.ready.append((callback, args, context))
        if not self.queued:
            self.wake()
        return None

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context)
        self._world.schedule(self._world.now + delay, self, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context)
        self._world.schedule(when - self._offset, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        # A task without a name gets a number, at the cost of the rest.
        task = asyncio.Task(coro, loop=self, name=name or self._node.name, context=context)
        self._world.keep(task)
        return task

    get_debug = staticmethod(bool)
    """Never in debug mode. Every future asks, and this is the fastest way to return False."""

    def is_running(self) -> bool:
        """Return True during a round."""
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        self._node.defect(context)

    def put(self, due: _Due) -> None:
        self.ready.append(due)
        if not self.queued:
            self.wake()

    def wake(self) -> None:
        """Queue a turn, unless the process is dead, stopped or already queued."""
        if not self.queued and self._node.alive and not self._node.stopped:
            self.queued = True
            self._world.awake.append(self)

    def ring(self, timer: _Timer) -> None:
        """Queue the call of an expired timer, or keep it for a stopped process."""
        due, node = timer[3], self._node
        if not node.alive or (type(due) is Handle and due.function is None):
            return
        if node.stopped:
            self.missed.append(timer)
        else:
            self.put(due)

    def turn(self) -> None:
        """Run due calls, up to MOST_CALLS."""
        ready, node = self.ready, self._node
        asyncio._set_running_loop(self)
        for _ in range(MOST_CALLS):
            if not ready or not node.alive:
                break
            due = ready.popleft()
            if isinstance(due, tuple):
                function, arguments, context = due
            elif due.function is not None:
                function, arguments, context = due.function, due.arguments, due.context
            else:
                continue
            try:
                if context is None:
                    function(*arguments)
                else:
                    context.run(function, *arguments)
            except Exception as error:  # noqa: BLE001 - as any event loop: it is told, and the loop goes on
                self.call_exception_handler({"message": f"in {function!r}", "exception": error})
        self.queued = False
        if ready:
            self.wake()


class Node:
    """A process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.host = name.partition("/")[0]
        """The host of the process: the first part of its name."""
        self.random = world.chance(name)
        self.alive = True
        self.stopped = False
        self.stops = 0
        self.slow = 0.0
        """Largest additional latency of the process's messages, seconds."""
        self.loop = NodeLoop(world, self, self.random.uniform(1.0, 1e6))  # type: ignore[abstract]
        self.at_end: list[Callable[[], None]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def later(self, delay: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the process after some seconds; no call if the process is dead by then."""
        world = self.world
        world.schedule(world.now + delay, self.loop, (function, arguments, None))

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.alive = False
            self.world.sleeps(self.loop)
            for function in self.at_end:
                function()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.stops += 1
        self.world.sleeps(self.loop)

    def go_on(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.stopped = False
            self.world.wakes(self.loop)

    def defect(self, context: Mapping[str, Any]) -> None:
        """Record an uncaught exception."""
        if self.alive and not self.world.closed:
            error = context.get("exception")
            where = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
            lines = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(where))
            what = error or context.get("task")
            self.world.defects.append(f"{self.name}: {context['message']}: {what!r} at {lines}")


class World:
    """All state of a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.nodes: list[Node] = []
        self.turns = 0
        self.closed = False
        self.defects: list[str] = []
        """Uncaught exceptions."""
        self.awake: deque[NodeLoop] = deque()
        """Loops of running processes with due calls."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._kept = KEPT
        self._timers: list[_Timer] = []
        self._scheduled = 0
        self._ids = 0
        self.timer = self.spawn("time")
        """The process without faults, for events at a given time."""

    def chance(self, of: str) -> random.Random:
        """Return a source of randomness for one purpose. Depends only on the seed and its name."""
        return random.Random(zlib.crc32(of.encode()) << 32 | self.seed)

    def spawn(self, name: str) -> Node:
        node = Node(self, name)
        self.nodes.append(node)
        return node

    def schedule(self, when: float, loop: NodeLoop, due: _Due) -> None:
        self._scheduled += 1
        heapq.heappush(self._timers, (when, self._scheduled, loop, due))

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until its end: nothing else may hold a task of a killed process."""
        self._tasks.append(task)
        if len(self._tasks) > self._kept:
            self._tasks = [task for task in self._tasks if not task.done() or _unheard(task)]
            self._kept = len(self._tasks) + KEPT

    def sleeps(self, loop: NodeLoop) -> None:
        """Dequeue a process that runs no more."""
        if loop in self.awake:
            self.awake.remove(loop)
            loop.queued = False

    def wakes(self, loop: NodeLoop) -> None:
        """Queue a process that runs again, with its missed timers."""
        if loop.ready:
            loop.wake()
        for timer in loop.missed:
            heapq.heappush(self._timers, timer)
        loop.missed.clear()

    def run(self, until: float) -> None:
        timers, awake = self._timers, self.awake
        while True:
            while timers and timers[0][0] <= self.now:
                timer = heapq.heappop(timers)
                timer[2].ring(timer)
            if not awake:
                if not timers or timers[0][0] > until:
                    break
                self.now = max(self.now, timers[0][0])
                continue
            loop = awake.popleft()
            self.turns += 1
            self.now += ROUND_S
            loop.turn()
        asyncio._set_running_loop(None)
        self.now = max(self.now, until)

    def new_id(self) -> str:
        """A UUIDv7 from the virtual wall clock."""
        self._ids += 1
        value = int((EPOCH_S + self.now) * 1000) << 80 | self._ids << 32 | zlib.crc32(b"%d" % self._ids)
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        digits = f"{value:032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def new_key(self) -> bytes:
        """Return 16 bytes that have not been a key yet."""
        return hashlib.md5(self.new_id().encode()).digest()

    def find_unheard(self) -> None:
        """Report tasks that failed with a defect that no caller has retrieved.

        The garbage collector reports only unreferenced tasks. A typed error is the answer to a caller that has
        disconnected.
        """
        for task in filter(_unheard, self._tasks):
            error = task.exception()
            if not isinstance(error, RlctlError):
                message = "nobody has asked what a task has failed with"
                task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})

    def close(self) -> None:
        """Cancel all remaining work of each process and clear the world.

        Otherwise the garbage collector would end coroutines outside their loop.
        """
        self.closed = True
        for node in self.nodes:
            node.alive, node.stopped = True, False
        for _ in range(CLOSING_ROUNDS):
            pending = [task for task in self._tasks if not task.done()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            for node in self.nodes:
                node.loop.turn()
        asyncio._set_running_loop(None)
        self._timers.clear()
        self.nodes.clear()


def _unheard(task: asyncio.Task[Any]) -> bool:
    """Return True if a task has failed and its error was not retrieved."""
    return task.done() and task._log_traceback


class SimClock:
    """The Clock port in a process."""

    def __init__(self, node: Node) -> None:
        self._world = node.world
        self.now = node.loop.time

    def uptime(self) -> float:
        return self.now() + SUSPENDED_S

    def wall(self) -> Timestamp:
        nanoseconds = int(self._world.now * 1e9)
        return Timestamp(seconds=EPOCH_S + nanoseconds // 10**9, nanos=nanoseconds % 10**9)

    def new_id(self) -> str:
        return self._world.new_id()

    def new_key(self) -> bytes:
        return self._world.new_key()
