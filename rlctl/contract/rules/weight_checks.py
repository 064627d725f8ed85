"""Rules for CheckWeights: digests, comparisons, probes and reads of tensors."""

from __future__ import annotations

from rlctl.contract import digests
from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields
from rlctl.contract.rules.options import check_prompts
from rlctl.contract.rules.table import Rules
from rlctl.v1 import verbs_pb2

RULES = Rules()


@RULES.of(verbs_pb2.CheckWeightsRequest)
def _check_weights(request: verbs_pb2.CheckWeightsRequest) -> None:
    fields.digest(request.expected_digest, "expected_digest")
    fields.digest_key(request.digest_key)
    _digest_function(request)
    _shadow(request)
    fields.fingerprints(request.fingerprints)
    if request.action == verbs_pb2.CHECK_ACTION_PROBE:
        check_prompts(request.prompts, "prompts")
    elif request.prompts:
        raise Reason.FIELD_CONFLICT.error("prompts are for the action PROBE", field="prompts")
    if request.action == verbs_pb2.CHECK_ACTION_READ:
        _read(request)
    elif request.tensor or request.HasField("rows"):
        field = "tensor" if request.tensor else "rows"
        raise Reason.FIELD_CONFLICT.error(f"{field} is for the action READ", field=field)


def _digest_function(request: verbs_pb2.CheckWeightsRequest) -> None:
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
    if request.digest == verbs_pb2.DIGEST_FUNCTION_PREFER_KEYED:
        raise fields.invalid("prefer_keyed is for updates only", "digest")
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


def _shadow(request: verbs_pb2.CheckWeightsRequest) -> None:
    if not request.shadow:
        return
    if request.action not in (verbs_pb2.CHECK_ACTION_UNSPECIFIED, verbs_pb2.CHECK_ACTION_CHECKSUM):
        raise Reason.FIELD_CONFLICT.error("a shadow copy can only be digested", field="action")
    if request.adapter:
        raise Reason.FIELD_CONFLICT.error("adapters have no shadow copy", field="shadow")


def _read(request: verbs_pb2.CheckWeightsRequest) -> None:
    fields.name(request.tensor, "tensor", fields.MOST_NAME)
    if request.HasField("rows") and not request.rows:
        raise fields.invalid("rows is 0; at least one row is read", "rows")
    for field in ("adapter", "expected_digest", "digest_key", "fingerprints", "per_tensor", "skip_tensors"):
        if getattr(request, field):
            raise Reason.FIELD_CONFLICT.error(f"the action READ takes no {field}", field=field)
