"""Rules for requests that write weights and adapters, form process groups, and read or fetch checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.contract import digests
from rlctl.contract.errors import Reason
from rlctl.contract.group_backends import BACKENDS
from rlctl.contract.rules import fields
from rlctl.contract.rules.options import check_options
from rlctl.contract.rules.table import Rules
from rlctl.v1 import verbs_pb2
from rlctl.v1.common_pb2 import Target

RULES = Rules()
RULES.require(verbs_pb2.DestroyWeightsUpdateGroupRequest, "group_name")


@RULES.of(verbs_pb2.UpdateWeightsFromDiskRequest)
def _from_disk(request: verbs_pb2.UpdateWeightsFromDiskRequest) -> None:
    fields.path(request.model_path, "model_path")
    _whole_model(request.header.target)
    _modules(request.target_modules)
    fields.digest(request.expected_digest, "expected_digest")
    if digests.key_of(request.expected_digest):
        raise fields.invalid("a checkpoint is digested by SHA-256", "expected_digest")
    check_options(request.options)


@RULES.of(verbs_pb2.InspectCheckpointRequest)
def _inspect(request: verbs_pb2.InspectCheckpointRequest) -> None:
    fields.path(request.model_path, "model_path")
    _modules(request.target_modules)


@RULES.of(verbs_pb2.PullWeightsRequest)
def _pull(request: verbs_pb2.PullWeightsRequest) -> None:
    fields.path(request.source_dir, "source_dir")
    fields.path(request.local_checkpoint_dir, "local_checkpoint_dir")
    fields.required(request.target_version, "target_version")


def _modules(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        fields.required(name, f"target_modules[{index}]")
    fields.unique(names, "target_modules")


@RULES.of(verbs_pb2.LoadAdapterRequest)
def _load_adapter(request: verbs_pb2.LoadAdapterRequest) -> None:
    fields.adapter_name(request.name, "name")
    fields.path(request.path, "path")
    _whole_model(request.header.target)


@RULES.of(verbs_pb2.UnloadAdapterRequest)
def _unload_adapter(request: verbs_pb2.UnloadAdapterRequest) -> None:
    fields.adapter_name(request.name, "name")
    _whole_model(request.header.target)


def _whole_model(target: Target) -> None:
    """Refuse a target smaller than a model. Weights and adapters belong to a model."""
    if target.slots or target.stages:
        raise fields.invalid(
            "weights and adapters change at every stage of a model; name the model only", "header.target"
        )


@RULES.of(verbs_pb2.InitWeightsUpdateGroupRequest)
def _init_group(request: verbs_pb2.InitWeightsUpdateGroupRequest) -> None:
    fields.required(request.group_name, "group_name")
    fields.required(request.master_address, "master_address")
    try:
        request.master_address.encode("idna")  # as the resolver encodes the name
    except UnicodeError:
        raise fields.invalid(f"{request.master_address!r} is no host's name", "master_address") from None
    if not 0 < request.master_port < 65536:
        raise fields.invalid(f"master_port is {request.master_port}; it must be 1 to 65535", "master_port")
    if request.backend not in BACKENDS.values():
        names = ", ".join(BACKENDS.values())
        raise fields.invalid(f"backend is {request.backend!r}; it must be one of {names}", "backend")
    if request.world_size < 2:
        raise fields.invalid(f"world_size is {request.world_size}; a source and a rank make 2", "world_size")
    if request.paired and (request.world_size != 2 or request.rank_offset > 1):
        raise Reason.FIELD_CONFLICT.error("paired groups are of two ranks each", field="paired")
    fields.timeout(request, "group_timeout")


@RULES.of(verbs_pb2.UpdateWeightsFromDistributedRequest)
def _from_distributed(request: verbs_pb2.UpdateWeightsFromDistributedRequest) -> None:
    fields.required(request.buckets, "buckets")
    for index, bucket in enumerate(request.buckets):
        path = f"buckets[{index}]"
        fields.required(bucket.group_name or request.group_name, "group_name")
        for name in ("names", "dtypes", "shapes"):
            fields.required(getattr(bucket, name), f"{path}.{name}")
        lengths = (len(bucket.names), len(bucket.dtypes), len(bucket.shapes))
        if len(set(lengths)) != 1:
            raise Reason.LENGTH_MISMATCH.error(
                f"{path} has {lengths[0]} names, {lengths[1]} dtypes and {lengths[2]} shapes",
                field=f"{path}.names",
            )
        for position, name in enumerate(bucket.names):
            fields.required(name, f"{path}.names[{position}]")
    fields.unique([name for bucket in request.buckets for name in bucket.names], "buckets.names")


@RULES.of(verbs_pb2.UpdateWeightsFromTensorRequest)
def _from_tensor(request: verbs_pb2.UpdateWeightsFromTensorRequest) -> None:
    if not request.engine_payloads:
        fields.required(request.segments, "segments")
    for index, segment in enumerate(request.segments):
        path = f"segments[{index}]"
        for name in ("node", "device", "size", "tensors"):
            fields.required(getattr(segment, name), f"{path}.{name}")
        handle = segment.WhichOneof("handle")
        if handle is None:
            raise Reason.FIELD_REQUIRED.error(f"{path} says not how to map it", field=f"{path}.handle")
        if handle in ("torch_shared_memory", "torch_cuda_memory"):
            fields.required(segment.reader.slot, f"{path}.reader")
        else:
            fields.required(segment.generation, f"{path}.generation")
            fields.required(getattr(segment, handle), f"{path}.{handle}")
        if handle == "cuda_ipc":
            fields.required(segment.header_memory, f"{path}.header_memory")
        if not segment.HasField("lease"):
            raise Reason.FIELD_REQUIRED.error(
                f"{path}.lease is required: the time for which the segment may be read", field=f"{path}.lease"
            )
        fields.timeout(segment, "lease", f"{path}.")
    readers = {segment.reader.slot for segment in request.segments}
    if len(readers) > 1:
        raise Reason.FIELD_CONFLICT.error(
            f"the segments of a request must have one reader, not {', '.join(sorted(map(repr, readers)))}",
            field="segments.reader.slot",
        )


@RULES.of(verbs_pb2.PrepareUpdateRequest)
def _prepare(request: verbs_pb2.PrepareUpdateRequest) -> None:
    fields.digest_key(request.digest_key)
