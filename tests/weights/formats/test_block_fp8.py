"""Block-fp8: the formula, weights with their scales as one, and what does not fit the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from rlctl.contract.errors import InvalidRequest, RlctlError, Unsupported
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.formats.block_fp8 import BlockFp8, BlockSize, block_size_of, dequantise, quantise
from rlctl.weights.tensor.buckets import plan
from rlctl.weights.tensor.source import as_source, atomic_lists, in_lists
from rlctl.weights.tensor.tensors import TensorMeta

FP8 = torch.float8_e4m3fn


def by_hand(weight: torch.Tensor, block: BlockSize, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, block by block."""
    codes = torch.zeros(weight.shape, dtype=FP8)
    scale = torch.zeros(block.scales(tuple(weight.shape)), dtype=scale_dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows = slice(i * block.rows, (i + 1) * block.rows)
            columns = slice(j * block.columns, (j + 1) * block.columns)
            part = weight[rows, columns].float()
            scale[i, j] = part.abs().max() / 448 if part.any() else 1.0
            codes[rows, columns] = (part / scale[i, j].float()).clamp(-448, 448).to(FP8)
    return codes, scale


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.builds(BlockSize, st.integers(1, 17), st.integers(1, 17)),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_formula(shape: tuple[int, int], block: BlockSize, scale_dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 10.0 ** (seed % 9 - 4)).to(torch.bfloat16)
    weight[: shape[0] // 2] *= seed % 2
    codes, scale = quantise(weight, block, scale_dtype)
    expected = by_hand(weight, block, scale_dtype)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])
    back = dequantise(codes, scale, block)
    # e4m3 has three bits behind the point: a sixteenth of a value, or of the smallest normal one's block.
    largest = weight.float().abs().max()
    assert ((back - weight.float()).abs() <= weight.float().abs() / 15 + largest * 2.0**-14).all()
    # What was quantised once is quantised to itself, up to the scale's own rounding.
    again = dequantise(*quantise(back, block, scale_dtype), block)
    assert torch.allclose(again, back, rtol=0.07, atol=float(largest) * 2.0**-13)


def test_a_part_is_dequantised_wherever_it_is_cut() -> None:
    codes, scale = quantise(torch.randn(300, 200))
    whole = dequantise(codes, scale)
    for row, column, rows, columns in ((0, 0, 300, 200), (150, 0, 150, 200), (0, 100, 300, 100), (127, 129, 2, 1)):
        part = codes[row : row + rows, column : column + columns]
        expected = whole[row : row + rows, column : column + columns]
        assert torch.equal(dequantise(part, scale, row=row, column=column), expected)


def test_values_that_are_not_finite_or_no_matrix_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(4, 4)
        weight[2, 3] = bad
        with pytest.raises(InvalidRequest, match="not finite"):
            quantise(weight)
    with pytest.raises(InvalidRequest, match="matrices"):
        quantise(torch.ones(3))
    for tiny in (9.4e-43, 1e-45):
        assert dequantise(*quantise(torch.full((4, 4), tiny))).isfinite().all()
    codes, scale = quantise(torch.zeros(4, 4))
    assert (scale == 1).all()
    assert not dequantise(codes, scale).any()


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
    ],
)
def test_other_quantisations_are_refused(settings_: dict[str, object], words: str) -> None:
    good = {"quant_method": "fp8", "weight_block_size": [64, 128], "activation_scheme": "dynamic"}
    assert block_size_of({"quantization_config": good}) == BlockSize(64, 128)
    assert block_size_of({}) is None
    with pytest.raises(Unsupported, match=words):
        block_size_of({"quantization_config": {**good, **settings_}})


@pytest.mark.parametrize("settings_", ["fp8", ["fp8"], 8, True])
def test_a_quantisation_that_is_no_object_is_refused(settings_: object) -> None:
    with pytest.raises(Unsupported, match="quantization_config is "):
        block_size_of({"quantization_config": settings_})


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(200, 140, bias=True, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(140, bias=False, dtype=torch.bfloat16)


REFERENCE = [
    TensorMeta("proj.weight", FP8, (140, 200)),
    TensorMeta("proj.weight_scale_inv", torch.bfloat16, (2, 2)),
    TensorMeta("proj.bias", torch.bfloat16, (140,)),
    TensorMeta("norm.weight", torch.bfloat16, (140,)),
]


def test_a_source_quantises_what_the_checkpoint_holds_quantised() -> None:
    trainer = Trainer()
    source = BlockFp8(trainer, REFERENCE)
    assert source.metas() == REFERENCE
    for _ in range(2):
        found = list(source.tensors())
        assert [TensorMeta.of(name, tensor) for name, tensor in found] == REFERENCE
    tensors = dict(found)
    expected = by_hand(trainer.proj.weight.detach(), BlockSize(), torch.bfloat16)
    assert torch.equal(tensors["proj.weight"].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(tensors["proj.weight_scale_inv"], expected[1])
    assert torch.equal(tensors["norm.weight"], trainer.norm.weight)
    assert source.together() == [("proj.weight", "proj.weight_scale_inv")]


def test_a_weight_and_its_scale_are_never_split_over_buckets() -> None:
    names = [f"layer{n}.weight" for n in range(6)]
    weights = [(name, torch.randn(10, 12)) for name in names]
    reference = [
        meta
        for name in names
        for meta in (TensorMeta(name, FP8, (10, 12)), TensorMeta(f"{name}_scale_inv", torch.float32, (1, 1)))
    ]
    source = BlockFp8(weights, reference)
    for bucket_bytes, large_bytes in ((1, 1 << 20), (130, 1 << 20), (300, 1 << 20), (1 << 20, 1)):
        entries = in_lists(source.metas(), atomic_lists(source))
        buckets = plan(entries, bucket_bytes=bucket_bytes, large_bytes=large_bytes)
        assert [meta.name for bucket in buckets for meta in bucket.metas] == [meta.name for meta in reference]
        for bucket in buckets:
            of_bucket = [meta.name for meta in bucket.metas]
            assert all(f"{name}_scale_inv" in of_bucket for name in of_bucket if name in names)
    # Without lists it would be: 130 bytes hold a weight and the scale, and a second weight's first.
    assert len(plan(source.metas(), bucket_bytes=123)) == 12


def test_what_is_quantised_already_passes_through() -> None:
    codes, scale = quantise(torch.randn(140, 200), scale_dtype=torch.bfloat16)
    pairs = [[("proj.weight", codes), ("proj.weight_scale_inv", scale)], ("norm.weight", torch.ones(140))]
    source = BlockFp8(pairs, REFERENCE)
    assert [name for name, _ in source.tensors()] == ["proj.weight", "proj.weight_scale_inv", "norm.weight"]
    assert dict(source.tensors())["proj.weight"] is codes or torch.equal(
        dict(source.tensors())["proj.weight"].view(torch.uint8), codes.view(torch.uint8)
    )
    assert source.together() == [("proj.weight", "proj.weight_scale_inv")]


def test_what_does_not_fit_the_reference_is_refused_before_anything_is_quantised(tmp_path: Path) -> None:
    reference = {meta.name: meta for meta in REFERENCE}
    for name, meta, kind in (
        ("proj.weight", TensorMeta("proj.weight", FP8, (200, 140)), InvalidRequest),
        ("proj.weight_scale_inv", TensorMeta("proj.weight_scale_inv", torch.float32, (2, 1)), InvalidRequest),
        ("proj.weight_scale_inv", TensorMeta("proj.weight_scale_inv", torch.float8_e8m0fnu, (2, 2)), Unsupported),
    ):
        with pytest.raises(kind, match=r"proj\.weight"):
            BlockFp8(Trainer(), {**reference, name: meta}.values())
    with pytest.raises(InvalidRequest, match="64 by 64"):
        BlockFp8(Trainer(), REFERENCE, BlockSize(64, 64))
    trainer = Trainer()
    with torch.no_grad():
        trainer.proj.weight[0, 0] = float("nan")
    with pytest.raises(RlctlError, match=r"proj\.weight: the weight holds values that are not finite"):
        list(BlockFp8(trainer, REFERENCE).tensors())


def test_a_checkpoint_says_its_block_size(tmp_path: Path) -> None:
    weight = torch.randn(140, 200)
    codes, scale = quantise(weight, BlockSize(32, 64))
    save_file({"proj.weight": codes, "proj.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    quantisation = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    checkpoint = open_checkpoint(str(tmp_path))
    found = dict(BlockFp8([("proj.weight", weight)], checkpoint).tensors())
    assert torch.equal(found["proj.weight_scale_inv"], scale)
    assert found["proj.weight_scale_inv"].shape == (5, 4)


def test_lists_of_pairs_stay_together_and_must_follow_each_other() -> None:
    source = as_source([("a", torch.zeros(1)), [("b", torch.zeros(1)), ("c", torch.zeros(1))]])
    lists = atomic_lists(source)
    assert lists == [("b", "c")]
    assert atomic_lists(as_source([["a", torch.zeros(2)], ["b", torch.zeros(2)]])) == [], "pairs, as lists"
    a, b, c = source.metas()
    assert in_lists([a, b, c], lists) == [a, [b, c]]
    for order in ([b, a, c], [c, b, a], [a, b]):
        with pytest.raises(InvalidRequest, match="b, c belong together"):
            in_lists(order, lists)
