"""Where the members of a group meet: the source's TCP store, and how a member forms its process group there.

Left to itself a rendezvous can hang for ever, in a store whose server is mute or for a member that never comes.
:class:`Forming` ends by its deadline and can be stopped: gloo waits through :class:`WatchedStore`, in short steps in
Python; and the whole runs in a thread whose connection to the store is cut when it blocks all the same.
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
"""The device under whose name torch keeps a backend's keys in the store: the first one that the backend serves."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_CONNECT_S = 2.0
"""How long torch's client may try to reach a store that took a connection a moment ago."""

_GRACE_S = 0.5
"""How long a rendezvous may take to end once it was told to."""


class GroupStore:
    """The source's store: it listens on a port of its own and serves any number of groups of different names.

    A group's name is used once per store: members that come later under the same name meet the earlier ones' traces.

    Attributes:
        port: where it listens.
    """

    def __init__(self, bind_host: str = "127.0.0.1") -> None:
        """Listen on a free port of ``bind_host``, an address or name of this machine.

        Raises GROUP_FAILED when that is not possible.
        """
        try:
            family = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((bind_host, 0), family=family)
        except OSError as error:
            raise Reason.GROUP_FAILED.error(f"no store can listen on {bind_host}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)
        self._store: TCPStore | None = TCPStore(
            self._host, self.port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def local_address(self) -> tuple[str, int]:
        """Where this machine's own members find it."""
        return self._host, self.port

    def address(self, host: str) -> tuple[str, int]:
        """Where other members find it, given a name or address under which they reach this machine."""
        return host, self.port

    def close(self) -> None:
        """Stop listening. Rendezvous under way end with an error; groups that stand are not touched."""
        self._store = None


@dataclass
class Member:
    """One member of a group, to be formed or formed.

    Attributes:
        name: the group's name.
        rank: this member's rank in it.
        world_size: number of members.
        backend: "gloo" or "nccl".
        interface_host: address of this machine that gloo listens on.
        broadcast_timeout_s: the longest that one broadcast may take.
        endpoints: where the members listen, by rank, as far as that is known.
        process_group: torch's process group, once it is formed.
        store: what the process group keeps using; must live as long as it does.
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
        """Raises FIELD_INVALID or UNSUPPORTED for a member that cannot be."""
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
    """One attempt to form a member's process group."""

    def __init__(self, member: Member, address: tuple[str, int], patient_s: float | None = None) -> None:
        """``address`` is where the store listens; ``patient_s``: how long it may take to; None: as long as there is
        time. Raises as :meth:`Member.check` does.
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
        """Fill in the member's process group, within ``timeout_s`` and unless ``stop`` is set meanwhile.

        Raises GROUP_FAILED, REJECTED.
        """
        deadline = time.monotonic() + timeout_s
        under_way.add(self)
        thread = threading.Thread(target=self._attempt, args=(deadline,), name=f"join-{self._member.name}", daemon=True)
        thread.start()
        # The attempt knows the deadline as well: past it, it is given up only if it does not end by itself.
        while not self._ended.wait(_LONGEST_PAUSE_S):
            if stop.is_set() or time.monotonic() > deadline + _GRACE_S:
                self._give_up.set()
                if not self._ended.wait(_GRACE_S):
                    self._cut()
                break
        if not self._ended.is_set() or self._error is not None:
            raise self._failure(timeout_s, stopped=stop.is_set()) from self._error

    def end(self, limit_s: float) -> None:
        """Break it off and wait for that, at most so long: whoever waits in :meth:`run` is told."""
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
            # Whatever it is, the caller's thread reports it. Its frames hold gloo's device, and are held by what they
            # hold: without them the device's thread and descriptors are gone now, not with the next cyclic collection.
            self._error = error.with_traceback(None)
        finally:
            under_way.discard(self)
            self._ended.set()

    def _group(self, store: TCPStore, deadline: float) -> Any:
        """The member's process group (a backend object)."""
        member = self._member
        # SGLang's prefix, then those of torch's _new_process_group_helper.
        prefixed = PrefixStore(f"{member.name}/", PrefixStore(member.name, store))
        prefixed = PrefixStore(f"{_PREFIX[member.backend]}/", prefixed)
        if member.backend == "gloo":
            return self._gloo(prefixed, deadline)
        # Not watched: NCCL comes back to the store later, from threads of its own.
        member.store = prefixed
        return nccl_group(prefixed, member.rank, member.world_size, member.broadcast_timeout_s)

    def _connect(self, deadline: float) -> TCPStore:
        """A client of the store, waiting for it to listen: the source may be slower than its members."""
        host, port = self._address
        patient_until = time.monotonic() + self._patient_s
        while True:
            remaining = deadline - time.monotonic()
            try:
                # torch's own client reports every refusal on stderr.
                socket.create_connection(self._address, timeout=max(remaining, _FIRST_PAUSE_S)).close()
                break
            except OSError:
                late = time.monotonic() > patient_until
                if remaining <= 0 or late or self._give_up.wait(_LONGEST_PAUSE_S):
                    raise
        # It comes back to a store that has gone in this moment until its time is up, and cannot be stopped.
        limit = datetime.timedelta(seconds=max(min(remaining, _CONNECT_S), _FIRST_PAUSE_S))
        # A store that torch's own rendezvous made waits until as many members as the group has have checked in.
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
        options._threads = 1  # there is one broadcast at a time
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
        if watched is not None and self._give_up.is_set():  # it was cut off while it asked the store who is missing
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
"""Attempts that have not ended, given up ones among them. The interpreter must not end a thread inside of torch: that
ends the process with an abort.
"""


class RendezvousEnded(Exception):
    """A wait in the store ended before its keys were there."""


class WatchedStore(Store):
    """A store whose waits can be ended, as gloo's rendezvous uses it.

    Attributes:
        missing: after a wait that came to its deadline, the ranks that had not come, where that can be told.
        awaited: the ranks that were waited for last.
        endpoints: where the members listen, by rank, as far as it became known.
    """

    def __init__(
        self, store: PrefixStore, *, rank: int, world_size: int, give_up: threading.Event, deadline: float
    ) -> None:
        """``give_up`` ends a wait; ``deadline`` is on the monotonic clock."""
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
        """Put a value; the first key that ends in this member's rank shows how gloo names its keys."""
        if self._prefix is None and key.endswith(str(self._rank)):
            self._prefix = key.removesuffix(str(self._rank))
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        value = self._store.get(key)
        rank = self._rank_of(key)
        if rank is not None and (endpoint := gloo_endpoint(value)) is not None:
            self.endpoints[rank] = endpoint
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys are there."""
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._store.add(key, amount)

    def has_extended_api(self) -> bool:
        """Whether there are bulk operations: none, the plain ones are the same in all versions."""
        return False

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return once all the keys are there. Raises RendezvousEnded; the shorter of both limits counts."""
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
