"""The source's half of a group that vLLM's workers join; gloo in NCCL's place, threads in that of processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.vllm_groups import unique_id_key
from rlctl.weights.group import vllm_nccl
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.group.rendezvous import Forming, Member
from rlctl.weights.group.vllm_nccl import UNIQUE_ID_BYTES, VLLMGroup, unique_id

TIMEOUT_S = 20.0
ID: Any = bytes(range(UNIQUE_ID_BYTES))


@pytest.fixture
def store() -> Iterator[GroupStore]:
    store = GroupStore("127.0.0.1")
    yield store
    store.close()


@pytest.fixture
def both(store: GroupStore) -> Iterator[tuple[VLLMGroup, WeightGroup]]:
    """The source, and a rank that receives."""
    member = Member("pays", 0, 2, "gloo", "127.0.0.1", TIMEOUT_S)
    with ThreadPoolExecutor(1) as helper:
        joining = helper.submit(join, store, name="pays", rank=1, world_size=2, timeout_s=TIMEOUT_S)
        Forming(member, store.local_address).run(TIMEOUT_S, threading.Event())
        source, rank = VLLMGroup(member, "cpu"), joining.result(TIMEOUT_S)
    yield source, rank
    rank.close()


def test_a_broadcast_that_does_not_start_near_the_end_of_the_process_ends(
    both: tuple[VLLMGroup, WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some Pythons start no thread by then, so the source itself pays; it must not wait for itself."""
    source, _ = both
    source.announce([3])

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    failing = threading.Thread(target=lambda: errors.append(failure(source)), daemon=True)
    errors: list[RlctlError] = []
    member = source._member
    assert member is not None
    group, member.process_group = member.process_group, SimpleNamespace(broadcast=fail)
    start = failing.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: start() if self is failing else refuse())
    failing.start()
    failing.join(10)
    monkeypatch.undo()
    member.process_group = group
    assert not failing.is_alive(), "it waits for itself"
    assert errors[0].reason is Reason.GROUP_FAILED
    assert "the device is gone" in errors[0].message


def failure(source: VLLMGroup) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        source.broadcast(torch.zeros(3, dtype=torch.uint8))
    return caught.value


def test_a_source_that_gives_up_pays_what_it_has_announced(both: tuple[VLLMGroup, WeightGroup]) -> None:
    source, rank = both
    sizes = [3, 1 << 20, 5]
    source.announce(sizes)
    received = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    with ThreadPoolExecutor(1) as helper:
        receiving = helper.submit(lambda: [rank.broadcast(tensor) for tensor in received])
        source.broadcast(torch.full((3,), 9, dtype=torch.uint8))
        source.interrupt("no gradient today")
        receiving.result(TIMEOUT_S)
    assert received[0].tolist() == [9, 9, 9]
    assert not received[1].any()
    assert not received[2].any()
    with pytest.raises(RlctlError) as refused:
        source.broadcast(torch.zeros(1, dtype=torch.uint8))
    assert refused.value.reason is Reason.GROUP_FAILED
    assert "no gradient today" in refused.value.message


def test_what_nobody_takes_is_not_paid_for_ever(
    both: tuple[VLLMGroup, WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_nccl, "PAY_S", 0.2)
    source, _ = both
    source.announce([1 << 24] * 100)
    started = time.monotonic()
    source.interrupt()
    source.interrupt("again")
    (paying,) = (thread for thread in threading.enumerate() if thread.name == "pay-pays")
    paying.join(TIMEOUT_S)
    assert time.monotonic() - started < 5


ENDS = """
import sys, threading
from rlctl.weights.group.rendezvous import Forming, Member
from rlctl.weights.group.vllm_nccl import VLLMGroup

member = Member("pays", 0, 2, "gloo", "127.0.0.1", 20.0)
Forming(member, ("127.0.0.1", int(sys.argv[1]))).run(20.0, threading.Event())
source = VLLMGroup(member, "cpu")
source.announce([1 << 20] * 20)
if sys.argv[2] == "gives up":
    source.interrupt()
if sys.argv[2] == "begins no thread":

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading.Thread.start = start
"""


@pytest.mark.parametrize("how", ["gives up", "only ends", "begins no thread"])
def test_a_process_that_ends_pays_first(store: GroupStore, how: str) -> None:
    arguments = [sys.executable, "-c", ENDS, str(store.local_address[1]), how]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
        rank = join(store, name="pays", rank=1, world_size=2, timeout_s=TIMEOUT_S)
        received = torch.full((1 << 20,), 7, dtype=torch.uint8)
        for _ in range(20):
            rank.broadcast(received)
        rank.close()
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, b"Traceback" in said) == (0, False), said.decode()
    assert not received.any()


class Workers:
    """In place of torch's group of NCCL: its unique id is in its store, and the others have come, or have not."""

    def __init__(self, store: Any, come: bool) -> None:
        store.set("0", ID)
        self._come = come

    def allreduce(self, tensors: list[torch.Tensor]) -> Workers:
        assert [tensor.numel() for tensor in tensors] == [1]
        return self

    def is_completed(self) -> bool:
        return self._come

    def wait(self) -> None:
        assert self._come


@pytest.mark.parametrize("come", [True, False])
def test_a_group_stands_once_vllms_workers_have_come(
    store: GroupStore, monkeypatch: pytest.MonkeyPatch, come: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda size, *, device: torch.ones(size, device="cpu"))
    monkeypatch.setattr(vllm_nccl, "nccl_group", lambda own, rank, size, timeout_s: Workers(own, come))
    with ThreadPoolExecutor(1) as helper:
        told = helper.submit(unique_id, store.local_address, "g", TIMEOUT_S)
        member = Member("g", 0, 3, "nccl", "127.0.0.1", TIMEOUT_S)
        forming = vllm_nccl._Forming(member, store.local_address)
        if come:
            forming.run(TIMEOUT_S, threading.Event())
            assert isinstance(member.process_group, Workers)
        else:
            with pytest.raises(RlctlError) as failed:
                forming.run(0.3, threading.Event())
            assert failed.value.reason is Reason.GROUP_FAILED
            assert "vLLM's workers did not come" in failed.value.message
        assert told.result(TIMEOUT_S) == ID


def test_the_unique_id_is_awaited_and_looked_at(store: GroupStore) -> None:
    with pytest.raises(RlctlError) as late:
        unique_id(store.local_address, "nobody", 0.2)
    assert "its source did not come within 0.2 s" in late.value.message
    client = torch.distributed.TCPStore(*store.local_address, None, False, wait_for_workers=False)
    client.set(unique_id_key("short"), b"no id")  # type: ignore[arg-type]
    with pytest.raises(RlctlError) as wrong:
        unique_id(store.local_address, "short", 5.0)
    assert "5 bytes are no unique id" in wrong.value.message
    client.set(unique_id_key("right"), ID)
    assert unique_id(store.local_address, "right", 5.0) == ID
