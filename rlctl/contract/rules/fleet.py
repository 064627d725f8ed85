"""Rules for requests of the fleet: registration, watches, slots, models and reserved request ids."""

from __future__ import annotations

from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields
from rlctl.contract.rules.table import Rules
from rlctl.v1 import coordinator_pb2

MOST_WATCH_ID = 128
MOST_KEY = 256
MOST_LOG_LINES = 100

RULES = Rules()
RULES.require(coordinator_pb2.TakeOverStagesRequest, "slots")
RULES.require(coordinator_pb2.ListVersionsRequest, "model")
RULES.require(coordinator_pb2.SetHealingRequest, "model")


@RULES.of(coordinator_pb2.RegisterStageRequest)
def _register(request: coordinator_pb2.RegisterStageRequest) -> None:
    registration = request.registration
    fields.slot_name(registration.slot, "registration.slot")
    for name in ("model", "address", "boot_id", "engine"):
        fields.name(getattr(registration, name), f"registration.{name}", fields.MOST_NAME)
    if registration.weight_version:
        fields.name(registration.weight_version, "registration.weight_version", fields.MOST_LABEL)
    fields.required(registration.layout.workers, "registration.layout.workers")
    ranks = [worker.rank for worker in registration.layout.workers]
    if ranks != list(range(len(ranks))):
        raise fields.invalid(f"ranks are {ranks}; they must run from 0, in order", "registration.layout.workers")


@RULES.of(coordinator_pb2.WatchFleetRequest)
def _watch(request: coordinator_pb2.WatchFleetRequest) -> None:
    if request.watch_id:
        fields.name(request.watch_id, "watch_id", MOST_WATCH_ID)


@RULES.of(coordinator_pb2.ConfirmFleetRequest)
def _confirm(request: coordinator_pb2.ConfirmFleetRequest) -> None:
    fields.name(request.watch_id, "watch_id", MOST_WATCH_ID)


@RULES.of(coordinator_pb2.SetStageEnabledRequest)
def _enabled(request: coordinator_pb2.SetStageEnabledRequest) -> None:
    fields.required(request.slots, "slots")
    if request.enabled and request.reason:
        raise Reason.FIELD_CONFLICT.error("reason says why stages are disabled", field="reason")
    if request.enabled and request.force:
        raise Reason.FIELD_CONFLICT.error("force is for a disable", field="force")


@RULES.of(coordinator_pb2.ReportEngineFailureRequest)
def _engine_failure(request: coordinator_pb2.ReportEngineFailureRequest) -> None:
    fields.required(request.slot, "slot")
    fields.required(request.failure.reason, "failure.reason")
    if len(request.failure.log) > MOST_LOG_LINES:
        raise fields.invalid(f"{len(request.failure.log)} lines; {MOST_LOG_LINES} at most", "failure.log")


@RULES.of(coordinator_pb2.AdmitSlotsRequest)
def _admit(request: coordinator_pb2.AdmitSlotsRequest) -> None:
    for field in ("slots", "dismissed"):
        for index, slot in enumerate(getattr(request, field)):
            fields.slot_name(slot, f"{field}[{index}]")
    duplicates = sorted(set(request.slots) & set(request.dismissed))
    if duplicates:
        raise Reason.FIELD_CONFLICT.error(f"slot {duplicates[0]!r} is to be admitted and dismissed", field="dismissed")


@RULES.of(coordinator_pb2.SetMinHealthyRequest)
def _min_healthy(request: coordinator_pb2.SetMinHealthyRequest) -> None:
    fields.required(request.model, "model")
    if request.min_healthy.percent > 100:
        raise fields.invalid(f"percent is {request.min_healthy.percent}, at most 100", "min_healthy.percent")


@RULES.of(coordinator_pb2.ReserveRequestIdRequest)
def _reserve(request: coordinator_pb2.ReserveRequestIdRequest) -> None:
    fields.name(request.key, "key", MOST_KEY)
    if len(request.body_sha256) != 32:
        raise fields.invalid(f"body_sha256 has {len(request.body_sha256)} bytes; SHA-256 has 32", "body_sha256")
