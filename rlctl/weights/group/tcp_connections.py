"""A process's own TCP connections to given endpoints: cut, so that blocked calls end at once, and tuned.

gloo cannot end a collective that waits for an unresponsive peer (such as a stopped process). Only the timeout ends the
collective, and until then late bytes may land in the receiver's memory. A store client of a mute server has the same
problem. Shutting down the sockets ends both within a millisecond, on every torch version: both see a closed peer.

Within a tensor gloo also closes the connection, but still waits for its timeout: ``Pair::signalException`` notifies
posted operations, not operations in progress. So callers check for closed connections, not only for the end of the
broadcast. On a system without a list of a process's descriptors no connection is cut, and the timeouts remain.

gloo has no option for the buffers of a socket, and the system's default suits long lines. Between processes of one
machine megabytes queue in the kernel, and have left the caches when they are read.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

Endpoint = tuple[str, int]
"""Numeric address and TCP port."""

_DESCRIPTORS = "/dev/fd"

_LOCAL_SEND_BYTES = 512 << 10
"""Send buffer of a connection within a machine.

A broadcast over loopback is 1.6 to 2 times as fast as with Linux's automatic size (4 MiB), at any size of tensors. 256
KiB is about as good, 1 MiB shows no gain (docs/benchmarks.md).
"""


def resolve(host: str, port: int) -> set[Endpoint]:
    """Return every endpoint of a host and port. Raises OSError if the name does not resolve."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {(str(info[4][0]), port) for info in infos}


def gloo_endpoint(blob: bytes) -> Endpoint | None:
    """Return the endpoint of a gloo member from its value in the store; None for an unknown layout.

    The layout: length of the host's name (8 bytes), name, length of the address (8 bytes), a ``sockaddr_storage``.
    """
    start = 8 + int.from_bytes(blob[:8], "little")
    address = blob[start + 8 : start + 8 + 28]
    if len(address) < 28 or int.from_bytes(blob[start : start + 8], "little") < 28:
        return None
    family = int.from_bytes(address[:2], "little")
    port = int.from_bytes(address[2:4], "big")
    if family == socket.AF_INET and port:
        return socket.inet_ntop(family, address[4:8]), port
    if family == socket.AF_INET6 and port:
        return socket.inet_ntop(family, address[8:24]), port
    return None


@dataclass(frozen=True)
class Connection:
    """A TCP connection of this process.

    Attributes:
        number: the descriptor; after a close the number may mean another file.
        inode: inode of the socket, to detect such a reuse.
    """

    number: int
    inode: int

    @property
    def is_open(self) -> bool:
        """Whether this process has not closed the connection. A cut connection is open until its owner notices."""
        try:
            return os.fstat(self.number).st_ino == self.inode
        except OSError:
            return False

    @property
    def is_live(self) -> bool:
        """Whether the connection is open in this process and the peer has not closed it."""
        try:
            with closing(_handle(self.number, self.inode)) as handle:
                return handle.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def find(*, accepted_at: Collection[Endpoint] = (), made_to: Collection[Endpoint] = ()) -> list[Connection]:
    """Return the connections of this process that a listener accepted, or that were made to a peer.

    ``accepted_at`` has endpoints of this process's listeners, ``made_to`` endpoints of peers.
    """
    connections = []
    for number in _descriptors():
        with suppress(OSError), closing(_handle(number)) as handle:
            if _plain(handle.getpeername()) in made_to or _plain(handle.getsockname()) in accepted_at:
                connections.append(Connection(number, os.fstat(handle.fileno()).st_ino))
    return connections


def of_group(endpoints: Mapping[int, Endpoint], rank: int) -> list[Connection]:
    """Return this process's connections in a gloo group, from the endpoints of the members by rank.

    Empty if the own endpoint is not known.
    """
    if rank not in endpoints:
        return []
    peers = {endpoint for peer_rank, endpoint in endpoints.items() if peer_rank != rank}
    return find(accepted_at={endpoints[rank]}, made_to=peers)


def cut(connections: Iterable[Connection]) -> int:
    """Shut down open connections and return their number. Blocked calls on these connections end at once."""
    count = 0
    for connection in connections:
        with suppress(OSError), closing(_handle(connection.number, connection.inode)) as handle:
            handle.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def keep_cached(connections: Iterable[Connection]) -> int:
    """Bound the send queues of connections within this machine. Return the number of such connections.

    Other connections keep the system's buffers, which grow with the length of the line.
    """
    count = 0
    for connection in connections:
        with suppress(OSError), closing(_handle(connection.number, connection.inode)) as handle:
            if handle.getpeername()[0] == handle.getsockname()[0]:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
                count += 1
    return count


def _descriptors() -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(_DESCRIPTORS)]
    except OSError:
        return []


def _handle(number: int, inode: int | None = None) -> socket.socket:
    """Duplicate the socket of a descriptor: the number may mean another file at any time.

    Raises OSError unless the descriptor is a socket, with this inode if given.
    """
    duplicate = os.dup(number)
    try:
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
            raise OSError("no such socket")
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _plain(address: object) -> Endpoint | None:
    match address:
        case (str(host), int(port), *_):
            # A dual-stack socket shows IPv4 peers as mapped addresses.
            return host.removeprefix("::ffff:"), port
    return None
