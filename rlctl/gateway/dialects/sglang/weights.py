"""SGLang's routes that change weights, groups and versions, with routes of slime and Miles."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED, Placed, read_payloads
from rlctl.gateway.dialects.sglang import checkpoint_engine, serialized_tensors
from rlctl.gateway.dialects.sglang.admin import SELECTORS
from rlctl.gateway.dialects.sglang.reads import fleet_of
from rlctl.gateway.dialects.sglang.replies import done, saying_success
from rlctl.gateway.http import engine_urls, weight_fields
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.table import Field, Row, RowCall
from rlctl.sglang_api.rows import rows_of
from rlctl.v1 import common_pb2, update_pb2, verbs_pb2
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation

log = logging.getLogger(__name__)

UPDATE_S = 600.0
"""Time limit for the end of an update, in seconds."""

FORMATS = (FLATTENED,)
KINDS = ("full", "partial")
DEFAULT_GROUP = "weight_update_group"


@saying_success(num_paused_requests=0)
async def from_disk(row_call: RowCall) -> Reply:
    """Update the model from a checkpoint that every engine reads."""
    if row_call["manifest"] is not None:
        raise Reason.UNSUPPORTED.error("checkpoints are checked by rlctl's own manifests", field="manifest")
    options = _options(row_call)
    options.recapture_cuda_graph = row_call["recapture_cuda_graph"]
    if row_call["keep_pause"]:
        options.after = verbs_pb2.AFTER_UPDATE_STAY_PAUSED
    request = verbs_pb2.UpdateWeightsFromDiskRequest(
        header=await row_call.header(model=row_call.model()),
        model_path=row_call["model_path"],
        load_format=row_call["load_format"] or "",
        weight_version=_label(row_call["weight_version"]),
        is_async=row_call["is_async"],
        token_step=weight_fields.token_step(row_call["token_step"]),
        options=options,
    )
    operation = await row_call.call.operate(request)
    if row_call["is_async"]:
        return done(f"Accepted as operation {operation.operation_id}.", num_paused_requests=0)
    return done(f"Succeeded to update model weights.{_versioned(operation)}", num_paused_requests=0)


@saying_success()
async def begin_weight_update(row_call: RowCall) -> Reply:
    """Open an update for later writes, without a pause yet."""
    return done(
        "Begin weight update succeeded.", update_id=await _begin(row_call, _kind(row_call), _selector(row_call))
    )


async def _begin(
    row_call: RowCall, kind: verbs_pb2.UpdateKind.ValueType, selector: common_pb2.WeightSelector.ValueType
) -> str:
    request = update_pb2.BeginWeightUpdateRequest(
        header=await row_call.header(),
        implicit=True,
        may_be_partial=True,
        model=row_call.model(),
        kind=kind,
        options=verbs_pb2.UpdateOptions(selector=selector, flush_cache=False),
    )
    request.header.ClearField("target")
    plan = await row_call.call.fleet.connection.call("BeginWeightUpdate", request, UPDATE_S)
    return str(plan.update_id)


@saying_success()
async def end_weight_update(row_call: RowCall) -> Reply:
    """Commit the open update: verify, publish and serve. Unwritten tensors keep their values."""
    operation = await _commit(row_call, "", partial=True)
    return done(f"End weight update succeeded.{_versioned(operation)}")


@saying_success()
async def update_weight_version(row_call: RowCall) -> Reply:
    """Commit an open update under this version, or relabel the published version."""
    label = _label(row_call["new_version"])
    if not label:
        raise Reason.FIELD_REQUIRED.error("a version has a name", field="new_version")
    if row_call["abort_all_requests"]:
        await row_call.operate(verbs_pb2.AbortRequestsRequest(abort_all=True), "abort")
    await _commit(row_call, label)
    return done(f"Weight version updated to {label}", new_version=row_call["new_version"])


async def _commit(row_call: RowCall, version: str, *, partial: bool = False) -> Operation:
    model = "" if row_call.slot else await engine_urls.updatable(row_call.call)
    request = update_pb2.CommitWeightUpdateRequest(
        header=await row_call.header("commit", model=model), version=version, partial=partial
    )
    operation: Operation = await row_call.call.fleet.connection.call("CommitWeightUpdate", request, UPDATE_S)
    row_call.call.note_excluded(operation)
    if operation.state not in (OPERATION_STATE_OK, OPERATION_STATE_PARTIAL):
        raise OperationFailed(operation)
    return operation


@saying_success()
async def init_group(row_call: RowCall) -> Reply:
    """Join the engine's ranks into a group of the client; waits until every engine was called and has joined."""
    offset, world_size, port = row_call["rank_offset"], row_call["world_size"], row_call["master_port"]
    for name, value in (("rank_offset", offset), ("world_size", world_size), ("master_port", port)):
        if not 0 <= value < 1 << 31:
            raise Reason.FIELD_INVALID.error(f"{name} is {value}; it must be from 0 to {(1 << 31) - 1}", field=name)
    request = verbs_pb2.InitWeightsUpdateGroupRequest(
        header=await row_call.header(model=row_call.model()),
        master_address=row_call["master_address"],
        master_port=port,
        rank_offset=offset,
        world_size=world_size,
        group_name=row_call["group_name"],
        backend=row_call["backend"],
    )
    if not row_call.slot and offset not in (0, 1):
        raise Reason.FIELD_INVALID.error(
            f"at the root the fleet is one server, whose ranks begin at 1, not at {offset}",
            field="rank_offset",
            next_step="To place engines at other offsets, call each engine at its own address.",
        )
    await row_call.call.operate(request)
    return done("Succeeded to initialize custom process group.")


@saying_success()
async def destroy_group(row_call: RowCall) -> Reply:
    """Leave a group."""
    await row_call.operate(verbs_pb2.DestroyWeightsUpdateGroupRequest(group_name=row_call["group_name"]))
    return done("Succeeded to destroy custom process group.")


@saying_success()
async def from_distributed(row_call: RowCall) -> Reply:
    """Receive tensors that the client broadcasts: into the open update, or as a whole update outside of a pause."""
    bucket = weight_fields.bucket(Fields(dict(row_call.values)), format=weight_fields.FORMATS[row_call["load_format"]])
    request = verbs_pb2.UpdateWeightsFromDistributedRequest(
        header=await row_call.header(model=row_call.model()),
        group_name=row_call["group_name"],
        buckets=[bucket],
        weight_version=_label(row_call["weight_version"]),
        options=_options(row_call),
        kind=_kind(row_call),
    )
    operation = await row_call.call.operate(request)
    return done(f"Succeeded to update parameter online.{_versioned(operation)}")


@saying_success()
async def from_tensor(row_call: RowCall) -> Reply:
    """Receive tensors from memory that the engines share with the client."""
    if row_call["serialized_named_tensors"] is not None:
        return await _serialized(row_call)
    if not row_call["segments"]:
        raise Reason.FIELD_REQUIRED.error(f"{serialized_tensors.FIELD} is required", field=serialized_tensors.FIELD)
    operation = await _from_segments(row_call, weight_fields.segments(row_call["segments"]))
    return done(f"Success{_versioned(operation)}")


async def _serialized(row_call: RowCall) -> Reply:
    if row_call["segments"]:
        raise Reason.FIELD_CONFLICT.error("segments and serialized_named_tensors exclude each other", field="segments")
    payloads = await row_call.call.beside(
        lambda: read_payloads(row_call["serialized_named_tensors"], row_call["load_format"], serialized_tensors.FIELD)
    )
    by_slot = serialized_tensors.segments_by_stage(payloads, await _stages(row_call))
    parts = [(dataclasses.replace(row_call, slot=slot), segments) for slot, segments in by_slot.items() if segments]
    operations = await asyncio.gather(*(_from_segments(part, segments, part.slot) for part, segments in parts))
    return done(f"Success{_versioned(operations[0])}" if operations else "Success. The payloads have no tensors.")


async def _stages(row_call: RowCall) -> list[Stage]:
    """Return the engine of this URL, or every engine of the model at the root."""
    stages = await engine_urls.addressed(row_call.call)
    if not row_call.slot:
        model = await engine_urls.updatable(row_call.call)
        stages = [stage for stage in stages if stage.registration.model == model]
    return sorted(stages, key=lambda stage: stage.registration.slot)


async def _from_segments(row_call: RowCall, segments: Sequence[verbs_pb2.TensorSegment], step: str = "") -> Operation:
    request = verbs_pb2.UpdateWeightsFromTensorRequest(
        header=await row_call.header(step, model=row_call.model()),
        weight_version=_label(row_call["weight_version"]),
        options=_options(row_call),
        kind=_kind(row_call),
        segments=segments,
    )
    return await row_call.call.operate(request)


@saying_success()
async def from_ipc(row_call: RowCall) -> Reply:
    """Receive tensors from checkpoint-engine's parameter servers: a whole update, buffer by buffer."""
    peers, readers = checkpoint_engine.peers_of(row_call["zmq_handles"], await _stages(row_call))
    async with checkpoint_engine.Conversation(peers) as conversation:
        update_id = await _begin(row_call, verbs_pb2.UPDATE_KIND_UNSPECIFIED, common_pb2.WEIGHT_SELECTOR_ALL)
        try:
            number = 0
            async for placed in conversation.buckets():
                await _from_buffers(row_call, readers, placed, number)
                number += 1
            operation = await _commit(row_call, _label(row_call["weight_version"]), partial=True)
        except RlctlError as error:
            await _give_up(row_call, update_id, error)
            raise
        await conversation.confirm()
    return done(f"Succeeded to update model weights.{_versioned(operation)}")


async def _from_buffers(
    row_call: RowCall, readers: Sequence[serialized_tensors.Reader], placed: Sequence[Placed], number: int
) -> None:
    by_slot: dict[str, list[verbs_pb2.TensorSegment]] = {}
    for each, reader in zip(placed, readers, strict=True):
        if each.tensors:
            by_slot.setdefault(reader[0], []).append(serialized_tensors.segment(each, reader, checkpoint_engine.FIELD))
    parts = [(dataclasses.replace(row_call, slot=slot), segments) for slot, segments in by_slot.items()]
    await asyncio.gather(*(_from_segments(part, segments, f"{part.slot}/{number}") for part, segments in parts))


async def _give_up(row_call: RowCall, update_id: str, cause: RlctlError) -> None:
    """Abort the update. With one call for each engine URL, a different call may already have aborted the update."""
    try:
        await row_call.call.fleet.abort_update(update_id, reason=str(cause)[:200])
    except RlctlError as error:
        log.info("update %s is not aborted: %s", update_id, error)


async def get_weights_by_name(row_call: RowCall) -> Reply:
    """Return the first rows of a tensor as nested lists; at the root of the first engine with readable ranks."""
    rows = row_call["truncate_size"]
    if not 0 < rows < 1 << 32:
        raise Reason.FIELD_INVALID.error(f"{rows} is no number of rows above 0", field="truncate_size")
    request = verbs_pb2.CheckWeightsRequest(action=verbs_pb2.CHECK_ACTION_READ, tensor=row_call["name"], rows=rows)
    try:
        operation = await row_call.operate(request, slots=[row_call.slot or await _readable(row_call)])
    except RlctlError as error:
        error.field = {"tensor": "name", "rows": "truncate_size"}.get(error.field, error.field)
        raise
    [result] = operation.stage_results
    return Reply(rows_of([rank.check.values for rank in result.rank_results if rank.check.HasField("values")]))


async def _readable(row_call: RowCall) -> str:
    """Return a slot of the model with readable ranks, routable if possible; else any slot, whose stage refuses."""
    model = await row_call.call.generation.model()
    stages = [stage for stage in (await fleet_of(row_call)).stages if stage.registration.model == model]
    if not stages:
        raise Reason.NO_TARGETS.error(f"no engine serves {model!r}")

    def order(stage: Stage) -> tuple[bool, bool]:
        reads = verbs_pb2.CHECK_ACTION_READ in stage.registration.capabilities.check_actions
        return not reads, not stage.routable

    return min(stages, key=order).registration.slot


@saying_success()
async def pull_weights(row_call: RowCall) -> Reply:
    """Fetch a published checkpoint or delta into a local directory; slime's."""
    request = verbs_pb2.PullWeightsRequest(
        source_dir=row_call["source_dir"],
        local_checkpoint_dir=row_call["local_checkpoint_dir"],
        target_version=_label(row_call["target_version"]),
    )
    await row_call.operate(request)
    return done(f"The directory is at version {request.target_version}.")


@saying_success()
async def post_process_weights(_: RowCall) -> Reply:
    """Do nothing: loaded weights are processed at the end of their update; slime's."""
    return done("Weights are processed when their update ends.")


def _options(row_call: RowCall) -> verbs_pb2.UpdateOptions:
    values = row_call.values
    return verbs_pb2.UpdateOptions(
        abort_all_requests=values.get("abort_all_requests", False),
        flush_cache=values["flush_cache"],
        torch_empty_cache=values["torch_empty_cache"],
        selector=_selector(row_call) if "selector" in values else common_pb2.WEIGHT_SELECTOR_UNSPECIFIED,
    )


def _selector(row_call: RowCall) -> common_pb2.WeightSelector.ValueType:
    return common_pb2.WeightSelector.Value(f"WEIGHT_SELECTOR_{row_call['selector'].upper()}")


def _kind(row_call: RowCall) -> verbs_pb2.UpdateKind.ValueType:
    kind = row_call.values.get("update_kind")
    return verbs_pb2.UpdateKind.Value(f"UPDATE_KIND_{kind.upper()}") if kind else verbs_pb2.UPDATE_KIND_UNSPECIFIED


def _label(version: str | int | None) -> str:
    """Return the label as a text; trainers also send numbers."""
    return "" if version is None else str(version)


def _versioned(operation: Operation) -> str:
    label = operation.weight_version.label
    return f" Weight version updated to {label}." if label else ""


_VERSION = Field("weight_version", str | int, None)
_KIND = Field(
    "update_kind", str, None, KINDS, "by default what is written; full unless end_weight_update ends it", own=True
)
_SELECTOR = Field("selector", str, "all", SELECTORS)
_GROUP = Field("group_name", str, DEFAULT_GROUP)


def _flag(name: str, *, default: bool = False) -> Field:
    return Field(name, bool, default)


_FLUSH, _ABORT, _EMPTY = _flag("flush_cache", default=True), _flag("abort_all_requests"), _flag("torch_empty_cache")
_LOADED: Any = {200: "done", 400: "not done, and why"}

ROWS = (
    Row(
        "POST",
        "/update_weights_from_disk",
        from_disk,
        "UpdateWeightsFromDisk",
        [
            Field("model_path", str),
            Field("load_format", str, None),
            _ABORT,
            _VERSION,
            Field("is_async", bool, False, doc="answer when it is accepted"),
            _EMPTY,
            _flag("keep_pause"),
            _flag("recapture_cuda_graph"),
            Field("token_step", int, 0),
            _FLUSH,
            Field("manifest", dict, None),
        ],
        note="one verified update of all engines of the model; is_async, keep_pause and token_step have their effect",
    ),
    Row("POST", "/begin_weight_update", begin_weight_update, "BeginWeightUpdate", [_SELECTOR, _KIND],
        note="a repeat before the first write is confirmed"),
    Row("POST", "/end_weight_update", end_weight_update, "CommitWeightUpdate",
        note="tensors without a write do not change; 400 if nothing was written, or a write failed"),
    Row(
        "POST",
        "/update_weight_version",
        update_weight_version,
        "AbortRequests, CommitWeightUpdate",
        [Field("new_version", str | int), _flag("abort_all_requests", default=True)],
        note="ends an open update; without one, renames the published version",
    ),
    Row(
        "POST",
        "/init_weights_update_group",
        init_group,
        "InitWeightsUpdateGroup",
        [
            Field("master_address", str),
            Field("master_port", int),
            Field("rank_offset", int),
            Field("world_size", int),
            _GROUP,
            Field("backend", str, "nccl", ("nccl", "gloo")),
        ],
        note="checked against the roster before any rank joins; at the root the fleet is one server",
    ),
    Row("POST", "/destroy_weights_update_group", destroy_group, "DestroyWeightsUpdateGroup", [_GROUP]),
    Row(
        "POST",
        "/update_weights_from_distributed",
        from_distributed,
        "UpdateWeightsFromDistributed",
        [
            Field("names", [str]),
            Field("dtypes", [str]),
            Field("shapes", [[int]]),
            _GROUP,
            _FLUSH,
            _ABORT,
            _VERSION,
            Field("load_format", str, None, FORMATS),
            _SELECTOR,
            _EMPTY,
            _KIND,
        ],
        note="without begin_weight_update, a write opens an update under a pause, and else is a whole update",
    ),
    Row(
        "POST",
        "/update_weights_from_tensor",
        from_tensor,
        "UpdateWeightsFromTensor",
        [
            Field("serialized_named_tensors", [str], None, doc="one for each rank; read as data, never unpickled"),
            Field("load_format", str, None),
            _FLUSH,
            _ABORT,
            _VERSION,
            _SELECTOR,
            _EMPTY,
            _KIND,
            Field("segments", [dict], None, doc="rlctl.v1.TensorSegment in protobuf's JSON", own=True),
        ],
        note="handles in `serialized_named_tensors` are read as data, and nothing is unpickled",
    ),
    Row("POST", "/update_weights_from_ipc", from_ipc, "BeginWeightUpdate, UpdateWeightsFromTensor, CommitWeightUpdate",
        [Field("zmq_handles", dict), _FLUSH, _VERSION, _EMPTY],
        note="of checkpoint-engine; the gateway runs on its host, and replies to its sockets"),
    Row("GET POST", "/get_weights_by_name", get_weights_by_name, "CheckWeights",
        [Field("name", str), Field("truncate_size", int, 100, doc="most rows")],
        note="for debugging; names of the checkpoint, at most 524288 values"),
    Row(
        "POST",
        "/pull_weights",
        pull_weights,
        "PullWeights",
        [Field("local_checkpoint_dir", str), Field("source_dir", str), Field("target_version", str | int)],
        note="of slime",
    ),
    Row(
        "POST",
        "/post_process_weights",
        post_process_weights,
        "",
        [_flag("restore_weights_before_load"), _flag("post_process_quantization")],
        note="of slime; confirmed without effect, since the end of an update does this",
    ),
)  # fmt: skip
