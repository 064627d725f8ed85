"""Weight updates as HTTP trainers ask for them, in the contract's messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.errors import Reason
from rlctl.gateway.bodies import Fields
from rlctl.v1.verbs_pb2 import BucketFormat, InitWeightsUpdateGroupRequest, Shape, TensorBucket


def bucket(
    fields: Fields, *, dtypes: str = "dtypes", format: BucketFormat.ValueType = BucketFormat.BUCKET_FORMAT_TENSORS
) -> TensorBucket:
    """The tensors that ``names``, ``dtypes`` (a field by that name) and ``shapes`` announce.

    Raises FIELD_REQUIRED where one is missing or empty, FIELD_INVALID, LENGTH_MISMATCH.
    """
    names: Sequence[str] = fields.take_list("names", str)
    kinds: Sequence[str] = fields.take_list(dtypes, str)
    shapes: Sequence[list[object]] = fields.take_list("shapes", list)
    if not names:
        raise Reason.FIELD_REQUIRED.error("it is empty", field=fields.path("names"))
    for field, given in ((dtypes, kinds), ("shapes", shapes)):
        if len(given) != len(names):
            raise Reason.LENGTH_MISMATCH.error(f"{len(given)} of them for {len(names)} names", field=fields.path(field))
    made = TensorBucket(names=names, dtypes=map(dtype, kinds), format=format)
    for number, shape in enumerate(shapes):
        try:
            made.shapes.append(Shape(dims=shape))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise Reason.FIELD_INVALID.error(f"{shape} is no shape", field=fields.path(f"shapes[{number}]")) from None
    return made


def dtype(name: str) -> str:
    """ "bfloat16" and "torch.bfloat16" are the same."""
    return name if name.startswith("torch.") else f"torch.{name}"


def group(
    fields: Fields, *, name: str = "weight_update_group", backend: str = "nccl", offset: int = 0
) -> InitWeightsUpdateGroupRequest:
    """The group that a trainer listens for; the keywords are defaults. Raises FIELD_REQUIRED, FIELD_INVALID."""
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
