"""Headers of requests that are forwarded over HTTP, from a gateway to the data port of a stage, and to its engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

MIN_VERSION = "X-RLCTL-Min-Version"
"""Of a request: least sequence number of the version that may answer it."""

WAIT = "X-RLCTL-Wait"
"""Of a request to a data port: seconds that it may wait for the gate of the stage."""

SLOT = "X-RLCTL-Slot"
VERSION = "X-RLCTL-Weight-Version"
SEQUENCE = "X-RLCTL-Weight-Version-Seq"
"""Of an answer: slot of the stage, and %-encoded label and sequence number of the version that let the request in."""

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)


def end_to_end(headers: Mapping[str, str], without: Collection[str] = ()) -> Iterable[tuple[str, str]]:
    """The headers that a proxy passes on (RFC 9110, 7.6.1), less those named here in lower case."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = {*_HOP_BY_HOP, *named, *without}
    return ((name, value) for name, value in headers.items() if name.lower() not in dropped)
