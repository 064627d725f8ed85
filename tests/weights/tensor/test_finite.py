"""Values that are NaN or infinite are found in every dtype, and in what a rank holds itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.formats.block_fp8 import BlockFp8
from rlctl.weights.tensor import finite
from rlctl.weights.tensor.finite import is_finite, local_values, not_finite
from rlctl.weights.tensor.source import Weights, as_source, only
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions.publish import publish_full

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    assert is_finite(tensor)
    assert is_finite(tensor.t()[:, :0])
    tensor[2, 4] = value
    assert not is_finite(tensor)
    assert not is_finite(tensor.t())
    assert is_finite(tensor[:2])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_value_of_a_float_of_one_byte_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    for bits in range(256):
        tensor = torch.tensor([0x38, bits], dtype=torch.uint8).view(dtype)
        assert is_finite(tensor) == bool(tensor.to(torch.float32).isfinite().all()), bits


def test_integers_and_tensors_without_elements_are_finite() -> None:
    assert is_finite(torch.tensor([1 << 40]))
    assert is_finite(torch.tensor([True]))
    assert is_finite(torch.empty(0))


def test_a_value_that_becomes_infinite_in_the_checkpoints_dtype_is_found() -> None:
    assert is_finite(torch.tensor([65519.0]), torch.float16)
    assert not is_finite(torch.tensor([65520.0]), torch.float16)
    assert is_finite(torch.tensor([65520.0]), torch.bfloat16)
    assert is_finite(torch.tensor([65520.0]), torch.float8_e4m3fn), "that takes more than a cast"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Parameter(torch.ones(2, 2))
        self.bad = nn.Parameter(torch.tensor([1.0, float("nan")]))


class Gathered:
    """A source that has its tensors only when they are asked for."""

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta("bad", torch.float32, (2,))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "bad", torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize("weights", [Layer(), list(Layer().named_parameters())], ids=["module", "pairs"])
def test_modules_and_pairs_show_what_they_hold(weights: Weights) -> None:
    source = as_source(weights)
    dtypes = {meta.name: meta.dtype for meta in source.metas()}
    held = local_values(source)
    assert held is not None
    assert not_finite(held, dtypes) == ["bad"]
    left = local_values(only(source, ["good"]))
    assert left is not None
    assert not_finite(left, {"good": torch.float32}) == [], "of what is not sent nothing is said"


def test_a_quantising_source_shows_what_it_quantises() -> None:
    reference = [
        TensorMeta("good", torch.float8_e4m3fn, (2, 2)),
        TensorMeta("good_scale_inv", torch.float32, (1, 1)),
        TensorMeta("bad", torch.float32, (2,)),
    ]
    source = BlockFp8(Layer(), reference)
    held = local_values(source)
    assert held is not None
    assert not_finite(held, {meta.name: meta.dtype for meta in source.metas()}) == ["bad"]
    assert local_values(BlockFp8(Gathered(), reference)) is None


def test_the_refusal_names_the_tensors_and_says_how_to_go_on() -> None:
    error = finite.refusal(["b", "a", *(f"c{n}" for n in range(5))], 9)
    assert (error.reason, error.field) == (Reason.WEIGHTS_NOT_FINITE, "weights")
    assert error.message == (
        "7 of 9 tensors hold NaN or infinite values in the dtype of the checkpoint: a, b, c0, c1, c2, ..."
    )
    assert error.metadata == {"tensor": "a", "count": "7"}
    assert "finite=False" in error.next_step


@pytest.mark.parametrize("weights", [Layer(), Gathered()], ids=["module", "source"])
def test_a_version_on_disk_holds_no_such_values(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(RlctlError) as caught:
        publish_full(tmp_path / "versions", weights, version="v", sequence=2, files_from=tmp_path / "first")
    assert caught.value.reason is Reason.WEIGHTS_NOT_FINITE
    assert "bad" in caught.value.message
    assert not list((tmp_path / "versions").glob("*")), "nothing is published"
    kept = publish_full(
        tmp_path / "versions", weights, version="v", sequence=2, files_from=tmp_path / "first", finite=False
    )
    assert kept.path.is_dir()
