"""The weight groups that this rank is a member of. Joined and left on helper threads, used by the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import GroupReport
from rlctl.weights.group import tcp_connections
from rlctl.weights.group.network_interfaces import probe
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.group.tcp_connections import Connection

PATIENT_S = 1.0
"""How long the store of an update may refuse connections: by then its source is there, or has gone."""


@dataclass(frozen=True)
class Membership:
    """What makes two requests to join the same: where the group meets, its shape, and this rank's place in it.

    ``pair``: of the groups of two that go by one name, which this is.
    """

    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    pair: int | None = None

    def full_name(self, name: str) -> str:
        """The name under which its members meet."""
        return name if self.pair is None else f"{name}-r{self.pair}"


@dataclass(frozen=True)
class _Joined:
    """A group that was joined.

    Attributes:
        store: this process's connections to the group's store; none where they are not known.
    """

    membership: Membership
    group: WeightGroup
    store: Sequence[Connection]

    @property
    def stands(self) -> bool:
        """Whether it can be used still. It cannot when its source has ended, and the source's store with it: members of
        other engines may be connected still.
        """
        return self.group.stands and (not self.store or any(connection.is_live for connection in self.store))


class Groups:
    """Weight groups by name."""

    def __init__(self, interface_host: str) -> None:
        """``interface_host``: address of this host under which the other members reach it."""
        self._interface_host = interface_host
        self._lock = threading.Lock()
        self._joining: dict[str, tuple[str, threading.Event]] = {}
        self._groups: dict[str, _Joined] = {}
        self._closed = False
        self._store: GroupStore | None = None

    @property
    def store_address(self) -> tuple[str, int]:
        """Where groups meet that this rank is the source of; the store is made when first asked for."""
        with self._lock:
            if self._store is None:
                self._store = GroupStore(self._interface_host)
            return self._store.address(self._interface_host)

    def join(
        self,
        name: str,
        membership: Membership,
        *,
        timeout_s: float,
        broadcast_timeout_s: float,
        update_id: str = "",
    ) -> GroupReport:
        """Join a group; blocks until all members have come. A group that stands with this membership is confirmed. A
        group whose source has ended does not stand, and gives way.

        ``update_id``: the update that it is for. Its store listens by now, or the coordinator asks again: one that does
        not is not waited for.

        Raises GROUP_EXISTS (it stands with another membership), OPERATION_CONFLICT (it is being joined),
        GROUP_FAILED.
        """
        report = GroupReport(group_name=name, group_rank=membership.rank, world_size=membership.world_size)
        with self._lock:
            if name in self._joining:
                raise Reason.OPERATION_CONFLICT.error(f"group {name} is being joined")
            if self._confirmed(name, membership):
                return report
            ended = self._groups.pop(name, None)
            stop = threading.Event()
            self._joining[name] = update_id, stop
            if self._closed:
                stop.set()
        if ended is not None:
            ended.group.close()
        group: WeightGroup | None = None
        store: Sequence[Connection] = ()
        try:
            group = join(
                (membership.host, membership.port),
                name=membership.full_name(name),
                rank=membership.rank,
                world_size=membership.world_size,
                backend=membership.backend,
                timeout_s=timeout_s,
                broadcast_timeout_s=broadcast_timeout_s,
                interface_host=self._interface_host,
                stop=stop,
                patient_s=PATIENT_S if update_id else None,
            )
            store = _connections_to(membership.host, membership.port)
        finally:
            with self._lock:
                del self._joining[name]
                if group is not None and not stop.is_set():
                    self._groups[name] = _Joined(membership, group, store)
        if stop.is_set():  # in the moment in which it came to stand
            group.close()
            raise Reason.GROUP_FAILED.error(f"group {name} was left while it was being joined")
        return report

    def probe(self, name: str, membership: Membership, *, timeout_s: float, update_id: str = "") -> GroupReport:
        """Whether this rank could join; ``update_id`` as for :meth:`join`.

        Raises OPERATION_CONFLICT, GROUP_EXISTS, UNREACHABLE.
        """
        with self._lock:
            if name in self._joining:
                raise Reason.OPERATION_CONFLICT.error(f"group {name} is being joined")
            confirmed = self._confirmed(name, membership)
        if not confirmed:
            place, patient_s = (membership.host, membership.port), PATIENT_S if update_id else None
            probe(place, self._interface_host, timeout_s=timeout_s, patient_s=patient_s)
        return GroupReport(group_name=name, group_rank=membership.rank, world_size=membership.world_size)

    def _confirmed(self, name: str, membership: Membership) -> bool:
        """Whether a group stands with this membership; the lock is held. Raises GROUP_EXISTS: with another one."""
        joined = self._groups.get(name)
        if joined is None or not joined.stands:
            return False
        if joined.membership != membership:
            raise Reason.GROUP_EXISTS.error(
                f"group {name} stands as {joined.membership}, not {membership}", field="group_name"
            )
        return True

    def get(self, name: str) -> WeightGroup:
        """The group of this name. Raises GROUP_NOT_FOUND."""
        with self._lock:
            if name not in self._groups:
                raise Reason.GROUP_NOT_FOUND.error(f"this rank is in no group {name!r}", field="group_name")
            return self._groups[name].group

    def leave(self, name: str) -> None:
        """Leave a group and forget it, or give up joining it; what is under way in it ends. Never blocks.

        Raises GROUP_NOT_FOUND.
        """
        with self._lock:
            _, joining = self._joining.get(name, ("", None))
        if joining is not None:
            joining.set()
            return
        group = self.get(name)
        with self._lock:
            self._groups.pop(name, None)
        group.close()

    def interrupt(self, update_id: str) -> None:
        """Give up joining the groups of this update: nobody comes there any more. Never blocks."""
        with self._lock:
            for joined_for, stop in self._joining.values():
                if joined_for == update_id:
                    stop.set()

    def drop(self, name: str, group: WeightGroup) -> None:
        """Forget a group that has failed: it is spent, and joining under its name makes a new one. Never blocks."""
        with self._lock:
            if name in self._groups and self._groups[name].group is group:
                del self._groups[name]
        group.close()

    def close(self) -> None:
        """Leave all groups, and give up those that are being joined."""
        with self._lock:
            self._closed = True
            for _, stop in self._joining.values():
                stop.set()
            groups, self._groups = list(self._groups.values()), {}
            store, self._store = self._store, None
        if store is not None:
            store.close()
        for joined in groups:
            joined.group.close()


def _connections_to(host: str, port: int) -> Sequence[Connection]:
    """This process's connections to a store."""
    try:
        return tcp_connections.find(made_to=tcp_connections.resolve(host, port))
    except OSError:
        return ()
