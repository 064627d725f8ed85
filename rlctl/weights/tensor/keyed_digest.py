"""The keyed digest of weights. The digests of the parts of a tensor add up to the digest of the tensor.

A tensor is a matrix of bytes. Its rows are all dimensions but the last, and the bytes of a row are those of the last
dimension. A vector is a single row, a scalar a single row of a single element. A row is cut into blocks of 8,192 bytes;
the last block may be shorter. With the bytes x as signed 8-bit integers, a digest is two 64-bit integers, j = 0, 1:

    h(r, b, l) = sum over the bytes c of block b of row r:  K(c mod 8192, l) * x(r, c)        l = 0 ... 15
    H(j) = sum over r, b:  A(j, r * blocks + b) * sum over l:  C(l, j) * h(r, b, l)           mod 2^64

K are integers from -64 to 63, C and A 64-bit integers. All derive from a key of 128 random bits. Consequences:

- The digest is a sum over elements. A rank digests its part of a tensor in place, with the rows and columns of the
  part in the full tensor. The digests of parts that tile the tensor add up to the tensor's.
- ``h`` is a product of two matrices of small integers. Processors with int8 instructions, and GPUs, have
  instructions for this product. The function needs no kernel of its own.
- Two different contents that were chosen without the key have equal digests with a chance of less than 2^-100
  (docs/digests.md derives it). A party with the key can make two contents with equal digests. So the key is drawn
  for each version, and published checkpoints keep SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from rlctl.weights.tensor.slices import Shard
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name
from rlctl.weights.tensor.work import Stop, usable_cores

log = logging.getLogger(__name__)

BLOCK = 8192
"""Bytes of a row that the small keys cover. Sums of |K * x| are at most 2^26."""

LANES = 16

_CPU_BYTES = (4 << 20, 16 << 20)
"""Bytes of a product (within the caches), and of a batch."""

_DEVICE_BYTES = (64 << 20, 256 << 20)
"""The same on other devices. Starting work there is slow, and the work is fast. A batch needs up to 0.5 GiB of memory
beside the weights: float32 copies of a chunk in _float_product, or 400 bytes for each line of a batch.
"""

_LINE_BYTES = 512
"""Minimum bytes of memory for the sums of a row, even a short row."""

_EXACT = 2048
"""Columns for which a product in float32 is exact: 2048 * 2^6 * 2^7 = 2^24."""

_FLOATS = 1 << 18
"""Elements of a float32 copy on a CPU. A larger copy leaves the caches: 0.4 GB/s instead of 0.85 on an AMD EPYC."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, of splitmix64
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Sum:
    """The digest of a tensor, or of a part. Sums of parts add up.

    Attributes:
        words: two integers, each from 0 to 2^64 - 1.
    """

    words: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, first: int, second: int) -> Sum:
        """Reduce two integers modulo 2^64."""
        return cls((first % 2**64, second % 2**64))

    def __add__(self, other: Sum) -> Sum:
        return Sum.of(self.words[0] + other.words[0], self.words[1] + other.words[1])

    def hex(self) -> str:
        """Return 32 hex digits, 16 for each word."""
        return "".join(f"{word:016x}" for word in self.words)


def keyed_sums(
    key: bytes, shards: Sequence[Shard], stop: Stop | None = None, *, threads: int | None = None
) -> list[Sum]:
    """Digest each shard as the part of its full tensor.

    Args:
        key: 16 bytes.
        shards: parts of tensors, or whole tensors, on any device. The contents are cast to the full tensor's dtype. A
            device that computes a wrong digest of sample tensors, or none, is replaced by the CPU.
        stop: its cause is raised between two batches (16 MiB on a CPU, 256 MiB elsewhere).
        threads: for parts in host memory. None: usable cores divided by torch's threads.
    """
    stop = stop or Stop()
    threads = threads or usable_cores() // torch.get_num_threads()
    sums = [Sum()] * len(shards)
    by_device: dict[torch.device, list[int]] = {}
    for index, shard in enumerate(shards):
        by_device.setdefault(shard.local.device, []).append(index)
    for held_by, indexes in by_device.items():
        device = _device_for(held_by)
        keys = _keys(key, device)

        def digest(batch: Sequence[_Rows], keys: _Keys = keys) -> dict[int, Sum]:
            stop.check()
            return _digest_in_memory(keys, batch)

        # Work for other devices, and copies from them, are started in this thread, on its stream.
        worker_threads = threads if held_by.type == "cpu" else 1
        for partial_sums in _mapped(digest, list(_batches(shards, indexes)), worker_threads):
            for index, part in partial_sums.items():
                sums[index] += part
    return sums


def outpaces_sha256() -> bool:
    """Whether this host has a GPU or a CPU with int8 instructions.

    On other CPUs SHA-256 takes half the time of a keyed digest.
    """
    return torch.cuda.is_available() or _product_on(torch.device("cpu")) is _int8_product


def identity(key: bytes, meta: TensorMeta) -> Sum:
    """Return the summand of a full tensor's name, dtype and shape in the tensor's digest."""
    text = f"{meta.name}{dtype_name(meta.dtype)}{meta.shape}".encode()
    digest = hashlib.sha256(key + text).digest()
    return Sum.of(int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]))


def _device_for(held_by: torch.device) -> torch.device:
    """Return the device that digests the tensors of a device."""
    return held_by if held_by.type == "cpu" or _is_exact_on(held_by) else torch.device("cpu")


@functools.cache
def _is_exact_on(device: torch.device) -> bool:
    """Whether a device digests sample tensors as the CPU does. Raises OutOfMemoryError."""
    generator = torch.Generator("cpu").manual_seed(2)
    key = bytes(range(16))
    for shape in ((17, 5000), (33, 4096), (3, 2), (7,)):
        sample = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator, device="cpu")
        shard = Shard(TensorMeta("sample", torch.int16, shape), sample)
        [expected] = _digest(_keys(key, sample.device), [_Rows(0, shard, 0, sample.reshape(-1, shape[-1]))]).values()
        try:
            there = sample.to(device).reshape(-1, shape[-1])
            [computed] = _digest(_keys(key, device), [_Rows(0, shard, 0, there)]).values()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("keyed digests are computed on the CPU: %s fails: %s", device, error)
            return False
        if computed != expected:
            log.warning("keyed digests are computed on the CPU: %s computes wrong digests", device)
            return False
    return True


def _mapped(
    work: Callable[[Sequence[_Rows]], dict[int, Sum]], batches: Sequence[Sequence[_Rows]], threads: int
) -> Iterable[dict[int, Sum]]:
    if threads <= 1 or len(batches) <= 1:
        return map(work, batches)
    with ThreadPoolExecutor(threads, "digest") as pool:
        return list(pool.map(work, batches))


@dataclass(frozen=True)
class _Rows:
    """Rows of a shard.

    Attributes:
        index: the shard's index in the list.
        start: number of the first row, within the shard.
        values: the rows, in the shard's own dtype.
    """

    index: int
    shard: Shard
    start: int
    values: torch.Tensor


def _batches(shards: Sequence[Shard], indexes: Sequence[int]) -> Iterator[list[_Rows]]:
    """Yield all rows of these shards, in batches of a size that suits the device."""
    batch: list[_Rows] = []
    remaining = 1.0
    for index in indexes:
        shard = shards[index]
        chunk_bytes, batch_bytes = _CPU_BYTES if shard.local.device.type == "cpu" else _DEVICE_BYTES
        for first, matrix in _matrices(shard.local.detach()):
            size = max(_LINE_BYTES, matrix.shape[1] * shard.meta.dtype.itemsize)
            rows = max(1, chunk_bytes // size)
            for at in range(0, len(matrix), rows):
                piece = matrix[at : at + rows]
                batch.append(_Rows(index, shard, first + at, piece))
                remaining -= len(piece) * size / batch_bytes
                if remaining <= 0:
                    yield batch
                    batch, remaining = [], 1.0
    if batch:
        yield batch


def _matrices(local: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of a tensor as matrices that share its memory, each with the number of its first row."""
    if not local.numel():
        return
    if local.dim() < 2:
        yield 0, local.reshape(1, -1)
        return
    try:
        yield 0, local.view(-1, local.shape[-1])
    except RuntimeError:  # the layout allows no such view
        rows = math.prod(local.shape[1:-1])
        for number, inner in enumerate(local.unbind(0)):
            for first, matrix in _matrices(inner):
                yield number * rows + first, matrix


def _digest_in_memory(keys: _Keys, batch: Sequence[_Rows]) -> dict[int, Sum]:
    """Digest these rows in as many pieces as the device's memory requires. Raises OutOfMemoryError for a single row."""
    try:
        return _digest(keys, batch)
    except torch.OutOfMemoryError:
        halves = _halves(batch)
        if not halves:
            raise
    # Not in the handler: the traceback there holds the tensors of the failed call.
    sums: dict[int, Sum] = {}
    for half in halves:
        for index, part in _digest_in_memory(keys, half).items():
            sums[index] = sums.get(index, Sum()) + part
    return sums


def _halves(batch: Sequence[_Rows]) -> list[Sequence[_Rows]]:
    """Split a batch in two by entries, a single entry by rows. []: the batch is a single row."""
    middle = len(batch) // 2
    if middle:
        return [batch[:middle], batch[middle:]]
    (rows,) = batch
    middle = len(rows.values) // 2
    if not middle:
        return []
    rest = replace(rows, start=rows.start + middle, values=rows.values[middle:])
    return [[replace(rows, values=rows.values[:middle])], [rest]]


def _digest(keys: _Keys, batch: Sequence[_Rows]) -> dict[int, Sum]:
    """Digest these rows by shard, on the device of the keys."""
    products: list[torch.Tensor] = []
    lines: list[torch.Tensor] = []
    owners: list[int] = []
    place = {index: number for number, index in enumerate(dict.fromkeys(rows.index for rows in batch))}
    for rows in batch:
        meta, part = rows.shard.meta, rows.shard.slice
        full = meta.shape or (1,)
        data = _bytes(rows.values.to(keys.small.device, meta.dtype))
        first = part.start * meta.dtype.itemsize if part.dim == len(full) - 1 else 0
        blocks = -(-full[-1] * meta.dtype.itemsize // BLOCK)
        numbers = _row_numbers(rows, full) * blocks
        for block, start, end in _cuts(first, data.shape[1]):
            at = (first + start) % BLOCK
            products.append(_product(data[:, start:end], keys.small[at : at + end - start]))
            lines.append(numbers + block)
            owners.append(place[rows.index])
    counts = torch.tensor([len(each) for each in lines], device="cpu")
    device = keys.small.device
    owner = torch.repeat_interleave(torch.tensor(owners, device="cpu"), counts).to(device)
    terms = keys.terms(torch.cat(products), torch.cat(lines).to(device))
    words = torch.zeros(len(place), 2, dtype=torch.int64, device=device).index_add_(0, owner, terms)
    return {index: Sum.of(*signed) for index, signed in zip(place, words.tolist(), strict=True)}


class _Keys:
    """K, C and the seeds of A, on a device.

    Attributes:
        small: K, int8, 8192 x 16.
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        stream = hashlib.shake_256(b"rlctl keyed digest 1" + key).digest(BLOCK * LANES + LANES * 16 + 16)
        read = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
        small = read[: BLOCK * LANES].view(BLOCK, LANES).bitwise_and(127).to(torch.int16) - 64
        self.small = small.to(torch.int8).to(device)
        large = read[BLOCK * LANES :].clone().view(torch.int64)
        self._lanes = large[: 2 * LANES].view(LANES, 2).to(device)
        self._seeds = large[2 * LANES :].to(device)

    def terms(self, products: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Return the terms of the sum, lines x 2, one row for each line (a block of a row).

        ``products``: h, lines x 16, int32; ``lines``: line numbers.
        """
        wide = products.to(torch.int64)
        mixed = torch.stack([(wide * lane).sum(1) for lane in self._lanes.unbind(1)], 1)
        return mixed * _mixed(self._seeds + (lines[:, None] + 1) * _GOLDEN)


@functools.lru_cache(maxsize=8)
def _keys(key: bytes, device: torch.device) -> _Keys:
    return _Keys(key, device)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014) to uint64 values in int64."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _MIX[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * _MIX[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically, without the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _bytes(matrix: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix as bytes. The result shares memory if rows are contiguous and do not overlap."""
    matrix = matrix.resolve_conj().resolve_neg()
    # A product reads past the memory of overlapping rows.
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1]:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int8)


def _row_numbers(rows: _Rows, full: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of the rows in the full tensor."""
    part, numbers = rows.shard.slice, torch.arange(rows.start, rows.start + len(rows.values), device="cpu")
    if part.dim is None or part.dim == len(full) - 1:
        return numbers
    inner = math.prod(full[part.dim + 1 : -1])
    outer, within = numbers // (part.length * inner), numbers % (part.length * inner)
    return outer * (full[part.dim] * inner) + part.start * inner + within


def _cuts(first: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Split ``width`` bytes from byte ``first`` of a row at the borders of blocks: (block, from, to)."""
    start = 0
    while start < width:
        block = (first + start) // BLOCK
        end = min(width, (block + 1) * BLOCK - first)
        yield block, start, end
        start = end


def _product(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply two int8 matrices exactly into int32."""
    return _product_on(data.device)(data, keys)


@functools.cache
def _product_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the fastest product that is exact on a device.

    torch also multiplies int8 matrices on CPUs without int8 instructions, at a tenth of the speed of float32.
    """
    generator = torch.Generator("cpu").manual_seed(1)  # also if torch's default device is not the CPU
    data = torch.randint(-128, 128, (64, 512), dtype=torch.int8, generator=generator, device="cpu")
    keys = torch.randint(-64, 64, (512, LANES), dtype=torch.int8, generator=generator, device="cpu")
    data[0], data[1], keys[:, 0], keys[:, 1] = -128, 127, -64, 63
    expected = data.to(torch.int64) @ keys.to(torch.int64)
    try:
        product = _int8_product(data.to(device), keys.to(device)).cpu()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # not in this build of torch
        return _float_product
    if not torch.equal(product.to(torch.int64), expected):
        return _float_product
    if device.type != "cpu":
        return _int8_product
    return min((_int8_product, _float_product), key=lambda product: _time_s(product, data, keys))


def _time_s(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], data: torch.Tensor, keys: torch.Tensor
) -> float:
    """Return the shortest of five times of a product."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        product(data, keys)
        times.append(time.perf_counter() - begun)
    return min(times)


def _int8_product(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    # cuBLASLt requires more than 16 rows, which begin and end at multiples of 16 bytes.
    aligned = not (data.data_ptr() | data.stride(0) | data.shape[1] | keys.data_ptr()) % 16
    if data.is_cuda and not (aligned and len(data) > 16):
        return _float_product(data, keys)
    try:
        product: torch.Tensor = torch._int_mm(data, keys)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if not data.is_cuda:
            raise
        return _float_product(data, keys)  # a shape that cuBLASLt refuses
    return product


def _float_product(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    product = torch.zeros(len(data), LANES, dtype=torch.int32, device=data.device)
    for start in range(0, data.shape[1], _EXACT):
        columns = slice(start, start + _EXACT)
        factors = keys[columns].to(torch.float32)
        count = max(1, _FLOATS // len(factors) if data.device.type == "cpu" else len(data))
        for first in range(0, len(data), count):
            rows = slice(first, first + count)
            product[rows] += (data[rows, columns].to(torch.float32) @ factors).to(torch.int32)
    return product
