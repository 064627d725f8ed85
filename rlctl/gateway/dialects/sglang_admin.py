"""SGLang's routes that pause, abort, flush, give memory back, and read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rlctl.errors import Reason, RlctlError
from rlctl.gateway.dialect import Reply, Scope
from rlctl.gateway.dialects.sglang_words import saying_success, status_of
from rlctl.gateway.table import Asked, Field, Row
from rlctl.times import duration, seconds
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.fleet_pb2 import Fleet, Stage
from rlctl.v1.results_pb2 import Operation, RankResult, StageResult
from rlctl.version import __version__

MODES = ("abort", "retract", "in_place")
TAGS = ("kv_cache", "weights", "cuda_graph")
ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")
SELECTORS = ("target", "draft", "all")

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
"""SGLang's own words: clients look for their beginning."""


async def pause_generation(asked: Asked) -> Reply:
    """Stop generating."""
    mode = common_pb2.PauseMode.Value(f"PAUSE_MODE_{asked['mode'].upper()}")
    await asked.tell(verbs_pb2.PauseGenerationRequest(mode=mode))
    return Reply({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(asked: Asked) -> Reply:
    """Go on; an update that writes opened is committed first."""
    await asked.tell(
        verbs_pb2.ContinueGenerationRequest(torch_empty_cache=asked["torch_empty_cache"], when_resident=True)
    )
    return Reply({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(asked: Asked) -> Reply:
    """End one request, or all."""
    rid = asked["rid"]
    if asked["abort_all"]:
        await asked.tell(verbs_pb2.AbortRequestsRequest(abort_all=True))
    elif rid:
        ran = await asked.call.generation.stop([rid])
        if not ran:
            await asked.tell(verbs_pb2.AbortRequestsRequest(rids=[rid]))
    return Reply()


async def flush_cache(asked: Asked) -> Reply:
    """Empty the caches; 400 while requests run."""
    wait = duration(asked["timeout"]) if asked["timeout"] else None
    try:
        await asked.tell(verbs_pb2.FlushCacheRequest(idle_timeout=wait))
    except RlctlError as error:
        if status_of(error) != 400:
            raise
        return Reply(f"Flush cache failed. {error}\n", 400)
    return Reply(FLUSHED)


async def release_memory(asked: Asked) -> Reply:
    """Give memory regions back; refused while requests run."""
    return await _memory(asked, verbs_pb2.ReleaseMemoryRequest())


async def resume_memory(asked: Asked) -> Reply:
    """Allocate them again; one that is not released is confirmed."""
    return await _memory(asked, verbs_pb2.ResumeMemoryRequest())


async def _memory(asked: Asked, request: verbs_pb2.ReleaseMemoryRequest | verbs_pb2.ResumeMemoryRequest) -> Reply:
    named = asked["tags"] or []
    for index, tag in enumerate(named):
        if tag not in TAGS:
            raise Reason.FIELD_INVALID.error(f"{tag!r} must be one of {', '.join(TAGS)}", field=f"tags[{index}]")
    there = [tag for tag in named if tag != "cuda_graph" or await _captures(asked)]
    request.tags.extend(common_pb2.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in there)
    if there or not named:
        await asked.tell(request)
    return Reply(b"null", content_type="application/json")


async def _captures(asked: Asked) -> bool:
    """Whether an engine has captured graphs: trainers name that region whether or not, and SGLang lets them."""
    fleet = await _fleet(asked)
    stages = [_stage(fleet, asked.slot)] if asked.slot else fleet.stages
    return any(
        common_pb2.MEMORY_TAG_CUDA_GRAPH in stage.registration.capabilities.memory_tags
        or not stage.registration.capabilities.memory_tags
        for stage in stages
    )


@saying_success()
async def weights_checker(asked: Asked) -> Reply:
    """Digest the weights, keep a snapshot, scramble them, or compare them with the snapshot."""
    action = asked["action"]
    request = verbs_pb2.CheckWeightsRequest(
        action=verbs_pb2.CheckAction.Value(f"CHECK_ACTION_{action.upper()}"),
        per_tensor=action == "checksum",
        skip_tensors=asked["skip_tensor_list"] or [],
        selector=common_pb2.WeightSelector.Value(f"WEIGHT_SELECTOR_{asked['selector'].upper()}"),
    )
    results = (await asked.tell(request)).stage_results
    ranks = [(result.slot, rank) for result in results for rank in result.rank_results]
    wrong = sorted({name for _, rank in ranks for name in [*rank.check.changed, *rank.check.missing]})
    body: dict[str, Any] = {"success": not wrong, "message": f"{action} of {len(results)} engines."}
    if wrong:
        body["message"] = f"{len(wrong)} tensors differ from the snapshot, first {wrong[0]}"
    if action == "checksum":
        body["ranks"] = [_checksums(slot, rank, results) for slot, rank in ranks]
        body["model_digest"] = {result.slot: result.rank_results[0].check.model_digest for result in results}
        if len(results) == 1:
            [digest] = body["model_digest"].values()
            body["per_engine_checksum"] = digest
    return Reply(body, 400 if wrong else 200)


def _checksums(slot: str, rank: RankResult, results: Sequence[StageResult]) -> dict[str, Any]:
    [size] = [len(result.rank_results) for result in results if result.slot == slot]
    place = rank.coordinates
    return {
        # Of the rank's own tensors or, where the engine gives none, of its share of the full ones.
        "checksums": {tensor.name: tensor.sha256 for tensor in rank.check.tensors or rank.check.model_tensors},
        "per_gpu_checksum": rank.check.rank_digest,
        "parallelism_info": [
            {
                "role": "target",
                "tp_rank": place.tp,
                "dp_rank": place.dp,
                "pp_rank": place.pp,
                "rank": place.rank,
                "size": size,
            }
        ],
        "engine": slot,
    }


# Reads.


async def model_info(asked: Asked) -> Reply:
    """What is loaded, and its version."""
    operation = await asked.tell(verbs_pb2.GetModelInfoRequest())
    result = operation.stage_results[0]
    info = result.rank_results[0].model_info
    version = result.weight_version if result.weight_version.sequence else info.weight_version
    if not asked.slot:
        version = await _latest(asked, await _fleet(asked), result.slot)
    return Reply(
        {
            "model_path": info.model_path,
            "served_model_name": info.model_path,
            "tokenizer_path": info.tokenizer_path or info.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": version.label,
            "weight_version_seq": version.sequence,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": info.model_type,
            "architectures": list(info.architectures),
        }
    )


async def get_weight_version(asked: Asked) -> Reply:
    """The version that is served."""
    fleet = await _fleet(asked)
    if asked.slot:
        stage = _stage(fleet, asked.slot)
        version = stage.report.weight_version
    else:
        version = await _latest(asked, fleet)
    return Reply({"weight_version": version.label, "weight_version_seq": version.sequence})


async def server_info(asked: Asked) -> Reply:
    """How the engines were started, and what they do now."""
    started = await asked.tell(verbs_pb2.GetServerInfoRequest())
    loads = await asked.tell(verbs_pb2.GetLoadsRequest(), "loads")
    first = started.stage_results[0]
    stage = _stage(await _fleet(asked), first.slot)
    info = first.rank_results[0].server_info
    states = _loads(loads)
    return Reply(
        {
            **dict(info.settings),
            "status": "ready" if stage.routable else "not ready",
            "model_path": stage.report.checkpoint or stage.registration.checkpoint,
            "tp_size": 1 + max(worker.tp for worker in stage.registration.layout.workers),
            "pp_size": 1 + max(worker.pp for worker in stage.registration.layout.workers),
            "dp_size": 1,
            "max_total_num_tokens": states[0]["max_total_num_tokens"],
            "internal_states": states,
            "weight_version": stage.report.weight_version.label,
            "version": info.engine_version,
            "engine": info.engine,
            "frontend": f"rlctl {__version__}",
            "startup_time": seconds(info.uptime),
            "engines": [result.slot for result in started.stage_results],
        }
    )


async def loads(asked: Asked) -> Reply:
    """What runs and waits, at every engine."""
    states = _loads(await asked.tell(verbs_pb2.GetLoadsRequest()))
    wanted = asked["dp_rank"]
    if wanted is not None and wanted >= len(states):
        raise Reason.FIELD_INVALID.error(f"there are {len(states)}, counted from 0", field="dp_rank")
    chosen = states if wanted is None else states[wanted : wanted + 1]
    if asked["format"] == "prometheus":
        return Reply(_prometheus(chosen), content_type="text/plain")
    return Reply(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": chosen,
        }
    )


def _loads(operation: Operation) -> list[dict[str, Any]]:
    """One entry for each engine; of its ranks the one that schedules counts."""
    states = []
    for index, result in enumerate(operation.stage_results):
        of = [rank.loads for rank in result.rank_results]
        running, waiting = max(load.running for load in of), max(load.waiting for load in of)
        used, most = max(load.used_tokens for load in of), max(load.max_tokens for load in of)
        states.append(
            {
                "dp_rank": index,
                "engine": result.slot,
                "timestamp": time.time(),
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_total_reqs": running + waiting,
                "num_used_tokens": used,
                "num_total_tokens": used,
                "max_total_num_tokens": most,
                "token_usage": round(used / most, 4) if most else 0.0,
            }
        )
    return states


def _prometheus(states: Sequence[dict[str, Any]]) -> str:
    lines = []
    for key in states[0] if states else ():
        if key not in ("dp_rank", "engine"):
            lines.append(f"# TYPE sglang_{key} gauge")
            lines += [f'sglang_{key}{{dp_rank="{s["dp_rank"]}",engine="{s["engine"]}"}} {s[key]}' for s in states]
    return "\n".join(lines) + "\n"


async def health(asked: Asked) -> Reply:
    """Whether the engine is there with all of its ranks, at the root whether one is; nothing is generated for it."""
    fleet = await _fleet(asked)
    stages = [_stage(fleet, asked.slot)] if asked.slot else fleet.stages
    return Reply(status=200 if any(map(_alive, stages)) else 503)


async def ready(asked: Asked) -> Reply:
    """Whether it may be generated with: at the admitted version, not paused; at the root whether one may."""
    fleet = await _fleet(asked)
    stages = [_stage(fleet, asked.slot)] if asked.slot else fleet.stages
    return Reply(status=200 if any(stage.routable for stage in stages) else 503)


def _alive(stage: Stage) -> bool:
    gone = (common_pb2.STAGE_STATE_UNREACHABLE, common_pb2.STAGE_STATE_JOINING, common_pb2.STAGE_STATE_RETIRED)
    return stage.state not in gone and all(rank.alive for rank in stage.report.ranks)


async def _fleet(asked: Asked) -> Fleet:
    """The fleet, as the gateway itself may see it: health asks for no token."""
    return await asked.call.generation.fleet.status()


def _stage(fleet: Fleet, slot: str) -> Stage:
    for stage in fleet.stages:
        if stage.registration.slot == slot:
            return stage
    raise Reason.STAGE_NOT_FOUND.error(f"no engine fills slot {slot!r}")


async def _latest(asked: Asked, fleet: Fleet, slot: str = "") -> common_pb2.WeightVersion:
    """The published version of the model that a stage serves, or of the gateway's."""
    model = _stage(fleet, slot).registration.model if slot else await asked.call.generation.model()
    return next(each.latest for each in fleet.models if each.name == model)


_READ = {200: "the answer", 400: "what is wrong with the request"}
_HEALTH = {200: "yes", 503: "no"}
_TAGS = Field("tags", [str], None, doc=f"any of {', '.join(TAGS)}; null or []: all")

ROWS = (
    Row("POST", "/pause_generation", pause_generation, "PauseGeneration", [Field("mode", str, "abort", MODES)]),
    Row(
        "POST",
        "/continue_generation",
        continue_generation,
        "ContinueGeneration",
        [Field("torch_empty_cache", bool, True)],
        note="400 where weights are stale or a mixture, and for an update that could not be published",
    ),
    Row(
        "POST",
        "/abort_request",
        abort_request,
        "AbortRequests",
        [Field("rid", str, ""), Field("abort_all", bool, False)],
        note="ids are exact; SGLang's scheduler also ends those that begin so",
    ),
    Row("GET POST", "/flush_cache", flush_cache, "FlushCache", query=[Field("timeout", float, 0.0)]),
    Row("GET POST", "/release_memory_occupation", release_memory, "ReleaseMemory", [_TAGS],
        note="400 while requests run, or a server that frees nothing; SGLang ends"),
    Row("GET POST", "/resume_memory_occupation", resume_memory, "ResumeMemory", [_TAGS],
        note="a region that is not released is confirmed; SGLang ends"),
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
        note="digests are rlctl's; `model_digest` is the same for every TP size",
    ),
    Row("GET", "/model_info", model_info, "GetModelInfo", scope=Scope.VIEWER, answers=_READ),
    Row("GET", "/get_model_info", model_info, "GetModelInfo", scope=Scope.VIEWER, answers=_READ),
    Row("GET", "/get_weight_version", get_weight_version, "GetFleet", scope=Scope.VIEWER, answers=_READ,
        note="slime's"),
    Row("GET", "/server_info", server_info, "GetServerInfo, GetLoads", scope=Scope.VIEWER, answers=_READ,
        note="arguments are strings; launch values are the engine's own"),
    Row("GET", "/get_server_info", server_info, "GetServerInfo, GetLoads", scope=Scope.VIEWER, answers=_READ),
    Row(
        "GET",
        "/v1/loads",
        loads,
        "GetLoads",
        query=[Field("dp_rank", int, None), Field("include", str, ""), Field("format", str, "json")],
        scope=Scope.VIEWER,
        answers=_READ,
        note="the core section, whatever is included; at the root one entry for each engine",
    ),
    Row("GET", "/health", health, "GetFleet", scope=Scope.OPEN, answers=_HEALTH,
        note="nothing is generated: a busy or paused engine is healthy"),
    Row("GET", "/health_generate", health, "GetFleet", scope=Scope.OPEN, answers=_HEALTH, note="as /health"),
    Row("GET", "/ready", ready, "GetFleet", scope=Scope.OPEN, answers=_HEALTH),
)  # fmt: skip
