"""Headers of HTTP requests forwarded from a gateway to the data port of a stage, and to its engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MIN_VERSION = "X-RLCTL-Min-Version"
"""Request header: least sequence number of the version that may answer."""

WAIT = "X-RLCTL-Wait"
"""Request header to a data port: longest wait for the gate of the stage, in seconds."""

SLOT = "X-RLCTL-Slot"
VERSION = "X-RLCTL-Weight-Version"
SEQUENCE = "X-RLCTL-Weight-Version-Seq"
"""Response headers: slot of the stage, and %-encoded label and sequence number of the version at the gate."""

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)


def end_to_end(headers: Mapping[str, str], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the headers that a proxy passes on (RFC 9110, 7.6.1), except ``without``, in lower case.

    ``headers``: a multi-map. A repeated header stays repeated, in its order.
    """
    pairs = [(name, name.lower(), value) for name, value in headers.items()]
    options = ",".join(value for _, lower, value in pairs if lower == "connection")
    dropped = {*without, *(name.strip().lower() for name in options.split(","))} if options else without
    return [(name, value) for name, lower, value in pairs if lower not in dropped and lower not in HOP_BY_HOP]
