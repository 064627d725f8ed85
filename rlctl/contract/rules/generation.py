"""Rules for requests of generation: samples, aborts, pauses, the cache and memory regions."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields
from rlctl.contract.rules.table import Rules
from rlctl.contract.sampling import check_levels
from rlctl.v1 import rollout_pb2, verbs_pb2
from rlctl.v1.common_pb2 import MEMORY_TAG_UNSPECIFIED

MOST_BY = 200
MOST_REASON = 1000

RULES = Rules()


@RULES.of(rollout_pb2.GenerateRequest)
def _generate(request: rollout_pb2.GenerateRequest) -> None:
    if request.WhichOneof("prompt") is None:
        raise Reason.FIELD_REQUIRED.error("neither text nor input_ids is set", field="prompt")
    if request.HasField("engine_fields"):
        check_levels(request.engine_fields)


@RULES.of(verbs_pb2.AbortRequestsRequest)
def _abort(request: verbs_pb2.AbortRequestsRequest) -> None:
    _rids(request)


@RULES.of(rollout_pb2.AbortRequest)
def _abort_at_stage(request: rollout_pb2.AbortRequest) -> None:
    _rids(request)


def _rids(request: verbs_pb2.AbortRequestsRequest | rollout_pb2.AbortRequest) -> None:
    if request.abort_all and request.rids:
        raise Reason.FIELD_CONFLICT.error("rids and abort_all exclude each other", field="rids")
    if not request.abort_all:
        fields.required(request.rids, "rids")


@RULES.of(verbs_pb2.PauseGenerationRequest)
def _pause(request: verbs_pb2.PauseGenerationRequest) -> None:
    for field, most in (("by", MOST_BY), ("reason", MOST_REASON)):
        if getattr(request, field):
            fields.name(getattr(request, field), field, most)
    fields.timeout(request, "ttl")
    if request.HasField("ttl") and request.header.fence.update_id:
        raise Reason.FIELD_CONFLICT.error("a pause inside an update ends with it", field="ttl")
    _scope(request)


@RULES.of(verbs_pb2.ContinueGenerationRequest)
def _continue(request: verbs_pb2.ContinueGenerationRequest) -> None:
    _scope(request)
    memory_fields = {"torch_empty_cache": request.HasField("torch_empty_cache"), "when_resident": request.when_resident}
    for field in (name for name, is_set in memory_fields.items() if is_set):
        if request.adapter:
            raise Reason.FIELD_CONFLICT.error(
                f"{field} does not apply to the continue of an adapter", field=field, next_step=f"Omit {field}."
            )


def _scope(request: verbs_pb2.PauseGenerationRequest | verbs_pb2.ContinueGenerationRequest) -> None:
    if not request.adapter:
        return
    fields.adapter_name(request.adapter, "adapter")
    if request.header.fence.update_id:
        raise Reason.FIELD_CONFLICT.error(
            "an update stops the requests with its adapter itself",
            field="adapter",
            next_step="Omit the adapter, or the update in the header's fence.",
        )


@RULES.of(verbs_pb2.FlushCacheRequest)
def _flush(request: verbs_pb2.FlushCacheRequest) -> None:
    fields.timeout(request, "idle_timeout")


@RULES.of(verbs_pb2.ReleaseMemoryRequest)
def _release(request: verbs_pb2.ReleaseMemoryRequest) -> None:
    _tags(request.tags)


@RULES.of(verbs_pb2.ResumeMemoryRequest)
def _resume(request: verbs_pb2.ResumeMemoryRequest) -> None:
    _tags(request.tags)


def _tags(tags: Sequence[int]) -> None:
    if MEMORY_TAG_UNSPECIFIED in tags:
        raise fields.invalid("tags holds an unspecified region", "tags")
    fields.unique(tags, "tags")
