"""Bad input is refused with the field and the cause, before anything looks at the fleet."""

from __future__ import annotations

import uuid

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import NULL_VALUE, ListValue, Struct, Value
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.validation import check
from rlctl.ports import new_uuid7
from rlctl.v1 import coordinator_pb2, fleet_pb2, rollout_pb2, update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.verbs_pb2 import CHECK_ACTION_READ as READ
from rlctl.v1.verbs_pb2 import CHECK_ACTION_RESET_TENSORS as RESET_TENSORS
from rlctl.v1.verbs_pb2 import Shape, TensorBucket, UpdateOptions


def bucket(**changes: object) -> verbs_pb2.UpdateWeightsFromDistributedRequest:
    parts = {"names": ["a", "b"], "dtypes": ["torch.float32"] * 2, "shapes": [Shape(dims=[1])] * 2} | changes
    return verbs_pb2.UpdateWeightsFromDistributedRequest(group_name="g", buckets=[TensorBucket(**parts)])


def segment(**changes: object) -> verbs_pb2.UpdateWeightsFromTensorRequest:
    parts = {
        "node": "n",
        "device": "cpu",
        "shared_memory": "s",
        "size": 1,
        "generation": 1,
        "lease": Duration(seconds=9),
    }
    parts = parts | {"tensors": [verbs_pb2.TensorHandle(name="a")]} | changes
    return verbs_pb2.UpdateWeightsFromTensorRequest(
        segments=[verbs_pb2.TensorSegment(**{name: value for name, value in parts.items() if value is not None})]
    )


TORCH = {
    "shared_memory": None,
    "generation": None,
    "torch_shared_memory": verbs_pb2.TorchSharedMemory(name="torch_1_2_3"),
    "reader": verbs_pb2.SegmentReader(slot="a"),
}


def for_readers(*slots: str) -> verbs_pb2.UpdateWeightsFromTensorRequest:
    each = [segment(reader=verbs_pb2.SegmentReader(slot=slot) if slot else None) for slot in slots]
    return verbs_pb2.UpdateWeightsFromTensorRequest(segments=[request.segments[0] for request in each])


def group(**changes: object) -> verbs_pb2.InitWeightsUpdateGroupRequest:
    parts = {"group_name": "g", "master_address": "h", "master_port": 1, "world_size": 2, "backend": "gloo"}
    return verbs_pb2.InitWeightsUpdateGroupRequest(**(parts | changes))


def timed(**parts: int) -> verbs_pb2.PauseGenerationRequest:
    return verbs_pb2.PauseGenerationRequest(header=RequestHeader(timeout=Duration(**parts)))


def registration(**fields: str) -> coordinator_pb2.RegisterStageRequest:
    sound = {"slot": "a", "model": "m", "address": "h:1", "boot_id": "b", "engine": "fake"}
    stage = fleet_pb2.StageRegistration(**sound | fields)
    stage.layout.workers.add()
    return coordinator_pb2.RegisterStageRequest(registration=stage)


BAD: list[tuple[Message, str, str]] = [
    (verbs_pb2.PauseGenerationRequest(mode=9), "UNKNOWN_ENUM_VALUE", "mode"),
    (
        verbs_pb2.UpdateWeightsFromDiskRequest(model_path="x", options=UpdateOptions(pause=77)),
        "UNKNOWN_ENUM_VALUE",
        "options.pause",
    ),
    (verbs_pb2.ReleaseMemoryRequest(tags=[1, 55]), "UNKNOWN_ENUM_VALUE", "tags"),
    (verbs_pb2.ReleaseMemoryRequest(tags=[0]), "FIELD_INVALID", "tags"),
    (verbs_pb2.ResumeMemoryRequest(tags=[1, 1]), "FIELD_INVALID", "tags"),
    (timed(seconds=0), "DEADLINE_INVALID", "header.timeout"),
    (timed(seconds=-1), "DEADLINE_INVALID", "header.timeout"),
    (timed(seconds=10**9), "DEADLINE_INVALID", "header.timeout"),
    (
        verbs_pb2.PauseGenerationRequest(header=RequestHeader(request_id="mine")),
        "FIELD_INVALID",
        "header.request_id",
    ),
    (
        verbs_pb2.PauseGenerationRequest(header=RequestHeader(request_id=str(uuid.uuid4()))),
        "FIELD_INVALID",
        "header.request_id",
    ),
    (verbs_pb2.AbortRequestsRequest(), "FIELD_REQUIRED", "rids"),
    (verbs_pb2.AbortRequestsRequest(rids=["a"], abort_all=True), "FIELD_CONFLICT", "rids"),
    (rollout_pb2.AbortRequest(), "FIELD_REQUIRED", "rids"),
    (rollout_pb2.AbortRequest(rids=["a"], abort_all=True), "FIELD_CONFLICT", "rids"),
    (rollout_pb2.GenerateRequest(), "FIELD_REQUIRED", "prompt"),
    (verbs_pb2.FlushCacheRequest(idle_timeout=Duration()), "DEADLINE_INVALID", "idle_timeout"),
    (verbs_pb2.UpdateWeightsFromDiskRequest(), "FIELD_REQUIRED", "model_path"),
    (
        verbs_pb2.UpdateWeightsFromDiskRequest(model_path="x", expected_digest="ABC"),
        "FIELD_INVALID",
        "expected_digest",
    ),
    (group(group_name=""), "FIELD_REQUIRED", "group_name"),
    (group(master_address=""), "FIELD_REQUIRED", "master_address"),
    (group(master_port=0), "FIELD_INVALID", "master_port"),
    (group(master_port=70000), "FIELD_INVALID", "master_port"),
    (group(world_size=1), "FIELD_INVALID", "world_size"),
    (group(backend="mpi"), "FIELD_INVALID", "backend"),
    (verbs_pb2.DestroyWeightsUpdateGroupRequest(), "FIELD_REQUIRED", "group_name"),
    (verbs_pb2.UpdateWeightsFromDistributedRequest(group_name="g"), "FIELD_REQUIRED", "buckets"),
    (verbs_pb2.UpdateWeightsFromTensorRequest(), "FIELD_REQUIRED", "segments"),
    *(
        (segment(**{name: None}), "FIELD_REQUIRED", f"segments[0].{name}")
        for name in ("node", "device", "size", "generation", "tensors", "lease")
    ),
    (segment(shared_memory=None), "FIELD_REQUIRED", "segments[0].handle"),
    (segment(shared_memory=""), "FIELD_REQUIRED", "segments[0].shared_memory"),
    (segment(shared_memory=None, cuda_ipc=b"h"), "FIELD_REQUIRED", "segments[0].header_memory"),
    (segment(lease=Duration()), "DEADLINE_INVALID", "segments[0].lease"),
    (segment(**TORCH | {"reader": None}), "FIELD_REQUIRED", "segments[0].reader"),
    (for_readers("a", "b"), "FIELD_CONFLICT", "segments.reader.slot"),
    (for_readers("a", ""), "FIELD_CONFLICT", "segments.reader.slot"),
    (bucket(format=99), "UNKNOWN_ENUM_VALUE", "buckets[0].format"),
    (coordinator_pb2.ListAuditRecordsRequest(since=Timestamp(seconds=1 << 62)), "FIELD_INVALID", "since"),
    (coordinator_pb2.ListAuditRecordsRequest(since=Timestamp(seconds=1, nanos=-1)), "FIELD_INVALID", "since"),
    (
        coordinator_pb2.ReportEngineFailureRequest(
            slot="a", failure=fleet_pb2.EngineFailure(reason="x", retry_time=Timestamp(seconds=-62_135_596_801))
        ),
        "FIELD_INVALID",
        "failure.retry_time",
    ),
    (bucket(names=[]), "FIELD_REQUIRED", "buckets[0].names"),
    (bucket(dtypes=[]), "FIELD_REQUIRED", "buckets[0].dtypes"),
    (bucket(shapes=[]), "FIELD_REQUIRED", "buckets[0].shapes"),
    (bucket(names=["a"]), "LENGTH_MISMATCH", "buckets[0].names"),
    (bucket(names=["a", ""]), "FIELD_REQUIRED", "buckets[0].names[1]"),
    (bucket(names=["a", "a"]), "FIELD_INVALID", "buckets.names"),
    (verbs_pb2.LoadAdapterRequest(name="math"), "FIELD_REQUIRED", "path"),
    (verbs_pb2.LoadAdapterRequest(name="math", path="/adapters/\0"), "FIELD_INVALID", "path"),
    (verbs_pb2.CheckWeightsRequest(expected_digest="0" * 63), "FIELD_INVALID", "expected_digest"),
    (verbs_pb2.CheckWeightsRequest(tensor="w"), "FIELD_CONFLICT", "tensor"),
    (verbs_pb2.CheckWeightsRequest(rows=3), "FIELD_CONFLICT", "rows"),
    (verbs_pb2.CheckWeightsRequest(shadow=True, action=RESET_TENSORS), "FIELD_CONFLICT", "action"),
    (verbs_pb2.CheckWeightsRequest(shadow=True, adapter="a"), "FIELD_CONFLICT", "shadow"),
    (verbs_pb2.CheckWeightsRequest(action=READ), "FIELD_REQUIRED", "tensor"),
    (verbs_pb2.CheckWeightsRequest(action=READ, tensor="a\nb"), "FIELD_INVALID", "tensor"),
    (verbs_pb2.CheckWeightsRequest(action=READ, tensor="w", rows=0), "FIELD_INVALID", "rows"),
    (verbs_pb2.CheckWeightsRequest(action=READ, tensor="w", adapter="a"), "FIELD_CONFLICT", "adapter"),
    (coordinator_pb2.RegisterStageRequest(), "FIELD_REQUIRED", "registration.slot"),
    (update_pb2.BeginWeightUpdateRequest(version="v"), "FIELD_REQUIRED", "model"),
    (update_pb2.BeginWeightUpdateRequest(model="m"), "FIELD_REQUIRED", "version"),
    (update_pb2.CommitWeightUpdateRequest(), "FIELD_REQUIRED", "update_id"),
    (coordinator_pb2.SetStageEnabledRequest(), "FIELD_REQUIRED", "slots"),
    (coordinator_pb2.SetHealingRequest(), "FIELD_REQUIRED", "model"),
    (group(master_address=64 * "x"), "FIELD_INVALID", "master_address"),
    (group(master_address="a..b"), "FIELD_INVALID", "master_address"),
    (update_pb2.CommitWeightUpdateRequest(update_id="u", version=257 * "x"), "FIELD_INVALID", "version"),
    (
        verbs_pb2.UpdateWeightsFromDiskRequest(model_path="m", weight_version="a\nb"),
        "FIELD_INVALID",
        "weight_version",
    ),
    (update_pb2.BeginWeightUpdateRequest(model="m", version=" "), "FIELD_INVALID", "version"),
    (verbs_pb2.UpdateWeightsFromDiskRequest(model_path="m", weight_version="  "), "FIELD_INVALID", "weight_version"),
    (verbs_pb2.LoadAdapterRequest(name=" ", path="/a"), "FIELD_INVALID", "name"),
    (registration(weight_version=" "), "FIELD_INVALID", "registration.weight_version"),
    (registration(slot="../x"), "FIELD_INVALID", "registration.slot"),
    (registration(model="a\nb"), "FIELD_INVALID", "registration.model"),
    (coordinator_pb2.TakeOverStagesRequest(), "FIELD_REQUIRED", "slots"),
    (coordinator_pb2.AdmitSlotsRequest(slots=["a/b"]), "FIELD_INVALID", "slots[0]"),
    (verbs_pb2.PauseGenerationRequest(by=" "), "FIELD_INVALID", "by"),
]


@pytest.mark.parametrize(("request_", "reason", "field"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input_is_refused_with_its_field(request_: Message, reason: str, field: str) -> None:
    with pytest.raises(RlctlError) as caught:
        check(request_)
    assert caught.value.reason.name == reason
    assert caught.value.field == field
    assert caught.value.message


GOOD: list[Message] = [
    verbs_pb2.PauseGenerationRequest(header=RequestHeader(request_id=new_uuid7(), timeout=Duration(nanos=1000))),
    bucket(),
    segment(),
    segment(shared_memory=None, cuda_ipc=b"h", header_memory="s"),
    segment(**TORCH),
    for_readers("a", "a"),
    verbs_pb2.UpdateWeightsFromTensorRequest(engine_payloads=[b"p"]),
    group(),
    group(master_address="fe80::1%eth0"),
    verbs_pb2.ReleaseMemoryRequest(tags=[1, 2]),
    verbs_pb2.AbortRequestsRequest(abort_all=True),
    verbs_pb2.CheckWeightsRequest(expected_digest="0" * 64),
]


@pytest.mark.parametrize("request_", GOOD, ids=lambda r: r.DESCRIPTOR.name)
def test_good_input_passes(request_: Message) -> None:
    check(request_)


def test_a_mismatch_of_lengths_names_all_three() -> None:
    with pytest.raises(RlctlError, match="1 names, 2 dtypes and 2 shapes"):
        check(bucket(names=["a"]))


def test_uuid7_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [new_uuid7() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert [i[:13] for i in ids] == sorted(i[:13] for i in ids)
    assert {uuid.UUID(i).version for i in ids} == {7}
    assert {uuid.UUID(i).variant for i in ids} == {uuid.RFC_4122}


@pytest.mark.parametrize("given", [float("inf"), float("-inf"), float("nan"), 1e12])
def test_what_is_no_time_is_refused_before_it_is_sent(given: float) -> None:
    with pytest.raises(RlctlError) as caught:
        duration(given)
    assert caught.value.reason is Reason.DEADLINE_INVALID


@pytest.mark.parametrize("given", [0.0, 0.25, -1.5, 86400.0, 3e11])
def test_a_time_is_what_it_was_once_it_has_been_sent(given: float) -> None:
    assert seconds(Duration.FromString(duration(given).SerializeToString())) == given


@pytest.mark.parametrize(
    "value",
    [
        Value(),
        Value(list_value=ListValue(values=[Value(null_value=NULL_VALUE), Value()])),
        Value(struct_value=Struct(fields={"inner": Value()})),
    ],
)
def test_an_engine_field_without_a_value_is_refused(value: Value) -> None:
    fields = Struct(fields={"sampling_params": value})
    with pytest.raises(RlctlError) as caught:
        check(rollout_pb2.GenerateRequest(input_ids={"ids": [1]}, engine_fields=fields))
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "engine_fields.sampling_params")
