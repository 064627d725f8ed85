"""A TCP proxy that makes a network slow, silent or broken for a test."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Self

from rlctl.runtime.addresses import join, split

CHUNK_BYTES = 64 << 10
CONNECT_S = 5.0


class ChaosProxy:
    """``async with ChaosProxy("127.0.0.1:5081") as proxy``: connections to ``proxy.address`` reach the target.

    The proxy belongs to the event loop of its start.

    Attributes:
        address: ``host:port`` of the listener.
        latency_s: delay of every piece, in both directions, seconds; order is kept.
        connections: number of accepted connections.
    """

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0") -> None:
        """``target``: ``host:port``, dialled anew for every connection. ``listen``: TCP port 0 takes a free port."""
        self.address = ""
        self.latency_s = 0.0
        self.connections = 0
        self._target = target
        self._listen = listen
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> str:
        """Listen; return the bound address. Raises OSError if the address is in use."""
        host, port = split(self._listen)
        self._server = await asyncio.start_server(self._accept, host, port)
        self.address = join(host, self._server.sockets[0].getsockname()[1])
        return self.address

    async def stop(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    @property
    def blackhole(self) -> bool:
        """Whether no data pass: connections stay open and new connections are accepted, but both sides receive nothing.

        Data sent meanwhile pass when the blackhole ends, as TCP repeats unacknowledged data.
        """
        return not self._passing.is_set()

    @blackhole.setter
    def blackhole(self, on: bool) -> None:
        if on:
            self._passing.clear()
        else:
            self._passing.set()

    def reset(self) -> None:
        """Break every connection with a TCP reset. New connections are accepted."""
        for writer in self._open:
            connection = writer.get_extra_info("socket")
            if connection is not None:
                # Closing a socket with a linger time of zero sends RST in place of FIN.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._open.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        try:
            await self._passing.wait()
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(*split(self._target))
            if writer.transport.is_closing():
                far_writer.transport.abort()
                raise ConnectionResetError("reset while the target was dialled")
            self._open.add(far_writer)
            try:
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(self._pump(reader, far_writer))
                    directions.create_task(self._pump(far_reader, writer))
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()
        except* OSError:  # TimeoutError too: the target is missing, or a side was reset
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until its end, then end the other side. Raises OSError after a reset."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(64)

        async def take() -> None:
            try:
                while data := await reader.read(CHUNK_BYTES):
                    await queue.put((loop.time(), data))
                await queue.put((loop.time(), b""))
            except OSError as error:
                await queue.put((loop.time(), error))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            while True:
                arrived_at, data = await queue.get()
                await asyncio.sleep(max(0.0, arrived_at + self.latency_s - loop.time()))
                await self._passing.wait()
                if isinstance(data, OSError):
                    raise data
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        if not writer.transport.is_closing():  # perhaps reset meanwhile; uvloop raises no OSError then
            writer.write_eof()
