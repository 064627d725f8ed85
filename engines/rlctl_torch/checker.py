"""CheckWeights: digests of what a rank really holds, and what to do with them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from google.protobuf.duration_pb2 import Duration

from rlctl.errors import Reason
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_COMPARE,
    CHECK_ACTION_RESET_TENSORS,
    CHECK_ACTION_SNAPSHOT,
    CheckReport,
    CheckWeightsRequest,
    Shape,
    TensorDigest,
)
from rlctl.weights.digest import RankDigest, rank_digest
from rlctl.weights.loading import refuse_draft
from rlctl.weights.shards import ShardMap, model_digest
from rlctl.weights.tensors import TensorMeta, as_bytes, dtype_name
from rlctl_torch.beside import Later
from rlctl_torch.rank import Rank, Weights
from rlctl_torch.shadow import Shadow

ACTIONS = (CHECK_ACTION_CHECKSUM, CHECK_ACTION_SNAPSHOT, CHECK_ACTION_RESET_TENSORS, CHECK_ACTION_COMPARE)


class Check:
    """CheckWeights, every action."""

    def __init__(self, rank: Rank, request: CheckWeightsRequest, update_id: str = "") -> None:
        self._rank = rank
        self._update_id = update_id
        self._request = request
        self._action = request.action or CHECK_ACTION_CHECKSUM
        if self._action not in ACTIONS:
            raise Reason.UNSUPPORTED.error(f"the torch engine has no checker action {self._action}", field="action")
        refuse_draft(request.selector, "selector")

    def admit(self) -> bool:
        """Refuse without weights; do not scramble them under requests or an update."""
        rank = self._rank
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released; there is nothing to digest")
        if self._action == CHECK_ACTION_RESET_TENSORS:
            rank.refuse_during_update()
            rank.refuse_active()
        if self._action == CHECK_ACTION_COMPARE and rank.snapshot is None and not self._request.expected_digest:
            raise Reason.FIELD_INVALID.error(
                "there is neither a snapshot nor an expected_digest to compare with", field="action"
            )
        if self._request.shadow:
            self._shadow()
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def run(self) -> CheckReport | Later:
        """Carry the action out. Raises DIGEST_MISMATCH when the model digest is not the expected one."""
        if self._request.shadow:
            shadow = self._shadow()
            return Later(lambda: self._digest_shadow(shadow))
        started = time.perf_counter()
        rank, request = self._rank, self._request
        if self._action == CHECK_ACTION_RESET_TENSORS:
            scramble(rank)
        local = rank_digest(rank.model.module, request.skip_tensors)
        digests = {entry.meta.name: entry.sha256 for entry in local.tensors}
        report = CheckReport(action=self._action, tensor_count=len(digests), rank_digest=local.digest)
        if request.per_tensor:
            report.tensors.extend(_entry(entry.meta, entry.sha256) for entry in local.tensors)
        if not request.HasField("model_digest") or request.model_digest or request.expected_digest:
            self._digest_model(report, local)
        if self._action == CHECK_ACTION_SNAPSHOT:
            rank.snapshot = digests
        elif self._action == CHECK_ACTION_COMPARE and rank.snapshot is not None:
            skip = request.skip_tensors
            kept = {name: sha for name, sha in rank.snapshot.items() if not any(part in name for part in skip)}
            _compare(report, digests, kept)
        return self._ended(report, started)

    def _shadow(self) -> Shadow:
        """The copy of the update that the command belongs to. Raises UPDATE_NOT_FOUND."""
        update = self._rank.update
        if update is None or update.shadow is None or update.update_id != self._update_id:
            raise Reason.UPDATE_NOT_FOUND.error(f"no staged update {self._update_id or '(none)'} is open at this rank")
        return update.shadow

    def _digest_shadow(self, shadow: Shadow) -> CheckReport:
        """The model digest of a shadow copy; in the thread beside generation."""
        started = time.perf_counter()
        skip = self._request.skip_tensors
        kept = {name: shard for name, shard in shadow.shards.shards.items() if not any(part in name for part in skip)}
        with self._rank.ranks.aside.exchanging() as exchange:
            result = model_digest(ShardMap(kept), exchange)
        report = CheckReport(
            action=self._action, tensor_count=len(kept), model_digest=result.digest, inconsistent=result.inconsistent
        )
        if self._request.per_tensor:
            report.model_tensors.extend(_entry(kept[name].meta, sha) for name, sha in result.digests.items())
        return self._ended(report, started)

    def _ended(self, report: CheckReport, started: float) -> CheckReport:
        request, elapsed = self._request, time.perf_counter() - started
        report.elapsed.CopyFrom(Duration(seconds=int(elapsed), nanos=int(elapsed % 1 * 1e9)))
        if request.expected_digest and report.model_digest != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {report.model_digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": report.model_digest},
            )
        return report

    def _digest_model(self, report: CheckReport, local: RankDigest) -> None:
        shards = self._rank.model.shards.shards
        skip = self._request.skip_tensors
        kept = ShardMap({name: shard for name, shard in shards.items() if not any(part in name for part in skip)})
        with self._rank.ranks.exchanging() as exchange:
            result = model_digest(kept, exchange, known=self._full_here(kept, local))
        report.model_digest = result.digest
        if self._rank.origin is not None and self._rank.update is None and len(kept.shards) == len(shards):
            self._rank.origin.digest = result.digest
        report.inconsistent.extend(result.inconsistent)
        if self._request.per_tensor:
            report.model_tensors.extend(_entry(shards[name].meta, sha) for name, sha in result.digests.items())

    def _full_here(self, shards: ShardMap, local: RankDigest) -> dict[str, str]:
        """Digests that are a full tensor's as they are: same name, dtype and memory."""
        parameters = self._rank.model.module.state_dict(keep_vars=True)
        return {
            entry.meta.name: entry.sha256
            for entry in local.tensors
            if (shard := shards.shards.get(entry.meta.name)) is not None
            and shard.meta == entry.meta
            and shard.local is parameters.get(entry.meta.name)
        }


def scramble(rank: Rank) -> None:
    """Turn every bit of every weight around; only a full update makes them whole again."""
    for tensor in rank.model.tensors:
        data = as_bytes(tensor)
        torch.bitwise_not(data, out=data)
    rank.weights = Weights.MIXED


def _compare(report: CheckReport, found: Mapping[str, str], snapshot: Mapping[str, str]) -> None:
    both = found.keys() & snapshot.keys()
    report.matched = sum(found[name] == snapshot[name] for name in both)
    report.changed.extend(sorted(name for name in both if found[name] != snapshot[name]))
    report.missing.extend(sorted(snapshot.keys() - found.keys()))
    report.unexpected.extend(sorted(found.keys() - snapshot.keys()))


def _entry(meta: TensorMeta, sha256: str) -> TensorDigest:
    return TensorDigest(name=meta.name, dtype=dtype_name(meta.dtype), shape=Shape(dims=meta.shape), sha256=sha256)
