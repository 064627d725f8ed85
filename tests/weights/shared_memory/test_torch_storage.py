"""Storages of a torch process are read under torch's own protocol: each reader drops its one reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy
from weights_helpers import full_model, tp_map

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.v1.verbs_pb2 import SegmentReader as ReaderMessage
from rlctl.v1.verbs_pb2 import Shape, TensorHandle, TensorSegment, TorchCudaMemory, TorchSharedMemory
from rlctl.weights.receiver import Receiver
from rlctl.weights.shared_memory import torch_storage
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.shared_memory.segment import Segment, from_proto
from rlctl.weights.tensor.placement import SHARED_MEMORY, host_id
from rlctl.weights.tensor.tensors import as_bytes

CPU = torch.device("cpu")
FULL = full_model()


@pytest.fixture(autouse=True)
def _strategy() -> Iterator[None]:
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    yield
    set_sharing_strategy(before)


class Sender:
    """A trainer's flattened bucket, serialised for one reader."""

    def __init__(self, full: dict[str, torch.Tensor] = FULL, rank: int = 0) -> None:
        self.storage = torch.cat([as_bytes(tensor) for tensor in full.values()]).untyped_storage()
        _, (_, _, handle, size) = reductions.reduce_storage(self.storage)
        self.name = handle.decode().removeprefix("/")
        self.file = SHARED_MEMORY / self.name
        handles, offset = [], 0
        for name, tensor in full.items():
            shape = Shape(dims=tensor.shape)
            handles.append(TensorHandle(name=name, dtype=str(tensor.dtype), shape=shape, offset=offset))
            offset += tensor.nbytes
        self.message = TensorSegment(
            node=host_id(),
            device="cpu",
            torch_shared_memory=TorchSharedMemory(name=self.name),
            size=size,
            tensors=handles,
            lease=duration(60.0),
            reader=ReaderMessage(slot="actor", rank=rank),
        )

    @property
    def references(self) -> int:
        """What torch's header says; 0: the memory is gone."""
        return int.from_bytes(self.file.read_bytes()[:4], "little") if self.file.exists() else 0

    @property
    def segment(self) -> Segment:
        return from_proto(self.message, "segments[0]")


class Rank:
    """A receiver of the model."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.shards = tp_map(FULL, rank, size)
        self.receiver = Receiver(self.shards)
        self.reader = SegmentReader(CPU, rank=rank)
        self.receiver.begin("update")

    def take(self, *segments: Segment) -> None:
        self.reader.read(self.reader.check(segments, self.receiver), self.receiver)

    @property
    def untouched(self) -> bool:
        return all(not as_bytes(shard.local).any() for shard in self.shards.shards.values())


def refusal(*segments: Segment, rank: Rank | None = None) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        (rank or Rank()).take(*segments)
    return caught.value


def test_every_rank_reads_its_own_storage_and_drops_its_reference() -> None:
    senders = [Sender(rank=number) for number in range(2)]
    for number, sender in enumerate(senders):
        assert sender.references == 2  # the sender's and the reader's
        rank, expected = Rank(number, 2), tp_map(FULL, number, 2)
        rank.take(*(each.segment for each in senders))
        assert sender.references == 1
        assert rank.receiver.missing() == []
        for name, shard in expected.shards.items():
            expected.place(name, FULL[name])
            assert torch.equal(as_bytes(rank.shards.shards[name].local), as_bytes(shard.local)), name
    names = [sender.file for sender in senders]
    del sender, senders
    assert [file.exists() for file in names] == [False, False]


def test_a_sender_that_drops_its_storage_before_it_is_read() -> None:
    """The reference that it has counted keeps the memory; the last reader removes it."""
    sender = Sender()
    del sender.storage
    assert sender.references == 1
    rank = Rank()
    rank.take(sender.segment)
    assert rank.receiver.missing() == []
    assert not sender.file.exists()


def test_memory_that_is_gone_before_it_is_mapped() -> None:
    sender, rank = Sender(), Rank()
    sender.file.unlink()
    error = refusal(sender.segment, rank=rank)
    assert (error.reason, error.field) == (Reason.SEGMENT_NOT_FOUND, "segments[0].torch_shared_memory")
    assert rank.untouched


def test_memory_that_is_removed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, rank = Sender(), Rank()
    place = rank.shards.place

    def remove(name: str, tensor: torch.Tensor) -> None:
        place(name, tensor)
        sender.file.unlink(missing_ok=True)

    monkeypatch.setattr(rank.shards, "place", remove)
    error = refusal(sender.segment, rank=rank)
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_DIRTY)
    assert rank.receiver.missing() == sorted(FULL)


def test_a_refused_request_drops_the_reference() -> None:
    sender, rank = Sender({**FULL, "other": torch.zeros(3)}), Rank()
    error = refusal(sender.segment, rank=rank)
    assert "no tensor 'other'" in error.message
    assert rank.untouched
    first, second = Sender(dict(list(FULL.items())[:4])), Sender(dict(list(FULL.items())[4:]))
    second.message.size += 1 << 20
    assert refusal(first.segment, second.segment).field == "segments[0].size"
    assert first.references == 1


def test_the_senders_manager_is_not_called() -> None:
    assert torch_storage._manager() == torch_storage._manager()
    assert Path(os.fsdecode(torch_storage._manager())).is_socket()


@pytest.mark.parametrize(
    "name", ["", "rlctl-" + "0" * 32, "../etc/passwd", "torch_1_2", "torch_1_2_3/x", "torch_1_2_3\n"]
)
def test_names_that_torch_does_not_give(name: str) -> None:
    message = Sender().message
    message.torch_shared_memory.name = name
    with pytest.raises(RlctlError) as caught:
        from_proto(message, "segments[0]")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "segments[0].torch_shared_memory")


def test_a_link_under_a_storages_name_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1 << 20))
    sender, link = Sender(), SHARED_MEMORY / f"torch_{os.getpid()}_0_999999"
    link.symlink_to(secret)
    try:
        sender.message.torch_shared_memory.name = link.name
        assert refusal(sender.segment).reason is Reason.SEGMENT_NOT_FOUND
    finally:
        link.unlink()


def test_a_storage_has_one_reader() -> None:
    message = Sender().message
    message.ClearField("reader")
    with pytest.raises(RlctlError) as caught:
        from_proto(message, "segments[0]")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_REQUIRED, "segments[0].reader")
    sender = Sender(rank=1)
    assert refusal(sender.segment).reason is Reason.NOT_COLOCATED
    assert sender.references == 2


CUDA = {
    "handle": b"\x01c" + b"h" * 64,
    "ref_counter": "torch_1_2_3",
    "ref_counter_offset": 9_999,
    "event": b"e" * 64,
    "event_sync_required": True,
}


def cuda(device: str = "cpu", **other: object) -> TensorSegment:
    message = Sender().message
    message.device = device
    message.torch_cuda_memory.CopyFrom(TorchCudaMemory(**{**CUDA, **other}))  # type: ignore[arg-type]
    return message


@pytest.mark.parametrize(
    "other",
    [
        {"handle": b""},
        {"handle": b"h" * 257},
        {"ref_counter": "passwd"},
        {"ref_counter_offset": 10_000},
        {"event": b""},
        {"event": b"e" * 63},
        {"offset": (1 << 63) - 1},
    ],
)
def test_handles_of_a_gpu_that_contradict_themselves(other: dict[str, object]) -> None:
    with pytest.raises(RlctlError) as caught:
        from_proto(cuda(**other), "segments[0]")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "segments[0].torch_cuda_memory")


def test_handles_of_a_gpu_are_for_the_rank_on_it() -> None:
    told = from_proto(cuda("GPU-1"), "segments[0]")
    assert refusal(told).reason is Reason.NOT_COLOCATED
    assert refusal(from_proto(cuda(), "segments[0]")).reason is Reason.SEGMENT_NOT_FOUND  # this rank has no GPU
