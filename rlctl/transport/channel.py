"""Client channels: keepalive and reconnect settings, and the token, in one place."""

from __future__ import annotations

import os

import grpc.aio

from rlctl.contract.errors import Reason
from rlctl.transport.auth import sendable

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


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:PATH`` on the running loop.

    Raises UNSUPPORTED in a process that was forked from one that had channels: nothing would ever come over this one.
    """
    if _opened_by - {os.getpid()}:
        raise Reason.UNSUPPORTED.error(
            "this process was forked from one that had connections already, which gRPC does not survive",
            next_step='Start such processes with multiprocessing\'s "spawn", or before the first connection is made.',
        )
    _opened_by.add(os.getpid())
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries the token. Raises FIELD_INVALID for one that none can carry."""
    return (("authorization", f"Bearer {sendable(token)}"),) if token else ()


def refuse_large(name: str, size: int) -> None:
    """Raise MESSAGE_TOO_LARGE for a message, named by its type, of more bytes than servers take."""
    if size > REFUSED_ABOVE_BYTES:
        raise Reason.MESSAGE_TOO_LARGE.error(
            f"{name} has {size} bytes; at most {REFUSED_ABOVE_BYTES} are taken", field=name
        )
