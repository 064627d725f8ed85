"""vLLM's control paths as verbs, with the response of each engine."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import PreconditionFailed, Reason, RlctlError, from_detail
from rlctl.gateway.dialects.vllm import requests
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import Call, confirmed
from rlctl.gateway.http.dialect import Reply, Route, plain_error
from rlctl.v1.common_pb2 import STAGE_STATE_FAILED, STAGE_STATE_PAUSED, StageState
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation, StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from rlctl.v1.verbs_pb2 import (
    AbortRequestsRequest,
    ContinueGenerationRequest,
    ResumeMemoryRequest,
)

UPDATE_S = 600.0

Steps = Callable[[Call], Awaitable[Sequence[Message]]]


@dataclass(frozen=True)
class Control:
    """A control path.

    Attributes:
        steps: the requests of the path, run in order until one fails.
        reply: the body of an engine's successful response.
        several: the path has several operations, so they continue when the caller disconnects.
        goes_on: generation continues once all memory is back.
    """

    path: str
    steps: Steps
    reply: Mapping[str, Any]
    doc: str
    several: bool = False
    goes_on: bool = False


_JOINED = {"message": "Weight transfer initialized"}
_DONE = {"message": "Weight update finished"}

CONTROLS = (
    Control(
        "/pause",
        requests.pause,
        {"status": "paused"},
        "PauseGeneration, and FlushCache for clear_cache.",
        several=True,
    ),
    Control("/resume", requests.resume, {"status": "resumed"}, "ContinueGeneration; commits an open update."),
    Control("/sleep", requests.sleep, {"status": "sleeping"}, "PauseGeneration, then ReleaseMemory.", several=True),
    Control(
        "/wake_up",
        requests.wake_up,
        {"status": "awake"},
        "ResumeMemory; all of it there: generation too.",
        several=True,
        goes_on=True,
    ),
    Control(
        "/reset_prefix_cache",
        requests.reset_prefix_cache,
        {"success": True},
        "FlushCache, of running requests too by a pause that retracts them.",
        several=True,
    ),
    Control(
        "/collective_rpc",
        requests.collective_rpc,
        {"results": []},
        "One of the methods that are allowed.",
        several=True,
    ),
    Control(
        "/init_weight_transfer_engine",
        functools.partial(requests.init_transfer, follow=False),
        _JOINED,
        "InitWeightsUpdateGroup.",
    ),
    Control(
        "/init_weight_transfer",
        functools.partial(requests.init_transfer, follow=True),
        _JOINED,
        "The same under SkyRL's first name; engines find out their own offsets.",
    ),
    Control(
        "/start_weight_update",
        requests.start_update,
        {"message": "Weight update started"},
        "Opens an update that is joined without naming it.",
    ),
    Control(
        "/update_weights", requests.update_weights, {"message": "Weights updated"}, "UpdateWeightsFromDistributed."
    ),
    Control("/finish_weight_update", requests.finish_update, _DONE, "Commits the open update."),
    Control("/finalize_weight_update", requests.finish_update, _DONE, "The same, SkyRL's first name."),
    Control("/update_weight_version", requests.set_version, {"success": True}, "Commits under this label."),
    Control(
        "/shutdown_weight_transfer_engine",
        requests.shut_down,
        {"message": "Weight transfer shut down"},
        "DestroyWeightsUpdateGroup.",
    ),
)


async def control(row: Control, call: Call) -> Reply:
    """Carry out the steps, and answer with the first failure.

    A continue step runs also after a failure, to end the pause for the other steps. A later step that no engine
    supports is refused before the first step.
    """
    steps = await row.steps(call)
    for step in steps[1:]:
        await _refuse(call, step)
    operation, refusal = Operation(), None
    for number, step in enumerate(steps):
        failed = refusal is not None or (number > 0 and not _done(operation))
        if failed and not isinstance(step, ContinueGenerationRequest):
            continue
        try:
            carried_out = await _carry_out(call, step, f"step {number}" if number else "")
        except RlctlError as error:
            if number == 0:
                raise
            refusal = refusal or error
            continue
        if failed:
            continue
        operation = carried_out
        if row.goes_on and isinstance(step, ResumeMemoryRequest) and operation.stage_results:
            operation = await _go_on(call, operation)
    if refusal is not None:
        raise refusal
    return await _told(call, row, operation)


async def _refuse(call: Call, step: Message) -> None:
    """Raise UNSUPPORTED_BY_ALL if no engine supports the step."""
    request = type(step)()
    request.CopyFrom(step)
    try:
        await call.fleet.call(await engine_urls.aimed(call, request, "asked"), validate_only=True)
    except RlctlError as error:
        if error.reason is Reason.UNSUPPORTED_BY_ALL:
            raise


async def _go_on(call: Call, woken: Operation) -> Operation:
    """Continue engines with all memory back and good weights: a vLLM server generates once it is awake."""
    if {result.state for result in woken.stage_results} - {STAGE_STATE_FAILED} != {STAGE_STATE_PAUSED}:
        return woken
    return await _carry_out(call, ContinueGenerationRequest(), "continue")


async def _carry_out(call: Call, step: Message, name: str = "") -> Operation:
    request = await engine_urls.aimed(call, step, name)
    if isinstance(request, BeginWeightUpdateRequest):
        request.implicit, request.model = True, request.header.target.model
        await call.fleet.connection.call("BeginWeightUpdate", request, UPDATE_S)
        return Operation(state=OPERATION_STATE_OK)
    if isinstance(request, CommitWeightUpdateRequest):
        committed: Operation = await call.fleet.connection.call("CommitWeightUpdate", request, UPDATE_S)
        call.note_excluded(committed)
        return committed
    operation: Operation = await call.operate(request, check=False)
    return operation


def _done(operation: Operation) -> bool:
    return operation.state == OPERATION_STATE_OK and all(map(confirmed, operation.stage_results))


async def _told(call: Call, row: Control, operation: Operation) -> Reply:
    results = {result.slot: result for result in operation.stage_results}
    slots = engine_urls.slots_of(call)
    if slots:
        result = results.get(slots[0])
        error = _error(operation, result)
        if error is not None:
            return plain_error(error) if not _is_no(row, error) else Reply({"success": False, "message": str(error)})
        return Reply(_body(row, result))
    missing = {each.slot: excluded_engine(each.slot, each.state, each.reason) for each in operation.excluded}
    targets = list(operation.targets)
    if not targets:  # an opened update: the coordinator reports no targets
        stages = await engine_urls.listed(call)
        targets = [stage.registration.slot for stage in stages if stage.state not in engine_urls.GONE]
        missing = {
            stage.registration.slot: excluded_engine(stage.registration.slot, stage.state)
            for stage in stages
            if stage.state in engine_urls.GONE
        }
    answers: dict[str, Mapping[str, Any]] = {}
    for slot in sorted({*targets, *missing}):
        if slot in missing:
            answers[engine_urls.url_of(call, slot)] = missing[slot]
            continue
        error = _error(operation, results.get(slot))
        if error is None:
            answers[engine_urls.url_of(call, slot)] = {"status": 200, "body": _body(row, results.get(slot))}
        elif _is_no(row, error):
            answers[engine_urls.url_of(call, slot)] = {"status": 200, "body": {"success": False, "message": str(error)}}
        else:
            answers[engine_urls.url_of(call, slot)] = {"status": error.http_status, "error": str(error)}
    return reply_by_engine(answers)


def _error(operation: Operation, result: StageResult | None) -> RlctlError | None:
    if result is not None:
        return None if confirmed(result) else from_detail(result.error)
    return None if operation.state == OPERATION_STATE_OK else from_detail(operation.error)


def _is_no(row: Control, error: RlctlError) -> bool:
    """vLLM answers 200 with success false if the cache cannot be reset."""
    return row.path == "/reset_prefix_cache" and isinstance(error, PreconditionFailed)


def _body(row: Control, result: StageResult | None) -> dict[str, Any]:
    body = dict(row.reply)
    if "results" in body:
        body["results"] = [None] * (len(result.rank_results) if result is not None else 1)
    if result is not None and result.weight_version.label:
        body["weight_version"] = result.weight_version.label
    return body


def reply_by_engine(answers: Mapping[str, Mapping[str, Any]]) -> Reply:
    """Form a map of statuses and bodies by engine URL: 207 unless all succeeded."""
    return Reply(answers, 200 if all(answer.get("status", 200) == 200 for answer in answers.values()) else 207)


def excluded_engine(slot: str, state: StageState.ValueType, reason: str = "") -> dict[str, Any]:
    error = engine_urls.unreachable(slot, state, reason)
    return {"status": error.http_status, "error": str(error)}


async def abort(call: Call) -> Reply:
    """Abort requests by their ids, or all requests."""
    fields = await call.fields()
    rids = fields.take_list("request_ids", str, None)
    ended = await _abort(call, rids or ())
    return Reply({"status": "aborted", "aborted": len(rids) if rids else ended})


async def abort_named(call: Call) -> Reply:
    """Abort requests by their ids. Without ids nothing ends."""
    fields = await call.fields()
    if rids := fields.take_list("request_ids", str):
        await _abort(call, rids)
    return Reply()


async def _abort(call: Call, rids: Sequence[str]) -> int:
    """Abort the requests with these ids, or all requests; return their number."""
    request = AbortRequestsRequest(rids=rids, abort_all=not rids)
    stopped = await call.generation.stop(rids) if rids else []
    operation = await call.operate(await engine_urls.aimed(call, request))
    ended = sum(rank.abort.aborted for result in operation.stage_results for rank in result.rank_results)
    return ended + len(stopped)


ROUTES = (
    *(Route("POST", row.path, functools.partial(control, row), doc=row.doc, lasting=row.several) for row in CONTROLS),
    Route("POST", "/abort_requests", abort, doc="AbortRequests; {} ends all."),
    Route("POST", "/inference/v1/abort_requests", abort_named, doc="AbortRequests of the ids in the body."),
)
