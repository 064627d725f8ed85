"""The weight groups of this rank. Joined and left on helper threads, used by the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import GroupReport, InitWeightsUpdateGroupRequest
from rlctl.weights.group import tcp_connections
from rlctl.weights.group.network_interfaces import probe
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.group.tcp_connections import Connection

PATIENT_S = 1.0
"""Time in which the store of an update may refuse connections: afterwards the source either listens or is gone."""


@dataclass(frozen=True)
class Membership:
    """Identity of a request to join: address of the store, shape of the group, and this member's group rank.

    ``pair``: index of a group of two among the groups with one name.
    """

    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    pair: int | None = None

    @classmethod
    def of(cls, request: InitWeightsUpdateGroupRequest, rank: int, device: torch.device) -> Membership | None:
        """Return the membership of an engine's rank, or None if the request leaves the rank out.

        Raises FIELD_INVALID for NCCL without a GPU.
        """
        if request.num_ranks and rank >= request.num_ranks:
            return None
        if request.backend == "nccl" and device.type != "cuda":
            raise Reason.FIELD_INVALID.error("this rank has no GPU, so it cannot join an nccl group", field="backend")
        return cls(
            host=request.master_address,
            port=request.master_port,
            rank=request.rank_offset + (0 if request.paired else rank),
            world_size=request.world_size,
            backend=request.backend or "gloo",
            pair=rank if request.paired else None,
        )

    def full_name(self, name: str) -> str:
        return name if self.pair is None else f"{name}-r{self.pair}"


@dataclass(frozen=True)
class _Joined:
    """A joined group.

    Attributes:
        store: this process's connections to the group's store; empty if unknown.
    """

    membership: Membership
    group: WeightGroup
    store: Sequence[Connection]

    @property
    def stands(self) -> bool:
        """Whether the group is usable.

        A group is not usable after its source and the source's store have ended, even if members of other engines are
        still connected.
        """
        return self.group.stands and (not self.store or any(connection.is_live for connection in self.store))


class Groups:
    """The weight groups of a rank, by name."""

    def __init__(self, interface_host: str) -> None:
        """Create an empty set; ``interface_host`` is the address of this host for other members."""
        self._interface_host = interface_host
        self._lock = threading.Lock()
        self._joining: dict[str, tuple[str, threading.Event]] = {}
        self._groups: dict[str, _Joined] = {}
        self._closed = False
        self._store: GroupStore | None = None

    @property
    def store_address(self) -> tuple[str, int]:
        """Address of the store for groups with this rank as the source; the first access creates the store."""
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
        """Join a group; block until all members have joined.

        A usable group with this membership is confirmed. A group whose source has ended is replaced.

        ``update_id``: the update of the group. With an update the wait for the store is short: the store listens by
        now, or the coordinator repeats the command.

        Raises GROUP_EXISTS (a usable group has a different membership), OPERATION_CONFLICT (the group is being joined),
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
        if stop.is_set():  # set in the moment in which the group was formed
            group.close()
            raise Reason.GROUP_FAILED.error(f"group {name} was left while it was being joined")
        return report

    def probe(self, name: str, membership: Membership, *, timeout_s: float, update_id: str = "") -> GroupReport:
        """Check whether this rank could join; ``update_id`` as for :meth:`join`.

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
        """Return whether a usable group has this membership, with the lock held.

        Raises GROUP_EXISTS for a different membership.
        """
        joined = self._groups.get(name)
        if joined is None or not joined.stands:
            return False
        if joined.membership != membership:
            raise Reason.GROUP_EXISTS.error(
                f"group {name} stands as {joined.membership}, not {membership}", field="group_name"
            )
        return True

    def get(self, name: str) -> WeightGroup:
        """Return the group of this name. Raises GROUP_NOT_FOUND."""
        with self._lock:
            if name not in self._groups:
                raise Reason.GROUP_NOT_FOUND.error(f"this rank is in no group {name!r}", field="group_name")
            return self._groups[name].group

    def leave(self, name: str) -> None:
        """Leave and forget a group, or stop joining it. A current broadcast ends. Never blocks.

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
        """Stop joining the groups of this update: their other members no longer come. Never blocks."""
        with self._lock:
            for joined_for, stop in self._joining.values():
                if joined_for == update_id:
                    stop.set()

    def drop(self, name: str, group: WeightGroup) -> None:
        """Forget a failed group: the group is spent, and a join under its name makes a new group. Never blocks."""
        with self._lock:
            if name in self._groups and self._groups[name].group is group:
                del self._groups[name]
        group.close()

    def close(self) -> None:
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
    try:
        return tcp_connections.find(made_to=tcp_connections.resolve(host, port))
    except OSError:
        return ()
