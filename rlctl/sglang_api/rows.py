"""Joins the ranks' parts of a tensor into rows, as nested lists. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import TensorValues


def rows_of(parts: Sequence[TensorValues]) -> Any:
    """Return the rows of a tensor. Ranks may hold the same part.

    Raises ANSWER_INVALID if no rank holds a part, or if the parts leave a gap.
    """
    if not parts:
        raise Reason.ANSWER_INVALID.error("no rank holds values of the tensor")
    first = parts[0]
    if not first.HasField("dim"):
        return _nested(list(first.values), list(first.shape.dims))
    distinct = sorted({part.start: part for part in parts}.items())
    end = 0
    for start, part in distinct:
        if start != end:
            raise Reason.ANSWER_INVALID.error(f"no rank holds indices {end} to {start} of {first.name}")
        end = start + part.shape.dims[first.dim]
    return _joined([_nested(list(part.values), list(part.shape.dims)) for _, part in distinct], first.dim)


def _nested(values: list[float], shape: list[int]) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    size = math.prod(shape[1:])
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if dim == 0:
        return [row for part in parts for row in part]
    return [_joined(rows, dim - 1) for rows in zip(*parts, strict=True)]
