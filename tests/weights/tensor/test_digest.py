"""Digests against bytes that are built by hand here."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from torch import nn

from rlctl.weights.tensor.digest import ModelDigest, TensorHash, combine, rank_digest, tensor_digest
from rlctl.weights.tensor.tensors import TensorMeta


def sha(*parts: str | bytes) -> str:
    return hashlib.sha256(b"".join(part.encode() if isinstance(part, str) else part for part in parts)).hexdigest()


def bf16(*values: float) -> bytes:
    """A bfloat16 is the upper half of a float32."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


GOLDEN = {
    "fp32": (
        torch.tensor([[1.0, -2.5, 3.25], [0.0, 1e-3, 7.0]]),
        sha("w", "torch.float32", "(2, 3)", struct.pack("<6f", 1.0, -2.5, 3.25, 0.0, 1e-3, 7.0)),
    ),
    "bf16": (
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16),
        sha("w", "torch.bfloat16", "(3,)", bf16(1.0, -2.0, 0.5)),
    ),
    "fp16": (
        torch.tensor([[1.5], [-0.25]], dtype=torch.float16),
        sha("w", "torch.float16", "(2, 1)", struct.pack("<2e", 1.5, -0.25)),
    ),
    "fp8_e4m3": (
        torch.tensor([1.0, 2.0, 0.5, -1.0]).to(torch.float8_e4m3fn),
        sha("w", "torch.float8_e4m3fn", "(4,)", b"\x38\x40\x30\xb8"),
    ),
    "int8": (
        torch.tensor([-1, 0, 127], dtype=torch.int8),
        sha("w", "torch.int8", "(3,)", b"\xff\x00\x7f"),
    ),
    "int64": (
        torch.tensor([1, -1]),
        sha("w", "torch.int64", "(2,)", struct.pack("<2q", 1, -1)),
    ),
    "bool": (
        torch.tensor([True, False, True]),
        sha("w", "torch.bool", "(3,)", b"\x01\x00\x01"),
    ),
    "0-d bf16": (
        torch.tensor(2.0, dtype=torch.bfloat16),
        sha("w", "torch.bfloat16", "()", bf16(2.0)),
    ),
    "0-d fp8": (
        torch.tensor(0.5).to(torch.float8_e4m3fn),
        sha("w", "torch.float8_e4m3fn", "()", b"\x30"),
    ),
    "empty": (
        torch.empty(0, 3),
        sha("w", "torch.float32", "(0, 3)"),
    ),
    "non-contiguous": (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
        sha("w", "torch.float32", "(2, 2)", struct.pack("<4f", 1.0, 3.0, 2.0, 4.0)),
    ),
    "strided": (
        torch.arange(6, dtype=torch.int8)[::2],
        sha("w", "torch.int8", "(3,)", b"\x00\x02\x04"),
    ),
    "conjugated": (
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        sha("w", "torch.complex64", "(1,)", struct.pack("<2f", 1.0, -2.0)),
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_a_tensor_digest_is_the_hash_of_name_dtype_shape_and_bytes(case: str) -> None:
    tensor, expected = GOLDEN[case]
    assert tensor_digest("w", tensor) == expected


def test_a_digest_is_the_same_as_ever() -> None:
    # The formula is a contract with other software: this number never changes.
    assert tensor_digest("lm_head.weight", torch.tensor([1.0, 2.0])) == (
        "b68b813b88fbfa4ada102010985cc12ca03ebc7e0ae1989a4c2495273e4ea761"
    )


def test_a_digest_notices_one_byte() -> None:
    tensor = torch.arange(4096, dtype=torch.float32)
    before = tensor_digest("w", tensor)
    tensor.view(torch.uint8)[4097] ^= 1
    assert tensor_digest("w", tensor) != before


def test_a_digest_notices_name_dtype_and_shape() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    variants = [
        tensor_digest("w", tensor),
        tensor_digest("v", tensor),
        tensor_digest("w", tensor.view(torch.float32)),
        tensor_digest("w", tensor.reshape(2, 2)),
    ]
    assert len(set(variants)) == len(variants)


def test_a_cast_comes_before_the_digest() -> None:
    tensor = torch.tensor([1.0, -2.0, 0.5])
    assert tensor_digest("w", tensor, dtype=torch.bfloat16) == GOLDEN["bf16"][1]


def test_a_parameter_is_digested_as_its_tensor() -> None:
    tensor, expected = GOLDEN["fp32"]
    assert tensor_digest("w", nn.Parameter(tensor)) == expected


def test_a_digest_in_pieces_equals_the_digest_of_the_whole() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    hash_ = TensorHash(TensorMeta.of("w", tensor))
    for row in tensor:
        hash_.update(row)
    assert hash_.hexdigest() == tensor_digest("w", tensor)


def test_names_are_combined_in_sorted_order() -> None:
    assert combine({"b": "22", "a": "11"}) == sha("a", "11", "b", "22")
    assert combine({}) == sha()


class Tied(nn.Module):
    """A parameter under two names, a buffer that is no part of the state, a buffer, a 0-d buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.tensor([7], dtype=torch.int8), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.bfloat16))
        self.register_buffer("scale_again", self.scale)
        self.register_buffer("weight_again", self.embed.weight)
        nn.init.constant_(self.embed.weight, 1.0)


def test_a_rank_digest_covers_parameters_then_buffers_each_object_once() -> None:
    found = rank_digest(Tied())
    weight = sha("embed.weight", "torch.float32", "(2, 2)", struct.pack("<4f", 1, 1, 1, 1))
    cache = sha("cache", "torch.int8", "(1,)", b"\x07")
    scale = sha("scale", "torch.bfloat16", "()", bf16(2.0))
    assert [(entry.meta.name, entry.sha256) for entry in found.tensors] == [
        ("embed.weight", weight),
        ("cache", cache),
        ("scale", scale),
    ]
    assert found.digest == sha("cache", cache, "embed.weight", weight, "scale", scale)


def test_a_rank_digest_leaves_out_names_that_contain_a_skipped_part() -> None:
    found = rank_digest(Tied(), skip=["cac", "embed."])
    assert [entry.meta.name for entry in found.tensors] == ["scale"]
    assert found.digest == combine({"scale": found.tensors[0].sha256})


def test_a_model_digest_grows_in_any_order() -> None:
    one, other = ModelDigest(), ModelDigest()
    one.add("a", torch.zeros(2))
    one.add("b", torch.ones(2), dtype=torch.bfloat16)
    other.add_digest("b", tensor_digest("b", torch.ones(2, dtype=torch.bfloat16)))
    other.add("a", torch.ones(2))
    assert other.digest() != one.digest()
    other.add("a", torch.zeros(2))
    assert other.digest() == one.digest() == combine(one.digests)
