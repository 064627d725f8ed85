"""Digests of weights: SHA-256, bit for bit as SGLang-Omni's weight checker, or keyed (``keyed_digest.py``).

The digest of a tensor is the hex SHA-256 over four values without separators: name (UTF-8), dtype ("torch.bfloat16"),
shape as a Python tuple ("(2, 3)", "(3,)", "()") and raw bytes in C order. The digest of a set of tensors is the SHA-256
over the sorted names, each followed by its tensor's hex digest in ASCII.

The *rank digest* covers a rank's local parameters, and is comparable between equal layouts. The *model digest* covers
the full tensors under their checkpoint names, and is comparable between all layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from rlctl.contract.digests import with_key
from rlctl.weights.tensor.keyed_digest import identity, keyed_sums
from rlctl.weights.tensor.slices import Shard
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, dtype_name
from rlctl.weights.tensor.work import Stop, usable_cores

_CHUNK_BYTES = 4 << 20
"""Bytes that a thread copies from a device to the host at a time."""


class TensorHash:
    """An incremental digest, for tensors that are never whole in one place."""

    def __init__(self, meta: TensorMeta) -> None:
        self._sha256 = hashlib.sha256(f"{meta.name}{dtype_name(meta.dtype)}{meta.shape}".encode())

    def update(self, data: torch.Tensor) -> None:
        """Add the next bytes (any dtype, on any device)."""
        for chunk in _host_chunks(as_bytes(data)):
            # hashlib reads the tensor's own memory through the buffer protocol, with the GIL released.
            self._sha256.update(chunk.numpy().data)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, 64 hex digits."""
        return self._sha256.hexdigest()


def tensor_digest(name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, key: bytes = b"") -> str:
    """Digest a tensor, cast to ``dtype`` if given: 64 hex digits, or 32 with a ``key``."""
    if key:
        meta = TensorMeta(name, dtype or tensor.dtype, tuple(tensor.shape))
        (contents,) = keyed_sums(key, [Shard(meta, tensor)], threads=1)
        return (contents + identity(key, meta)).hex()
    cast = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    hash_ = TensorHash(TensorMeta.of(name, cast))
    hash_.update(cast)
    return hash_.hexdigest()


def digest_of_bytes(meta: TensorMeta, data: torch.Tensor) -> str:
    """Digest the tensor with these bytes (C order): 64 hex digits."""
    hash_ = TensorHash(meta)
    hash_.update(data)
    return hash_.hexdigest()


def part_digest(shard: Shard, key: bytes = b"") -> str:
    """Digest a part of a tensor, in hex.

    By SHA-256 as a tensor of the part's shape. With a ``key`` the result is the part's summand of the tensor's digest,
    and for a whole tensor its digest.
    """
    if not key:
        return tensor_digest(shard.meta.name, shard.local, dtype=shard.meta.dtype)
    (digest,) = keyed_sums(key, [shard])
    if shard.slice.whole(shard.meta.shape):
        digest += identity(key, shard.meta)
    return digest.hex()


def tensor_digests(
    tensors: Mapping[str, tuple[torch.Tensor, torch.dtype]], stop: Stop | None = None, *, key: bytes = b""
) -> dict[str, str]:
    """Digest each tensor, cast to the dtype beside it, on all cores; return digests by name.

    SHA-256 cannot be split over cores: each core hashes one tensor, the largest first. Raises the cause of ``stop``
    between two tensors.
    """
    stop = stop or Stop()
    if key:
        shards = [
            Shard(TensorMeta(name, dtype, tuple(tensor.shape)), tensor) for name, (tensor, dtype) in tensors.items()
        ]
        sums = keyed_sums(key, shards, stop)
        return {
            shard.meta.name: (each + identity(key, shard.meta)).hex() for shard, each in zip(shards, sums, strict=True)
        }

    def digest(name: str) -> str:
        stop.check()
        return tensor_digest(name, tensors[name][0], dtype=tensors[name][1])

    by_size = sorted(tensors, key=lambda name: tensors[name][0].numel() * tensors[name][1].itemsize, reverse=True)
    with ThreadPoolExecutor(usable_cores(), thread_name_prefix="digest") as pool:
        return dict(zip(by_size, pool.map(digest, by_size), strict=True))


def combine(digests: Mapping[str, str], key: bytes = b"") -> str:
    """Digest a set of tensors from hex digests by name; ``key`` is the key of these digests."""
    sha256 = hashlib.sha256()
    for name in sorted(digests):
        sha256.update(f"{name}{digests[name]}".encode())
    return with_key(sha256.hexdigest(), key)


@dataclass(frozen=True)
class TensorDigestEntry:
    """A tensor's description and its digest, hex."""

    meta: TensorMeta
    sha256: str


@dataclass(frozen=True)
class RankDigest:
    """Digests of a rank's tensors.

    Attributes:
        tensors: every tensor, in the module's order.
        digest: the digest over all tensors, hex; SGLang-Omni's ``per_gpu_checksum``.
    """

    tensors: list[TensorDigestEntry]
    digest: str


def rank_digest(module: nn.Module, skip: Sequence[str] = (), stop: Stop | None = None) -> RankDigest:
    """Digest a module's parameters, then its buffers, every tensor object once.

    Names that contain an entry of ``skip`` are excluded. Raises the cause of ``stop``. The last check of ``stop``
    follows the last digest, so that a stop before a change of the weights voids the result.
    """
    chosen = {name: tensor for name, tensor in _tensors_once(module) if not any(part in name for part in skip)}
    digests = tensor_digests({name: (tensor, tensor.dtype) for name, tensor in chosen.items()}, stop)
    if stop is not None:
        stop.check()
    entries = [TensorDigestEntry(TensorMeta.of(name, tensor), digests[name]) for name, tensor in chosen.items()]
    return RankDigest(entries, combine({entry.meta.name: entry.sha256 for entry in entries}))


class ModelDigest:
    """A model digest that grows tensor by tensor, as a source sends its tensors.

    Attributes:
        key: of a keyed digest; b"": SHA-256.
        digests: hex digests so far, by checkpoint name.
    """

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self.digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Digest a full tensor, cast to ``dtype`` if given. A repeated name replaces the earlier digest."""
        self.digests[name] = tensor_digest(name, tensor, dtype=dtype, key=self.key)

    def add_digest(self, name: str, digest: str) -> None:
        """Add the digest of a tensor that was digested elsewhere, such as at another source."""
        self.digests[name] = digest

    def digest(self) -> str:
        return combine(self.digests, self.key)


def _tensors_once(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yielded: set[int] = set()
    for named_tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named_tensors:
            if id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield name, tensor


def _host_chunks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    if data.device.type == "cpu":
        yield data
        return
    # Page-locked: a GPU copies into pageable memory for one thread at a time, slower than two cores hash.
    room = torch.empty(min(data.numel(), _CHUNK_BYTES), dtype=torch.uint8, pin_memory=data.is_cuda)
    for start in range(0, data.numel(), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        yield room[: part.numel()].copy_(part)
