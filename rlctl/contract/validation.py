"""Rules for requests, checked before any state is read. Pure: invalid input never changes state.

:func:`check` looks in every message for enum values that this version does not know and for impossible times, and then
applies the rules of the message's type. Coordinator, stage and worker all call :func:`check`, so a request is refused
with the same words everywhere.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract import digests, fingerprints, vllm_groups
from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_levels
from rlctl.v1 import common_pb2, coordinator_pb2, rollout_pb2, update_pb2, verbs_pb2

MAX_TIMEOUT_S = 24 * 3600.0
MAX_PROMPTS = 256
BACKENDS = ("gloo", "nccl", vllm_groups.BACKEND)
MOST_ADAPTER_NAME = 256
MOST_WATCH_ID = 128
MOST_KEY = 256
MOST_LABEL = 256
MOST_LOG_LINES = 100
MOST_NAME = 1024
MOST_BY = 200
MOST_REASON = 1000
_SLOT = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
"""Names that are safe unquoted in file names, metric labels and command lines."""
_UUID7 = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
"""Seconds of the first and the last time that a protobuf Timestamp may have."""

_ON_OPEN_UPDATE = (
    update_pb2.RetryWeightUpdateRequest,
    update_pb2.CommitBatchRequest,
    update_pb2.CommitWeightUpdateRequest,
    update_pb2.AbortWeightUpdateRequest,
    update_pb2.RenewLeaseRequest,
)

M = TypeVar("M", bound=Message)
_RULES: dict[type[Message], Callable[..., None]] = {}


def _rule(kind: type[M]) -> Callable[[Callable[[M], None]], Callable[[M], None]]:
    def register(function: Callable[[M], None]) -> Callable[[M], None]:
        _RULES[kind] = function
        return function

    return register


def check(request: Message) -> None:
    """Raise an :class:`rlctl.contract.errors.RlctlError` that names the field if the request is invalid."""
    kind = request.DESCRIPTOR
    _values(request, "")
    if _has_header(kind):
        header = request.header  # type: ignore[attr-defined]
        if header.HasField("timeout"):
            timeout_s(header.timeout, "header.timeout")
        if header.request_id:
            request_id(header.request_id, "header.request_id")
        if header.validate_only and isinstance(request, _ON_OPEN_UPDATE):
            raise _invalid("what is done to an open update cannot be tried without doing it", "header.validate_only")
    for field in _labels(kind):
        if label := getattr(request, field):  # every sample and every list of stages carries the label
            _name(label, field, MOST_LABEL)
    rule = _RULES.get(type(request))
    if rule is not None:
        rule(request)


def timeout_s(value: Duration, field: str) -> float:
    """Return the seconds of a duration. The duration must be above zero and at most a day."""
    length_s = seconds(value)
    if not 0 < length_s <= MAX_TIMEOUT_S:
        raise Reason.DEADLINE_INVALID.error(
            f"{field} is {length_s:g} s; it must be above 0 and at most {MAX_TIMEOUT_S:g} s", field=field
        )
    return length_s


def slot_name(value: str, field: str) -> None:
    """Check a slot's name, which names files, metrics and processes."""
    _required(value, field)
    if not _SLOT.fullmatch(value):
        raise _invalid(
            f"{field} {value[:64]!r} must be letters, digits, '.', '_' and '-', 255 at most, a letter or digit first",
            field,
        )


def request_id(value: str, field: str) -> None:
    """Check a request_id. A UUIDv7's time tells whether the id is older than the recorded operations."""
    if not _UUID7.fullmatch(value):  # operations are recorded under this spelling only
        raise Reason.FIELD_INVALID.error(
            f"{field} {value!r} is not a UUIDv7 as RFC 9562 writes it, in lower case",
            field=field,
            next_step="Leave it empty, or make a UUIDv7 once per logical call.",
        )


def _values(message: Message, path: str) -> None:
    for descriptor in _fields_with_rules(message.DESCRIPTOR):
        where = f"{path}{descriptor.name}"
        value = getattr(message, descriptor.name)
        if descriptor.enum_type is not None:
            for number in value if descriptor.is_repeated else [value]:
                if number not in descriptor.enum_type.values_by_number:
                    raise Reason.UNKNOWN_ENUM_VALUE.error(
                        f"{where} is {number}, which {descriptor.enum_type.full_name} does not have",
                        field=where,
                    )
        elif descriptor.is_repeated:
            for index, item in enumerate(value):
                _values(item, f"{where}[{index}].")
        elif message.HasField(descriptor.name):
            if isinstance(value, Timestamp):
                _time(value, where)
            else:
                _values(value, f"{where}.")


def _time(value: Timestamp, field: str) -> None:
    """Refuse a time that protobuf does not define: Python raises ValueError wherever such a time is read or shown."""
    if not (_FIRST_S <= value.seconds <= _LAST_S and 0 <= value.nanos < 10**9):
        raise _invalid(f"{field} is {value.seconds} s and {value.nanos} ns; a time is in the years 1 to 9999", field)


# Lookups by message type are cached: requests for samples come by the thousand a second.


@functools.cache
def _has_header(kind: Descriptor) -> bool:
    return "header" in kind.fields_by_name


@functools.cache
def _labels(kind: Descriptor) -> tuple[str, ...]:
    """Return the fields of a message that are labels of versions."""
    candidates = [kind.fields_by_name.get(name) for name in ("version", "weight_version", "target_version")]
    return tuple(field.name for field in candidates if field is not None and field.type == field.TYPE_STRING)


@functools.cache
def _fields_with_rules(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields of a message that are or contain enums or times; the thousands of shapes in buckets do not."""
    return tuple(field for field in kind.fields if _leads_to_rule(field, set()))


def _leads_to_rule(field: FieldDescriptor, seen: set[str]) -> bool:
    inner = field.message_type
    if inner is None:
        return field.enum_type is not None
    if inner.full_name == Timestamp.DESCRIPTOR.full_name:
        return True
    if inner.GetOptions().map_entry or inner.full_name in seen:
        return False
    seen.add(inner.full_name)
    return any(_leads_to_rule(deeper, seen) for deeper in inner.fields)


def _required(value: object, field: str) -> None:
    if not value:
        raise Reason.FIELD_REQUIRED.error(f"{field} is empty", field=field)


def _invalid(message: str, field: str, next_step: str = "") -> RlctlError:
    return Reason.FIELD_INVALID.error(message, field=field, next_step=next_step)


def _unique(values: Sequence[object], field: str) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise _invalid(f"{field} names {repeated[0]!r} more than once", field)


@_rule(rollout_pb2.GenerateRequest)
def _generate(request: rollout_pb2.GenerateRequest) -> None:
    if request.HasField("engine_fields"):
        check_levels(request.engine_fields)


@_rule(verbs_pb2.AbortRequestsRequest)
def _abort(request: verbs_pb2.AbortRequestsRequest) -> None:
    if request.abort_all and request.rids:
        raise Reason.FIELD_CONFLICT.error("rids and abort_all exclude each other", field="rids")
    if not request.abort_all:
        _required(request.rids, "rids")


@_rule(verbs_pb2.ReleaseMemoryRequest)
def _release(request: verbs_pb2.ReleaseMemoryRequest) -> None:
    _tags(request.tags)


@_rule(verbs_pb2.ResumeMemoryRequest)
def _resume(request: verbs_pb2.ResumeMemoryRequest) -> None:
    _tags(request.tags)


def _tags(tags: Sequence[int]) -> None:
    if 0 in tags:
        raise _invalid("tags holds an unspecified region", "tags")
    _unique(list(tags), "tags")


@_rule(verbs_pb2.FlushCacheRequest)
def _flush(request: verbs_pb2.FlushCacheRequest) -> None:
    if request.HasField("idle_timeout"):
        timeout_s(request.idle_timeout, "idle_timeout")


@_rule(verbs_pb2.UpdateWeightsFromDiskRequest)
def _from_disk(request: verbs_pb2.UpdateWeightsFromDiskRequest) -> None:
    _path(request.model_path, "model_path")
    if request.header.target.slots or request.header.target.stages:
        raise _invalid("an update reaches every stage of its model; name the model only", "header.target.slots")
    _modules(request.target_modules)
    _digest(request.expected_digest, "expected_digest")
    if digests.key_of(request.expected_digest):
        raise _invalid("a checkpoint is digested by SHA-256", "expected_digest")
    _options(request.options)


@_rule(verbs_pb2.InspectCheckpointRequest)
def _inspect(request: verbs_pb2.InspectCheckpointRequest) -> None:
    _path(request.model_path, "model_path")
    _modules(request.target_modules)


@_rule(verbs_pb2.PullWeightsRequest)
def _pull(request: verbs_pb2.PullWeightsRequest) -> None:
    _path(request.source_dir, "source_dir")
    _path(request.local_checkpoint_dir, "local_checkpoint_dir")
    _required(request.target_version, "target_version")


def _path(value: str, field: str) -> None:
    _required(value, field)
    if "\0" in value:
        raise _invalid(f"{field} holds a zero byte", field)


def _modules(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        _required(name, f"target_modules[{index}]")
    _unique(names, "target_modules")


@_rule(verbs_pb2.InitWeightsUpdateGroupRequest)
def _init_group(request: verbs_pb2.InitWeightsUpdateGroupRequest) -> None:
    _required(request.group_name, "group_name")
    _required(request.master_address, "master_address")
    try:
        request.master_address.encode("idna")  # as the resolver encodes the name
    except UnicodeError:
        raise _invalid(f"{request.master_address!r} is no host's name", "master_address") from None
    if not 0 < request.master_port < 65536:
        raise _invalid(f"master_port is {request.master_port}; it must be 1 to 65535", "master_port")
    if request.backend not in BACKENDS:
        raise _invalid(f"backend is {request.backend!r}; it must be one of {', '.join(BACKENDS)}", "backend")
    if request.world_size < 2:
        raise _invalid(f"world_size is {request.world_size}; a source and a rank make 2", "world_size")
    if request.paired and (request.world_size != 2 or request.rank_offset > 1):
        raise Reason.FIELD_CONFLICT.error("paired groups are of two ranks each", field="paired")
    if request.HasField("group_timeout"):
        timeout_s(request.group_timeout, "group_timeout")


@_rule(verbs_pb2.DestroyWeightsUpdateGroupRequest)
def _destroy_group(request: verbs_pb2.DestroyWeightsUpdateGroupRequest) -> None:
    _required(request.group_name, "group_name")


@_rule(verbs_pb2.UpdateWeightsFromDistributedRequest)
def _from_distributed(request: verbs_pb2.UpdateWeightsFromDistributedRequest) -> None:
    _required(request.buckets, "buckets")
    for index, bucket in enumerate(request.buckets):
        path = f"buckets[{index}]"
        _required(bucket.group_name or request.group_name, "group_name")
        for name in ("names", "dtypes", "shapes"):
            _required(getattr(bucket, name), f"{path}.{name}")
        lengths = (len(bucket.names), len(bucket.dtypes), len(bucket.shapes))
        if len(set(lengths)) != 1:
            raise Reason.LENGTH_MISMATCH.error(
                f"{path} has {lengths[0]} names, {lengths[1]} dtypes and {lengths[2]} shapes",
                field=f"{path}.names",
            )
        for position, name in enumerate(bucket.names):
            _required(name, f"{path}.names[{position}]")
    _unique([name for bucket in request.buckets for name in bucket.names], "buckets.names")


@_rule(verbs_pb2.UpdateWeightsFromTensorRequest)
def _from_tensor(request: verbs_pb2.UpdateWeightsFromTensorRequest) -> None:
    if not request.engine_payloads:
        _required(request.segments, "segments")
    for index, segment in enumerate(request.segments):
        path = f"segments[{index}]"
        for name in ("node", "device", "size", "tensors"):
            _required(getattr(segment, name), f"{path}.{name}")
        handle = segment.WhichOneof("handle")
        if handle is None:
            raise Reason.FIELD_REQUIRED.error(f"{path} says not how to map it", field=f"{path}.handle")
        if handle in ("torch_shared_memory", "torch_cuda_memory"):
            _required(segment.reader.slot, f"{path}.reader")
        else:
            _required(segment.generation, f"{path}.generation")
            _required(getattr(segment, handle), f"{path}.{handle}")
        if handle == "cuda_ipc":
            _required(segment.header_memory, f"{path}.header_memory")
        if not segment.HasField("lease"):
            raise Reason.FIELD_REQUIRED.error(
                f"{path}.lease is required: the time for which the segment may be read", field=f"{path}.lease"
            )
        timeout_s(segment.lease, f"{path}.lease")
    readers = {segment.reader.slot for segment in request.segments}
    if len(readers) > 1:
        raise Reason.FIELD_CONFLICT.error(
            f"the segments of a request must have one reader, not {', '.join(sorted(map(repr, readers)))}",
            field="segments.reader.slot",
        )


@_rule(verbs_pb2.CheckWeightsRequest)
def _check_weights(request: verbs_pb2.CheckWeightsRequest) -> None:
    _digest(request.expected_digest, "expected_digest")
    _digest_key(request.digest_key)
    _digest_function(request)
    _fingerprints(request.fingerprints)
    if request.action == verbs_pb2.CHECK_ACTION_PROBE:
        _prompts(request.prompts, "prompts")
    elif request.prompts:
        raise Reason.FIELD_CONFLICT.error("prompts are for the action PROBE", field="prompts")
    if request.action == verbs_pb2.CHECK_ACTION_READ:
        _read(request)
    elif request.tensor or request.HasField("rows"):
        field = "tensor" if request.tensor else "rows"
        raise Reason.FIELD_CONFLICT.error(f"{field} is for the action READ", field=field)


def _digest_function(request: verbs_pb2.CheckWeightsRequest) -> None:
    """Check the digest function, its key and their conflicts."""
    key = request.digest_key or digests.key_of(request.expected_digest)
    digesting = (
        verbs_pb2.CHECK_ACTION_UNSPECIFIED,
        verbs_pb2.CHECK_ACTION_CHECKSUM,
        verbs_pb2.CHECK_ACTION_COMPARE,
    )
    as_verified = request.digest == verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED
    if as_verified and (key or request.expected_digest or request.adapter or request.shadow or request.skip_tensors):
        raise Reason.FIELD_CONFLICT.error(
            "AS_VERIFIED takes no digest_key, expected_digest, adapter, shadow or skip_tensors", field="digest"
        )
    if request.digest == verbs_pb2.DIGEST_FUNCTION_KEYED and not key:
        raise Reason.FIELD_REQUIRED.error("a keyed digest needs a key", field="digest_key")
    if not key and not as_verified:
        return
    field = "digest" if as_verified else "digest_key" if request.digest_key else "expected_digest"
    if request.action not in digesting:
        raise Reason.FIELD_CONFLICT.error("only CHECKSUM and COMPARE compute keyed digests", field=field)
    if request.HasField("model_digest") and not request.model_digest:
        raise Reason.FIELD_CONFLICT.error("a keyed digest is the model digest", field="model_digest")
    if request.digest == verbs_pb2.DIGEST_FUNCTION_SHA256:
        raise Reason.FIELD_CONFLICT.error("digest is SHA256, but a key is given", field="digest")
    if request.adapter:
        raise Reason.FIELD_CONFLICT.error("adapters are digested by SHA-256", field="adapter")
    if request.digest_key and request.expected_digest and digests.key_of(request.expected_digest) != request.digest_key:
        raise Reason.FIELD_CONFLICT.error("expected_digest was made with another key", field="digest_key")


def _read(request: verbs_pb2.CheckWeightsRequest) -> None:
    _name(request.tensor, "tensor", MOST_NAME)
    if request.HasField("rows") and not request.rows:
        raise _invalid("rows is 0; at least one row is read", "rows")
    for field in ("adapter", "shadow", "expected_digest", "digest_key", "fingerprints", "per_tensor", "skip_tensors"):
        if getattr(request, field):
            raise Reason.FIELD_CONFLICT.error(f"the action READ takes no {field}", field=field)


def _fingerprints(value: bytes) -> None:
    if len(value) % fingerprints.SIZE:
        raise _invalid(f"fingerprints has {len(value)} bytes, no multiple of {fingerprints.SIZE}", "fingerprints")


def _probe(probe: verbs_pb2.Probe, field: str) -> None:
    if not 0 < probe.tolerance < math.inf:
        raise _invalid(f"{field}.tolerance is {probe.tolerance:g}; it must be above 0", f"{field}.tolerance")
    _prompts(probe.prompts, f"{field}.prompts")
    for index, prompt in enumerate(probe.prompts):
        path = f"{field}.prompts[{index}]"
        if len(prompt.logprobs) != len(prompt.token_ids) - 1:
            raise Reason.LENGTH_MISMATCH.error(
                f"{path} has {len(prompt.token_ids)} tokens and {len(prompt.logprobs)} log probabilities; every token "
                "but the first has one",
                field=f"{path}.logprobs",
            )
        if not all(-math.inf < value <= 0 for value in prompt.logprobs):
            raise _invalid(f"{path}.logprobs holds one that is above 0 or not finite", f"{path}.logprobs")


def _prompts(prompts: Sequence[verbs_pb2.ProbePrompt], field: str) -> None:
    _required(prompts, field)
    if len(prompts) > MAX_PROMPTS:
        raise _invalid(f"{field} holds {len(prompts)} prompts, at most {MAX_PROMPTS} are taken", field)
    for index, prompt in enumerate(prompts):
        if len(prompt.token_ids) < 2:
            raise _invalid(f"{field}[{index}] has fewer than two tokens", f"{field}[{index}].token_ids")


def _options(options: verbs_pb2.UpdateOptions, field: str = "options") -> None:
    if options.HasField("probe"):
        _probe(options.probe, f"{field}.probe")
    if options.digest == verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED:
        raise _invalid("as_verified is for CheckWeights only", f"{field}.digest")
    if options.verify == common_pb2.VERIFICATION_LEVEL_DECODE:
        raise _invalid("decode is asked for by decode_check, beside a level of the bytes", f"{field}.verify")


@_rule(verbs_pb2.PrepareUpdateRequest)
def _prepare(request: verbs_pb2.PrepareUpdateRequest) -> None:
    _digest_key(request.digest_key)


def _adapter_options(options: verbs_pb2.UpdateOptions) -> None:
    """Check the options of an adapter's update. Only the digest of the staged tensors verifies an adapter."""
    if options.HasField("probe"):
        raise Reason.FIELD_CONFLICT.error(
            "a probe is computed without adapters, so it does not verify the adapter",
            field="options.probe",
            next_step="Omit the probe: the digest of an adapter's tensors is verified.",
        )
    if options.decode_check:
        raise Reason.FIELD_CONFLICT.error(
            "the decode check runs without adapters, so it does not verify the adapter",
            field="options.decode_check",
            next_step="Omit decode_check: the digest of an adapter's tensors is verified.",
        )
    if options.verify in (common_pb2.VERIFICATION_LEVEL_PROBE, common_pb2.VERIFICATION_LEVEL_RECEIVED):
        raise Reason.FIELD_CONFLICT.error(
            "an adapter is verified by the digest of its staged tensors",
            field="options.verify",
            next_step="Omit verify, or set expected, replica or none.",
        )


def _digest(value: str, field: str) -> None:
    if value and not digests.is_digest(value):
        raise _invalid(f"{field} is neither a SHA-256 in lower-case hex nor a keyed digest (hex@key)", field)


def _digest_key(value: bytes) -> None:
    if len(value) not in (0, digests.KEY_BYTES):
        raise _invalid(f"digest_key has {len(value)} bytes; a key has {digests.KEY_BYTES}", "digest_key")


@_rule(coordinator_pb2.RegisterStageRequest)
def _register(request: coordinator_pb2.RegisterStageRequest) -> None:
    registration = request.registration
    slot_name(registration.slot, "registration.slot")
    for name in ("model", "address", "boot_id", "engine"):
        _name(getattr(registration, name), f"registration.{name}", MOST_NAME)
    if registration.weight_version:
        _name(registration.weight_version, "registration.weight_version", MOST_LABEL)
    _required(registration.layout.workers, "registration.layout.workers")
    ranks = [worker.rank for worker in registration.layout.workers]
    if ranks != list(range(len(ranks))):
        raise _invalid(f"ranks are {ranks}; they must run from 0, in order", "registration.layout.workers")


@_rule(verbs_pb2.PauseGenerationRequest)
def _pause(request: verbs_pb2.PauseGenerationRequest) -> None:
    for field, most in (("by", MOST_BY), ("reason", MOST_REASON)):
        if getattr(request, field):
            _name(getattr(request, field), field, most)
    if request.HasField("ttl"):
        timeout_s(request.ttl, "ttl")
        if request.header.fence.update_id:
            raise Reason.FIELD_CONFLICT.error("a pause inside an update ends with it", field="ttl")
    _scope(request)


@_rule(verbs_pb2.ContinueGenerationRequest)
def _continue(request: verbs_pb2.ContinueGenerationRequest) -> None:
    _scope(request)
    memory_fields = {"torch_empty_cache": request.HasField("torch_empty_cache"), "when_resident": request.when_resident}
    for field in (name for name, is_set in memory_fields.items() if is_set):
        if request.adapter:
            raise Reason.FIELD_CONFLICT.error(
                f"{field} does not apply to the continue of an adapter", field=field, next_step=f"Leave {field} out."
            )


def _scope(request: verbs_pb2.PauseGenerationRequest | verbs_pb2.ContinueGenerationRequest) -> None:
    """Check the adapter of a pause or a continue."""
    if not request.adapter:
        return
    _adapter_name(request.adapter, "adapter")
    if request.header.fence.update_id:
        raise Reason.FIELD_CONFLICT.error(
            "an update stops the requests with its adapter itself",
            field="adapter",
            next_step="Leave out the adapter, or the update in the header's fence.",
        )


@_rule(verbs_pb2.LoadAdapterRequest)
def _load_adapter(request: verbs_pb2.LoadAdapterRequest) -> None:
    _adapter_name(request.name, "name")
    _path(request.path, "path")


@_rule(verbs_pb2.UnloadAdapterRequest)
def _unload_adapter(request: verbs_pb2.UnloadAdapterRequest) -> None:
    _adapter_name(request.name, "name")


def _adapter_name(name: str, field: str) -> None:
    _name(name, field, MOST_ADAPTER_NAME)


def _name(name: str, field: str, most: int) -> None:
    _required(name, field)
    if len(name) > most or not name.isprintable() or not name.strip():
        raise _invalid(f"{field} is no printable name of at most {most} characters", field)


@_rule(update_pb2.BeginWeightUpdateRequest)
def _begin(request: update_pb2.BeginWeightUpdateRequest) -> None:
    if not request.implicit:
        _required(request.model, "model")
        _required(request.version, "version")
    elif request.apply == verbs_pb2.APPLY_MODE_STAGED or request.num_sources > 1 or request.retries:
        raise Reason.FIELD_CONFLICT.error(
            "an implicit update excludes staging, several sources and retries", field="implicit"
        )
    elif request.rollout.max_unavailable:
        raise Reason.FIELD_CONFLICT.error(
            "clients that name no update send the weights once, not batch by batch", field="rollout.max_unavailable"
        )
    if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
        _adapter_name(request.adapter, "adapter")
        if not request.HasField("adapter_config"):
            raise Reason.FIELD_REQUIRED.error(
                "adapter_config is required for an adapter",
                field="adapter_config",
                next_step="Load an adapter from disk with LoadAdapter.",
            )
        _adapter_options(request.options)
    elif request.adapter or request.HasField("adapter_config"):
        raise Reason.FIELD_CONFLICT.error("an adapter is named, but the update is not of kind ADAPTER", field="kind")
    target = request.header.target
    if target.slots or target.stages or target.model not in ("", request.model):
        raise _invalid("an update reaches every stage of its model; leave the target empty", "header.target")
    if request.HasField("lease_ttl"):
        timeout_s(request.lease_ttl, "lease_ttl")
    if request.HasField("renew_interval"):
        timeout_s(request.renew_interval, "renew_interval")
    _options(request.options)


@_rule(update_pb2.JoinWeightUpdateRequest)
def _join_update(request: update_pb2.JoinWeightUpdateRequest) -> None:
    _required(request.update_id, "update_id")


@_rule(update_pb2.RetryWeightUpdateRequest)
def _retry_update(request: update_pb2.RetryWeightUpdateRequest) -> None:
    _required(request.update_id, "update_id")
    _required(request.failed_attempt, "failed_attempt")


@_rule(update_pb2.CommitBatchRequest)
def _commit_batch(request: update_pb2.CommitBatchRequest) -> None:
    _required(request.update_id, "update_id")
    _required(request.batch, "batch")
    _said_at_commit(request)


@_rule(update_pb2.CommitWeightUpdateRequest)
def _commit(request: update_pb2.CommitWeightUpdateRequest) -> None:
    if not (request.header.target.model or request.header.for_slot):
        _required(request.update_id, "update_id")
    if request.update_id and request.version:
        raise _invalid("an update that was begun by name has its version", "version")
    _said_at_commit(request)


def _said_at_commit(request: update_pb2.CommitWeightUpdateRequest | update_pb2.CommitBatchRequest) -> None:
    _digest(request.expected_digest, "expected_digest")
    _digest(request.sent_digest, "sent_digest")
    _fingerprints(request.fingerprints)


@_rule(update_pb2.AbortWeightUpdateRequest)
def _abort_update(request: update_pb2.AbortWeightUpdateRequest) -> None:
    _required(request.update_id, "update_id")


@_rule(update_pb2.RenewLeaseRequest)
def _renew(request: update_pb2.RenewLeaseRequest) -> None:
    _required(request.update_id, "update_id")


@_rule(coordinator_pb2.WatchFleetRequest)
def _watch(request: coordinator_pb2.WatchFleetRequest) -> None:
    if request.watch_id:
        _name(request.watch_id, "watch_id", MOST_WATCH_ID)


@_rule(coordinator_pb2.ConfirmFleetRequest)
def _confirm(request: coordinator_pb2.ConfirmFleetRequest) -> None:
    _name(request.watch_id, "watch_id", MOST_WATCH_ID)


@_rule(coordinator_pb2.SetStageEnabledRequest)
def _enabled(request: coordinator_pb2.SetStageEnabledRequest) -> None:
    _required(request.slots, "slots")
    if request.enabled and request.reason:
        raise Reason.FIELD_CONFLICT.error("reason says why stages are disabled", field="reason")
    if request.enabled and request.force:
        raise Reason.FIELD_CONFLICT.error("force is for a disable", field="force")


@_rule(coordinator_pb2.ReportEngineFailureRequest)
def _engine_failure(request: coordinator_pb2.ReportEngineFailureRequest) -> None:
    _required(request.slot, "slot")
    _required(request.failure.reason, "failure.reason")
    if len(request.failure.log) > MOST_LOG_LINES:
        raise _invalid(f"{len(request.failure.log)} lines; {MOST_LOG_LINES} at most", "failure.log")


@_rule(coordinator_pb2.AdmitSlotsRequest)
def _admit(request: coordinator_pb2.AdmitSlotsRequest) -> None:
    for field in ("slots", "dismissed"):
        for index, slot in enumerate(getattr(request, field)):
            slot_name(slot, f"{field}[{index}]")
    duplicates = sorted(set(request.slots) & set(request.dismissed))
    if duplicates:
        raise Reason.FIELD_CONFLICT.error(f"slot {duplicates[0]!r} is to be admitted and dismissed", field="dismissed")


@_rule(coordinator_pb2.TakeOverStagesRequest)
def _take_over(request: coordinator_pb2.TakeOverStagesRequest) -> None:
    _required(request.slots, "slots")


@_rule(coordinator_pb2.ListVersionsRequest)
def _versions(request: coordinator_pb2.ListVersionsRequest) -> None:
    _required(request.model, "model")


@_rule(coordinator_pb2.SetHealingRequest)
def _healing(request: coordinator_pb2.SetHealingRequest) -> None:
    _required(request.model, "model")


@_rule(coordinator_pb2.SetMinHealthyRequest)
def _min_healthy(request: coordinator_pb2.SetMinHealthyRequest) -> None:
    _required(request.model, "model")
    if request.min_healthy.percent > 100:
        raise _invalid(f"percent is {request.min_healthy.percent}, at most 100", "min_healthy.percent")


@_rule(coordinator_pb2.ReserveRequestIdRequest)
def _reserve(request: coordinator_pb2.ReserveRequestIdRequest) -> None:
    _name(request.key, "key", MOST_KEY)
    if len(request.body_sha256) != 32:
        raise _invalid(f"body_sha256 has {len(request.body_sha256)} bytes; SHA-256 has 32", "body_sha256")
