"""Checkpoints of very many tensors, as mixtures of experts have: what is done for each does not grow with their number.

Counted in calls of functions, which do not depend on the machine.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights_helpers import digest_of

from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full
from rlctl.weights.versions.pull import pull

FEW, TIMES = 150, 4


def calls(work: Callable[[], object]) -> int:
    """Calls that this thread makes."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def tensors(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.0.experts.{n}.weight": torch.randn(3, 2, generator=generator) for n in range(count)}


def checkpoint(place: Path, count: int) -> Path:
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file(tensors(count), place / "model.safetensors")
    return place


def published_full(place: Path, count: int) -> Callable[[], object]:
    started = checkpoint(place / "started", count)
    after = tensors(count, seed=1)
    return lambda: publish_full(place / "source", after.items(), version="a", sequence=2, files_from=started)


def published_delta(place: Path, count: int) -> Callable[[], object]:
    base = BaseVersion(checkpoint(place / "started", count), "a", 2)
    after = tensors(count, seed=1)
    return lambda: publish_delta(place / "source", after.items(), version="b", sequence=3, base=base)


def pulled(place: Path, count: int) -> Callable[[], object]:
    started = checkpoint(place / "started", count)
    source, base = str(place / "source"), BaseVersion(started, "a", 2)
    publish_delta(source, tensors(count, seed=1).items(), version="b", sequence=3, base=base)
    return lambda: pull(source, str(place / "local"), "b", base_dir=str(started), threads=1)


def loaded(place: Path, count: int) -> Callable[[], object]:
    stored = open_checkpoint(str(checkpoint(place / "started", count)))
    memory = {name: torch.empty_like(tensor) for name, tensor in tensors(count).items()}
    shards = ShardMap({name: Shard(TensorMeta.of(name, held), held) for name, held in memory.items()})
    return lambda: shards.load(stored, only=shards.select(stored))


def digested(place: Path, count: int) -> Callable[[], object]:
    held = tensors(count)
    return lambda: digest_of(held)


@pytest.mark.parametrize("work", [published_full, published_delta, pulled, loaded, digested])
def test_the_work_for_each_tensor_does_not_grow_with_their_number(
    work: Callable[[Path, int], Callable[[], object]], tmp_path: Path
) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few = calls(work(tmp_path / "few", FEW))
    many = calls(work(tmp_path / "many", FEW * TIMES))
    assert many < few * TIMES * 1.2
    assert many > FEW * TIMES, "it has counted the work"
