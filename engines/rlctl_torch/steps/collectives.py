"""Rendezvous and collectives of the ranks of an engine.

Process groups are built directly, without a default group. So several engines fit into a process, and nothing else in
the process is disturbed. A peer that dies closes its connections, which ends a pending collective at once. A peer that
hangs costs a collective its timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, TCPStore

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.weights.group.network_interfaces import address_of
from rlctl.weights.group.process_group import keep_for_ever
from rlctl.weights.group.rendezvous import RendezvousEnded, WatchedStore
from rlctl.weights.group.tcp_connections import Endpoint, cut, of_group
from rlctl.weights.shards.rank_exchange import Exchange, GroupExchange, LocalExchange, agree_to_go_on
from rlctl.weights.tensor.work import Stop
from rlctl_torch.steps.step_plan import HEAD_BYTES, Plan, decode, encode, length_of

HEARTBEAT_S = 0.5
"""Seconds between steps of an idle rank 0. The steps reveal a dead follower, and show followers that rank 0 lives."""

_PLAN_TIMEOUT = timedelta(hours=24)
"""Timeout for the next plan: rank 0 may be inside a command for this time (a verb's timeout is at most a day)."""

_COMPUTE_TIMEOUT = timedelta(seconds=120)
"""Timeout of collectives inside a step. Ranks are never further apart there than the computation of one layer."""

_START_TIMEOUT_S = 120.0
_SLICE = timedelta(seconds=0.25)

_END_S = 2.0
"""Seconds that an operation may take to end once its connections are cut."""


def make_store(node: str) -> tuple[TCPStore, str]:
    """Open rank 0's store on the node's own address and a free TCP port. Also return "host:port" for the followers."""
    address = address_of(node)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((address, 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Reason.ENGINE_FAILED.error(f"cannot listen on {address} ({node}): {error}") from error
    port = listener.getsockname()[1]
    store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{address}:{port}"


class Broken(Exception):
    """The ranks can no longer work together, so the engine cannot continue.

    Attributes:
        error: the cause, for callers of the engine.
    """

    def __init__(self, error: RlctlError) -> None:
        super().__init__(error.message)
        self.error = error


class Council:
    """The ranks of an engine in a group. For a single thread at a time.

    A failed collective raises :class:`Broken` with RANK_LOST, or with CANCELLED after :meth:`Ranks.stop`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._gloo: Any = None

    def agree(self, check: Callable[[], object]) -> None:
        """Run a check on every rank. If a check raises, every rank raises: the failing rank its error, other ranks a
        copy.

        An unforeseen exception becomes an error like any refusal, so that the ranks stay together.
        """
        stop = Stop()
        with stop.on_error(Broken):
            check()
        with self.exchanging() as exchange:
            agree_to_go_on(exchange, stop)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[Exchange]:
        """Yield the weights package's exchange over these ranks."""
        yield LocalExchange() if self._gloo is None else _CouncilExchange(self._gloo)


class _CouncilExchange(GroupExchange):
    """Exchange over an engine's own ranks. Here a failure means a lost rank, unlike in a group with other processes."""

    def _wait(self, starts: Sequence[Callable[[], Any]]) -> None:
        try:
            super()._wait(starts)
        except RlctlError as error:
            raise _lost(self.rank, error.message) from error


class Aside(Council):
    """The background threads of the ranks (:mod:`rlctl_torch.steps.background`), in a group of their own.

    A failed exchange has failed at every rank, and for good: messages of a later exchange could not be told from its
    messages. The steps are not affected and continue.
    """

    _endpoints: Mapping[int, Endpoint] = {}
    _broken = False

    def open(self, group: Any, endpoints: Mapping[int, Endpoint]) -> None:
        self._gloo, self._endpoints = group, endpoints

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[Exchange]:
        """Yield the weights package's exchange over these ranks, for the background thread."""
        if self.size > 1 and (self._gloo is None or self._broken):
            raise _lost(self.rank, "the ranks can no longer exchange beside the steps")
        try:
            with super().exchanging() as exchange:
                yield exchange
        except RlctlError:
            raise  # agreed by all ranks
        except BaseException:
            # The other ranks wait for this rank in the middle of an exchange.
            self._break()
            raise

    def close(self) -> None:
        """Leave the group. A waiting exchange in the group ends, here and at the other ranks."""
        self._break()
        self._gloo = None

    def _break(self) -> None:
        if self._gloo is not None and not self._broken:
            self._broken = True
            cut(of_group(self._endpoints, self.rank))


class Ranks(Council):
    """This rank among all ranks of its engine. All methods except :meth:`stop` belong to the engine thread.

    Attributes:
        aside: the ranks of the background threads.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aside = Aside(rank, size)
        self._stopped = threading.Event()
        self._alone = False
        self._compute: Any = None
        self._store: TCPStore | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._given_up: list[Any] = []
        self._head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)

    def join(self, setup: Mapping[str, str], store: TCPStore | None, node: str, device: torch.device) -> None:
        """Form the groups, all ranks at the same time. ``store`` is rank 0's own store."""
        if self.size == 1:
            return
        try:
            if store is None:
                host, _, port = setup["rendezvous"].rpartition(":")
                timeout = timedelta(seconds=_START_TIMEOUT_S)
                store = TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=_START_TIMEOUT_S))
            self._store = store
            self._gloo, self._endpoints = self._form(PrefixStore("gloo", store), address_of(node))
            self._gloo._set_default_timeout(_PLAN_TIMEOUT)
            background, endpoints = self._form(PrefixStore("aside", store), address_of(node))
            # A rank that broadcasts to a different stage in between may keep the other ranks waiting for long.
            background._set_default_timeout(_PLAN_TIMEOUT)
            self.aside.open(background, endpoints)
            self._compute = self._gloo
            if device.type == "cuda":
                self._compute = _nccl(PrefixStore("nccl", store), self.rank, self.size)
        except (RuntimeError, RendezvousEnded, KeyError, ValueError) as error:
            raise Reason.RANK_LOST.error(f"rank {self.rank} of {self.size} cannot join the others: {error}") from error

    def _form(self, store: PrefixStore, address: str) -> tuple[Any, dict[int, Endpoint]]:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=_START_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=address)]
        options._threads = 2
        watched = WatchedStore(
            store,
            rank=self.rank,
            world_size=self.size,
            give_up=self._stopped,
            deadline=time.monotonic() + _START_TIMEOUT_S,
        )
        return gloo(watched, self.rank, self.size, options), watched.endpoints

    def send_plan(self, plan: Plan) -> None:
        """Send the next step to the followers; rank 0 only."""
        if self._gloo is None:
            return
        data = encode(plan)
        head = torch.frombuffer(bytearray(data[:HEAD_BYTES]), dtype=torch.uint8)
        self._head[: head.numel()] = head
        # A follower waits long for the next plan. Rank 0 does not wait long for a follower that hangs.
        self._broadcast(self._head, _COMPUTE_TIMEOUT)
        if len(data) > HEAD_BYTES:
            self._broadcast(torch.frombuffer(bytearray(data[HEAD_BYTES:]), dtype=torch.uint8), _COMPUTE_TIMEOUT)

    def receive_plan(self) -> Plan:
        """Receive the next step from rank 0; followers only."""
        self._broadcast(self._head, _PLAN_TIMEOUT)
        data = self._head.numpy().tobytes()
        length = length_of(data)
        if length > HEAD_BYTES:
            rest = torch.empty(length - HEAD_BYTES, dtype=torch.uint8)
            self._broadcast(rest, _COMPUTE_TIMEOUT)
            data += rest.numpy().tobytes()
        return decode(data)

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Add up a contiguous tensor over the ranks, in place."""
        if self._compute is not None and not self._alone:
            options = dist.AllreduceOptions()
            options.timeout = _COMPUTE_TIMEOUT
            self._collect(lambda: self._compute.allreduce([tensor], options))

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate ``[..., c]`` of every rank to ``[..., c * size]``."""
        if self._compute is None:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if not self._alone:
            options = AllgatherOptions()
            options.timeout = _COMPUTE_TIMEOUT
            self._collect(lambda: self._compute.allgather([parts], [tensor], options))
        return torch.cat(parts, dim=-1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Leave the collectives of a computation out: this rank's work and memory, without a result."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def stop(self) -> None:
        """Make a wait for other ranks raise; from any thread."""
        self._stopped.set()

    def close(self) -> None:
        """Leave the groups. Other ranks notice at once, also if an operation was given up."""
        self.aside.close()
        if self._given_up:
            # Destroying a group waits for its pending operation, which ends once the connections are cut.
            cut(of_group(self._endpoints, self.rank))
            give_up = time.monotonic() + _END_S
            while not all(work.is_completed() for work in self._given_up) and time.monotonic() < give_up:
                time.sleep(0.01)
            if not all(work.is_completed() for work in self._given_up):
                keep_for_ever((self._gloo, self._compute, self._given_up))
        self._given_up = []
        self._gloo = self._compute = self._store = None

    def _broadcast(self, tensor: torch.Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        self._collect(lambda: self._gloo.broadcast([tensor], options), slices=True)

    def _collect(self, start: Callable[[], Any], *, slices: bool = False) -> None:
        work = None
        try:
            work = start()
            if not slices:
                work.wait()
                return
            while not self._waited(work):
                if self._stopped.is_set():
                    self._given_up.append(work)
                    raise Broken(Reason.CANCELLED.error("the engine was stopped"))
        except RuntimeError as error:
            if work is not None:
                self._given_up.append(work)
            raise _lost(self.rank, str(error)) from error

    def _waited(self, work: Any) -> bool:
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # ended just as the slice did, with or without an error
        return True


def _nccl(store: PrefixStore, rank: int, size: int) -> Any:
    """Create the NCCL group of the steps.

    torch ends the process if a collective of this group fails. This is intended: by then the step has continued without
    the result.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _COMPUTE_TIMEOUT
    return nccl(store, rank, size, options)


def _lost(rank: int, cause: str) -> Broken:
    first_line = (cause.strip().splitlines() or ["no cause given"])[0]
    return Broken(
        Reason.RANK_LOST.error(
            f"rank {rank} lost the connection to another rank of its engine: {first_line}", outcome=OUTCOME_UNKNOWN
        )
    )
