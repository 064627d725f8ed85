"""Headers of HTTP requests forwarded from a gateway to the data port of a stage, and to its engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from rlctl.contract.errors import Reason

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


_SEQUENCE = re.compile(r"\d{1,18}", re.ASCII)


def min_version(headers: Mapping[str, str]) -> int:
    """Return the least sequence number of a request, 0 without the header. Raises FIELD_INVALID."""
    value = headers.get(MIN_VERSION, "0")
    if not _SEQUENCE.fullmatch(value):
        raise Reason.FIELD_INVALID.error(f"{value!r} is no sequence number", field=MIN_VERSION)
    return int(value)


def end_to_end(headers: Mapping[str, str], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the headers that a proxy passes on (RFC 9110, 7.6.1), except ``without``, in lower case.

    ``headers``: a multi-map. A repeated header stays repeated, in its order.
    """
    pairs = [(name, name.lower(), value) for name, value in headers.items()]
    options = ",".join(value for _, lower, value in pairs if lower == "connection")
    dropped = {*without, *(name.strip().lower() for name in options.split(","))} if options else without
    return [(name, value) for name, lower, value in pairs if lower not in dropped and lower not in HOP_BY_HOP]
