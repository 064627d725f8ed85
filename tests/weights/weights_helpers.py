"""What the tests of the tensor data plane share: a small model in several layouts, and work in several threads."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.tensors import TensorMeta

HEADS, KV_HEADS, HEAD, HIDDEN = 4, 2, 8, 16


def full_model(seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer's worth of full tensors under checkpoint names, of several dtypes and ranks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed.weight": random(24, HIDDEN),
        "layer.q.weight": random(HEADS * HEAD, HIDDEN),
        "layer.k.weight": random(KV_HEADS * HEAD, HIDDEN),
        "layer.v.weight": random(KV_HEADS * HEAD, HIDDEN),
        "layer.q.bias": random(HEADS * HEAD, dtype=torch.float32),
        "layer.o.weight": random(HIDDEN, HEADS * HEAD),
        "layer.experts": random(3, 8, HIDDEN, dtype=torch.float16),
        "layer.norm.weight": random(HIDDEN, dtype=torch.float32),
        "layer.scale": random(dtype=torch.float32),
        "layer.codes": random(5, 4).to(torch.float8_e4m3fn),
    }


def metas_of(full: Mapping[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta.of(name, tensor) for name, tensor in full.items()]


def digest_of(full: Mapping[str, torch.Tensor], key: bytes = b"") -> str:
    digest = ModelDigest(key)
    for name, tensor in full.items():
        digest.add(name, tensor)
    return digest.digest()


def tp_map(full: Mapping[str, torch.Tensor], rank: int, size: int) -> ShardMap:
    """The shard map of one rank of ``size``, its memory zeroed.

    q, k and v lie fused in one parameter; k and v are held by pairs of ranks when there are more ranks than heads;
    the embedding is padded where it does not divide.
    """
    slices: dict[str, Slice] = {}
    for name, tensor in full.items():
        dim = {"layer.o.weight": 1, "layer.experts": 1}.get(name, 0)
        if size == 1 or name in ("layer.norm.weight", "layer.scale", "layer.codes"):
            slices[name] = Slice()
        elif name in ("layer.k.weight", "layer.v.weight") and size > KV_HEADS:
            slices[name] = Slice(0, rank * KV_HEADS // size * HEAD, HEAD)
        else:
            length = tensor.shape[dim] // size
            slices[name] = Slice(dim, rank * length, length)
    shapes = {name: slices[name].shape(tuple(tensor.shape)) for name, tensor in full.items()}
    fused_names = ("layer.q.weight", "layer.k.weight", "layer.v.weight")
    fused = torch.zeros(sum(shapes[name][0] for name in fused_names), HIDDEN, dtype=torch.bfloat16)
    padded = torch.zeros(shapes["embed.weight"][0] + 3, HIDDEN, dtype=torch.bfloat16)
    views = dict(zip(fused_names, fused.split([shapes[name][0] for name in fused_names]), strict=True))
    views["embed.weight"] = padded[:-3]
    return ShardMap(
        {
            name: Shard(
                TensorMeta.of(name, tensor),
                views[name] if name in views else torch.zeros(shapes[name], dtype=tensor.dtype),
                slices[name],
            )
            for name, tensor in full.items()
        }
    )


def filled(full: Mapping[str, torch.Tensor], rank: int, size: int) -> ShardMap:
    shards = tp_map(full, rank, size)
    for name, tensor in full.items():
        shards.place(name, tensor)
    return shards


def together(*jobs: Callable[[], Any], timeout_s: float = 20.0) -> list[Any]:
    """Run jobs at the same time; their results in order. Raises the first failure."""
    running = [Background(job) for job in jobs]
    return [job.result(timeout_s) for job in running]


class Background:
    """A job in a thread of its own."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job = job
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float = 20.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._job()
        except BaseException as error:  # noqa: BLE001
            self._error = error


def over(group: WeightGroup, buckets: Sequence[Bucket]) -> list[tuple[WeightGroup, Bucket]]:
    """The buckets as a stream over one group."""
    return [(group, bucket) for bucket in buckets]


@contextlib.contextmanager
def files_left(count: int) -> Iterator[None]:
    """Let the process open so many further files at a time."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
