"""The Link and Dialer ports: connections that delay, stall, break and lose messages in transit.

A connection keeps its order, as TCP does. A partition delays the messages of a connection, even from an end that has
closed since. Delayed messages arrive some time after the partition ends: the sender retries ever more rarely, while new
connections work at once. A long partition breaks the connection. A reset breaks the connection at once, and later
messages are lost. Old connections may therefore still deliver after new connections were made: messages are late,
repeated by retries, and overtaken.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import REFUSED
from rlctl.runtime import shielding
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT, OUTCOME_UNKNOWN
from tests.simulator.ports.virtual_time import Node, World

LATENCY_S = 0.002
"""Mean latency of a message."""
CONNECT_S = 5.0
KEEPALIVE_S = 15.0
"""Silence after which the transport breaks a connection."""
BACKOFF_S = 8.0
"""Longest delay of held messages after a partition."""

Serve = Callable[["End"], Coroutine[Any, Any, None]]
Handler = Callable[[str, Message, float], Coroutine[Any, Any, Any]]


class End:
    """An end of a connection: a Link."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self.node = node
        self.peer: End
        self.ended = False
        self._broken = False
        self._inbox: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._arrives = 0.0
        self._held: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send. Raises LINK_LOST once this end knows that the connection has ended."""
        if self.ended:
            raise Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT)
        # No copy: gRPC serialises later too, and senders may not change sent messages.
        self._network.tap(self.node, message)
        self._dispatch(message)

    def _dispatch(self, message: Any) -> None:
        """Send a message, or the end of messages (None)."""
        if self._broken:
            return
        network = self._network
        if self._held or (network.cut and network.parted(self.node, self.peer.node)):
            self._held.append(message)
        else:
            self._ship(message)

    def _ship(self, message: Any) -> None:
        network, peer = self._network, self.peer
        world = network.world
        self._arrives = max(self._arrives + 1e-6, world.now + network.latency(self.node))
        world.schedule(self._arrives, peer.node.loop, (peer._take, (message,), None))

    def _take(self, message: Any) -> None:
        if message is None:
            self.end()
        elif not self.ended:
            self._put(message)

    def end(self) -> None:
        """End this end of the connection."""
        if not self.ended:
            self.ended = True
            self._put(None)

    def _put(self, message: Any) -> None:
        self._inbox.append(message)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def release(self, late_s: float) -> None:
        """Release held messages after a partition, with a delay."""
        self._arrives = max(self._arrives, self._network.world.now + late_s)
        held, self._held = self._held, deque()
        for message in held:
            self._dispatch(message)

    async def receive(self) -> AsyncIterator[Any]:
        """Yield messages until the connection ends."""
        inbox = self._inbox
        while True:
            while not inbox:
                self._waiting = self.node.loop.create_future()
                await self._waiting
            message = inbox.popleft()
            if message is None:
                return
            yield message

    async def close(self) -> None:
        """End the connection; the other end learns this after all sent messages, if it can be reached."""
        if not self.ended:
            self.end()
            self._dispatch(None)
            if not self._held:
                self._network.forget(self)

    def reset(self) -> None:
        """Break the connection: both ends learn this with a delay, and later messages are lost."""
        self._network.forget(self)
        for end in (self, self.peer):
            end.node.later(self._network.latency(end.node), end.end)
            end._broken = True
            end._held.clear()


@dataclass
class Partition:
    """Blocks messages between two sides. ``other`` None: all other hosts."""

    side: frozenset[str]
    other: frozenset[str] | None = None

    def cuts(self, a: str, b: str) -> bool:
        """Return True if two hosts are on different sides."""
        if self.other is None:
            return (a in self.side) != (b in self.side)
        return (a in self.side and b in self.other) or (b in self.side and a in self.other)


class Network:
    """Connections between processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._serving: dict[str, tuple[Node, Serve]] = {}
        self._calls: dict[str, tuple[Node, Handler]] = {}
        self._connections: dict[End, None] = {}
        self._connected: set[Node] = set()
        """Processes whose connections end with them."""
        self.cut: list[Partition] = []
        self.slow = 0.0
        self.messages = 0
        self.tap: Callable[[Node, Message], None] = lambda *_: None
        """Called with every message and its sender; may change the message."""

    def latency(self, node: Node) -> float:
        """Return the latency of a message from a process, seconds."""
        self.messages += 1
        slow = max(self.slow, node.slow)
        slow = slow * node.random.random() if slow else 0.0
        return -math.log(1.0 - node.random.random()) * LATENCY_S + slow

    def listen(self, node: Node, address: str, serve: Serve) -> None:
        """Serve links at an address while the process lives."""
        self._serving[address] = node, serve
        self._connects(node)

    def _connects(self, node: Node) -> None:
        if node not in self._connected:
            self._connected.add(node)
            node.at_end.append(lambda: self._gone(node))

    def _gone(self, node: Node) -> None:
        for end in [end for end in self._connections if node in (end.node, end.peer.node)]:
            self.forget(end)
            other = end.peer if end.node is node else end
            if not self.parted(end.node, end.peer.node):
                other.node.later(self.latency(node), other.end)
            else:  # no end is signalled, and no message arrives
                other.node.later(KEEPALIVE_S, other.end)

    def forget(self, end: End) -> None:
        """Drop an ended connection."""
        self._connections.pop(end, None)
        self._connections.pop(end.peer, None)

    # Partitions.

    def parted(self, a: Node, b: Node) -> bool:
        """Return True if a partition separates two processes."""
        return any(partition.cuts(a.host, b.host) for partition in self.cut)

    def part(self, partition: Partition, seconds: float) -> None:
        self.cut.append(partition)

        def look() -> None:
            for end in list(self._connections):
                if self.parted(end.node, end.peer.node):
                    end.reset()

        def heal() -> None:
            self.cut.remove(partition)
            for end in list(self._connections):
                if not self.parted(end.node, end.peer.node):
                    late_s = end.node.random.uniform(0, min(seconds, BACKOFF_S))
                    end.release(late_s)
                    end.peer.release(late_s)
                    if end.ended and end.peer.ended:
                        self.forget(end)

        if seconds > KEEPALIVE_S:
            self.world.timer.later(KEEPALIVE_S, look)
        self.world.timer.later(seconds, heal)

    def reset(self, node: Node) -> None:
        for end in [end for end in self._connections if node in (end.node, end.peer.node)]:
            end.reset()

    # Links.

    def dialer(self, node: Node) -> SimDialer:
        return SimDialer(self, node)

    async def connect(self, node: Node, address: str) -> End:
        """Open a connection. Raises UNREACHABLE."""
        await asyncio.sleep(2 * self.latency(node))
        server, serve = self._serving.get(address, (None, None))
        if server is None or serve is None or not server.alive:
            refused = {REFUSED: "true"}
            raise Reason.UNREACHABLE.error(f"{address} refuses", outcome=OUTCOME_NOT_SENT, metadata=refused)
        if self.parted(node, server) or server.stopped:
            await asyncio.sleep(CONNECT_S)
            raise Reason.UNREACHABLE.error(f"{address} did not answer in {CONNECT_S:g} s", outcome=OUTCOME_NOT_SENT)
        self._connects(node)
        near, far = End(self, node), End(self, server)
        near.peer, far.peer = far, near
        self._connections[near] = None
        server.later(self.latency(node), lambda: server.start(serve(far)))
        return near

    # Calls.

    def answer(self, node: Node, address: str, handler: Handler) -> None:
        """Answer unary calls at an address while the process lives."""
        self._calls[address] = node, handler

    async def call(self, node: Node, address: str, method: str, request: Message, timeout_s: float) -> Any:
        """Make a unary call. Raises the server's typed error, UNREACHABLE, LINK_LOST or DEADLINE_EXCEEDED."""
        server, handler = self._calls.get(address, (None, None))
        if server is None or handler is None or not server.alive:
            await asyncio.sleep(self.latency(node))
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
                node.later(self.latency(server), settle, value, error)

        async def serve() -> None:
            try:
                value = await shielding.answer(handler(method, sent, timeout_s))
            except RlctlError as error:
                reply(None, error)
            else:
                reply(value, None)

        serving: list[asyncio.Task[None]] = []

        def leave() -> None:
            """Tell the server that the caller has disconnected, like the reset of a stream."""
            if not self.parted(node, server):
                server.later(self.latency(node), lambda: [task.cancel() for task in serving])

        if not self.parted(node, server):
            server.later(self.latency(node), lambda: serving.append(server.start(serve())))
        lost = Reason.LINK_LOST.error("the server is gone", outcome=OUTCOME_UNKNOWN)
        server.at_end.append(lambda: node.later(self.latency(node), settle, None, lost))
        node.at_end.append(lambda: None if answered.done() else leave())
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except (TimeoutError, asyncio.CancelledError) as error:
            leave()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Reason.DEADLINE_EXCEEDED.error("no answer in time", outcome=OUTCOME_UNKNOWN) from None


class SimDialer:
    """The Dialer port."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    async def dial(self, address: str) -> End:
        """Connect. Raises UNREACHABLE."""
        return await self._network.connect(self._node, address)
