"""Segments in a GPU's memory, mapped by CUDA IPC handle. Needs a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from segment_helpers import Member, big_model, parsed, soon
from shared_memory import held
from weights_helpers import digest_of

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.shard_map import LocalExchange, Shard, ShardMap, model_digest
from rlctl.weights.shared_memory.posix import sweep
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor.placement import device_id
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]

GPU = torch.device("cuda", 0)


def train(pipe: Connection) -> None:
    """Writes the models of the seeds that it is given, from host and GPU tensors, and says their segments."""
    sender = SegmentSender(GPU)
    sent: list[SentSegment] = []
    with contextlib.suppress(EOFError):
        for update in range(10):
            pipe.recv()
            for segment in sent:
                segment.release()
            full = big_model(update)
            source = as_source((name, t.to(GPU) if "weight" in name else t) for name, t in full.items())
            sent = list(sender.write(source, source.metas()))
            pipe.send([message.SerializeToString() for segment in sent for message in segment.messages])


@pytest.fixture
def trainer() -> Iterator[Member]:
    member = Member(train)
    yield member
    member.kill()
    sweep()


def written(trainer: Member) -> list[TensorSegment]:
    trainer.tell([])
    return trainer.messages()


def on_gpu() -> ShardMap:
    full = big_model()
    return ShardMap({name: Shard(TensorMeta.of(name, t), torch.zeros_like(t, device=GPU)) for name, t in full.items()})


def test_a_gpus_memory_is_read_by_handle_and_goes_back(trainer: Member) -> None:
    shards = on_gpu()
    reader, receiver = SegmentReader(GPU), Receiver(shards)
    torch.cuda.synchronize()
    mapped = set()
    for update in range(3):
        messages = written(trainer)
        assert {message.device for message in messages} == {device_id(GPU)}
        receiver.begin(f"update-{update}")
        reader.read(reader.check(parsed(messages), receiver), receiver)
        assert receiver.missing() == []
        assert model_digest(shards, LocalExchange()).digest == digest_of(big_model(update))
        mapped.add((*reader.mapped, *(message.cuda_ipc for message in messages)))
    assert len(mapped) == 1, "mapped once"
    trainer.kill()
    assert soon(lambda: reader.mapped == [])
    assert held(message.header_memory for message in messages) == set()
    with pytest.raises(RlctlError) as caught:
        reader.check(parsed(messages), receiver)
    assert caught.value.reason is Reason.SEGMENT_NOT_FOUND
    reader.close()


def test_a_handle_that_is_none_is_refused(trainer: Member) -> None:
    (message,) = written(trainer)
    receiver = Receiver(on_gpu())
    receiver.begin("update")
    reader = SegmentReader(GPU)
    message.cuda_ipc = bytes(64)
    with pytest.raises(RlctlError) as caught:
        reader.check(parsed([message]), receiver)
    assert caught.value.reason is Reason.SEGMENT_NOT_FOUND
    # The device is not the worse for it.
    assert torch.ones(3, device=GPU).sum().item() == 3
    reader.close()
