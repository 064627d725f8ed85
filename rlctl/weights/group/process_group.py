"""The process group over which a source sends weights: formation, broadcasts, interruption.

The group is built as SGLang builds its weight update groups (``init_custom_process_group``), with the same prefixes, so
that SGLang's own ranks can be members. No default process group of torch is needed or made.

No call can hang: the formation and every broadcast have a timeout, and :meth:`WeightGroup.interrupt` ends a broadcast
at once. A group that failed or was interrupted is spent; a new group replaces it.
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
from contextlib import suppress
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
"""Default cause of an interruption."""

LONGEST_S = 24 * 3600.0
"""Maximum duration of a call: for groups whose use is not known yet."""

_SLICE = datetime.timedelta(milliseconds=100)
_LEAST_S = 0.01
_GRACE_S = 1.0
"""Time in which a broadcast must end after an interruption, or past its own timeout."""

_LONGEST_PAUSE_S = 1.0
"""Maximum pause between two polls of a broadcast that gloo does not end before its timeout."""

_EXIT_S = 2.5
"""Time that the end of the process waits for the disposal of groups and the end of formations."""


class WeightGroup:
    """A member of a formed group. Broadcasts come from one thread at a time, other calls from any thread.

    Attributes:
        rank: the group rank; 0 is the source.
        world_size: number of members.
        backend: "gloo" or "nccl".
        store: the source's store, if this group alone uses it; the store listens until the group is spent.
    """

    store: object = None

    def __init__(self, member: Member) -> None:
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
        """torch's process group (a backend object); None after :meth:`close`."""
        return None if self._member is None else self._member.process_group

    @property
    def under_way(self) -> bool:
        """Whether a broadcast may still read or write its tensor, even after an interruption.

        False if all known connections are closed: no byte comes or goes. gloo then may not end a broadcast that was
        within a tensor; it remains until its own timeout.
        """
        work = self._work
        return work is not None and not work.is_completed() and not self._severed

    @property
    def stands(self) -> bool:
        """Whether the group is not spent and has not lost all other members. NCCL reports no losses."""
        return not self._spent and not self._severed

    def allow(self, timeout_s: float) -> None:
        """Set the timeout of further broadcasts, up to the timeout with which the group was formed.

        A group serves several updates: the time of the update that formed the group does not apply to later updates.
        """
        self._timeout_s = min(self._most_s, max(timeout_s, _LEAST_S))

    def announce(self, sizes: Iterable[int]) -> None:
        """At rank 0, record the sizes in bytes of the broadcasts that the members await. For groups that need them."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Send a tensor's bytes from rank ``src`` to all, or receive them in place; return at the end.

        On a device the end is the end of the device's work. The tensor must be contiguous, with the same number of
        bytes at every member; dtype and shape are not sent.

        Raises FIELD_INVALID for a tensor that is not contiguous. Raises GROUP_FAILED, REJECTED, if the group is spent
        or busy: nothing was sent. Raises GROUP_FAILED, DIRTY, if the broadcast failed, timed out or was interrupted:
        the contents of the tensor are then undefined.
        """
        if not tensor.is_contiguous():
            raise Reason.FIELD_INVALID.error(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
        self._start(as_bytes(tensor), src)
        try:
            self._await()
        finally:
            self._idle.set()

    def interrupt(self, cause: str = INTERRUPTED) -> None:
        """End the current broadcast with GROUP_FAILED, here and at the peers. The group is spent. Never blocks."""
        self._spend(cause)

    def close(self) -> None:
        """Leave the group. Never blocks: a current broadcast is interrupted, and disposed of after its end.

        The source must leave only after the members have confirmed the bytes: closing a connection can discard bytes
        that the peer has not read.
        """
        self._spend("it was closed")
        with self._lock:
            member, self._member = self._member, None
        if member is not None:
            _open_groups.discard(self)
            disposal = _Disposal(member, self._work, self._data, self._idle)
            try:
                disposal.start()
            except RuntimeError:  # near the end of the process some Pythons (3.12) start no thread
                disposal.forget()

    def forget(self) -> None:
        """Leave the group to the parent, in a child of a fork: the connections are the parent's."""
        keep_for_ever((self._member, self._work, self.store))
        self._lock = threading.Lock()  # no thread of the child could release a locked lock
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
                failure = error
            else:
                self._data = data
                self._begun += 1
                self._idle.clear()
                return
        # Without the lock, which the end of a group may need.
        raise self._failure(self._spend(f"a broadcast did not start: {cause_of(failure)}")) from failure

    def _await(self) -> None:
        """Wait for the end of the broadcast, in slices, so that an interruption is noticed."""
        work = self._work
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while not self._done_within_slice(work) and not self._spent:
            if time.monotonic() > deadline:
                self._spend(f"a broadcast took longer than {self._timeout_s:g} s")
            elif self._severed:
                self._spend("the other members have gone")
        if self._spent:
            # The connections are cut. The broadcast ends within a moment, and may write into the tensor until then.
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
            # A traceback keeps this frame. The frame must not keep the work: only a thread that may block releases it.
            del work
            raise self._failure(cause)

    def _done_within_slice(self, work: Any) -> bool:
        if self.backend == "gloo":
            try:
                work.wait(_SLICE)
            except RuntimeError:
                # The slice is over, or the broadcast has failed. Only a failed broadcast is completed.
                return bool(work.is_completed())
            return True
        # NCCL's wait blocks only the current stream; a wait with a timeout aborts the communicator.
        slice_end = time.monotonic() + _SLICE.total_seconds()
        pause = 50e-6
        while not work.is_completed() and time.monotonic() < slice_end:
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return bool(work.is_completed())

    def _spend(self, cause: str) -> str:
        """Make the group unusable and break the current broadcast; return the first cause. Takes no lock."""
        self._spent = self._spent or cause
        self.store = None
        if self._member is not None:
            self._abort(self._member)
        tcp_connections.cut(self._connections)
        return self._spent

    def _abort(self, member: Member) -> None:
        """End NCCL's communicators, in a thread: this blocks until the communicators have ended."""
        if self.backend == "nccl":
            thread = threading.Thread(target=member.process_group.abort, name=f"abort-{self.name}", daemon=True)
            with suppress(RuntimeError):  # near the end of the process some Pythons (3.12) start no thread
                thread.start()

    @property
    def _severed(self) -> bool:
        """Whether all known connections of the group are closed. False without known connections."""
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
    """Form a group with the other members; return when all members have joined.

    ``store`` is the source's store, or its address (host, port). ``timeout_s`` limits the formation, and
    ``broadcast_timeout_s`` (by default equal) each broadcast, see :meth:`WeightGroup.allow`. gloo listens on
    ``interface_host``, an address of this machine that the other members reach. ``stop`` ends the formation early.
    ``patient_s`` limits the time in which the store may refuse connections. None: ``timeout_s``, since the source may
    be slower than its members. With NCCL the members meet only in their first broadcast.

    Raises FIELD_INVALID, DEADLINE_INVALID, UNSUPPORTED (this torch lacks the backend). Raises GROUP_FAILED, REJECTED,
    if the group was not formed, with the missing ranks if known.
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
    """Disposes of a group in the background.

    Dropping a gloo group joins its threads: this takes 0.1 s, or until the timeout of a current broadcast. The thread
    is a daemon, so that the process can end meanwhile. It sleeps in Python, not in torch: torch's threads must not be
    killed.
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
        """Keep the group without disposal: in a child of a fork, or at the end of the process."""
        keep_for_ever((self._member, self._work))
        self._work = self._data = self._member = None


_open_groups: weakref.WeakSet[WeightGroup] = weakref.WeakSet()
_disposals: weakref.WeakSet[_Disposal] = weakref.WeakSet()

needed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that members depend on. The end of the process waits for these threads."""


@atexit.register
def _take_apart() -> None:
    """Leave every group before the interpreter ends: torch would otherwise wait for current broadcasts."""
    for group in list(_open_groups):
        group.close()
    for thread in list(needed):  # started just now; the interpreter itself waits for earlier threads
        thread.join()
    give_up = time.monotonic() + _EXIT_S
    for forming in list(rendezvous.under_way):
        forming.end(give_up - time.monotonic())
    for disposal in list(_disposals):
        disposal.join(max(0.0, give_up - time.monotonic()))


def _after_fork() -> None:
    # The end of a child would cut the parent's connections, and wait for gloo's threads, which the child lacks.
    for group in list(_open_groups):
        group.forget()
    for disposal in list(_disposals):
        disposal.forget()
    for threads in (_open_groups, _disposals, needed, rendezvous.under_way):
        threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def keep_for_ever(resource: object) -> None:
    """Never destroy this object, even at the interpreter's exit.

    Destroying a gloo group waits for its threads and for a current broadcast.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))
