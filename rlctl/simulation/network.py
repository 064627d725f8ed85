"""The Link and Dialer ports: connections that delay, stall, break and lose what is under way.

A connection keeps its order, as TCP does. A partition holds what is sent; if it lasts, the connection breaks. A reset
breaks it at once, and what was under way is lost from some message on. Old connections may still deliver after new ones
were made, which is how messages are late, repeated by retries, and overtaken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from google.protobuf.message import Message

from rlctl.errors import Reason, RlctlError
from rlctl.simulation.world import Node, World
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT, OUTCOME_UNKNOWN

CONNECT_S = 5.0
KEEPALIVE_S = 15.0
"""A connection over which nothing comes for so long is broken by the transport."""

Serve = Callable[["End"], Coroutine[Any, Any, None]]


class End:
    """One end of a connection: a Link."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self.node = node
        self.peer: End
        self.ended = False
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._arrives = 0.0
        self._held: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send. Raises LINK_LOST once this end knows that the connection has ended."""
        if self.ended:
            raise Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT)
        copy = message
        if isinstance(message, Message):
            copy = type(message)()
            copy.CopyFrom(message)
        if self._network.parted(self.node, self.peer.node):
            self._held.append(copy)
        else:
            self._ship(copy)

    def _ship(self, message: Any) -> None:
        world = self._network.world
        self._arrives = max(self._arrives + 1e-6, world.now + self._network.latency())
        self.peer.node.later(self._arrives - world.now, self.peer._take, message)

    def _take(self, message: Any) -> None:
        if not self.ended:
            self._inbox.put_nowait(message)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._inbox.put_nowait(None)

    def release(self) -> None:
        """A partition is over."""
        while self._held and not self.ended:
            self._ship(self._held.popleft())

    async def receive(self) -> AsyncIterator[Any]:
        """Messages until the connection ends."""
        while (message := await self._inbox.get()) is not None:
            yield message

    async def close(self) -> None:
        """End the connection; the other end hears of it after what was sent, if it can be reached."""
        self._end()
        self._network.forget(self)
        if not self._network.parted(self.node, self.peer.node):
            world = self._network.world
            self._arrives = max(self._arrives + 1e-6, world.now + self._network.latency())
            self.peer.node.later(self._arrives - world.now, self.peer._end)

    def reset(self) -> None:
        """Break it: both ends hear of it by and by, what is under way is lost."""
        self._network.forget(self)
        for end in (self, self.peer):
            end.node.later(self._network.latency(), end._end)
            end._arrives += 1e9  # nothing more arrives


class Network:
    """Who reaches whom."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._serving: dict[str, tuple[Node, Serve]] = {}
        self._calls: dict[str, tuple[Node, Callable[[str, Message, float], Coroutine[Any, Any, Any]]]] = {}
        self._connections: dict[End, None] = {}
        self._partitions: list[frozenset[str]] = []
        self.slow = 0.0
        self.messages = 0

    def latency(self) -> float:
        """Seconds for one message."""
        self.messages += 1
        return self.world.random.expovariate(1 / 0.002) + self.slow * self.world.random.random()

    def listen(self, node: Node, address: str, serve: Serve) -> None:
        """Serve links at an address while the process lives."""
        self._serving[address] = node, serve
        node.at_end.append(lambda: self._gone(node))

    def _gone(self, node: Node) -> None:
        for end in [end for end in self._connections if node in (end.node, end.peer.node)]:
            self.forget(end)
            other = end.peer if end.node is node else end
            if not self.parted(end.node, end.peer.node):
                other.node.later(self.latency(), other._end)

    def forget(self, end: End) -> None:
        """It needs no more care."""
        self._connections.pop(end, None)
        self._connections.pop(end.peer, None)

    # Partitions.

    def parted(self, a: Node, b: Node) -> bool:
        """Whether nothing gets from one to the other."""
        return any((host(a) in island) != (host(b) in island) for island in self._partitions)

    def part(self, hosts: frozenset[str], seconds: float, timer: Node) -> None:
        """Cut hosts off from all others for a while."""
        self._partitions.append(hosts)

        def look() -> None:
            for end in list(self._connections):
                if self.parted(end.node, end.peer.node):
                    self.forget(end)
                    end._end()
                    end.peer.node.later(0.0, end.peer._end)

        def heal() -> None:
            self._partitions.remove(hosts)
            for end in list(self._connections):
                if not self.parted(end.node, end.peer.node):
                    end.release()
                    end.peer.release()

        if seconds > KEEPALIVE_S:
            timer.later(KEEPALIVE_S, look)
        timer.later(seconds, heal)

    def reset(self, node: Node) -> None:
        """Break the connections of a process."""
        for end in [end for end in self._connections if node in (end.node, end.peer.node)]:
            end.reset()

    # Links.

    def dialer(self, node: Node) -> SimDialer:
        """The Dialer port of a process."""
        return SimDialer(self, node)

    async def connect(self, node: Node, address: str) -> End:
        """Open a connection. Raises UNREACHABLE."""
        await asyncio.sleep(2 * self.latency())
        server, serve = self._serving.get(address, (None, None))
        if server is None or serve is None or not server.alive:
            raise Reason.UNREACHABLE.error(f"{address} refuses", outcome=OUTCOME_NOT_SENT)
        if self.parted(node, server) or server.stopped:
            await asyncio.sleep(CONNECT_S)
            raise Reason.UNREACHABLE.error(f"{address} did not answer in {CONNECT_S:g} s", outcome=OUTCOME_NOT_SENT)
        near, far = End(self, node), End(self, server)
        near.peer, far.peer = far, near
        self._connections[near] = None
        server.later(self.latency(), lambda: server.start(serve(far)))
        return near

    # Calls.

    def answer(
        self, node: Node, address: str, handler: Callable[[str, Message, float], Coroutine[Any, Any, Any]]
    ) -> None:
        """Answer unary calls at an address while the process lives."""
        self._calls[address] = node, handler

    async def call(self, node: Node, address: str, method: str, request: Message, timeout_s: float) -> Any:
        """A unary call. Raises the server's typed error, UNREACHABLE, LINK_LOST or DEADLINE_EXCEEDED."""
        server, handler = self._calls.get(address, (None, None))
        if server is None or handler is None or not server.alive:
            await asyncio.sleep(self.latency())
            raise Reason.UNREACHABLE.error(f"{address} refuses", outcome=OUTCOME_NOT_SENT)
        loop = node.loop
        answered: asyncio.Future[Any] = loop.create_future()
        sent = type(request)()
        sent.CopyFrom(request)

        def settle(value: Any, error: RlctlError | None) -> None:
            if answered.done():
                return
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(value)

        def reply(value: Any, error: RlctlError | None) -> None:
            if not self.parted(node, server):
                node.later(self.latency(), settle, value, error)

        async def serve() -> None:
            try:
                value = await handler(method, sent, timeout_s)
            except RlctlError as error:
                reply(None, error)
            else:
                reply(value, None)

        if not self.parted(node, server):
            server.later(self.latency(), lambda: server.start(serve()))
        lost = Reason.LINK_LOST.error("the server is gone", outcome=OUTCOME_UNKNOWN)
        server.at_end.append(lambda: node.later(self.latency(), settle, None, lost))
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("no answer in time", outcome=OUTCOME_UNKNOWN) from None


class SimDialer:
    """The Dialer port."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    async def dial(self, address: str) -> End:
        """Connect. Raises UNREACHABLE."""
        return await self._network.connect(self._node, address)


def host(node: Node) -> str:
    """The machine that a process runs on: the first part of its name."""
    return node.name.partition("/")[0]
