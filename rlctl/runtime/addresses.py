"""Addresses: parsing, and the rule that an address reachable from other hosts needs a token or certificates."""

from __future__ import annotations

import ipaddress
import socket

from rlctl.contract.errors import Reason
from rlctl.contract.os_errors import unbound

PROBE_S = 1.0


def split(address: str, field: str = "address") -> tuple[str, int]:
    """Return (host, TCP port) of ``host:port`` (``[::1]:port`` for IPv6). Raises FIELD_INVALID."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not host
        or "/" in host
        or not (port.isascii() and port.isdigit())
        or len(port) > 5
        or int(port) > 65535
    ):
        raise Reason.FIELD_INVALID.error(f"{address!r} is not host:port", field=field)
    return host, int(port)


def refuse_taken(listen: str) -> None:
    """Raise FIELD_INVALID for ``unix:PATH`` if a process answers there.

    gRPC would put its own socket in that place, and later callers would reach the wrong process.
    """
    if not listen.startswith("unix:"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(listen.removeprefix("unix:"))
        except (TimeoutError, BlockingIOError):
            pass  # a process listens, but is too busy to answer
        except OSError:
            return
    raise Reason.FIELD_INVALID.error(f"{listen} is in use by another process", field="listen")


def refuse_unreachable(address: str, field: str = "address") -> None:
    """Raise FIELD_INVALID for an address that cannot be dialled: neither ``host:port`` nor ``unix:PATH``.

    For an address without a port gRPC assumes 443. Of a port that is too large gRPC takes the lowest 16 bits.
    """
    if not address.startswith("unix:"):
        split(address, field)


def join(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only this host can reach the address. A name counts if all its addresses are loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: the text is no host name
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in addresses)


def refuse_insecure(bind: str, *, token: str | None, insecure: bool) -> None:
    """Raise INSECURE_BIND for an address reachable from other hosts, without a token and without --insecure."""
    if bind.startswith("unix:"):
        return
    host, _ = split(bind, "listen")
    if token is None and not insecure and not is_loopback(host):
        raise Reason.INSECURE_BIND.error(
            f"{bind} is reachable from other hosts, and neither a token nor certificates are set", field="listen"
        )


def refuse_used(listen: str) -> None:
    """Raise FIELD_INVALID if an address cannot be bound, for example because another process listens there."""
    if listen.startswith("unix:"):
        refuse_taken(listen)
        return
    host, port = split(listen, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise unbound(listen, error) from None
