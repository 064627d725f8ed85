"""Compression of the tensors of deltas: one zstd frame for each tensor."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rlctl.contract.errors import Reason

_LEVEL = 1
"""zstd's fastest regular level. Level 3 makes the XOR of one optimizer step no smaller."""


def compressed(data: torch.Tensor) -> torch.Tensor:
    """Return the zstd frame of bytes (uint8, one dimension). Raises UNSUPPORTED without the package."""
    frame: bytes = package("zstandard").ZstdCompressor(level=_LEVEL).compress(data.numpy().data)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decompressed(frame: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bytes of a frame, at most ``size`` + 1 of them.

    The size in the frame's header is not used: a damaged header may claim terabytes. Raises ValueError for a damaged
    frame, UNSUPPORTED without the package.
    """
    zstandard = package("zstandard")
    plain = torch.empty(size + 1, dtype=torch.uint8)
    room, read = plain.numpy().data, 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame.numpy().data) as reader:
            while read < len(room) and (count := reader.readinto(room[read:])):
                read += count
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return plain[:read]


def package(name: str) -> Any:
    """Import an optional package of deltas. Raises UNSUPPORTED."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Reason.UNSUPPORTED.error(
            f"deltas need the package {name}, which is not installed here",
            field="source_dir",
            next_step="pip install 'rlctl[torch]'",
        ) from None
