"""Client channels: keepalive and reconnect settings, credentials and the token, in one place."""

from __future__ import annotations

import functools
import getpass
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rlctl.contract.errors import Reason
from rlctl.transport.auth import CLIENT, ON_BEHALF_OF, USER, sendable
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.diagnosis import handshake_failure
from rlctl.transport.tls.identity import Role
from rlctl.version import __version__

MAX_MESSAGE_BYTES = 64 << 20
"""Above it gRPC itself refuses; servers refuse with a typed error from REFUSED_ABOVE_BYTES on."""

REFUSED_ABOVE_BYTES = 16 << 20

BATCH_BYTES = 1 << 20
"""Where many things go as one message, another one is begun from this size on."""

AT_ONCE = 16
"""So many of them are taken in at a time: what the first ones lead to is under way while the rest is taken in.
Otherwise both sides of a busy stream take turns, and each is idle for half of the time."""

FLOW_CONTROL: tuple[tuple[str, int], ...] = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20))
"""Of channels and servers. gRPC finds out how much a connection takes by pings, one for each few messages: of what a
stage sends in a fan-out, more than half of the packets were pings, their answers and new windows (docs/benchmarks.md,
fanout). The window has the width from the start that it would come to."""

# A peer that was stopped is noticed after ping_timeout, not after gRPC's 60 s; a peer that came back is found within
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


_opened_by: set[int] = set()
"""Process ids: this one's, and those of the processes that it was forked from."""


def open_channel(address: str, tls: Tls | None = None, role: Role = Role.COORDINATOR) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:PATH`` on the running loop.

    ``tls``: None for plain text. ``role``: of the server, which its certificate must name.

    Raises UNSUPPORTED in a process that was forked from one that had channels: nothing would ever come over this one.
    """
    if _opened_by - {os.getpid()}:
        raise Reason.UNSUPPORTED.error(
            "this process was forked from one that had connections already, which gRPC does not survive",
            next_step='Start such processes with multiprocessing\'s "spawn", or before the first connection is made.',
        )
    _opened_by.add(os.getpid())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    name = ("grpc.ssl_target_name_override", tls.peer_name(role))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=(*OPTIONS, name))


class LastingChannel:
    """A channel that outlives certificates: gRPC reads them once for each channel.

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
        """Open another channel if the certificate has been renewed. Calls on the former one go on."""
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

    async def close(self, grace_s: float | None = None) -> None:
        """Close it, once calls have ended or after so long."""
        for channel in (*self._former, self._channel):
            await channel.close(grace_s)


@dataclass(frozen=True)
class OnBehalf:
    """The credentials of a gateway that calls for a principal which it has authenticated itself."""

    token: str
    principal: str


Credentials = str | OnBehalf | None
"""What a call is authenticated by: a token, a gateway's token with the principal it speaks for, or nothing."""


def bearer(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries the credentials. Raises FIELD_INVALID for a token that no call can carry."""
    if isinstance(credentials, OnBehalf):
        return (*bearer(credentials.token), (ON_BEHALF_OF, credentials.principal))
    return (("authorization", f"Bearer {sendable(credentials)}"),) if credentials else ()


def stated(client: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that names the calling program, and the user and host that it runs as."""
    return ((CLIENT, _ascii(f"{client}/{__version__}")), (USER, _ascii(_user())))


@functools.cache
def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _ascii(text: str) -> str:
    """The text as a header can hold it."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in text)


def refuse_large(name: str, size: int) -> None:
    """Raise MESSAGE_TOO_LARGE for a message, named by its type, of more bytes than servers take."""
    if size > REFUSED_ABOVE_BYTES:
        raise Reason.MESSAGE_TOO_LARGE.error(
            f"{name} has {size} bytes; at most {REFUSED_ABOVE_BYTES} are taken", field=name
        )
