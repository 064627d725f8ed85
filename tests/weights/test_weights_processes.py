"""Groups with members in processes of their own: killed, stopped, of SGLang's making."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forking import NURSERY, Forked
from member import MUCH, VALUES
from weights_helpers import Background, over, together

from rlctl.contract.errors import Internal
from rlctl.v1 import common_pb2
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.receiver import Receiver, send
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.buckets import plan
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

pytestmark = pytest.mark.processes

MEMBER = Path(__file__).with_name("member.py")
Start = Callable[..., Forked]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Forked] = []

    def run(role: str, port: int, told: str = "") -> Forked:
        process = NURSERY.script([str(MEMBER), role, str(port), "group"], sys.stderr.buffer)
        started.append(process)
        process.stdin.write(told.encode())
        process.stdin.close()
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.close()


def joined(store: GroupStore) -> WeightGroup:
    return join(store, name="group", rank=0, world_size=2, timeout_s=30, broadcast_timeout_s=600)


def stopped_in_the_middle(start: Start, store: GroupStore) -> tuple[Forked, WeightGroup, Background]:
    """A sender that was stopped while half a tensor was here, the group, and the broadcast that waits for the rest."""
    process = start("sender-of-much", store.port)
    group = joined(store)
    group.broadcast(torch.zeros(len(VALUES)), src=1)
    tensor = torch.zeros(MUCH)
    while True:
        job = Background(lambda: group.broadcast(tensor, src=1))
        while not tensor[0]:
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        if not tensor[MUCH // 2]:  # what is left is more than sockets hold
            return process, group, job
        process.send_signal(signal.SIGCONT)  # too late: this process had to wait for a core
        job.result(60)
        tensor.zero_()


def test_an_interrupt_in_the_middle_of_a_tensor_leaves_nothing_at_risk(store: GroupStore, start: Start) -> None:
    """gloo itself goes on waiting for the rest of it, for as long as the broadcast was allowed to take."""
    process, group, job = stopped_in_the_middle(start, store)
    group.interrupt()
    with pytest.raises(Internal, match="interrupted"):
        job.result(10)
    assert not group.under_way
    group.close()
    process.send_signal(signal.SIGCONT)


def test_a_source_that_dies_in_the_middle_of_a_tensor_ends_the_broadcast(store: GroupStore, start: Start) -> None:
    process, group, job = stopped_in_the_middle(start, store)
    process.kill()
    with pytest.raises(Internal, match="the other members have gone") as caught:
        job.result(10)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY
    assert not group.under_way
    group.close()


def test_children_of_a_member_that_end_or_leave_take_nothing_along(store: GroupStore, start: Start) -> None:
    """A data loader's worker, say, or whatever else a trainer forks."""
    process = start("forks", store.port)
    group = joined(store)
    tensor = torch.zeros(len(VALUES))
    group.broadcast(tensor, src=1)
    assert tensor.tolist() == VALUES
    assert process.wait(30) == 0
    group.close()


def test_sglangs_own_ranks_receive_from_us(store: GroupStore, start: Start) -> None:
    process = start("sglang-receiver", store.port)
    group = joined(store)
    group.broadcast(torch.tensor(VALUES))
    assert process.wait(30) == 0
    assert process.stdout.read().decode().strip() == str(VALUES)
    group.close()


def test_we_receive_from_a_source_that_sglang_code_made(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    process = start("sglang-source", address[1])
    group = join(address, name="group", rank=1, world_size=2, timeout_s=30)
    tensor = torch.zeros(len(VALUES))
    group.broadcast(tensor)
    assert tensor.tolist() == VALUES
    assert process.wait(30) == 0
    group.close()


def test_a_receiver_of_sglangs_making_takes_in_whole_updates_beside_ours(store: GroupStore, start: Start) -> None:
    """An independent receiver: torch's own calls, and what SGLang is told of a bucket."""
    generator = torch.Generator().manual_seed(0)
    models = [
        {
            f"{name}.{number}": torch.randn(shape, generator=generator).to(dtype)
            for number in range(3)
            for name, shape, dtype in (
                ("embed", (70, 40), torch.float32),
                ("norm", (40,), torch.bfloat16),
                ("up", (33, 40), torch.float16),
            )
        }
        for _ in range(2)
    ]
    source = as_source(models[0].items())
    buckets = plan(source.metas(), bucket_bytes=8000, large_bytes=10_000)
    assert {bucket.flattened for bucket in buckets} == {True, False}
    described = [
        {
            "flattened": bucket.flattened,
            "names": [meta.name for meta in bucket.metas],
            "dtypes": [str(meta.dtype) for meta in bucket.metas],
            "shapes": [meta.shape for meta in bucket.metas],
        }
        for bucket in buckets
    ]
    process = start("sglang-updates", store.port, json.dumps([described] * len(models)))
    ours = {name: torch.zeros_like(tensor) for name, tensor in models[0].items()}

    def join_as(rank: int) -> WeightGroup:
        return join(store, name="group", rank=rank, world_size=3, timeout_s=60, broadcast_timeout_s=60)

    sender, member = together(lambda: join_as(0), lambda: join_as(1), timeout_s=60)
    receiver = Receiver(ShardMap({name: Shard(TensorMeta.of(name, tensor), tensor) for name, tensor in ours.items()}))
    for number, model in enumerate(models):
        receiver.begin(f"update-{number}")
        digest = ModelDigest()
        together(
            lambda model=model, digest=digest: send(as_source(model.items()), buckets, sender, digest),
            lambda: receiver.receive(over(member, buckets)),
            timeout_s=60,
        )
        assert all(torch.equal(ours[name], tensor) for name, tensor in model.items())
        theirs = json.loads(process.stdout.readline())
        assert theirs == {
            name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in model.items()
        }
    sender.close()
    member.close()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_stops_between_two_tensors(store: GroupStore, start: Start, fate: signal.Signals) -> None:
    process = start("sender-of-half", store.port)
    group = joined(store)
    first = torch.zeros(len(VALUES))
    group.broadcast(first, src=1)
    assert first.tolist() == VALUES
    job = Background(lambda: group.broadcast(torch.zeros(4), src=1))
    while not group.under_way:
        time.sleep(0.001)
    process.send_signal(fate)
    if fate is signal.SIGSTOP:
        # Nothing tells a stopped sender from a slow one; the coordinator's deadline interrupts.
        group.interrupt()
    with pytest.raises(Internal) as caught:
        job.result(10)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY
    assert not group.under_way
    group.close()


def test_a_process_ends_while_it_joins(store: GroupStore, start: Start) -> None:
    assert start("exits-while-joining", store.port).wait(30) == 0


def test_a_process_ends_while_it_receives(store: GroupStore, start: Start) -> None:
    process = start("exits-while-receiving", store.port)
    group = joined(store)
    group.broadcast(torch.zeros(len(VALUES)), src=1)
    # Its second broadcast would wait for ten minutes.
    assert process.wait(20) == 0
    group.close()


def test_a_process_ends_while_it_sends(store: GroupStore, start: Start) -> None:
    """Python waits at its end for the threads of executors, before anything could leave the group."""
    process = start("exits-while-sending", store.port)
    group = join(store, name="group", rank=1, world_size=2, timeout_s=30)
    # The receiver does not come to the broadcast, which would wait for ten minutes.
    assert process.wait(20) == 0
    group.close()
