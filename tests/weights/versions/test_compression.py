"""Frames of deltas: what comes back, and what a damaged or hostile frame may cost."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
import zstandard

from rlctl.weights.versions.compression import compressed, decompressed


@pytest.mark.parametrize("size", [0, 1, 200_001])
def test_the_bytes_come_back(size: int) -> None:
    data = torch.randint(0, 3, (size,), dtype=torch.uint8)
    assert torch.equal(decompressed(compressed(data), size), data)


def test_a_frame_of_more_bytes_than_the_tensor_has_is_seen_and_not_unpacked() -> None:
    bomb = torch.frombuffer(bytearray(zstandard.compress(bytes(64 << 20))), dtype=torch.uint8)
    tracemalloc.start()
    assert decompressed(bomb, 1000).numel() == 1001
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_that_claims_terabytes_costs_nothing() -> None:
    claiming = zstandard.ZstdCompressor().compressobj(size=1 << 42)
    frame = claiming.compress(bytes(70_000)) + claiming.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert zstandard.frame_content_size(frame) == 1 << 42
    tracemalloc.start()
    plain = decompressed(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 100_000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert torch.equal(plain, torch.zeros(70_000, dtype=torch.uint8))


def test_a_truncated_frame_ends_early_and_noise_is_refused() -> None:
    frame = compressed(torch.randint(0, 255, (100_000,), dtype=torch.uint8))
    assert decompressed(frame[: len(frame) // 2].clone(), 100_000).numel() < 100_000
    with pytest.raises(ValueError, match="decompress"):
        decompressed(torch.randint(0, 255, (1000,), dtype=torch.uint8), 1000)
