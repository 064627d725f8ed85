"""Rules for a trainer's calls of a weight update."""

from __future__ import annotations

from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields
from rlctl.contract.rules.options import check_adapter_options, check_options
from rlctl.contract.rules.table import Rules
from rlctl.v1 import update_pb2, verbs_pb2

RULES = Rules()
RULES.require(update_pb2.JoinWeightUpdateRequest, "update_id")
RULES.require(update_pb2.RetryWeightUpdateRequest, "update_id", "failed_attempt")
RULES.require(update_pb2.AbortWeightUpdateRequest, "update_id")
RULES.require(update_pb2.RenewLeaseRequest, "update_id")


@RULES.of(update_pb2.BeginWeightUpdateRequest)
def _begin(request: update_pb2.BeginWeightUpdateRequest) -> None:
    if not request.implicit:
        fields.required(request.model, "model")
        fields.required(request.version, "version")
    elif request.apply == verbs_pb2.APPLY_MODE_STAGED or request.num_sources > 1 or request.retries:
        raise Reason.FIELD_CONFLICT.error(
            "an implicit update excludes staging, several sources and retries", field="implicit"
        )
    elif request.rollout.max_unavailable:
        raise Reason.FIELD_CONFLICT.error(
            "clients that name no update send the weights once, not batch by batch", field="rollout.max_unavailable"
        )
    if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
        fields.adapter_name(request.adapter, "adapter")
        if not request.HasField("adapter_config"):
            raise Reason.FIELD_REQUIRED.error(
                "adapter_config is required for an adapter",
                field="adapter_config",
                next_step="Load an adapter from disk with LoadAdapter.",
            )
        check_adapter_options(request.options)
    elif request.adapter or request.HasField("adapter_config"):
        raise Reason.FIELD_CONFLICT.error("an adapter is named, but the update is not of kind ADAPTER", field="kind")
    target = request.header.target
    if target.slots or target.stages or target.model not in ("", request.model):
        raise fields.invalid("an update reaches every stage of its model; leave the target empty", "header.target")
    fields.timeout(request, "lease_ttl")
    fields.timeout(request, "renew_interval")
    check_options(request.options)


@RULES.of(update_pb2.CommitBatchRequest)
def _commit_batch(request: update_pb2.CommitBatchRequest) -> None:
    fields.required(request.update_id, "update_id")
    fields.required(request.batch, "batch")
    _said_at_commit(request)


@RULES.of(update_pb2.CommitWeightUpdateRequest)
def _commit(request: update_pb2.CommitWeightUpdateRequest) -> None:
    if not (request.header.target.model or request.header.for_slot):
        fields.required(request.update_id, "update_id")
    if request.update_id and request.version:
        raise fields.invalid("an update that was begun by name has its version", "version")
    _said_at_commit(request)


def _said_at_commit(request: update_pb2.CommitWeightUpdateRequest | update_pb2.CommitBatchRequest) -> None:
    fields.digest(request.expected_digest, "expected_digest")
    fields.digest(request.sent_digest, "sent_digest")
    fields.fingerprints(request.fingerprints)
