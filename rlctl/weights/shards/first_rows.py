"""Values of the first rows of a tensor, for debugging: action READ of the weight check."""

from __future__ import annotations

import math

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import CheckWeightsRequest, Shape, TensorValues
from rlctl.weights.tensor.slices import Shard
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name

MOST_VALUES = 1 << 19
"""Maximum number of values in an answer: 2 MiB, and about 10 MB of JSON."""

DEFAULT_ROWS = 100


def rows_of(request: CheckWeightsRequest, meta: TensorMeta) -> int:
    """Return the number of rows to read. Raises FIELD_INVALID if the rows have too many values."""
    requested = request.rows if request.HasField("rows") else DEFAULT_ROWS
    if not meta.shape:
        return 1
    width = math.prod(meta.shape[1:])
    rows = min(requested, meta.shape[0])
    if rows * width > MOST_VALUES:
        raise Reason.FIELD_INVALID.error(
            f"{rows} rows of {meta.name} have {rows * width} values; at most {MOST_VALUES} are returned",
            field="rows",
            next_step=f"Read at most {MOST_VALUES // width} rows." if width <= MOST_VALUES else "",
        )
    return rows


def unknown(name: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(f"the model has no tensor {name!r} under a checkpoint's name", field="tensor")


def first_rows(request: CheckWeightsRequest, shard: Shard) -> TensorValues | None:
    """Return a rank's part of the rows, or None without a part. Raises as :func:`rows_of`."""
    meta, part = shard.meta, shard.slice
    rows, local = rows_of(request, meta), shard.local.detach()
    if part.dim == 0:
        rows = min(rows - part.start, part.length)
        if rows <= 0:
            return None
    if meta.shape:
        local = local[:rows]
    return values_of(meta, local, None if part.dim is None else (part.dim, part.start))


def values_of(meta: TensorMeta, local: torch.Tensor, place: tuple[int, int] | None = None) -> TensorValues:
    """Return a rank's values of a tensor; ``place`` is the cut dimension and the first index."""
    values = TensorValues(
        name=meta.name,
        dtype=dtype_name(meta.dtype),
        full_shape=Shape(dims=meta.shape),
        shape=Shape(dims=local.shape),
        values=local.to("cpu", torch.float32).flatten().tolist(),
    )
    if place is not None:
        values.dim, values.start = place
    return values
