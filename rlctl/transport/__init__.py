"""gRPC behind the ports: channels, servers, handlers, status codes, tokens, links.

Decides keepalive, message sizes, the principal of a call, the access file and the mapping between errors and gRPC
status. All other packages import ``grpc`` from here, because gRPC reads its settings when it is imported.

Imports: contract, ports, runtime, command_stream.

Start with ``handlers.py`` (``generic_handler``: parsing, size limit, deadline and errors for every method),
``links.py`` (``GrpcDialer``: streams as links) and ``auth.py`` (``Access``, ``AccessGuard``).
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

# Fork support of gRPC is off. With fork support, a child forked during work of gRPC's threads ended with a segmentation
# fault (1.85), and asyncio does not survive a fork anyway. gRPC reads the variable when the first channel is made.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_CHOICE = "GRPC_EXPERIMENTS"
_POLLED = "-event_engine_client,-event_engine_listener"
KNOWN_UP_TO = (1, 85)
"""The last release known to have these experiments. A later release may report unknown names on stderr."""


def _known() -> bool:
    try:
        major, minor = version("grpcio").split(".")[:2]
        return (int(major), int(minor)) <= KNOWN_UP_TO
    except (PackageNotFoundError, ValueError):  # a build without metadata, or with a different form of version
        return False


def _import() -> bool:
    """Import gRPC with the polling of releases up to 1.79; return True on success.

    In this mode the thread that waits for completions also polls the sockets. Later releases poll on separate threads
    and wake the waiting thread for every message: a sixth of the cost of a command.
    """
    if "grpc" in sys.modules or _CHOICE in os.environ or not _known():
        return False
    os.environ[_CHOICE] = _POLLED
    try:
        importlib.import_module("grpc")  # reads the variable
    finally:
        del os.environ[_CHOICE]  # children of this process may have a different release of gRPC
    return True


POLLED = _import()
"""Whether gRPC polls as in 1.79. False if gRPC was imported before, or the environment sets its experiments."""

import grpc.aio  # noqa: E402

__all__ = ["POLLED", "grpc"]
