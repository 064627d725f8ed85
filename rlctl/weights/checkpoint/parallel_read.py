"""Reading parts of tensors from files into existing memory, on several cores.

A part with contiguous bytes in file and memory is read directly into place. Any other part passes through a small
buffer, a few rows at a time: a part that is cut along an inner dimension, cast, or placed on a device. Memory use does
not depend on the size of the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.slices import Slice
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

CHUNK_BYTES = 8 << 20
"""Maximum bytes of one read by a thread."""

BUFFER_BYTES = 1 << 20
"""Bytes per buffer on the host: the buffer stays in a core's cache between read and copy."""

DEVICE_BUFFER_BYTES = 8 << 20
"""Bytes per buffer for a device, where each copy is synchronous."""

RUN_BYTES = 128 << 10
"""Minimum length of a run of bytes that is read alone. Shorter runs are read with the gaps between."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor in a file, and its destination.

    Attributes:
        file: the file.
        offset: start of the full tensor's bytes in the file.
        meta: the full tensor, as stored.
        slice: the part.
        into: memory of the part's shape; the values are cast to its dtype.
    """

    file: TensorFile
    offset: int
    meta: TensorMeta
    slice: Slice
    into: torch.Tensor


def read_parts(parts: Sequence[Part], *, threads: int = 0) -> int:
    """Read all parts into place; return the bytes read. ``threads`` 0: one for each core, up to 8.

    Raises CHECKPOINT_NOT_FOUND if a read fails; some parts are then in place and others are not.
    """
    jobs = [job for part in parts for job in _jobs(part)]
    threads = threads or min(8, os.cpu_count() or 1)
    if threads == 1 or len(jobs) < 2:
        return sum(job() for job in jobs)
    with ThreadPoolExecutor(threads, "rlctl-read") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            return sum(future.result() for future in futures)
        except BaseException:
            # Start no further jobs: the weights are a mixture already, and the caller waits for the error.
            pool.shutdown(cancel_futures=True)
            raise


def _jobs(part: Part) -> Iterator[Callable[[], int]]:
    into, meta = part.into.detach(), part.meta
    if not into.numel():
        return
    dim = part.slice.dim or 0
    start = 0 if part.slice.dim is None else part.slice.start
    # The full tensor as [outer, cut, inner]; the part is [outer, length, inner].
    outer = math.prod(meta.shape[:dim])
    cut = meta.shape[dim] if meta.shape else 1
    inner = math.prod(meta.shape[dim + 1 :])
    length = into.numel() // (outer * inner)
    size = meta.dtype.itemsize
    straight = into.device.type == "cpu" and into.dtype == meta.dtype and into.is_contiguous()
    if straight and (outer == 1 or length * inner * size >= RUN_BYTES):
        runs = as_bytes(into).view(outer, -1)
        for index in range(outer):
            first = part.offset + (index * cut + start) * inner * size
            for begin in range(0, runs.shape[1], CHUNK_BYTES):
                yield _Straight(part.file, first + begin, runs[index, begin : begin + CHUNK_BYTES])
        return
    # A view of the memory in three dimensions. If strides allow no view, the part is read into separate memory first.
    try:
        target = into.view(outer, length, inner)
        scratch = None
    except RuntimeError:
        scratch = torch.empty(outer, length, inner, dtype=into.dtype, device=into.device)
        target = scratch
    buffer_bytes = BUFFER_BYTES if into.device.type == "cpu" else DEVICE_BUFFER_BYTES
    blocks = _blocks(outer, cut, inner * size, start, length, buffer_bytes)
    if scratch is None:
        for index in range(0, len(blocks), 16):
            yield _Buffered(part, target, blocks[index : index + 16], cut, start, None)
    else:
        yield _Buffered(part, target, blocks, cut, start, into)


@dataclass(frozen=True)
class _Straight:
    file: TensorFile
    offset: int
    into: torch.Tensor

    def __call__(self) -> int:
        self.file.read_bytes(self.offset, self.into)
        return self.into.numel()


@dataclass(frozen=True)
class _Block:
    """Indices [outer_start, outer_stop) of a full tensor's outer dimension, and [start, stop) of the cut dimension."""

    outer_start: int
    outer_stop: int
    start: int
    stop: int


def _blocks(outer: int, cut: int, row_bytes: int, start: int, length: int, buffer_bytes: int) -> list[_Block]:
    """Divide the part into blocks with contiguous bytes in the file, each of about a buffer's size (or one row)."""
    whole = outer > 1 and length * row_bytes < RUN_BYTES
    if whole:
        count = max(1, buffer_bytes // max(1, cut * row_bytes))
        return [_Block(at, min(at + count, outer), 0, cut) for at in range(0, outer, count)]
    count = max(1, buffer_bytes // max(1, row_bytes))
    return [
        _Block(at, at + 1, begin, min(begin + count, start + length))
        for at in range(outer)
        for begin in range(start, start + length, count)
    ]


@dataclass(frozen=True)
class _Buffered:
    part: Part
    target: torch.Tensor
    blocks: Sequence[_Block]
    cut: int
    start: int
    copy_to: torch.Tensor | None

    def __call__(self) -> int:
        part, dtype = self.part, self.part.meta.dtype
        _, length, inner = self.target.shape
        largest = max((b.outer_stop - b.outer_start) * (b.stop - b.start) for b in self.blocks) * inner
        buffer = torch.empty(largest, dtype=dtype, pin_memory=self.target.is_cuda)
        total = 0
        for block in self.blocks:
            shape = (block.outer_stop - block.outer_start, block.stop - block.start, inner)
            data = buffer[: math.prod(shape)].view(shape)
            first = (block.outer_start * self.cut + block.start) * inner * dtype.itemsize
            part.file.read_bytes(part.offset + first, data)
            total += data.nbytes
            # The part's rows among the read rows; indices of the write count from the start of the part.
            begin, end = max(block.start, self.start), min(block.stop, self.start + length)
            rows = data[:, begin - block.start : end - block.start]
            self.target[block.outer_start : block.outer_stop, begin - self.start : end - self.start].copy_(rows)
        if self.copy_to is not None:
            self.copy_to.copy_(self.target.view(self.copy_to.shape))
        return total
