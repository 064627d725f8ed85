"""SGLang's routes that return information: the model, versions, loads, health."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Scope
from rlctl.gateway.http.table import Field, Row, RowCall
from rlctl.runtime.addresses import split
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.fleet_pb2 import Fleet, Stage
from rlctl.v1.results_pb2 import Operation, StageResult
from rlctl.version import __version__

_ARGUMENTS: dict[str, Any] = {
    "base_gpu_id": 0,
    "enable_memory_saver": False,
    "ep_size": 1,
    "gpu_id_step": 1,
    "load_format": "auto",
    "nnodes": 1,
    "node_rank": 0,
}
"""SGLang's arguments that trainers compare, for engines without an argument of this name."""

_MODES = {common_pb2.WORKER_TYPE_PREFILL: "prefill", common_pb2.WORKER_TYPE_DECODE: "decode"}


async def model_info(row_call: RowCall) -> Reply:
    """Return the loaded model and its version."""
    operation = await row_call.operate(verbs_pb2.GetModelInfoRequest(), partly=True)
    result = telling(operation)[0]
    info = result.rank_results[0].model_info
    version = result.weight_version if result.weight_version.sequence else info.weight_version
    if not row_call.slot:
        version = await _latest(row_call, await fleet_of(row_call), result.slot)
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


async def get_weight_version(row_call: RowCall) -> Reply:
    """Return the served version."""
    fleet = await fleet_of(row_call)
    if row_call.slot:
        stage = stage_of(fleet, row_call.slot)
        version = stage.report.weight_version
    else:
        version = await _latest(row_call, fleet)
    return Reply({"weight_version": version.label, "weight_version_seq": version.sequence})


async def server_info(row_call: RowCall) -> Reply:
    """Return the engines' start arguments and present state."""
    started = await row_call.operate(verbs_pb2.GetServerInfoRequest(), partly=True)
    loads = await row_call.operate(verbs_pb2.GetLoadsRequest(), "loads", partly=True)
    results = telling(started)
    first = results[0]
    fleet = await fleet_of(row_call)
    stage = stage_of(fleet, first.slot)
    layouts = [stage_of(fleet, result.slot).registration.layout.workers for result in results]
    info = first.rank_results[0].server_info
    states = _loads(loads)
    return Reply(
        {
            **_ARGUMENTS,
            **(_data(info.arguments) if info.HasField("arguments") else dict(info.settings)),
            **_place(row_call.call),
            **_sizes(layouts),
            "disaggregation_mode": _MODES.get(stage.registration.worker_type, "null"),
            "status": "ready" if stage.routable else "not ready",
            "model_path": stage.report.checkpoint or stage.registration.checkpoint,
            "max_total_num_tokens": states[0]["max_total_num_tokens"],
            "internal_states": states,
            "weight_version": stage.report.weight_version.label,
            "version": info.engine_version,
            "engine": info.engine,
            "frontend": f"rlctl {__version__}",
            "startup_time": seconds(info.uptime),
            "engines": [result.slot for result in results],
        }
    )


def _sizes(layouts: Sequence[Sequence[WorkerCoordinates]]) -> dict[str, int]:
    """Return the sizes of the only engine, or of several engines as one server. Trainers count tp_size times pp_size
    ranks.
    """
    ranks = sum(map(len, layouts))
    pp_size = 1 + max(worker.pp for worker in layouts[0])
    if len(layouts) > 1:
        return {"tp_size": ranks, "pp_size": 1, "dp_size": 1, "num_gpus": ranks}
    return {
        "tp_size": 1 + max(worker.tp for worker in layouts[0]),
        "pp_size": pp_size,
        "dp_size": 1,
        "num_gpus": ranks,
    }


def _place(call: Call) -> dict[str, Any]:
    """Return host and port of the request, because callers must not bypass the gateway by an engine's own address."""
    try:
        host, port = split(call.headers.get("Host", ""), "Host")
    except RlctlError:
        return {"host": call.headers.get("Host", ""), "port": 80}
    return {"host": host, "port": port}


def _data(arguments: Struct) -> dict[str, Any]:
    """Return the values with the engine's types. A Struct has only floats, so whole numbers become ints."""
    return {name: _whole(value) for name, value in json_format.MessageToDict(arguments).items()}


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def loads(row_call: RowCall) -> Reply:
    """Return the running and waiting requests of every engine."""
    states = _loads(await row_call.operate(verbs_pb2.GetLoadsRequest(), partly=True))
    dp_rank = row_call["dp_rank"]
    if dp_rank is not None and dp_rank >= len(states):
        raise Reason.FIELD_INVALID.error(
            f"dp_rank is {dp_rank}; there are {len(states)} ranks, counted from 0", field="dp_rank"
        )
    chosen = states if dp_rank is None else states[dp_rank : dp_rank + 1]
    if row_call["format"] == "prometheus":
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


def telling(operation: Operation) -> list[StageResult]:
    """Return the results of engines that support the verb. Other results are empty."""
    return [result for result in operation.stage_results if result.outcome == common_pb2.OUTCOME_APPLIED]


def _loads(operation: Operation) -> list[dict[str, Any]]:
    """Return one entry for each engine with loads: the maximum over its ranks, since only one rank schedules."""
    states = []
    for index, result in enumerate(telling(operation)):
        rank_loads = [rank.loads for rank in result.rank_results]
        running, waiting = max(load.running for load in rank_loads), max(load.waiting for load in rank_loads)
        used_tokens, max_tokens = (
            max(load.used_tokens for load in rank_loads),
            max(load.max_tokens for load in rank_loads),
        )
        states.append(
            {
                "dp_rank": index,
                "engine": result.slot,
                "timestamp": time.time(),
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_total_reqs": running + waiting,
                "num_used_tokens": used_tokens,
                "num_total_tokens": used_tokens,
                "max_total_num_tokens": max_tokens,
                "token_usage": round(used_tokens / max_tokens, 4) if max_tokens else 0.0,
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


async def health(row_call: RowCall) -> Reply:
    """Return whether the engine is present with all ranks, at the root whether any is; generates nothing."""
    fleet = await fleet_of(row_call)
    stages = [stage_of(fleet, row_call.slot)] if row_call.slot else fleet.stages
    return Reply(status=200 if any(map(_alive, stages)) else 503)


async def ready(row_call: RowCall) -> Reply:
    """Return whether the engine may generate: at the admitted version, not paused; at the root whether any may."""
    fleet = await fleet_of(row_call)
    stages = [stage_of(fleet, row_call.slot)] if row_call.slot else fleet.stages
    return Reply(status=200 if any(stage.routable for stage in stages) else 503)


def _alive(stage: Stage) -> bool:
    absent_states = (common_pb2.STAGE_STATE_UNREACHABLE, common_pb2.STAGE_STATE_JOINING, common_pb2.STAGE_STATE_RETIRED)
    return stage.state not in absent_states and all(rank.alive for rank in stage.report.ranks)


async def fleet_of(row_call: RowCall) -> Fleet:
    """Return the fleet with the gateway's own token, because health needs no token of the caller."""
    return await row_call.call.generation.fleet.status()


def stage_of(fleet: Fleet, slot: str) -> Stage:
    """Return the stage in a slot. Raises STAGE_NOT_FOUND."""
    for stage in fleet.stages:
        if stage.registration.slot == slot:
            return stage
    raise Reason.STAGE_NOT_FOUND.error(f"no engine fills slot {slot!r}")


async def _latest(row_call: RowCall, fleet: Fleet, slot: str = "") -> common_pb2.WeightVersion:
    """Return the published version of a stage's model, or of the gateway's model."""
    model = stage_of(fleet, slot).registration.model if slot else await row_call.call.generation.model()
    return next(each.latest for each in fleet.models if each.name == model)


_READ = {200: "the answer", 400: "what is wrong with the request"}
_HEALTH = {200: "yes", 503: "no"}

ROWS = (
    Row("GET", "/model_info", model_info, "GetModelInfo", scope=Scope.VIEWER, answers=_READ),
    Row("GET", "/get_model_info", model_info, "GetModelInfo", scope=Scope.VIEWER, answers=_READ),
    Row("GET", "/get_weight_version", get_weight_version, "GetFleet", scope=Scope.VIEWER, answers=_READ,
        note="of slime"),
    Row("GET", "/server_info", server_info, "GetServerInfo, GetLoads", scope=Scope.VIEWER, answers=_READ,
        note="the engine's own launch arguments, with their types"),
    Row("GET", "/get_server_info", server_info, "GetServerInfo, GetLoads", scope=Scope.VIEWER, answers=_READ),
    Row(
        "GET",
        "/v1/loads",
        loads,
        "GetLoads",
        query=[Field("dp_rank", int, None), Field("include", str, ""), Field("format", str, "json")],
        scope=Scope.VIEWER,
        answers=_READ,
        note="always the core section only; at the root one entry for each engine",
    ),
    Row("GET", "/health", health, "GetFleet", scope=Scope.OPEN, answers=_HEALTH,
        note="generates nothing: a busy or paused engine is healthy"),
    Row("GET", "/health_generate", health, "GetFleet", scope=Scope.OPEN, answers=_HEALTH, note="as /health"),
    Row("GET", "/ready", ready, "GetFleet", scope=Scope.OPEN, answers=_HEALTH),
)  # fmt: skip
