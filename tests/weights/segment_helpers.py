"""What the tests of shared segments share: senders and receivers in processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from shared_memory import mapped_by
from weights_helpers import digest_of, full_model, tp_map

from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.receiver import Receiver
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.shared_memory.segment import Segment, from_proto
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

CPU = torch.device("cpu")
BIG = 32 << 20
MAP_FIXED = 0x10


def soon(condition: Callable[[], bool], within: float = 5.0) -> bool:
    """Whether a condition comes to hold; for what the kernel, or another process, tells nobody."""
    give_up = time.monotonic() + within
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def big_model(seed: int = 0) -> dict[str, torch.Tensor]:
    """The small model, and a tensor that is large enough to be missed."""
    generator = torch.Generator().manual_seed(seed)
    return {**full_model(seed), "big": torch.randint(0, 256, (BIG,), dtype=torch.uint8, generator=generator)}


def parsed(messages: list[TensorSegment]) -> list[Segment]:
    return [from_proto(message, f"segments[{index}]") for index, message in enumerate(messages)]


class Member:
    """A process in one of the roles below. It ends when its pipe does."""

    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        # Forked from a process that has imported everything and has no threads: started in no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rlctl.weights.shared_memory.sender", "rlctl.weights.shared_memory.reader"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=role, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next."""
        assert self._pipe.poll(30), "it says nothing"
        return self._pipe.recv()

    def messages(self) -> list[TensorSegment]:
        """The segments that a sender has written."""
        return [TensorSegment.FromString(data) for data in self.hear()]

    def tell(self, messages: list[TensorSegment]) -> None:
        """Give it segments; to a sender: it may end."""
        self._pipe.send([message.SerializeToString() for message in messages])

    def segments(self) -> set[str]:
        """Names of the segments that it has mapped now."""
        assert self.process.pid is not None
        return mapped_by(self.process.pid)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()


class _Halves:
    """A source that stands still after its first tensor."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta.of(name, tensor) for name, tensor in big_model().items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in big_model().items():
            yield name, tensor
            self._pipe.send([])
            threading.Event().wait()


def send_half(pipe: Connection) -> None:
    """Is in the middle of writing a segment when it says something."""
    source = _Halves(pipe)
    list(SegmentSender().write(source, source.metas()))


def receive_half(pipe: Connection) -> None:
    """Takes segments, and is in the middle of reading them when it says something."""
    shards = tp_map(big_model(), 0, 1)
    reader, receiver = SegmentReader(CPU), Receiver(shards)
    place = shards.place

    def half(name: str, full: torch.Tensor) -> None:
        place(name, full)
        pipe.send([])
        threading.Event().wait()

    shards.place = half  # type: ignore[method-assign]
    segments = parsed([TensorSegment.FromString(data) for data in pipe.recv()])
    receiver.begin("update")
    reader.read(reader.check(segments, receiver), receiver)


def send(pipe: Connection, seed: int) -> None:
    """Writes a model into segments, says their messages, and waits."""
    sender = SegmentSender()
    source = as_source(big_model(seed).items())
    sent = list(sender.write(source, source.metas()))
    pipe.send([message.SerializeToString() for segment in sent for message in segment.messages])
    with contextlib.suppress(EOFError):
        pipe.recv()
    sender.close()


def receive(pipe: Connection) -> None:
    """Takes segments, reads them, says the digest of what it holds, and waits for the next."""
    full = big_model()
    shards = tp_map(full, 0, 1)
    reader, receiver = SegmentReader(CPU), Receiver(shards)
    with contextlib.suppress(EOFError):
        while True:
            segments = parsed([TensorSegment.FromString(data) for data in pipe.recv()])
            receiver.begin("update")
            reader.read(reader.check(segments, receiver), receiver)
            pipe.send(digest_of({name: shard.local for name, shard in shards.shards.items()}))


def send_and_fork(pipe: Connection) -> None:
    """A sender with a child that was forked after the segments were made; says its process id."""
    sender = SegmentSender()
    source = as_source(big_model().items())
    list(sender.write(source, source.metas()))
    child = os.fork()
    if child == 0:
        pipe.send(os.getpid())
        threading.Event().wait()
    os.waitpid(child, 0)


def fork_and_let_go(pipe: Connection) -> None:
    """A sender with a child that has other memory where the segment is here; says how it ended."""
    sender = SegmentSender()
    source = as_source(big_model().items())
    list(sender.write(source, source.metas()))
    segment = sender.pool._entries[0].memory.data
    page = mmap.PAGESIZE
    first, size = segment.data_ptr() // page * page, segment.nbytes // page * page
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        anywhere, protection = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        libc.mmap(ctypes.c_void_p(first), ctypes.c_size_t(size), protection, anywhere, -1, ctypes.c_long(0))
        del segment
        sender.close()
        ctypes.memset(first, 1, size)
        os._exit(0)
    pipe.send(os.waitpid(child, 0)[1])
