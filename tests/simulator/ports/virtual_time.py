"""Virtual time, and processes that can be killed and stopped: an event loop for each, run one round at a time.

A process that is killed simply never runs again: nothing of it is cleaned up, as with SIGKILL. One that is stopped runs
what is due when it is let go on, as with SIGSTOP. Each process counts its monotonic time from a zero of its own, and
draws what befalls it from a source of its own: what one is asked to do leaves the others' luck alone.
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
"""Calls of one turn; who goes on for longer does not stop time."""

KEPT = 1000
"""Tasks that are held after they may have ended."""

EPOCH_S = 1_800_000_000
"""Wall time at which every simulation starts."""

ROUND_S = 1e-7
"""What one round of an event loop takes: somebody who waits for a time that is a rounding error away gets there."""


class Handle:
    """A call that is due at some time, or now, and may be cancelled until then."""

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
        """Let it not happen."""
        self.function = None
        self.arguments = ()


_Call = tuple[Callable[..., object], tuple[Any, ...], contextvars.Context | None]
"""One that nobody will cancel, as most are: the steps of tasks, and the messages."""

_Due = Handle | _Call
_Timer = tuple[float, int, "NodeLoop", _Due]
"""When, its number, where, what."""


class NodeLoop(asyncio.AbstractEventLoop):
    """An event loop on the world's time: what tasks, futures, timeouts, locks and queues need, and nothing else.

    All timers of the world are in one heap, so that the next one is found without asking every process.
    """

    def __init__(self, world: World, node: Node, offset: float) -> None:
        self._world = world
        self._node = node
        self._offset = offset
        self.ready: deque[_Due] = deque()
        self.queued = False
        """Whether it is among the world's loops that have something to do, or has its turn."""
        self.missed: list[_Timer] = []
        """Timers that ran out while the process was stopped."""

    def time(self) -> float:
        """This process's monotonic clock, seconds."""
        return self._world.now + self._offset

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle | None:
        """Call in the next round. With a context, which only tasks and futures pass, there is nothing to cancel."""
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
        """Call some seconds from now."""
        handle = Handle(callback, args, context)
        self._world.schedule(self._world.now + delay, self, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Call at a time of this loop's clock."""
        handle = Handle(callback, args, context)
        self._world.schedule(when - self._offset, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """A task of this loop."""
        # Without a name it would be given a number, which takes as long as the rest.
        task = asyncio.Task(coro, loop=self, name=name or self._node.name, context=context)
        self._world.keep(task)
        return task

    get_debug = staticmethod(bool)
    """Never. Every future asks, and this is the quickest way to say False."""

    def is_running(self) -> bool:
        """Whether a round is under way."""
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        """Never."""
        return False

    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        """An exception that nobody caught."""
        self._node.defect(context)

    def put(self, due: _Due) -> None:
        """It is due."""
        self.ready.append(due)
        if not self.queued:
            self.wake()

    def wake(self) -> None:
        """Have a turn, unless the process is dead or stopped, or has one anyway."""
        if not self.queued and self._node.alive and not self._node.stopped:
            self.queued = True
            self._world.awake.append(self)

    def ring(self, timer: _Timer) -> None:
        """A timer has run out."""
        due, node = timer[3], self._node
        if not node.alive or (type(due) is Handle and due.function is None):
            return
        if node.stopped:
            self.missed.append(timer)
        else:
            self.put(due)

    def turn(self) -> None:
        """Run what is due, until there is nothing or it has gone on for long."""
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
        """The machine that it runs on: the first part of its name."""
        self.random = world.chance(name)
        self.alive = True
        self.stopped = False
        self.stops = 0
        self.slow = 0.0
        """How much later what it sends may come, seconds."""
        self.loop = NodeLoop(world, self, self.random.uniform(1.0, 1e6))  # type: ignore[abstract]
        self.at_end: list[Callable[[], None]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process."""
        return self.loop.create_task(work)

    def later(self, delay: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the process, some seconds from now; it never happens if the process is gone by then."""
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
        """An exception that nobody caught."""
        if self.alive and not self.world.closed:
            error = context.get("exception")
            where = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
            lines = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(where))
            what = error or context.get("task")
            self.world.defects.append(f"{self.name}: {context['message']}: {what!r} at {lines}")


class World:
    """Everything that one seed consists of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.nodes: list[Node] = []
        self.turns = 0
        self.closed = False
        self.defects: list[str] = []
        """Exceptions that nobody caught."""
        self.awake: deque[NodeLoop] = deque()
        """Loops of running processes that have something to do now."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._kept = KEPT
        self._timers: list[_Timer] = []
        self._scheduled = 0
        self._ids = 0
        self.timer = self.spawn("time")
        """The process that nothing befalls: what is to happen at a time is put here."""

    def chance(self, of: str) -> random.Random:
        """A source of randomness for one thing, which depends on nothing but the seed and its name."""
        return random.Random(zlib.crc32(of.encode()) << 32 | self.seed)

    def spawn(self, name: str) -> Node:
        """Start a process."""
        node = Node(self, name)
        self.nodes.append(node)
        return node

    def schedule(self, when: float, loop: NodeLoop, due: _Due) -> None:
        """Let something be due at a time."""
        self._scheduled += 1
        heapq.heappush(self._timers, (when, self._scheduled, loop, due))

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task until it has ended: nothing else may hold one of a process that was killed."""
        self._tasks.append(task)
        if len(self._tasks) > self._kept:
            self._tasks = [task for task in self._tasks if not task.done() or _unheard(task)]
            self._kept = len(self._tasks) + KEPT

    def sleeps(self, loop: NodeLoop) -> None:
        """A process runs no more."""
        if loop in self.awake:
            self.awake.remove(loop)
            loop.queued = False

    def wakes(self, loop: NodeLoop) -> None:
        """A process runs again."""
        if loop.ready:
            loop.wake()
        for timer in loop.missed:
            heapq.heappush(self._timers, timer)
        loop.missed.clear()

    def run(self, until: float) -> None:
        """Let the processes run until a time."""
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
        """16 bytes that have not been a key yet."""
        return hashlib.md5(self.new_id().encode()).digest()

    def find_unheard(self) -> None:
        """Find tasks that failed with a defect which nobody has asked for. The garbage collector tells only of those
        that nobody holds either. A typed error is the answer to a caller that has left.
        """
        for task in filter(_unheard, self._tasks):
            error = task.exception()
            if not isinstance(error, RlctlError):
                message = "nobody has asked what a task has failed with"
                task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})

    def close(self) -> None:
        """Let everything go. What is left of each process is cancelled first: no coroutine may be torn down by the
        garbage collector, outside of its loop.
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
    """Whether a task has failed, and nobody has asked with what."""
    return task.done() and task._log_traceback


class SimClock:
    """The Clock port in a process."""

    def __init__(self, node: Node) -> None:
        self._world = node.world
        self.now = node.loop.time
        """The process's monotonic seconds."""

    def wall(self) -> Timestamp:
        """The virtual wall time."""
        nanoseconds = int(self._world.now * 1e9)
        return Timestamp(seconds=EPOCH_S + nanoseconds // 10**9, nanos=nanoseconds % 10**9)

    def new_id(self) -> str:
        """A fresh UUIDv7."""
        return self._world.new_id()

    def new_key(self) -> bytes:
        """A fresh key."""
        return self._world.new_key()
