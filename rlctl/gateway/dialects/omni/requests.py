"""SGLang-Omni's admin requests, as verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.enums import number
from rlctl.contract.errors import Reason
from rlctl.gateway.http import engine_urls, weight_fields
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.results_pb2 import Operation

GROUP = "weight_update_group"


@dataclass(frozen=True)
class Verb:
    """An admin path.

    Attributes:
        build: makes the request from the fields of the body.
        timeout_s: default time limit of the whole operation.
        locked: the router runs one such operation at a time.
    """

    build: Callable[[Fields], Message]
    timeout_s: float
    doc: str
    locked: bool = False
    methods: str = "POST"


@dataclass(frozen=True)
class AdminRequest:
    """A parsed request."""

    request: Message
    stages: Sequence[str]
    timeout_s: float


def read(verb: Verb, fields: Fields) -> AdminRequest:
    """Read a body. Raises FIELD_REQUIRED, FIELD_INVALID, LENGTH_MISMATCH, UNSUPPORTED."""
    stages = fields.take_list("stages", str, None)
    timeout_s = fields.take("timeout_s", float, None)
    if timeout_s is not None and timeout_s < 0:
        raise Reason.FIELD_INVALID.error(f"{timeout_s} is below 0", field="timeout_s")
    if stages is not None and not stages:
        raise Reason.FIELD_INVALID.error("stages is empty; omit stages for all stages", field="stages")
    return AdminRequest(verb.build(fields), stages or (), timeout_s or verb.timeout_s)


async def carry_out(call: Call, admin_request: AdminRequest) -> Operation:
    """Return the ended operation, also after a failure. Raises a refusal."""
    return await call.operate(
        await engine_urls.aimed(call, admin_request.request),
        stages=admin_request.stages,
        timeout_s=admin_request.timeout_s,
        check=False,
    )


def _model_info(fields: Fields) -> Message:
    del fields
    return verbs_pb2.GetModelInfoRequest()


def _pause(fields: Fields) -> Message:
    mode = fields.take("mode", str, "abort")
    return verbs_pb2.PauseGenerationRequest(mode=_one_of(common_pb2.PauseMode.DESCRIPTOR, mode, "mode"))


def _continue(fields: Fields) -> Message:
    return verbs_pb2.ContinueGenerationRequest(
        torch_empty_cache=fields.take("torch_empty_cache", bool, True), when_resident=True
    )


def _from_disk(fields: Fields) -> Message:
    if fields.take("manifest", dict, None) is not None:
        raise Reason.UNSUPPORTED.error(
            "the digest comes from rlctl-manifest.json beside the checkpoint, not from the request", field="manifest"
        )
    options = _options(fields)
    if fields.take("keep_pause", bool, False):
        options.after = verbs_pb2.AFTER_UPDATE_STAY_PAUSED
    options.recapture_cuda_graph = fields.take("recapture_cuda_graph", bool, False)
    return verbs_pb2.UpdateWeightsFromDiskRequest(
        model_path=fields.take("model_path", str),
        load_format=fields.take("load_format", str, ""),
        weight_version=fields.take("weight_version", str, ""),
        token_step=weight_fields.token_step(fields.take("token_step", int, 0)),
        is_async=fields.take("is_async", bool, False),
        options=options,
    )


def _from_tensor(fields: Fields) -> Message:
    if "serialized_named_tensors" in fields.values:
        raise weight_fields.pickled(
            "serialized_named_tensors",
            "Announce shared segments (`segments`, as TensorSegment has them), or use fleet.publisher().",
        )
    return verbs_pb2.UpdateWeightsFromTensorRequest(
        weight_version=fields.take("weight_version", str, ""),
        load_format=fields.take("load_format", str, ""),
        options=_options(fields),
        segments=weight_fields.segments(fields.take_list("segments", dict)),
    )


def _from_distributed(fields: Fields) -> Message:
    load_format = fields.take("load_format", str, None)
    if load_format not in weight_fields.FORMATS:
        raise Reason.UNSUPPORTED.error(f"{load_format!r} is no format of a bucket", field="load_format")
    return verbs_pb2.UpdateWeightsFromDistributedRequest(
        group_name=fields.take("group_name", str, GROUP),
        buckets=[weight_fields.bucket(fields, format=weight_fields.FORMATS[load_format])],
        weight_version=fields.take("weight_version", str, ""),
        options=_options(fields),
    )


def _init_group(fields: Fields) -> Message:
    return weight_fields.group(fields, name=GROUP)


def _destroy_group(fields: Fields) -> Message:
    return verbs_pb2.DestroyWeightsUpdateGroupRequest(group_name=fields.take("group_name", str, GROUP))


def _check(fields: Fields) -> Message:
    action = fields.take("action", str, "checksum")
    return verbs_pb2.CheckWeightsRequest(
        action=_one_of(verbs_pb2.CheckAction.DESCRIPTOR, action, "action"),
        per_tensor=True,
        digest=verbs_pb2.DIGEST_FUNCTION_SHA256,
    )


def _options(fields: Fields) -> verbs_pb2.UpdateOptions:
    return verbs_pb2.UpdateOptions(
        abort_all_requests=fields.take("abort_all_requests", bool, False),
        flush_cache=fields.take("flush_cache", bool, True),
        torch_empty_cache=fields.take("torch_empty_cache", bool, False),
    )


def _one_of(enum: Any, value: str, field: str) -> Any:
    if not value:
        raise Reason.FIELD_INVALID.error(f"{field} is empty", field=field)
    return number(enum, value, field)


VERBS: Mapping[str, Verb] = {
    "/model_info": Verb(_model_info, 30, "What is loaded; 409 if versions are mixed.", methods="GET POST"),
    "/pause_generation": Verb(_pause, 60, "PauseGeneration.", locked=True),
    "/continue_generation": Verb(_continue, 60, "ContinueGeneration; commits an open update first."),
    "/update_weights_from_disk": Verb(_from_disk, 120, "UpdateWeightsFromDisk, a whole update.", locked=True),
    "/update_weights_from_tensor": Verb(_from_tensor, 300, "UpdateWeightsFromTensor, from segments.", locked=True),
    "/init_weights_update_group": Verb(_init_group, 300, "InitWeightsUpdateGroup, for all replicas.", locked=True),
    "/destroy_weights_update_group": Verb(_destroy_group, 300, "DestroyWeightsUpdateGroup.", locked=True),
    "/update_weights_from_distributed": Verb(_from_distributed, 300, "UpdateWeightsFromDistributed.", locked=True),
    "/weights_checker": Verb(_check, 120, "CheckWeights, with every tensor's digest.", methods="GET POST"),
}
"""Every admin path, of the router and of a worker."""
