"""A co-located trainer in small: writes a checkpoint into shared segments, here or in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch_source import tensors_of
from torch_stage import PRELOAD

from rlctl.v1.verbs_pb2 import TensorSegment, UpdateWeightsFromTensorRequest
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source


def write(
    sender: SegmentSender, path: str, names: Sequence[str] = (), digest: ModelDigest | None = None, **settings: Any
) -> list[SentSegment]:
    """Write a checkpoint, or some tensors of it."""
    source = as_source([(name, t) for name, t in tensors_of(path).items() if not names or name in names])
    return list(sender.write(source, source.metas(), digest=digest, **settings))


def request_of(sent: Sequence[SentSegment], **fields: Any) -> UpdateWeightsFromTensorRequest:
    """What a stage is told to read."""
    return UpdateWeightsFromTensorRequest(segments=[m for segment in sent for m in segment.messages], **fields)


class Trainer:
    """A process with every ``of``-th tensor, from ``part`` on."""

    def __init__(self, part: int = 0, of: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_train, args=(theirs, part, of), daemon=True)
        self.process.start()
        theirs.close()

    def write(self, path: str) -> tuple[list[TensorSegment], dict[str, str]]:
        """Write its part of a checkpoint again; its segments, and the digests of its tensors by name."""
        self._pipe.send(path)
        assert self._pipe.poll(30), "the trainer says nothing"
        messages, digests = self._pipe.recv()
        return [TensorSegment.FromString(message) for message in messages], digests

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()


def _train(pipe: Connection, part: int, of: int) -> None:
    sender = SegmentSender()
    sent: list[SentSegment] = []
    with contextlib.suppress(EOFError):
        while True:
            path = pipe.recv()
            for segment in sent:
                segment.release()
            digest = ModelDigest()
            sent = write(sender, path, sorted(tensors_of(path))[part::of], digest)
            pipe.send(([m.SerializeToString() for s in sent for m in s.messages], digest.digests))
