"""Operations in the form of SGLang-Omni's worker and router. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlctl.contract.durations import seconds
from rlctl.contract.enums import short_name
from rlctl.contract.errors import from_detail
from rlctl.contract.verbs import VERBS
from rlctl.gateway.http.call import confirmed
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.plain_json import plain
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_SKIPPED,
    STAGE_STATE_FAILED,
    STAGE_STATE_PAUSED,
    STAGE_STATE_RETIRED,
    STAGE_STATE_UNREACHABLE,
    ErrorDetail,
    StageState,
)
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, Operation, RankResult, StageResult
from rlctl.v1.verbs_pb2 import CHECK_ACTION_COMPARE, CheckAction, CheckReport, TensorDigest

UrlOf = Callable[[str], str]

_ACTIONS = {"GetModelInfo": "model_info", "CheckWeights": "weights_checker"}

_GOOD = (OPERATION_STATE_OK, OPERATION_STATE_RUNNING)


def of_router(operation: Operation, path: str, url_of: UrlOf) -> Reply:
    """Form the response to a broadcast: 502 if a worker failed, 409 if the workers' versions are mixed."""
    results: list[dict[str, Any]] = [
        {
            "worker": url_of(result.slot),
            "success": _succeeded(operation, result),
            "status_code": _status(operation, result),
            "body": _body(operation, [result]),
        }
        for result in operation.stage_results
    ]
    failed = [result for result in results if not result["success"]]
    success = operation.state in _GOOD and not failed
    status = 200 if success else 502
    message = "ok" if success else _why(operation.error) or failed[0]["body"]["message"]
    versions = {result.weight_version.label for result in operation.stage_results}
    if success and path == "/model_info" and len(versions) > 1:
        success, status, message = False, 409, f"the workers' weight versions are mixed: {', '.join(sorted(versions))}"
    body = {
        "success": success,
        "message": message,
        "path": path,
        "worker_count": len(operation.targets),
        "results": results,
        "excluded": [
            {"worker": url_of(each.slot), "state": short_name(StageState.DESCRIPTOR, each.state), "reason": each.reason}
            for each in operation.excluded
        ],
        "operation_id": operation.operation_id,
    }
    if path == "/model_info":
        body["workers"] = results
    if path == "/model_info" and success and results:
        first = results[0]["body"]
        body |= {"weight_version": versions.pop(), "model_path": first.get("model_path"), "load_format": None}
    return Reply(body, status)


def of_worker(operation: Operation, slot: str) -> Reply:
    """Form one engine's response to an operation with possibly several targets."""
    results = [result for result in operation.stage_results if result.slot == slot]
    body = _body(operation, results)
    if results:
        return Reply(body, _status(operation, results[0]))
    succeeded = operation.state in _GOOD
    return Reply(body, 200 if succeeded else from_detail(operation.error).http_status)


def worker(stage: Stage, url: str) -> dict[str, Any]:
    """Return a worker in the form of the router's list."""
    dead = stage.state in (STAGE_STATE_UNREACHABLE, STAGE_STATE_RETIRED, STAGE_STATE_FAILED)
    return {
        "worker_id": stage.registration.slot,
        "url": url,
        "model": stage.registration.model,
        "state": short_name(StageState.DESCRIPTOR, stage.state),
        "routable": stage.routable,
        "disabled": not stage.enabled,
        "is_dead": dead,
        "weight_version": stage.report.weight_version.label,
        "reason": stage.not_routable,
    }


def _body(operation: Operation, results: Sequence[StageResult]) -> dict[str, Any]:
    stages = [_stage(operation, result) for result in results]
    success = all(stage["success"] for stage in stages) if stages else operation.state in _GOOD
    failed = next((stage["message"] for stage in stages if not stage["success"]), _why(operation.error))
    body: dict[str, Any] = {
        "op_id": operation.operation_id,
        "action": _action(operation),
        "success": success,
        "message": "ok" if success else failed,
        "results": stages,
    }
    if operation.verb == "GetModelInfo" and success and stages:
        body = {**stages[0]["data"], **body, "stages": stages}
    return body


def _stage(operation: Operation, result: StageResult) -> dict[str, Any]:
    """Return a stage's result. Success needs all ranks; ``data`` is rank 0's, and rank_results has every rank's."""
    ranks = [_rank(rank) for rank in result.rank_results]
    success = _succeeded(operation, result)
    data: dict[str, Any] = {
        **(ranks[0]["data"] if ranks else {}),
        "engine_paused": result.state == STAGE_STATE_PAUSED,
        "weight_version": result.weight_version.label,
        "tp_size": len(ranks),
        "rank_results": ranks,
    }
    if result.outcome == OUTCOME_SKIPPED and not success:
        data |= {"skipped": True, "unsupported": True}
    return {
        "op_id": operation.operation_id,
        "stage": "main",
        "action": _action(operation),
        "success": success,
        "message": "ok" if result.outcome == OUTCOME_APPLIED else _why(result.error),
        "data": data,
        "error": None if success else _why(result.error),
        "rank": None,
        "role": None,
        "state": short_name(StageState.DESCRIPTOR, result.state),
    }


def _action(operation: Operation) -> str:
    """Return Omni's name of the verb, equal to its path."""
    verb = VERBS.get(operation.verb)
    return _ACTIONS.get(operation.verb) or (verb.method if verb is not None else operation.verb)


def _rank(result: RankResult) -> dict[str, Any]:
    kind = result.WhichOneof("data")
    data = getattr(result, kind) if kind else None
    fields: dict[str, Any] = {}
    if isinstance(data, CheckReport):
        fields = _check(data)
    elif data is not None:
        fields = plain(data)
        if isinstance(fields.get("weight_version"), dict):
            fields["weight_version"] = fields["weight_version"]["label"]
    return {
        "rank": result.coordinates.rank,
        "success": confirmed(result),
        "message": "ok" if result.outcome == OUTCOME_APPLIED else _why(result.error),
        "data": fields,
    }


def _check(report: CheckReport) -> dict[str, Any]:
    """Return the checker's result under Omni's names, with the model digest, equal for all layouts."""
    fields: dict[str, Any] = {
        "action": short_name(CheckAction.DESCRIPTOR, report.action),
        "tensor_count": report.tensor_count,
        "checksums": {tensor.name: tensor.sha256 for tensor in report.tensors},
        "tensor_metadata": {tensor.name: _metadata(tensor) for tensor in report.tensors},
        "per_gpu_checksum": report.rank_digest,
        "model_digest": report.model_digest,
        "elapsed_s": seconds(report.elapsed),
    }
    if report.action == CHECK_ACTION_COMPARE:
        fields |= {
            "matched": not (report.missing or report.unexpected or report.changed),
            "missing": list(report.missing),
            "unexpected": list(report.unexpected),
            "changed": list(report.changed),
        }
    return fields


def _metadata(tensor: TensorDigest) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape.dims), "dtype": tensor.dtype, "sha256": tensor.sha256}


def _succeeded(operation: Operation, result: StageResult) -> bool:
    verb = VERBS.get(operation.verb)
    return confirmed(result, update=verb is not None and verb.writes_weights)


def _status(operation: Operation, result: StageResult) -> int:
    return 200 if _succeeded(operation, result) else from_detail(result.error).http_status


def _why(error: ErrorDetail) -> str:
    return str(from_detail(error)) if error.reason else ""
