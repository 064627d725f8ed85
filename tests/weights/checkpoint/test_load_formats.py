"""Load formats by name."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.contract.errors import NotFound, Reason, RlctlError
from rlctl.weights.checkpoint import load_formats as loaders
from rlctl.weights.checkpoint.checkpoint import Checkpoint, open_checkpoint
from rlctl.weights.checkpoint.load_formats import BUCKETS, load_formats, open_stored
from rlctl.weights.checkpoint.safetensors_file import header_of
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.tensors import TensorMeta
from tests.support.flattened import save_flattened

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "b": torch.tensor(2.5, dtype=torch.bfloat16),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_packed_buckets_are_read_as_what_went_in(directory: Path) -> None:
    bucket = Bucket(0, [TensorMeta.of(*entry) for entry in TENSORS.items()], True)
    save_flattened(directory, [(bucket, TENSORS)])
    stored = open_stored(str(directory), "flattened_bucket")
    assert isinstance(stored, Checkpoint)
    assert stored.metas == {meta.name: meta for meta in bucket.metas}
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "contents",
    [
        {"bucket": [["a", "float32", [3], 0]]},  # 12 bytes, there are 8
        {"bucket": [["a", "float32", [1], 8]]},
        {"bucket": [["a", "float32", [1], -4]]},
        {"bucket": [["a", "float32", [-1], 0]]},
        {"bucket": [["a", "float32", [1], 0], ["a", "float32", [1], 4]]},
        {"other": [["a", "float32", [1], 0]]},
        {"bucket": [["a", "float32"]]},
        {"bucket": [["a", "uint8", [4], 0.5]]},
        {"bucket": [["a", "uint8", [4], True]]},
        {"bucket": [["a", "uint8", [4.0], 0]]},
        {"bucket": [["a", "uint8", "", 0]]},
        {"bucket": [["a", 8, [4], 0]]},
        {"bucket": [[5, "uint8", [4], 0]]},
        {"bucket": [["\ud800", "uint8", [4], 0]]},
        {"bucket": 5},
        [],
        3,
    ],
)
def test_a_description_that_does_not_fit_the_buckets_is_refused(directory: Path, contents: Any) -> None:
    header = header_of([TensorMeta("bucket", torch.uint8, (8,))], {BUCKETS: json.dumps(contents)})
    (directory / "model.safetensors").write_bytes(header + bytes(8))
    with pytest.raises(NotFound, match="no packed buckets"):
        open_stored(str(directory), "flattened_bucket")


def test_direct_takes_the_files_of_the_rank(directory: Path) -> None:
    for rank in range(2):
        save_file({"w": torch.full((2,), float(rank))}, directory / f"model-rank-{rank}-part-0.safetensors")
        save_file({"v": torch.full((1,), float(rank))}, directory / f"model-rank-{rank}-part-1.safetensors")
    stored = open_stored(str(directory), "direct", rank=1, size=2)
    assert isinstance(stored, Checkpoint)
    assert set(stored.metas) == {"w", "v"}
    assert stored.read("w").tolist() == [1, 1]
    for size in (1, 3):
        with pytest.raises(RlctlError, match=f"ranks 0, 1, not of {size} ranks") as caught:
            open_stored(str(directory), "direct", rank=0, size=size)
        assert caught.value.reason is Reason.CHECKPOINT_MISMATCH
    save_file({"w": torch.zeros(2)}, directory / "model-rank-0-part-2.safetensors")
    with pytest.raises(RlctlError, match="twice"):
        open_stored(str(directory), "direct", rank=0, size=2)


def test_direct_at_one_rank_takes_a_single_file(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")
    assert set(open_stored(str(directory), "direct").metas) == set(TENSORS)


def test_loaders_of_installed_packages_are_found_by_their_entry_point(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, directory / "model.safetensors")
    point = importlib.metadata.EntryPoint("mine", "rlctl.weights.checkpoint.checkpoint:open_checkpoint", loaders.GROUP)

    def points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [point] if group == loaders.GROUP and name in (None, "mine") else []

    monkeypatch.setattr(loaders, "entry_points", points)
    assert "mine" in load_formats()
    assert open_stored(str(directory), "mine").metas == open_checkpoint(str(directory)).metas
    with pytest.raises(RlctlError) as caught:
        open_stored(str(directory), "rlctl.weights.checkpoint.checkpoint:open_checkpoint")
    assert caught.value.reason is Reason.UNSUPPORTED
