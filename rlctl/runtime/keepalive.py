"""TCP keepalive: the system notices a peer that is gone, or a network on the way that has forgotten the connection."""

from __future__ import annotations

import socket

_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and number of probes: a connection without its peer breaks after 25 s."""


def keep_alive(connection: socket.socket) -> None:
    """Let a silent connection break when its peer does not answer probes. Without effect on a Unix socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
