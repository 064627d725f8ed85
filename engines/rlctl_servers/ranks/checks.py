"""Digests of the weights of a rank, or of its shadow copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rlctl.contract.errors import Reason
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.shards.mismatch import difference
from rlctl.weights.shards.rank_exchange import Exchange
from rlctl.weights.shards.shard_map import ShardMap, model_digest
from rlctl.weights.tensor.digest import combine, tensor_digests
from rlctl.weights.tensor.tensors import dtype_name
from rlctl_servers.ranks.rank_exchange import agreed


def refuse_check(request: v.CheckWeightsRequest) -> None:
    """Raise UNSUPPORTED for a checksum of the model that leaves tensors out."""
    if request.skip_tensors and (
        request.per_tensor or request.fingerprints or request.expected_digest or request.digest_key
    ):
        raise Reason.UNSUPPORTED.error("the digests of the model are over all tensors", field="skip_tensors")


def checksum(
    request: v.CheckWeightsRequest, shards: ShardMap, exchange: Exchange, *, first_rank: bool
) -> v.CheckReport:
    """Digest the rank's parts and, together with the other ranks, the model. Raises an error of any rank."""
    report = v.CheckReport(action=v.CHECK_ACTION_CHECKSUM)
    full_digests: dict[str, str] = {}
    key = request.digest_key
    if key or (not request.skip_tensors and (request.model_digest or not request.HasField("model_digest"))):
        result = model_digest(shards, exchange, key=key)
        report.model_digest = result.digest
        report.inconsistent.extend(result.inconsistent)
        full_digests = {name: digest for name, digest in result.every.items() if name not in result.inconsistent}
        if request.fingerprints:
            report.difference.CopyFrom(agreed(exchange, partial(difference, shards, result, request.fingerprints, key)))
        if request.per_tensor and first_rank:
            report.model_tensors.extend(_listed(shards, result.every))
    if key:
        report.tensor_count = len(shards.shards)
        return report
    parts = agreed(exchange, partial(_digests_of_parts, shards, full_digests, request.skip_tensors))
    report.tensor_count, report.rank_digest = len(parts), combine(parts)
    return report


def _digests_of_parts(shards: ShardMap, every: Mapping[str, str], skip: Sequence[str]) -> dict[str, str]:
    """Return hex digests of the rank's own parts, by checkpoint name. ``every``: known digests of full tensors."""
    parts = {
        name: shard
        for name, shard in shards.shards.items()
        if shard.local.numel() and not any(fragment in name for fragment in skip)
    }
    complete = {
        name: every[name] for name, shard in parts.items() if name in every and shard.slice.whole(shard.meta.shape)
    }
    cut = {name: (shard.local, shard.meta.dtype) for name, shard in parts.items() if name not in complete}
    return {**complete, **tensor_digests(cut)}


def _listed(shards: ShardMap, digests: Mapping[str, str]) -> list[v.TensorDigest]:
    return [
        v.TensorDigest(
            name=name,
            dtype=dtype_name(shards.shards[name].meta.dtype),
            shape=v.Shape(dims=shards.shards[name].meta.shape),
            sha256=digest,
        )
        for name, digest in sorted(digests.items())
    ]
