"""The replying end of a ZeroMQ connection over a Unix socket, without libzmq: ZMTP 3.0 with the mechanism NULL.

A parameter server of checkpoint-engine binds a REQ socket and waits for the rank's REP socket. This module is that REP
socket: it connects, receives one message at a time and replies. The size of a message is limited.
"""

from __future__ import annotations

import asyncio
import struct

from rlctl.contract.errors import Reason, RlctlError

_GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_MOST_COMMAND = 64 << 10
_RETRY_S = 0.05


class ReplySocket:
    """A connection. Each message follows the reply to the previous message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, most_bytes: int) -> None:
        """``name``: of the socket, for errors."""
        self._reader = reader
        self._writer = writer
        self._name = name
        self._most_bytes = most_bytes

    @classmethod
    async def connect(cls, path: str, name: str, *, most_bytes: int, timeout_s: float) -> ReplySocket:
        """Connect to the socket at a path; a path that begins with a null byte is an abstract name.

        Waits until the peer listens. Raises UNREACHABLE, FIELD_INVALID.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        reader, writer = await asyncio.open_unix_connection(path)
                        break
                    except (ConnectionRefusedError, FileNotFoundError):
                        await asyncio.sleep(_RETRY_S)
                socket = cls(reader, writer, name, most_bytes)
                try:
                    await socket._greet()
                except BaseException:
                    socket.close()
                    raise
                return socket
        except (TimeoutError, OSError, EOFError) as error:
            raise Reason.UNREACHABLE.error(
                f"{name}: {str(error) or f'no answer within {timeout_s:g} s'}",
                next_step="The process that listens there must be on this host.",
            ) from error

    async def receive(self, timeout_s: float) -> bytes:
        """Return the next message. Raises UNREACHABLE, DEADLINE_EXCEEDED; FIELD_INVALID for a non-request."""
        try:
            async with asyncio.timeout(timeout_s):
                parts = [await self._frame()]
                while parts[-1][0]:
                    parts.append(await self._frame(self._most_bytes - sum(len(data) for _, data in parts)))
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(f"{self._name}: no message within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise Reason.UNREACHABLE.error(f"{self._name}: the connection has ended") from error
        if len(parts) != 2 or parts[0][1]:
            raise self._invalid("a request of one part was expected")
        return parts[1][1]

    async def reply(self, data: bytes) -> None:
        """Reply to the last message. Raises UNREACHABLE."""
        try:
            self._writer.write(bytes([_MORE, 0]) + _framed(0, data))
            await self._writer.drain()
        except OSError as error:
            raise Reason.UNREACHABLE.error(f"{self._name}: the connection has ended") from error

    def close(self) -> None:
        self._writer.close()

    async def _greet(self) -> None:
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(len(_GREETING))
        if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
            raise self._invalid("the peer does not speak ZMTP 3 without authentication")
        self._writer.write(_framed(_COMMAND, b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"REP"))
        await self._writer.drain()
        flags, ready = await self._read_frame(_MOST_COMMAND)
        if not flags & _COMMAND or not ready.startswith(b"\x05READY") or b"\x0bSocket-Type\0\0\0\x03REQ" not in ready:
            raise self._invalid("the peer is no REQ socket")

    async def _frame(self, most: int | None = None) -> tuple[bool, bytes]:
        """Return the next frame of a message, and True if more frames follow. Handles commands."""
        while True:
            flags, data = await self._read_frame(self._most_bytes if most is None else most)
            if not flags & _COMMAND:
                return bool(flags & _MORE), data
            if data.startswith(b"\x04PING"):
                self._writer.write(_framed(_COMMAND, b"\x04PONG" + data[7:]))

    async def _read_frame(self, most: int) -> tuple[int, bytes]:
        [flags] = await self._reader.readexactly(1)
        size = int.from_bytes(await self._reader.readexactly(8 if flags & _LONG else 1))
        if flags > _MORE | _LONG | _COMMAND or size > (_MOST_COMMAND if flags & _COMMAND else most):
            raise self._invalid(f"a frame of {size} bytes with flags {flags} is not read")
        return flags, await self._reader.readexactly(size)

    def _invalid(self, cause: str) -> RlctlError:
        return Reason.FIELD_INVALID.error(f"{self._name}: {cause}")


def _framed(flags: int, data: bytes) -> bytes:
    if len(data) < 1 << 8:
        return bytes([flags, len(data)]) + data
    return bytes([flags | _LONG]) + struct.pack(">Q", len(data)) + data
