"""Names of dtypes, sizes and bytes of tensors."""

from __future__ import annotations

import pytest
import torch

from rlctl.contract.errors import InvalidRequest, Reason
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, by_name, dtype_name, parse_dtype

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_to_its_name_and_back(dtype: torch.dtype) -> None:
    assert parse_dtype(dtype_name(dtype)) is dtype
    assert parse_dtype(dtype_name(dtype).removeprefix("torch.")) is dtype


@pytest.mark.parametrize(
    "name", ["", "torch.", "bfloat17", "Tensor", "torch.nn", "qint8", "__name__", "torch.torch.int8"]
)
def test_what_is_no_dtype_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_dtype(name, "buckets[0].dtypes[3]")
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.field == "buckets[0].dtypes[3]"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_bytes_have_the_size_that_the_description_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    data = as_bytes(tensor)
    assert (data.dtype, data.dim(), data.numel()) == (torch.uint8, 1, TensorMeta.of("w", tensor).nbytes)


def test_bytes_of_a_contiguous_tensor_are_its_own_memory() -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 2))
    as_bytes(tensor)[0] = 255
    assert tensor[0, 0] != 0


def test_bytes_of_a_transposed_tensor_are_in_c_order() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t()
    assert as_bytes(tensor).tolist() == [1, 3, 2, 4]


def test_a_name_that_comes_twice_is_refused() -> None:
    meta = TensorMeta("w", torch.int8, (1,))
    with pytest.raises(InvalidRequest, match="'w' appears twice"):
        by_name([meta, meta])
