"""The source's half of a group that vLLM's workers join by vLLM's own NCCL engine. Never run on a GPU.

vLLM's workers join by NCCL's unique id. torch's NCCL group writes its id into the store with which it was made. So the
group has a private store here, and the id is copied to the common store. Nothing is pickled on either side. The bytes
are those of any other group: vLLM's packed tensors equal the bytes of an rlctl bucket.

Only its bytes end a broadcast in a vLLM worker: vLLM's engine has no timeout and checks for no errors, and an attached
server must not be ended. So an abandoned group first sends the remaining announced bytes as zeros. The server then has
weights that are never accepted, and can be updated again.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from rlctl.contract.errors import Reason
from rlctl.contract.vllm_groups import unique_id_key
from rlctl.weights.group import tcp_connections
from rlctl.weights.group.nccl import nccl_group
from rlctl.weights.group.process_group import WeightGroup, needed
from rlctl.weights.group.rendezvous import Forming, Member

UNIQUE_ID_BYTES = 128
PAY_S = 10.0
"""Time for one broadcast of zeros: by then the members have joined the broadcast, or never will."""

_FIRST = "0"
"""torch's key for the unique id of a group's first communicator."""

_PAUSE_S = 0.002


class VLLMGroup(WeightGroup):
    """The source's membership in a group with vLLM's workers."""

    def __init__(self, member: Member, device: str = "cuda") -> None:
        """Create a membership, for :func:`join_vllm`; ``device`` is the device of the zeros."""
        super().__init__(member)
        self._sizes: list[int] = []
        self._device = device
        self._unpaid = threading.Lock()

    def announce(self, sizes: Iterable[int]) -> None:
        """Record the sizes in bytes of the broadcasts that the members await, in order."""
        with self._lock:
            self._sizes, self._begun = list(sizes), 0

    def _spend(self, cause: str) -> str:
        """Make the group unusable. The owed bytes are sent in the background, then the communicator is aborted."""
        self._spent = self._spent or cause
        if self._member is not None and self._unpaid.acquire(blocking=False):  # only once
            # The end of the process waits for this thread: a trainer that gives up usually ends, too.
            thread = threading.Thread(target=self._pay, args=(self._member,), name=f"pay-{self.name}")
            try:
                thread.start()
                needed.add(thread)
            except RuntimeError:  # near the end of the process some Pythons (3.12) start no thread
                self._pay(self._member)
        return self._spent

    def _pay(self, member: Member) -> None:
        with self._lock:
            work, owed_sizes = self._work, deque(self._sizes[self._begun :])  # from here on no broadcast begins
        with suppress(RuntimeError):  # the group is broken: no member remains
            while _ends(work) and owed_sizes:
                zeros = torch.zeros(owed_sizes.popleft(), dtype=torch.uint8, device=self._device)
                options = dist.BroadcastOptions()
                options.timeout = datetime.timedelta(seconds=PAY_S)
                work = member.process_group.broadcast([zeros], options)
        self._abort(member)
        tcp_connections.cut(self._connections)


def join_vllm(
    store: tuple[str, int],
    *,
    name: str,
    world_size: int,
    timeout_s: float,
    broadcast_timeout_s: float,
    interface_host: str,
    stop: threading.Event,
) -> VLLMGroup:
    """Form a group as its source, on the current CUDA device; return when vLLM's workers have joined.

    The limits are those of :func:`rlctl.weights.group.process_group.join`.

    Raises UNSUPPORTED (this torch lacks NCCL). Raises GROUP_FAILED, REJECTED, if the group was not formed. A thread
    then remains in NCCL's rendezvous, which has no timeout.
    """
    member = Member(name, 0, world_size, "nccl", interface_host, broadcast_timeout_s)
    forming = _Forming(member, store)
    forming.run(timeout_s, stop)
    return VLLMGroup(member, forming.device)


def unique_id(store: tuple[str, int], name: str, timeout_s: float) -> bytes:
    """Wait for the unique id of a group, which the source writes when it joins. Raises GROUP_FAILED."""
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        client = TCPStore(*store, None, False, timeout=limit, wait_for_workers=False)
        id_bytes: bytes = client.get(unique_id_key(name))
    except RuntimeError as error:
        raise Reason.GROUP_FAILED.error(f"group {name}: its source did not come within {timeout_s:g} s") from error
    if len(id_bytes) != UNIQUE_ID_BYTES:
        raise Reason.GROUP_FAILED.error(f"group {name}: {len(id_bytes)} bytes are no unique id of NCCL's")
    return id_bytes


class _Forming(Forming):
    """An attempt to form the group at its source."""

    def __init__(self, member: Member, address: tuple[str, int]) -> None:
        super().__init__(member, address)  # raises without NCCL
        self.device = f"cuda:{torch.cuda.current_device()}"

    def _group(self, store: TCPStore, deadline: float) -> Any:
        member = self._member
        member.store = local_store = HashStore()
        local_store.set_timeout(datetime.timedelta(seconds=max(deadline - time.monotonic(), _PAUSE_S)))
        group = nccl_group(local_store, 0, member.world_size, member.broadcast_timeout_s)

        def tell() -> None:
            with suppress(RuntimeError):  # the group was not formed
                store.set(unique_id_key(member.name), local_store.get(_FIRST))  # type: ignore[arg-type]

        threading.Thread(target=tell, name=f"id-{member.name}", daemon=True).start()
        # vLLM's workers also begin with this all-reduce (PyNcclCommunicator); torch joins during the first collective.
        work = group.allreduce([torch.zeros(1, device=self.device)])
        while not work.is_completed() and not self._give_up.wait(_PAUSE_S):
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM's workers did not come")
        work.wait()
        return group


def _ends(work: Any) -> bool:
    """Return whether a broadcast ends within :data:`PAY_S`."""
    give_up = time.monotonic() + PAY_S
    while work is not None and not work.is_completed():
        if time.monotonic() > give_up:
            return False
        time.sleep(_PAUSE_S)
    return True
