"""Ports of the cores; real time, gRPC and SQLite are adapters behind the ports.

Coordinator, stage and worker cores import nothing of grpc, sqlite3 or time. A simulation replaces these ports and
:class:`rlctl.engine.Engine`, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Clock(Protocol):
    """Time, ids and randomness."""

    def now(self) -> float:
        """Return monotonic seconds of the running event loop's clock, the clock of deadlines and timers."""

    def uptime(self) -> float:
        """Return monotonic seconds that also count while the host is suspended: the clock of a stage's serving lease.

        Never compared with :meth:`now`: the difference is the time that the host was suspended.
        """

    def wall(self) -> Timestamp:
        """Return wall time: for people, and for few decisions (docs/decisions, "The wall clock decides little")."""

    def new_id(self) -> str:
        """Return a fresh UUIDv7."""

    def new_key(self) -> bytes:
        """Return 128 random bits."""


class Caller:
    """The caller that waits for an answer.

    Attributes:
        disconnected: set once the transport knows that the caller has disconnected; the requested work goes on.
    """

    def __init__(self) -> None:
        self.disconnected = asyncio.Event()


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller that waits for the answer to the current call; None: the transport cannot tell."""


class Link(Protocol[Out, In]):
    """An open, ordered message stream to one peer."""

    def send(self, message: Out) -> None:
        """Queue a message; never blocks. Raises LINK_LOST when the stream has ended."""

    def receive(self) -> AsyncIterator[In]:
        """Yield messages in order until the stream ends, for any reason."""

    async def close(self) -> None:
        """End the stream."""


REFUSED = "refused"
"""In the metadata of UNREACHABLE: the host exists, but no process listens at the address."""


class Dialer(Protocol[Out, In]):
    """Opens links."""

    async def dial(self, address: str) -> Link[Out, In]:
        """Connect to ``host:port``. Raises UNREACHABLE, with REFUSED in its metadata if the refusal is known."""


@dataclass(frozen=True)
class Put:
    """Write a journal record, replacing a record of the same kind and key."""

    kind: str
    key: str
    body: bytes


@dataclass(frozen=True)
class Delete:
    """Remove a journal record."""

    kind: str
    key: str


class Journal(Protocol):
    """Durable records by kind and key."""

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make all changes durable, or none. Raises JOURNAL_FAILED; nothing was written then."""

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Return every record of a kind, in key order. Called once, at the start."""

    def owned(self) -> bool:
        """Return True while this process owns the journal. A former owner has a successor, and commands no stage."""


_UPTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class SystemClock:
    """Real time."""

    def now(self) -> float:
        """Return monotonic seconds; event loops count from the same moment.

        The running loop is not asked: Python 3.11 finds the loop with a system call (getpid), up to four for a command.
        """
        return time.monotonic()

    def uptime(self) -> float:
        """Return the time since the start of the host. Only Linux counts the time of a suspended host."""
        return time.monotonic() if _UPTIME is None else time.clock_gettime(_UPTIME)

    def wall(self) -> Timestamp:
        """Return the present wall time."""
        seconds, nanos = divmod(time.time_ns(), 10**9)  # Timestamp.GetCurrentTime takes three times as long
        return Timestamp(seconds=seconds, nanos=nanos)

    def new_id(self) -> str:
        """Return a UUIDv7 (RFC 9562, section 5.7) from the wall clock and the system's randomness."""
        return new_uuid7()

    def new_key(self) -> bytes:
        """Return 16 bytes of the system's randomness."""
        return os.urandom(16)


def new_uuid7() -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, version, variant, 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
