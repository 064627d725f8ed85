"""Publishes versions in slime's layout, from the facts in rlctl/weights/versions/slime_layout.py."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import blake3
import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file

Model = Mapping[str, torch.Tensor]


def checksum(kind: str, data: bytes) -> str:
    if kind == "xxh3-128":
        return xxhash.xxh3_128(data).hexdigest()
    if kind == "blake3":
        return blake3.blake3(data).hexdigest()
    return f"{zlib.adler32(data):08x}"


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class SlimePublisher:
    """A trainer: diffs every version against the previous version, and starts from the engine's own checkpoint."""

    def __init__(self, source: Path, base: Model, *, encoding: str = "xor", kind: str = "xxh3-128") -> None:
        self.source = source
        self.encoding = encoding
        self.kind = kind
        self.number = 0
        self._before = {name: as_array(tensor).copy() for name, tensor in base.items()}
        source.mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        return self.source / f"weight_v{number:06d}"

    def full(self, checkpoint: Path, weights: Model) -> Path:
        """Write a complete version: a copy of a checkpoint directory with these weights."""
        self.number += 1
        self._before = {name: as_array(tensor).copy() for name, tensor in weights.items()}
        shutil.copytree(checkpoint, self.path(self.number))
        return self.path(self.number)

    def delta(self, weights: Model, *, files: int = 2) -> Path:
        """Write a difference to the previous version, in ``files`` files as from pipeline stages."""
        self.number += 1
        path = self.path(self.number)
        path.mkdir()
        stored: dict[str, np.ndarray] = {}
        sums: dict[str, str] = {}
        for name, tensor in weights.items():
            old, new = self._before[name], as_array(tensor).copy()
            self._before[name] = new
            if not (old != new).any():
                continue
            if self.encoding == "xor":
                plain = (old ^ new).tobytes()
            else:
                positions = np.flatnonzero(old != new)
                count = len(positions).to_bytes(4, "little")
                plain = count + positions.astype("<u4").tobytes() + new[positions].tobytes()
            stored[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(plain), np.uint8)
            sums[name] = checksum(self.kind, new.tobytes())
        parts = [part for n in range(files) if (part := list(stored)[n::files])]
        weight_map: dict[str, str] = {}
        for n, names in enumerate(parts):
            file = f"model-{n:05d}-of-{len(parts):05d}.safetensors"
            save_file({name: stored[name] for name in names}, path / file, {name: sums[name] for name in names})
            weight_map |= dict.fromkeys(names, file)
        metadata = {
            "version": f"{self.number:06d}",
            "base_version": f"{self.number - 1:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.kind,
        }
        index = {"metadata": metadata, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path
