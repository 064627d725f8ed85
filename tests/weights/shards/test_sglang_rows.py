"""Rows of a tensor that ranks hold in parts are put together, and gaps are found."""

from __future__ import annotations

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.sglang_api.rows import rows_of
from rlctl.v1.verbs_pb2 import CheckWeightsRequest, TensorValues
from rlctl.weights.shards.first_rows import first_rows
from rlctl.weights.tensor.slices import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta


def parts_of(full: torch.Tensor, slices: list[Slice], rows: int) -> list[TensorValues]:
    meta = TensorMeta("w", full.dtype, tuple(full.shape))
    request = CheckWeightsRequest(tensor="w", rows=rows)
    told = [first_rows(request, Shard(meta, piece.of(full), piece)) for piece in slices]
    return [part for part in told if part is not None]


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 100])
@pytest.mark.parametrize(
    "slices",
    [
        [Slice()],
        [Slice(), Slice()],
        [Slice(0, 0, 4), Slice(0, 4, 4)],
        [Slice(0, 4, 4), Slice(0, 0, 4), Slice(0, 4, 4)],
        [Slice(1, 0, 2), Slice(1, 2, 4)],
        [Slice(2, 0, 1), Slice(2, 1, 2)],
    ],
)
def test_parts_make_the_rows(slices: list[Slice], rows: int) -> None:
    full = torch.arange(8 * 6 * 3, dtype=torch.bfloat16).reshape(8, 6, 3)
    assert rows_of(parts_of(full, slices, rows)) == full[:rows].tolist()


def test_vectors_and_single_numbers() -> None:
    assert rows_of(parts_of(torch.arange(4.0), [Slice(0, 0, 2), Slice(0, 2, 2)], 3)) == [0.0, 1.0, 2.0]
    assert rows_of(parts_of(torch.tensor(7.0), [Slice()], 3)) == 7.0


@pytest.mark.parametrize("slices", [[], [Slice(1, 2, 4)], [Slice(1, 0, 2), Slice(1, 4, 2)]])
def test_a_gap_is_no_answer(slices: list[Slice]) -> None:
    with pytest.raises(RlctlError) as caught:
        rows_of(parts_of(torch.zeros(8, 6), slices, 2))
    assert caught.value.reason is Reason.ANSWER_INVALID
