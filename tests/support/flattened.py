"""Checkpoints of packed buckets, for the load format "flattened_bucket"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlctl.weights.checkpoint.load_formats import BUCKETS
from rlctl.weights.tensor.buckets import Bucket, pack
from rlctl.weights.tensor.tensors import dtype_name


def save_flattened(path: str | Path, buckets: Iterable[tuple[Bucket, Mapping[str, torch.Tensor]]]) -> None:
    """Write ``model.safetensors`` of packed buckets into a directory; each bucket comes with its tensors."""
    packed: dict[str, torch.Tensor] = {}
    contents: dict[str, list[list[object]]] = {}
    for bucket, tensors in buckets:
        key = f"bucket.{len(packed):05}"
        packed[key] = pack(Bucket(bucket.sequence, bucket.metas, True), tensors).cpu().clone()
        contents[key] = [
            [meta.name, dtype_name(meta.dtype), meta.shape, start]
            for meta, start in zip(bucket.metas, bucket.offsets, strict=True)
        ]
    save_file(packed, Path(path) / "model.safetensors", {BUCKETS: json.dumps(contents)})
