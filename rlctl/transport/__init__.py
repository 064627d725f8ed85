"""gRPC behind the ports: channels, servers, handlers, status codes, tokens, links.

Decides keepalive, message sizes, the bearer token and the mapping between errors and gRPC status. All other
packages import ``grpc`` from here, because gRPC reads its settings when it is imported.

Imports: contract, ports, runtime, command_stream.

Start with ``handlers.py`` (``generic_handler``: parsing, size limit, deadline and errors for every method),
``links.py`` (``GrpcDialer``: streams as links) and ``auth.py`` (``TokenGuard``).
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

# gRPC would take part in forks, though what has asyncio does not survive one: where its threads were at work then, the
# child ended in a segmentation fault, whatever it was for (1.85). It reads this when the first channel is made.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_CHOICE = "GRPC_EXPERIMENTS"
_POLLED = "-event_engine_client,-event_engine_listener"
KNOWN_UP_TO = (1, 85)
"""Releases that have this choice. A later one may take the names for a mistake, and say so on stderr."""


def _known() -> bool:
    try:
        major, minor = version("grpcio").split(".")[:2]
        return (int(major), int(minor)) <= KNOWN_UP_TO
    except (PackageNotFoundError, ValueError):  # built by somebody, or into something, in a way of their own
        return False


def _import() -> bool:
    """Import gRPC; whether it was told to poll as it did up to 1.79: the thread that waits for completions waits for
    the sockets itself. Since then others do, which have to wake it for every message: a sixth of what a command costs.
    """
    if "grpc" in sys.modules or _CHOICE in os.environ or not _known():
        return False
    os.environ[_CHOICE] = _POLLED
    try:
        importlib.import_module("grpc")  # which reads it
    finally:
        del os.environ[_CHOICE]  # for this process alone: what it starts may have gRPC of any release inside
    return True


POLLED = _import()
"""Whether it does: not where somebody else had imported gRPC before, or has made a choice of their own."""

import grpc.aio  # noqa: E402

__all__ = ["POLLED", "grpc"]
