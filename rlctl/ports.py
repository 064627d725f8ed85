"""The ports that the state machines run against; real time, gRPC and SQLite are adapters behind them.

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
        """Monotonic seconds, the clock of the running event loop; deadlines and leases are measured on it."""

    def wall(self) -> Timestamp:
        """Wall time, for display only."""

    def new_id(self) -> str:
        """A fresh UUIDv7."""

    def new_key(self) -> bytes:
        """128 random bits."""


class Caller:
    """Who waits for an answer.

    Attributes:
        left: set once the transport knows that nobody waits any more; what was asked for goes on.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Whoever waits for the answer to the call at hand; None: the transport does not tell."""


class Link(Protocol[Out, In]):
    """An open, ordered message stream to one peer."""

    def send(self, message: Out) -> None:
        """Queue a message; never blocks. Raises LINK_LOST when the stream has ended."""

    def receive(self) -> AsyncIterator[In]:
        """Messages in order; ends when the stream does, for whatever reason."""

    async def close(self) -> None:
        """End the stream."""


REFUSED = "refused"
"""In the metadata of UNREACHABLE: there is a host at the address, and no process that listens."""


class Dialer(Protocol[Out, In]):
    """Opens links."""

    async def dial(self, address: str) -> Link[Out, In]:
        """Connect to ``host:port``. Raises UNREACHABLE, with REFUSED in its metadata where that is known."""


@dataclass(frozen=True)
class Put:
    """Write one journal record, replacing an earlier one of the same kind and key."""

    kind: str
    key: str
    body: bytes


@dataclass(frozen=True)
class Delete:
    """Remove one journal record."""

    kind: str
    key: str


class Journal(Protocol):
    """Durable records by kind and key."""

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make the changes durable, all or none. Raises JOURNAL_FAILED; then nothing was written."""

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Every record of a kind, in key order. Used once, at the start."""

    def held(self) -> bool:
        """Whether the journal is still this process's: whoever lost it has been succeeded, and commands nothing."""


class SystemClock:
    """Real time."""

    def now(self) -> float:
        """Monotonic time, seconds; event loops count from the same moment.

        Not by asking the running loop: Python 3.11 finds it with a system call (getpid), up to four for a command.
        """
        return time.monotonic()

    def wall(self) -> Timestamp:
        """Now."""
        seconds, nanos = divmod(time.time_ns(), 10**9)  # Timestamp's own way to ask takes three times as long
        return Timestamp(seconds=seconds, nanos=nanos)

    def new_id(self) -> str:
        """A UUIDv7 (RFC 9562, section 5.7) from the wall clock and the system's randomness."""
        return new_uuid7()

    def new_key(self) -> bytes:
        """From the system's randomness."""
        return os.urandom(16)


def new_uuid7() -> str:
    """A UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then version, variant and 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
