"""Client channels: keepalive and reconnect settings, credentials and the token, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import getpass
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.auth import CLIENT, ON_BEHALF_OF, USER, sendable
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.diagnosis import handshake_failure
from rlctl.transport.tls.identity import Role
from rlctl.version import __version__

MAX_MESSAGE_BYTES = 64 << 20
"""Limit of gRPC itself; servers refuse with a typed error from REFUSED_ABOVE_BYTES on."""

REFUSED_ABOVE_BYTES = 16 << 20

BATCH_BYTES = 1 << 20
"""Size from which a batch of items continues in a further message."""

AT_ONCE = 16
"""Number of items read at a time, so that work on the first items runs while the rest is read.

Otherwise both sides of a busy stream take turns, and each is idle for half of the time.
"""

FLOW_CONTROL: tuple[tuple[str, int], ...] = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20))
"""Options of channels and servers.

gRPC measures a connection's capacity by pings, one for each few messages. Of a stage's packets in a fan-out, more than
half were pings, their answers and new windows (docs/benchmarks.md, fanout). Here the window has its final width from
the start.
"""

# A stopped peer is noticed after ping_timeout, not after gRPC's 60 s. A peer that is back is found within
# reconnect_backoff, not after minutes.
OPTIONS: tuple[tuple[str, int], ...] = (
    *FLOW_CONTROL,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # a web proxy leads out of a cluster, not to its machines
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


DIAGNOSIS_S = 2.0
"""Longest time to find the cause of a failed connection."""

_opened_by: set[int] = set()
"""Process ids of this process and of the processes that it was forked from."""


def open_channel(address: str, tls: Tls | None = None, role: Role = Role.COORDINATOR) -> grpc.aio.Channel:
    """Return a channel to ``host:port`` or ``unix:PATH`` on the running loop.

    ``tls``: None for plain text. ``role``: of the server, required in its certificate. Raises UNSUPPORTED in a process
    forked from a process with channels: no message would arrive on this channel.
    """
    if _opened_by - {os.getpid()}:
        raise Reason.UNSUPPORTED.error(
            "this process was forked from a process with open connections, which gRPC does not support",
            next_step='Start such processes with multiprocessing\'s "spawn", or fork before the first connection.',
        )
    _opened_by.add(os.getpid())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    name = ("grpc.ssl_target_name_override", tls.peer_name(role))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=(*OPTIONS, name))


class LastingChannel:
    """A channel that outlives certificates: gRPC reads certificates once for each channel.

    Attributes:
        stub: of the present channel.
    """

    def __init__(self, address: str, tls: Tls | None, role: Role, stub: Callable[[grpc.aio.Channel], Any]) -> None:
        """``role``: of the server."""
        self._address = address
        self._tls = tls
        self._role = role
        self._make_stub = stub
        self._former: list[grpc.aio.Channel] = []
        self._open()

    def _open(self) -> None:
        self._material = None if self._tls is None else self._tls.material
        self._channel = open_channel(self._address, self._tls, self._role)
        self.stub = self._make_stub(self._channel)

    def failed(self) -> None:
        """Open a new channel if the certificate has been renewed. Calls on the former channel go on."""
        if self._tls is not None and self._tls.material is not self._material:
            self._former.append(self._channel)
            self._open()

    async def ready(self) -> None:
        """Wait until the server can be reached. Raises TLS_FAILED."""
        while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                failure = await handshake_failure(self._address, self._tls, self._role)
                if failure is not None:
                    raise failure
            await self._channel.wait_for_state_change(state)

    async def explained(self, failure: RlctlError) -> RlctlError:
        """Return a failure to reach the server, or TLS_FAILED with the same outcome if a certificate is the cause.

        Takes :data:`DIAGNOSIS_S` at most.
        """
        if self._tls is None or failure.reason is not Reason.UNREACHABLE:
            return failure
        cause = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DIAGNOSIS_S):
                cause = await handshake_failure(self._address, self._tls, self._role)
        if cause is None:
            return failure
        cause.outcome = failure.outcome  # an earlier try may have arrived
        return cause

    async def close(self, grace_s: float | None = None) -> None:
        """Close all channels, once calls have ended or after ``grace_s`` in all."""
        await asyncio.gather(*(channel.close(grace_s) for channel in (*self._former, self._channel)))


@dataclass(frozen=True)
class OnBehalf:
    """The credentials of a gateway that calls for a principal after authenticating it."""

    token: str
    principal: str


Credentials = str | OnBehalf | None
"""Credentials of a call: a token, a gateway's token with the principal that it calls for, or None."""


def bearer(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """Return call metadata with the credentials. Raises FIELD_INVALID for a token that no call can carry."""
    if isinstance(credentials, OnBehalf):
        return (*bearer(credentials.token), (ON_BEHALF_OF, credentials.principal))
    return (("authorization", f"Bearer {sendable(credentials)}"),) if credentials else ()


def stated(client: str) -> tuple[tuple[str, str], ...]:
    """Return call metadata with the calling program, its user and host."""
    return ((CLIENT, _ascii(f"{client}/{__version__}")), (USER, _ascii(_user())))


@functools.cache
def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _ascii(text: str) -> str:
    """Return the text in a form that a header can hold."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in text)


def refuse_large(name: str, size: int) -> None:
    """Raise MESSAGE_TOO_LARGE for a message of more bytes than servers accept. ``name``: type of the message."""
    if size > REFUSED_ABOVE_BYTES:
        raise Reason.MESSAGE_TOO_LARGE.error(
            f"{name} has {size} bytes; the maximum is {REFUSED_ABOVE_BYTES}", field=name
        )
