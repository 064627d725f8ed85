"""The rendezvous of the members of a group: the source's TCP store, and the formation of a process group there.

A plain rendezvous can hang for ever, in a store with a mute server or for a member that never comes. :class:`Forming`
has a deadline and can be stopped. gloo waits through :class:`WatchedStore`, in short steps in Python. The whole
formation runs in a thread; if the thread still blocks, its connection to the store is cut.
"""

from __future__ import annotations

import datetime
import math
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.group import tcp_connections
from rlctl.weights.group.nccl import nccl_group
from rlctl.weights.group.tcp_connections import Endpoint, gloo_endpoint
from rlctl.weights.group.torch_errors import cause_of

_PREFIX = {"gloo": "cpu", "nccl": "cuda"}
"""First device of a backend. torch prefixes the backend's keys in the store with its name."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_CONNECT_S = 2.0
"""Time in which torch's client may retry a store that took a connection a moment ago."""

_GRACE_S = 0.5
"""Time in which a rendezvous must end after a request to end."""


class GroupStore:
    """The source's store. Listens on its own TCP port and serves any number of groups of different names.

    A group's name is used once per store: later members of the same name would read the earlier members' keys.

    Attributes:
        port: TCP port of the store.
    """

    def __init__(self, bind_host: str = "127.0.0.1") -> None:
        """Listen on a free port of ``bind_host``, an address or name of this machine.

        Raises GROUP_FAILED if that is not possible.
        """
        try:
            family = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((bind_host, 0), family=family)
        except OSError as error:
            raise Reason.GROUP_FAILED.error(f"no store can listen on {bind_host}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)
        try:
            self._store: TCPStore | None = TCPStore(
                self._host, self.port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        except RuntimeError as error:  # for example without a free file descriptor
            raise Reason.GROUP_FAILED.error(f"no store can listen on {bind_host}: {cause_of(error)}") from error

    @property
    def local_address(self) -> tuple[str, int]:
        return self._host, self.port

    def address(self, host: str) -> tuple[str, int]:
        """Return the address of the store for other members; they reach this machine as ``host``."""
        return host, self.port

    def close(self) -> None:
        """Stop listening. A current rendezvous ends with an error; formed groups are unaffected."""
        self._store = None


@dataclass
class Member:
    """A member of a group, before or after the formation.

    Attributes:
        rank: the group rank.
        world_size: number of members.
        backend: "gloo" or "nccl".
        interface_host: address of this machine on which gloo listens.
        broadcast_timeout_s: maximum duration of a broadcast.
        endpoints: known endpoints of the members, by rank.
        process_group: torch's process group, after the formation.
        store: the store of the process group; must live as long as the group.
    """

    name: str
    rank: int
    world_size: int
    backend: str
    interface_host: str
    broadcast_timeout_s: float
    endpoints: dict[int, Endpoint] = field(default_factory=dict)
    process_group: Any = None
    store: object = None

    def check(self) -> None:
        """Raise FIELD_INVALID or UNSUPPORTED for an impossible member."""
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise Reason.FIELD_INVALID.error(
                f"there is no rank {self.rank} in a group of {self.world_size}", field="rank"
            )
        if self.backend not in _PREFIX:
            raise Reason.FIELD_INVALID.error(
                f"{self.backend!r} is no backend; there are: {', '.join(_PREFIX)}", field="backend"
            )
        if not getattr(dist, f"is_{self.backend}_available")():
            raise Reason.UNSUPPORTED.error(f"this torch is built without {self.backend}", field="backend")


class Forming:
    """An attempt to form a member's process group."""

    def __init__(self, member: Member, address: tuple[str, int], patient_s: float | None = None) -> None:
        """Create an attempt; ``address`` is the store's.

        ``patient_s`` limits the time in which the store may refuse connections; None: the whole timeout. Raises as
        :meth:`Member.check`.
        """
        member.check()
        self._member = member
        self._address = address
        self._patient_s = math.inf if patient_s is None else patient_s
        self._give_up = threading.Event()
        self._ended = threading.Event()
        self._watched: WatchedStore | None = None
        self._error: Exception | None = None

    def run(self, timeout_s: float, stop: threading.Event) -> None:
        """Form the member's process group within ``timeout_s``; ``stop`` ends the attempt early.

        Raises GROUP_FAILED, REJECTED.
        """
        deadline = time.monotonic() + timeout_s
        under_way.add(self)
        thread = threading.Thread(target=self._attempt, args=(deadline,), name=f"join-{self._member.name}", daemon=True)
        thread.start()
        # The attempt has the same deadline. Past the deadline and a grace time the attempt is forced to end.
        while not self._ended.wait(_LONGEST_PAUSE_S):
            if stop.is_set() or time.monotonic() > deadline + _GRACE_S:
                self._give_up.set()
                if not self._ended.wait(_GRACE_S):
                    self._cut()
                break
        if not self._ended.is_set() or self._error is not None:
            raise self._failure(timeout_s, stopped=stop.is_set()) from self._error

    def end(self, limit_s: float) -> None:
        """Break off the attempt and wait at most ``limit_s`` for its end. The caller of :meth:`run` gets an error."""
        until = time.monotonic() + limit_s
        self._give_up.set()
        if not self._ended.wait(min(_GRACE_S, limit_s)):
            self._cut()
            self._ended.wait(until - time.monotonic())

    def _attempt(self, deadline: float) -> None:
        try:
            group = self._group(self._connect(deadline), deadline)
            if not self._give_up.is_set():
                self._member.process_group = group
        except Exception as error:  # noqa: BLE001
            # The caller's thread reports the error, whatever its type. Frames of the traceback hold gloo's device in a
            # reference cycle. Without them the device's thread and descriptors go now, not with the next cyclic
            # collection.
            self._error = error.with_traceback(None)
        finally:
            under_way.discard(self)
            self._ended.set()

    def _group(self, store: TCPStore, deadline: float) -> Any:
        member = self._member
        # SGLang's prefix, then the prefixes of torch's _new_process_group_helper.
        prefixed = PrefixStore(f"{member.name}/", PrefixStore(member.name, store))
        prefixed = PrefixStore(f"{_PREFIX[member.backend]}/", prefixed)
        if member.backend == "gloo":
            return self._gloo(prefixed, deadline)
        # Not watched: NCCL uses the store again later, from its own threads.
        member.store = prefixed
        return nccl_group(prefixed, member.rank, member.world_size, member.broadcast_timeout_s)

    def _connect(self, deadline: float) -> TCPStore:
        """Wait for the store to listen and return a client: the source may be slower than its members."""
        host, port = self._address
        patient_until = time.monotonic() + self._patient_s
        while True:
            remaining = deadline - time.monotonic()
            try:
                # torch's own client would report every refusal on stderr.
                socket.create_connection(self._address, timeout=max(remaining, _FIRST_PAUSE_S)).close()
                break
            except OSError:
                late = time.monotonic() > patient_until
                if remaining <= 0 or late or self._give_up.wait(_LONGEST_PAUSE_S):
                    raise
        # If the store goes away just now, torch's client retries for its whole time and cannot be stopped.
        limit = datetime.timedelta(seconds=max(min(remaining, _CONNECT_S), _FIRST_PAUSE_S))
        # A store of torch's own rendezvous waits until all members of the group have checked in.
        store = TCPStore(host, port, self._member.world_size, False, timeout=limit, wait_for_workers=True)
        store.set_timeout(datetime.timedelta(seconds=max(deadline - time.monotonic(), _FIRST_PAUSE_S)))
        return store

    def _gloo(self, store: PrefixStore, deadline: float) -> Any:
        member = self._member
        gloo: Any = dist.ProcessGroupGloo
        watched = WatchedStore(
            store, rank=member.rank, world_size=member.world_size, give_up=self._give_up, deadline=deadline
        )
        self._watched = member.store = watched
        member.endpoints = watched.endpoints
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), _FIRST_PAUSE_S))
        options._threads = 1  # broadcasts do not overlap
        options._devices = [gloo.create_device(hostname=member.interface_host, lazy_init=False)]
        return gloo(watched, member.rank, member.world_size, options)

    def _cut(self) -> None:
        with suppress(OSError):
            tcp_connections.cut(tcp_connections.find(made_to=tcp_connections.resolve(*self._address)))
            self._ended.wait(_GRACE_S)

    def _failure(self, timeout_s: float, *, stopped: bool) -> RlctlError:
        member = self._member
        host, port = self._address
        watched = self._watched
        missing = watched.missing if watched is not None else []
        if watched is not None and self._give_up.is_set():  # cut off during the query for the missing ranks
            missing = missing or watched.awaited
        reported = cause_of(self._error) if self._error is not None else ""
        if stopped:
            cause = "forming it was interrupted"
        elif missing:
            cause = f"after {timeout_s:g} s these ranks had not come: {', '.join(map(str, missing))}"
        elif member.store is None:
            waited_s = min(timeout_s, self._patient_s) if isinstance(self._error, OSError) else timeout_s
            cause = f"the store at {host}:{port} did not answer within {waited_s:g} s: {reported or 'it is mute'}"
        else:
            cause = reported or f"it was not formed within {timeout_s:g} s"
        return Reason.GROUP_FAILED.error(
            f"group {member.name}, rank {member.rank} of {member.world_size}: {cause}",
            metadata={"missing_ranks": ",".join(map(str, missing))} if missing else None,
        )


under_way: weakref.WeakSet[Forming] = weakref.WeakSet()
"""Attempts that have not ended, including abandoned attempts.

The interpreter must not end a thread inside torch: that aborts the process.
"""


class RendezvousEnded(Exception):
    """A wait in the store ended without its keys."""


class WatchedStore(Store):
    """A store for gloo's rendezvous, with waits that can be ended.

    Attributes:
        missing: ranks without a key after a wait reached its deadline, if known.
        awaited: ranks of the last wait.
        endpoints: known endpoints of the members, by rank.
    """

    def __init__(
        self, store: PrefixStore, *, rank: int, world_size: int, give_up: threading.Event, deadline: float
    ) -> None:
        """Wrap a store; ``give_up`` ends a wait, ``deadline`` is on the monotonic clock."""
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._give_up = give_up
        self._deadline = deadline
        self._prefix: str | None = None
        self.missing: list[int] = []
        self.awaited: list[int] = []
        self.endpoints: dict[int, Endpoint] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store a value. The first key that ends in this member's rank shows gloo's prefix of such keys."""
        if self._prefix is None and key.endswith(str(self._rank)):
            self._prefix = key.removesuffix(str(self._rank))
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value. Records the endpoint of a gloo member."""
        self.wait([key])
        value = self._store.get(key)
        rank = self._rank_of(key)
        if rank is not None and (endpoint := gloo_endpoint(value)) is not None:
            self.endpoints[rank] = endpoint
        return value

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def has_extended_api(self) -> bool:
        """Return False, for no bulk operations: the plain operations are the same in all versions of torch."""
        return False

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for all keys until the earlier of both deadlines. Raises RendezvousEnded."""
        deadline = self._deadline
        if timeout is not None and timeout.total_seconds() > 0:
            deadline = min(deadline, time.monotonic() + timeout.total_seconds())
        self.awaited = [rank for rank in map(self._rank_of, keys) if rank is not None]
        pause = _FIRST_PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                self.missing = self._absent()
                raise RendezvousEnded("the time was up")
            if self._give_up.wait(pause):
                raise RendezvousEnded("it was interrupted")
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _absent(self) -> list[int]:
        if self._prefix is None:
            return []
        return [rank for rank in range(self._world_size) if not self._store.check([f"{self._prefix}{rank}"])]

    def _rank_of(self, key: str) -> int | None:
        if self._prefix is None:
            return None
        suffix = key.removeprefix(self._prefix)
        return int(suffix) if suffix.isdecimal() else None
