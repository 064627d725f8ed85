"""Request bodies of an HTTP server: read within bounds of time, size and memory, and parsed beside the event loop.

A small body is parsed at once and waits for nothing. Bodies from :data:`LARGE` bytes on are handled one at a time, and
their total size is bounded. A parser holds the interpreter's lock, for seconds if a document has millions of values.
Documents from :data:`HUGE` bytes on are therefore parsed by a process (:mod:`rlctl.runtime.large_json`).
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime import large_json

READ_S = 30.0
"""Time allowance of a body beside its pace, in seconds. A slower caller is gone or hostile."""

SLOWEST_BYTES_S = 16 << 10
"""Least pace of a body beside that allowance, in bytes per second."""

LARGE = 256 << 10
HUGE = 2 << 20

TOTAL_BYTES = 256 << 20
"""Total size of the large bodies in progress at a server."""

WAIT_S = 30.0
"""Longest wait of a large body for room, in seconds."""

MOST_WAITING = 1024
"""Large bodies that may wait for room. Up to LARGE bytes of each have been read."""

T = TypeVar("T")


class Room:
    """Room for a number of bytes, granted in order of arrival. On one event loop."""

    def __init__(self, total: int) -> None:
        self.used = 0
        self._total = total
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Sizes of the waiting bodies, in order of arrival."""

    async def take(self, size: int) -> None:
        """Wait for room for ``size`` bytes.

        Raises TOO_MANY_REQUESTS after :data:`WAIT_S`, and at once if :data:`MOST_WAITING` others wait.
        """
        if not self._waiting and self._fits(size):
            self.used += size
            return
        if len(self._waiting) >= MOST_WAITING:
            raise Reason.TOO_MANY_REQUESTS.error(f"{len(self._waiting)} bodies wait for room here", field="body")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[admitted] = size
        try:
            async with asyncio.timeout(WAIT_S):
                await admitted
        except BaseException as error:
            if admitted.done() and not admitted.cancelled():
                self.give(size)
            admitted.cancel()
            self._waiting.pop(admitted, None)
            self._admit()  # the cancelled request may have been first in line
            if isinstance(error, TimeoutError):
                raise self._full(size) from None
            raise

    def give(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _full(self, size: int) -> RlctlError:
        return Reason.TOO_MANY_REQUESTS.error(
            f"bodies of {self.used} bytes are under way here, and {self._total} are taken at a time; "
            f"a body of {size} bytes has waited for {WAIT_S:g} s",
            field="body",
        )

    def _fits(self, size: int) -> bool:
        return self.used + size <= self._total

    def _admit(self) -> None:
        while self._waiting:
            admitted, size = next(iter(self._waiting.items()))
            if not admitted.cancelled():
                if not self._fits(size):
                    return
                self.used += size
                admitted.set_result(None)
            del self._waiting[admitted]


class Bodies:
    """Size limits of a server's bodies, and work with these bodies."""

    def __init__(self, most: int) -> None:
        """``most``: bytes of one body."""
        self.most = most
        self.room = Room(max(TOTAL_BYTES, most))
        self._parsing = asyncio.Lock()
        self._working = asyncio.Lock()

    async def parse(self, data: bytes) -> Any:
        """Return the value of a JSON document.

        In a document of :data:`HUGE` bytes, prompts of token ids become :class:`rlctl.runtime.large_json.TokenIds`.
        Raises FIELD_INVALID; MESSAGE_TOO_LARGE for an excessive prompt or number of values.
        """
        if len(data) < LARGE:
            return parsed(data)
        if len(data) < HUGE:
            return await self.beside(len(data), lambda: parsed(data))
        async with self._parsing:
            process = _start()
            kind, value, field = await _on_thread(lambda: _answer(process, data), process.kill)
        if kind == large_json.PARSED:
            return value
        if kind == large_json.TOO_LARGE:
            raise Reason.MESSAGE_TOO_LARGE.error(value, field=field)
        raise _no_json(value)

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on a body of this size. Large bodies are handled off the loop, one at a time."""
        if size < LARGE:
            return work()
        async with self._working:
            return await _on_thread(work)


class Body:
    """The body of one request, with its room until closed."""

    def __init__(self, request: web.Request, bodies: Bodies) -> None:
        self._request = request
        self._bodies = bodies
        self._room = 0

    async def read(self) -> bytes:
        """Return the whole body.

        Raises MESSAGE_TOO_LARGE, DEADLINE_EXCEEDED (408) for a slow body, and TOO_MANY_REQUESTS without room. Raises
        FIELD_INVALID if compression or chunks contradict the headers.
        """
        try:
            return await self._read()
        except web.RequestPayloadError as error:
            self.close()
            raise Reason.FIELD_INVALID.error(
                f"the body is not coded as its headers say: {error}", field="body"
            ) from None
        except BaseException:
            self.close()
            raise

    async def _read(self) -> bytes:
        content = self._request.content
        if content.is_eof() and content.total_bytes < min(LARGE, self._bodies.most + 1):
            return content.read_nowait()  # a small body usually comes with its head
        declared, most = self._request.content_length or 0, self._bodies.most
        # The length of a compressed body says nothing of its size.
        expected = declared if declared and "Content-Encoding" not in self._request.headers else most
        parts: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            if max(size, declared) > most:
                raise Reason.MESSAGE_TOO_LARGE.error(
                    f"the body has {max(size, declared)} bytes or more; the maximum is {most}", field="body"
                )
            if max(size, declared) >= LARGE and not self._room:
                before = loop.time()
                await self._bodies.room.take(expected)
                self._room = expected
                began += loop.time() - before
            try:
                async with asyncio.timeout_at(began + READ_S + size / SLOWEST_BYTES_S):
                    part = await content.readany()
            except TimeoutError:
                failure = Reason.DEADLINE_EXCEEDED.error(
                    f"{size} bytes of the body came within {loop.time() - began:.0f} s", field="body"
                )
                failure.http_status = 408
                raise failure from None
            if not part:
                return await self._bodies.beside(size, lambda: b"".join(parts))
            parts.append(part)
            size += len(part)

    def close(self) -> None:
        room, self._room = self._room, 0
        if room:
            self._bodies.room.give(room)


def parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise _no_json(str(error)) from None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", large_json.__name__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _answer(process: subprocess.Popen[bytes], data: bytes) -> tuple[int, Any, str]:
    """Return the process's answer to a document. Raises INTERNAL if the process ended without an answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    result = b""
    with contextlib.suppress(BrokenPipeError), process:
        process.stdin.write(data)
        process.stdin.close()
        result = process.stdout.read()
    if process.returncode:
        raise Reason.INTERNAL.error(f"the process that parses large bodies has ended: {process.returncode}")
    kind, value, field = marshal.loads(result)
    return kind, large_json.unpacked(value), field


async def _on_thread(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Return the result of work on a thread; the thread has ended in any case. ``stop``: ends the work early."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([running])
        raise


def _no_json(why: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(f"the body is no JSON: {why}", field="body")
