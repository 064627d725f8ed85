"""Weight updates of HTTP trainers as messages of the contract. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.gateway.http.bodies import Fields
from rlctl.v1.verbs_pb2 import (
    BUCKET_FORMAT_FLATTENED,
    BUCKET_FORMAT_TENSORS,
    BucketFormat,
    InitWeightsUpdateGroupRequest,
    Shape,
    TensorBucket,
    TensorSegment,
)

FORMATS = {None: BUCKET_FORMAT_TENSORS, FLATTENED: BUCKET_FORMAT_FLATTENED}
"""Bucket formats by SGLang's ``load_format``."""


def bucket(
    fields: Fields, *, dtypes: str = "dtypes", format: BucketFormat.ValueType = BUCKET_FORMAT_TENSORS
) -> TensorBucket:
    """Return the tensors announced by ``names``, ``shapes`` and the field that ``dtypes`` names.

    Raises FIELD_REQUIRED for a missing or empty field, FIELD_INVALID, LENGTH_MISMATCH.
    """
    names: Sequence[str] = fields.take_list("names", str)
    kinds: Sequence[str] = fields.take_list(dtypes, str)
    shapes: Sequence[list[object]] = fields.take_list("shapes", list)
    if not names:
        raise Reason.FIELD_REQUIRED.error("names is empty", field=fields.path("names"))
    for field, values in ((dtypes, kinds), ("shapes", shapes)):
        if len(values) != len(names):
            raise Reason.LENGTH_MISMATCH.error(
                f"{field} has {len(values)} entries for {len(names)} names", field=fields.path(field)
            )
    message = TensorBucket(names=names, dtypes=map(dtype, kinds), format=format)
    for number, shape in enumerate(shapes):
        try:
            message.shapes.append(Shape(dims=shape))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise Reason.FIELD_INVALID.error(f"{shape} is no shape", field=fields.path(f"shapes[{number}]")) from None
    return message


def packed(whole: TensorBucket, most: int) -> list[TensorBucket]:
    """Return vLLM's packed buckets, each for one broadcast.

    A bucket ends with the tensor that exceeds ``most`` bytes (``vllm/distributed/weight_transfer/packed_tensor.py``).
    Raises FIELD_INVALID for a dtype of unknown size, and a ``most`` below 1.
    """
    if most < 1:
        raise Reason.FIELD_INVALID.error(
            f"packed_buffer_size_bytes is {most}; it must be 1 or more", field="packed_buffer_size_bytes"
        )
    buckets: list[TensorBucket] = []
    size = most + 1
    for name, kind, shape in zip(whole.names, whole.dtypes, whole.shapes, strict=True):
        if size > most:
            buckets.append(TensorBucket(format=whole.format))
            size = 0
        buckets[-1].names.append(name)
        buckets[-1].dtypes.append(kind)
        buckets[-1].shapes.append(shape)
        size += math.prod(shape.dims) * itemsize(kind)
    return buckets


def itemsize(kind: str) -> int:
    """Return the bytes of an element, by the bits in the dtype's name ("torch.float8_e4m3fn"). Raises FIELD_INVALID."""
    bits = re.fullmatch(r"torch\.[a-z]+(8|16|32|64|128)(_[a-z0-9]+)?", kind)
    if bits is None and kind != "torch.bool":
        raise Reason.FIELD_INVALID.error(f"{kind} is no dtype that is sent packed", field="dtypes")
    return int(bits[1]) // 8 if bits else 1


def dtype(name: str) -> str:
    """Return the full name: "bfloat16" becomes "torch.bfloat16"."""
    return name if name.startswith("torch.") else f"torch.{name}"


def token_step(step: int) -> int:
    """Check a trainer's step. Raises FIELD_INVALID below 0."""
    if step < 0:
        raise Reason.FIELD_INVALID.error(f"{step} is below 0", field="token_step")
    return step


def group(
    fields: Fields, *, name: str = "weight_update_group", backend: str = "nccl", offset: int = 0
) -> InitWeightsUpdateGroupRequest:
    """Return the request for a trainer's group; the keywords are defaults. Raises FIELD_REQUIRED, FIELD_INVALID."""
    numbers: dict[str, int] = {
        "master_port": fields.take("master_port", int),
        "world_size": fields.take("world_size", int),
        "rank_offset": fields.take("rank_offset", int, offset),
    }
    for field, value in numbers.items():
        if not 0 <= value < 1 << 31 or (field != "rank_offset" and value == 0):
            raise Reason.FIELD_INVALID.error(f"{value} is no value for it", field=fields.path(field))
    return InitWeightsUpdateGroupRequest(
        master_address=fields.take("master_address", str),
        master_port=numbers["master_port"],
        world_size=numbers["world_size"],
        rank_offset=numbers["rank_offset"],
        group_name=fields.take("group_name", str, name),
        backend=fields.take("backend", str, backend),
    )


def segments(values: Sequence[Any]) -> list[TensorSegment]:
    """Read the shared memory in ``segments``, in protobuf's JSON. Raises FIELD_INVALID."""
    result = []
    for index, value in enumerate(values):
        try:
            result.append(json_format.ParseDict(value, TensorSegment()))
        except json_format.ParseError as error:
            raise Reason.FIELD_INVALID.error(
                f"segments[{index}] is no TensorSegment: {error}", field=f"segments[{index}]"
            ) from None
    return result


def pickled(field: str, next_step: str) -> RlctlError:
    """Return the error for pickled tensors."""
    return Reason.UNSUPPORTED.error(
        "pickles are neither read nor forwarded: unpickling can run any code",
        field=field,
        next_step=next_step,
    )
