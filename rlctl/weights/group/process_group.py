"""The process group over which a source sends weights: forming it, broadcasting in it, breaking out of it.

It is built as SGLang builds its weight update groups (``init_custom_process_group``), prefix for prefix, so that
SGLang's own ranks may be members. No default process group of torch is needed or made.

Nothing here can hang: forming a group and every broadcast end by their timeout, and :meth:`WeightGroup.interrupt`
ends a broadcast at once. A group that failed or was interrupted is spent; a new one takes its place.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.group import rendezvous, tcp_connections
from rlctl.weights.group.rendezvous import Forming, GroupStore, Member
from rlctl.weights.group.torch_errors import cause_of
from rlctl.weights.tensor.tensors import as_bytes

__all__ = ["INTERRUPTED", "LONGEST_S", "GroupStore", "WeightGroup", "join", "keep_for_ever", "needed"]

INTERRUPTED = "it was interrupted"
"""Why something broke off, where nobody says more."""

LONGEST_S = 24 * 3600.0
"""As long as a call may take: for groups of which nobody knows yet what they will be used for."""

_SLICE = datetime.timedelta(milliseconds=100)
_LEAST_S = 0.01
_GRACE_S = 1.0
"""How long a broadcast may take to end once it was broken, or past its own timeout."""

_LONGEST_PAUSE_S = 1.0
"""Between two looks at a broadcast that gloo does not end before its timeout."""

_EXIT_S = 2.5
"""How long the end of the process waits for groups to be taken apart, and for those that are being formed to be given
up."""


class WeightGroup:
    """One member of a group that stands. Broadcasts come from one thread at a time; the rest from any thread.

    Attributes:
        name: the group's name.
        rank: this member's rank; 0 is the source.
        world_size: number of members.
        backend: "gloo" or "nccl".
        store: the source's, where it is this group's alone; it listens until the group is spent.
    """

    store: object = None

    def __init__(self, member: Member) -> None:
        """Use :func:`join`."""
        self.name = member.name
        self.rank = member.rank
        self.world_size = member.world_size
        self.backend = member.backend
        self._most_s = self._timeout_s = member.broadcast_timeout_s
        self._member: Member | None = member
        self._connections = tcp_connections.of_group(member.endpoints, member.rank)
        self._lock = threading.Lock()
        self._spent = ""
        self._begun = 0
        self._work: Any = None
        self._data: torch.Tensor | None = None
        self._idle = threading.Event()
        self._idle.set()
        tcp_connections.keep_cached(self._connections)
        _open_groups.add(self)

    @property
    def process_group(self) -> Any:
        """torch's process group (a backend object); None once the group was closed."""
        return None if self._member is None else self._member.process_group

    @property
    def under_way(self) -> bool:
        """Whether a broadcast may still read or write its tensor, one that was given up included.

        One whose connections are closed cannot: gloo forgets to end it if it was in the middle of a tensor, and it
        stays until its own timeout, but no byte comes or goes any more.
        """
        work = self._work
        return work is not None and not work.is_completed() and not self._severed

    @property
    def stands(self) -> bool:
        """Whether it is not spent, and not every other member is known to have gone. NCCL does not say who has."""
        return not self._spent and not self._severed

    def allow(self, timeout_s: float) -> None:
        """Let every broadcast from now on take so long, at most as long as the group was formed for.

        A group is kept from one update to the next: what is left of the one that formed it says nothing of the others.
        """
        self._timeout_s = min(self._most_s, max(timeout_s, _LEAST_S))

    def announce(self, sizes: Iterable[int]) -> None:
        """Rank 0: the members are waiting for broadcasts of so many bytes each. For groups that must know."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Send a tensor's bytes from rank ``src`` to all, or receive them into it; returns when that is done.

        On a device, done means done by the device. The tensor must be contiguous, and of the same number of bytes
        everywhere; its dtype and shape do not travel.

        Raises FIELD_INVALID for a tensor that is not contiguous; GROUP_FAILED, REJECTED, when the group is spent or
        busy, so that nothing was sent; GROUP_FAILED, DIRTY, when the broadcast failed, timed out or was interrupted:
        the tensor may hold anything then.
        """
        if not tensor.is_contiguous():
            raise Reason.FIELD_INVALID.error(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
        self._start(as_bytes(tensor), src)
        try:
            self._await()
        finally:
            self._idle.set()

    def interrupt(self, cause: str = INTERRUPTED) -> None:
        """End the broadcast under way with GROUP_FAILED, here and at the peers; the group is spent. Never blocks."""
        self._spend(cause)

    def close(self) -> None:
        """Leave the group. Never blocks: what is under way is interrupted, and let go of once it has ended.

        The source leaves only when the members have confirmed what they received: a connection that is closed may
        take bytes along that its peer has not read yet.
        """
        self._spend("it was closed")
        with self._lock:
            member, self._member = self._member, None
        if member is not None:
            _open_groups.discard(self)
            disposal = _Disposal(member, self._work, self._data, self._idle)
            try:
                disposal.start()
            except RuntimeError:  # at the end of the process some Pythons (3.12) begin no thread
                disposal.forget()

    def forget(self) -> None:
        """In a child of a fork: leave it to the parent, whose connections these are."""
        keep_for_ever((self._member, self._work, self.store))
        self._lock = threading.Lock()  # whoever held it is not here
        self._spent = "it belongs to the process that this one was forked from"
        self._member, self._work, self._connections, self.store = None, None, [], None
        self._idle.set()

    def _start(self, data: torch.Tensor, src: int) -> None:
        with self._lock:
            if self._spent or self._member is None:
                raise Reason.GROUP_FAILED.error(f"group {self.name}: {self._spent}")
            if self._work is not None:
                raise Reason.GROUP_FAILED.error(f"group {self.name}: another broadcast is under way")
            options = dist.BroadcastOptions()
            options.rootRank = src
            options.timeout = datetime.timedelta(seconds=self._timeout_s)
            try:
                self._work = self._member.process_group.broadcast([data], options)
            except RuntimeError as error:
                raise self._failure(self._spend(f"a broadcast did not start: {cause_of(error)}")) from error
            self._data = data
            self._begun += 1
            self._idle.clear()

    def _await(self) -> None:
        """Wait until the broadcast is done, in slices, so that an interrupt is noticed."""
        work = self._work
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while not self._done_within_slice(work) and not self._spent:
            if time.monotonic() > deadline:
                self._spend(f"a broadcast took longer than {self._timeout_s:g} s")
            elif self._severed:
                self._spend("the other members have gone")
        if self._spent:
            # Connections are cut: it ends within a moment, and until it has ended it may write into the tensor.
            give_up = time.monotonic() + _GRACE_S
            while self.under_way and time.monotonic() < give_up:
                time.sleep(0.001)
        cause = self._spent
        if not cause:
            try:
                work.wait()
            except RuntimeError as error:
                cause = self._spend(f"a broadcast failed: {cause_of(error)}")
        if work.is_completed():
            self._work = self._data = None
        if cause:
            # A traceback keeps this frame: without the work, which only a thread that may block lets go of.
            del work
            raise self._failure(cause)

    def _done_within_slice(self, work: Any) -> bool:
        if self.backend == "gloo":
            try:
                work.wait(_SLICE)
            except RuntimeError:
                # Either the slice is over or the broadcast has failed; only one that failed is complete.
                return bool(work.is_completed())
            return True
        # NCCL's wait only makes the current stream wait, and one with a limit gives the communicator up.
        over = time.monotonic() + _SLICE.total_seconds()
        pause = 50e-6
        while not work.is_completed() and time.monotonic() < over:
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return bool(work.is_completed())

    def _spend(self, cause: str) -> str:
        """Make the group unusable and break what is under way; returns the first cause. Takes no lock."""
        self._spent = self._spent or cause
        self.store = None
        member = self._member
        if member is not None and self.backend == "nccl":
            # It waits for the communicators to be given up.
            threading.Thread(target=member.process_group.abort, name=f"abort-{self.name}", daemon=True).start()
        tcp_connections.cut(self._connections)
        return self._spent

    @property
    def _severed(self) -> bool:
        """Whether the group had connections that are known, and has closed all of them."""
        return bool(self._connections) and not any(connection.is_open for connection in self._connections)

    def _failure(self, cause: str) -> RlctlError:
        return Reason.GROUP_FAILED.error(f"group {self.name}: {cause}", outcome=common_pb2.OUTCOME_DIRTY)


def join(
    store: GroupStore | tuple[str, int],
    *,
    name: str,
    rank: int,
    world_size: int,
    backend: str = "gloo",
    timeout_s: float,
    broadcast_timeout_s: float | None = None,
    interface_host: str = "127.0.0.1",
    stop: threading.Event | None = None,
    patient_s: float | None = None,
) -> WeightGroup:
    """Form a group together with the other members; returns when all of them have come.

    ``store`` is the source's store, or (host, port) where it listens. ``timeout_s`` bounds the forming,
    ``broadcast_timeout_s`` (by default the same) each broadcast, see :meth:`WeightGroup.allow`. gloo listens on
    ``interface_host``, an address of this machine that the other members reach. Setting ``stop`` ends it early. A store
    that takes no connections is given up after ``patient_s``; None: when the time is up, since the source may be slower
    than its members.
    With NCCL the members meet only in their first broadcast.

    Raises FIELD_INVALID, DEADLINE_INVALID, UNSUPPORTED (this torch lacks the backend); GROUP_FAILED, REJECTED, when
    the group did not come about, naming the ranks that are missing where it can.
    """
    limit = timeout_s if broadcast_timeout_s is None else broadcast_timeout_s
    for field, seconds in (("timeout_s", timeout_s), ("broadcast_timeout_s", limit)):
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise Reason.DEADLINE_INVALID.error(f"{seconds} s is no time to wait", field=field)
    address = store.local_address if isinstance(store, GroupStore) else store
    member = Member(name, rank, world_size, backend, interface_host, limit)
    Forming(member, address, patient_s).run(timeout_s, stop or threading.Event())
    return WeightGroup(member)


class _Disposal(threading.Thread):
    """Takes a group apart in the background.

    Dropping a gloo group joins its threads: a tenth of a second, or until the timeout of what is under way. A daemon,
    so that the process may end meanwhile; it sleeps in Python rather than in torch, whose threads must not be ended
    from under it.
    """

    def __init__(self, member: Member, work: Any, data: torch.Tensor | None, idle: threading.Event) -> None:
        super().__init__(name=f"dispose-{member.name}", daemon=True)
        self._member: Member | None = member
        self._work = work
        self._data = data
        self._idle = idle
        _disposals.add(self)

    def run(self) -> None:
        pause = 0.02
        while self._work is not None and not self._work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        # Another thread may still be on its way out of the broadcast.
        self._idle.wait()
        self._work = self._data = self._member = None

    def forget(self) -> None:
        """Where it does not run: in a child of a fork, at the end of the process."""
        keep_for_ever((self._member, self._work))
        self._work = self._data = self._member = None


_open_groups: weakref.WeakSet[WeightGroup] = weakref.WeakSet()
_disposals: weakref.WeakSet[_Disposal] = weakref.WeakSet()

needed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that do what members rely on: the end of the process waits for them."""


@atexit.register
def _take_apart() -> None:
    """Leave every group before the interpreter goes: torch would otherwise wait for broadcasts under way."""
    for group in list(_open_groups):
        group.close()
    for thread in list(needed):  # begun just now; those before the interpreter has waited for itself
        thread.join()
    give_up = time.monotonic() + _EXIT_S
    for forming in list(rendezvous.under_way):
        forming.end(give_up - time.monotonic())
    for disposal in list(_disposals):
        disposal.join(max(0.0, give_up - time.monotonic()))


def _after_fork() -> None:
    # A child that ended would cut its parent's connections, and wait for gloo's threads, which it does not have.
    for group in list(_open_groups):
        group.forget()
    for disposal in list(_disposals):
        disposal.forget()
    for threads in (_open_groups, _disposals, needed, rendezvous.under_way):
        threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def keep_for_ever(held: object) -> None:
    """Never destroy this, also not at the interpreter's exit: destroying a gloo group waits for its threads, and for
    what is under way in it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
