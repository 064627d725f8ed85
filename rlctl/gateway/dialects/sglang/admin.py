"""SGLang's routes that pause, abort, flush, release memory, and check weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.dialects.sglang.reads import fleet_of, stage_of, telling
from rlctl.gateway.dialects.sglang.replies import saying_success, status_of
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.table import Field, Row, RowCall
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.results_pb2 import RankResult, StageResult

MODES = ("abort", "retract", "in_place")
TAGS = ("kv_cache", "weights", "cuda_graph")
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")
SELECTORS = ("target", "draft", "all")

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
"""SGLang's text: clients compare its beginning."""


async def pause_generation(row_call: RowCall) -> Reply:
    """Pause generation."""
    mode = common_pb2.PauseMode.Value(f"PAUSE_MODE_{row_call['mode'].upper()}")
    await row_call.operate(verbs_pb2.PauseGenerationRequest(mode=mode))
    return Reply({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(row_call: RowCall) -> Reply:
    """Continue generation; an update opened by writes is committed first."""
    await row_call.operate(
        verbs_pb2.ContinueGenerationRequest(torch_empty_cache=row_call["torch_empty_cache"], when_resident=True)
    )
    return Reply({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(row_call: RowCall) -> Reply:
    """Abort one request, or all requests."""
    rid = row_call["rid"]
    if row_call["abort_all"]:
        await row_call.operate(verbs_pb2.AbortRequestsRequest(abort_all=True))
    elif rid:
        stopped = await row_call.call.generation.stop([rid])
        if not stopped:
            await row_call.operate(verbs_pb2.AbortRequestsRequest(rids=[rid]))
    return Reply()


async def flush_cache(row_call: RowCall) -> Reply:
    """Empty the caches; 400 while requests run."""
    wait = duration(row_call["timeout"]) if row_call["timeout"] else None
    try:
        await row_call.operate(verbs_pb2.FlushCacheRequest(idle_timeout=wait))
    except RlctlError as error:
        if status_of(error) != 400:
            raise
        return Reply(f"Flush cache failed. {error}\n", 400)
    return Reply(FLUSHED)


async def release_memory(row_call: RowCall) -> Reply:
    """Release memory regions; refused while requests run."""
    return await _memory(row_call, verbs_pb2.ReleaseMemoryRequest())


async def resume_memory(row_call: RowCall) -> Reply:
    """Resume memory regions; a region that is not released is confirmed."""
    return await _memory(row_call, verbs_pb2.ResumeMemoryRequest())


async def _memory(row_call: RowCall, request: verbs_pb2.ReleaseMemoryRequest | verbs_pb2.ResumeMemoryRequest) -> Reply:
    tags = row_call["tags"] or []
    for index, tag in enumerate(tags):
        if tag not in TAGS:
            raise Reason.FIELD_INVALID.error(f"{tag!r} must be one of {', '.join(TAGS)}", field=f"tags[{index}]")
    supported_tags = [tag for tag in tags if tag != "cuda_graph" or await _captures(row_call)]
    request.tags.extend(common_pb2.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in supported_tags)
    if supported_tags or not tags:
        await row_call.operate(request)
    return Reply(b"null", content_type="application/json")


async def _captures(row_call: RowCall) -> bool:
    """Return whether an engine has captured graphs. Trainers always name this region, and SGLang accepts that."""
    fleet = await fleet_of(row_call)
    stages = [stage_of(fleet, row_call.slot)] if row_call.slot else fleet.stages
    return any(
        common_pb2.MEMORY_TAG_CUDA_GRAPH in stage.registration.capabilities.memory_tags
        or not stage.registration.capabilities.memory_tags
        for stage in stages
    )


@saying_success()
async def weights_checker(row_call: RowCall) -> Reply:
    """Digest the weights, keep a snapshot, scramble the weights, or compare them with the snapshot."""
    action = row_call["action"]
    request = verbs_pb2.CheckWeightsRequest(
        action=verbs_pb2.CheckAction.Value(f"CHECK_ACTION_{action.upper()}"),
        per_tensor=action == "checksum",
        digest=verbs_pb2.DIGEST_FUNCTION_SHA256,
        skip_tensors=row_call["skip_tensor_list"] or [],
        selector=common_pb2.WeightSelector.Value(f"WEIGHT_SELECTOR_{row_call['selector'].upper()}"),
    )
    operation = await row_call.operate(request, partly=True)
    results = telling(operation)
    slots = {result.slot for result in results}
    without = [result for result in operation.stage_results if result.slot not in slots]
    skipped = {result.slot: result.error.message for result in without}
    ranks = [(result.slot, rank) for result in results for rank in result.rank_results]
    checks = [rank.check for _, rank in ranks]
    different_names = sorted({name for c in checks for name in (*c.changed, *c.missing, *c.unexpected)})
    skipped_phrase = f"; of {len(skipped)} it cannot be had: {', '.join(skipped)}" if skipped else ""
    body: dict[str, Any] = {
        "success": not different_names and not skipped,
        "message": f"{action} of {len(results)} engines{skipped_phrase}.",
    }
    if skipped:
        body["skipped"] = skipped
        body["reason"] = without[0].error.reason
    if different_names:
        body["message"] = f"{len(different_names)} tensors differ from the snapshot, first {different_names[0]}"
        body["reason"] = Reason.DIGEST_MISMATCH.name
    if action == "checksum":
        body["ranks"] = [_checksums(slot, rank, results) for slot, rank in ranks]
        body["model_digest"] = {result.slot: result.rank_results[0].check.model_digest for result in results}
        if len(results) == 1:
            [digest] = body["model_digest"].values()
            body["per_engine_checksum"] = digest
    return Reply(body, 200 if body["success"] else 400)


def _checksums(slot: str, rank: RankResult, results: Sequence[StageResult]) -> dict[str, Any]:
    [places] = [[each.coordinates for each in result.rank_results] for result in results if result.slot == slot]
    place = rank.coordinates
    return {
        # The rank's own tensors, or its share of the full tensors if the engine reports only that.
        "checksums": {tensor.name: tensor.sha256 for tensor in rank.check.tensors or rank.check.model_tensors},
        "per_gpu_checksum": rank.check.rank_digest,
        "parallelism_info": [
            {
                "role": "target",
                "tp_rank": place.tp,
                "tp_size": 1 + max(each.tp for each in places),
                "dp_rank": place.dp,
                "dp_size": 1 + max(each.dp for each in places),
                "pp_rank": place.pp,
                "pp_size": 1 + max(each.pp for each in places),
                "rank": place.rank,
                "size": len(places),
            }
        ],
        "engine": slot,
    }


_TAGS = Field("tags", [str], None, doc=f"any of {', '.join(TAGS)}; null or []: all")

ROWS = (
    Row("POST", "/pause_generation", pause_generation, "PauseGeneration", [Field("mode", str, "abort", MODES)]),
    Row(
        "POST",
        "/continue_generation",
        continue_generation,
        "ContinueGeneration",
        [Field("torch_empty_cache", bool, True)],
        note="400 if weights are stale or a mixture, or the open update cannot be published",
    ),
    Row(
        "POST",
        "/abort_request",
        abort_request,
        "AbortRequests",
        [Field("rid", str, ""), Field("abort_all", bool, False)],
        note="ends the request with this id only; SGLang ends every request whose id begins with it",
    ),
    Row("GET POST", "/flush_cache", flush_cache, "FlushCache", query=[Field("timeout", float, 0.0)]),
    Row("GET POST", "/release_memory_occupation", release_memory, "ReleaseMemory", [_TAGS],
        note="400 while requests run (SGLang ends), or if no engine can free memory"),
    Row("GET POST", "/resume_memory_occupation", resume_memory, "ResumeMemory", [_TAGS],
        note="a region that is not released is confirmed (SGLang ends)"),
    Row(
        "GET POST",
        "/weights_checker",
        weights_checker,
        "CheckWeights",
        [
            Field("action", str, "checksum", ACTIONS),
            Field("allow_quant_error", bool, False),
            Field("skip_tensor_list", [str], None),
            Field("selector", str, "all", SELECTORS),
        ],
        note="rlctl's digests; `model_digest` is equal for all TP sizes",
    ),
)  # fmt: skip
