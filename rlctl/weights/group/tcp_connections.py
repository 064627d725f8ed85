"""A process's own TCP connections to given endpoints: cut, so that what blocks on them ends at once; and tuned.

gloo has no way to end a collective that waits for a peer which never answers (a stopped process, say); only its
timeout ends it, and until then late bytes may still land in the receiver's memory. The same holds for a store client
whose server is mute. Shutting down the sockets underneath ends both within a millisecond, on every torch version,
because to them it is a peer that went away. In the middle of a tensor gloo closes the connection as well, but waits
for its timeout all the same (``Pair::signalException`` tells what is posted, not what is on its way): so it is asked
whether the connections are closed, not only whether the broadcast has ended. Where a system has no list of a
process's descriptors nothing is cut, and the timeouts remain.

gloo has no way to set a socket's buffers either, and the system's default is made for long lines: between processes
of one machine megabytes queue up in the kernel and have left the caches by the time they are read.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass

Endpoint = tuple[str, int]
"""Numeric address and port."""

_DESCRIPTORS = "/dev/fd"

_LOCAL_SEND_BYTES = 512 << 10
"""Send buffer of a connection within a machine. A broadcast over loopback is 1.6 to 2 times as fast with it as with
what Linux grows to by itself (4 MiB), at any size of tensors; 256 KiB is about as good, 1 MiB shows no gain
(docs/benchmarks.md)."""


def resolve(host: str, port: int) -> set[Endpoint]:
    """Every endpoint that a host and port stand for. Raises OSError when the name cannot be resolved."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {(str(info[4][0]), port) for info in found}


def gloo_endpoint(blob: bytes) -> Endpoint | None:
    """Where a member of a gloo group listens, from what it put into the store; None for an unknown layout.

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
    """A TCP connection of this process: the number of its descriptor, which may come to mean another file once it is
    closed, and the inode of its socket, which tells.
    """

    number: int
    inode: int

    @property
    def is_open(self) -> bool:
        """Whether this process has not closed it yet. One that was cut is open until its owner has noticed."""
        try:
            return os.fstat(self.number).st_ino == self.inode
        except OSError:
            return False

    @property
    def is_live(self) -> bool:
        """Whether this process has it open, and its peer has not closed it."""
        try:
            with closing(_handle(self.number, self.inode)) as handle:
                return handle.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def find(*, accepted_at: Collection[Endpoint] = (), made_to: Collection[Endpoint] = ()) -> list[Connection]:
    """Every connection of this process that one of its listeners accepted, or that it made to a peer.

    ``accepted_at`` are endpoints of listeners of this process, ``made_to`` those of peers.
    """
    found = []
    for number in _descriptors():
        with suppress(OSError), closing(_handle(number)) as handle:
            if _plain(handle.getpeername()) in made_to or _plain(handle.getsockname()) in accepted_at:
                found.append(Connection(number, os.fstat(handle.fileno()).st_ino))
    return found


def of_group(endpoints: Mapping[int, Endpoint], rank: int) -> list[Connection]:
    """This process's connections of a gloo group whose member it is, given where the members listen, by rank.

    None where its own place is not known.
    """
    if rank not in endpoints:
        return []
    peers = {endpoint for other, endpoint in endpoints.items() if other != rank}
    return find(accepted_at={endpoints[rank]}, made_to=peers)


def cut(connections: Iterable[Connection]) -> int:
    """Shut down those that are still open; returns how many were cut. What blocks on them ends at once."""
    count = 0
    for connection in connections:
        with suppress(OSError), closing(_handle(connection.number, connection.inode)) as handle:
            handle.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def keep_cached(connections: Iterable[Connection]) -> int:
    """Bound what queues up in those that do not leave this machine. Returns how many those are.

    Others keep the system's buffers, which grow with the length of the line.
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
    """A second handle on the socket of a descriptor: the number may mean another file by the time it is looked at.

    Raises OSError if it is no socket, or not the one with this inode.
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
            # A socket for both families shows IPv4 peers as mapped addresses.
            return host.removeprefix("::ffff:"), port
    return None
