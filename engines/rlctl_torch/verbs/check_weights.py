"""CheckWeights: digests of the weights that a rank holds, and the other actions of the checker."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_COMPARE,
    CHECK_ACTION_DECODE,
    CHECK_ACTION_PROBE,
    CHECK_ACTION_READ,
    CHECK_ACTION_RESET_TENSORS,
    CHECK_ACTION_SNAPSHOT,
    CheckAction,
    CheckReport,
    CheckWeightsRequest,
    Shape,
    TensorDigest,
)
from rlctl.weights.shards.first_rows import first_rows, rows_of, unknown
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.shards.mismatch import difference
from rlctl.weights.shards.rank_exchange import agree_to_go_on
from rlctl.weights.shards.shard_map import Shard, ShardMap, model_digest
from rlctl.weights.tensor.digest import RankDigest, rank_digest
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, dtype_name
from rlctl.weights.tensor.work import Stop
from rlctl_torch.model.shadow_copy import Shadow
from rlctl_torch.rank import OpenUpdate, Rank, Weights
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.collectives import Council
from rlctl_torch.steps.ordered_commands import Action
from rlctl_torch.verbs.decode_check import check_decode
from rlctl_torch.verbs.probe import probed, refuse_prompts

ACTIONS = (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_SNAPSHOT,
    CHECK_ACTION_RESET_TENSORS,
    CHECK_ACTION_COMPARE,
    CHECK_ACTION_PROBE,
    CHECK_ACTION_READ,
    CHECK_ACTION_DECODE,
)


def actions(rank: Rank) -> list[CheckAction.ValueType]:
    return [action for action in ACTIONS if action != CHECK_ACTION_DECODE or rank.calibration is not None]


class Check(Action):
    """CheckWeights, every action.

    Digests of shadow copies, and of the served weights while steps continue, run in the background. Everything else
    runs on the engine thread.
    """

    def __init__(self, rank: Rank, request: CheckWeightsRequest, update_id: str, deadline: float) -> None:
        """``deadline`` of a digest in the background, on :func:`time.monotonic`'s clock."""
        self._rank = rank
        self._request = request
        self._update_id = update_id
        self._deadline = deadline
        self._action = request.action or CHECK_ACTION_CHECKSUM
        if self._action not in actions(rank):
            raise Reason.UNSUPPORTED.error(f"the torch engine has no checker action {self._action}", field="action")
        refuse_draft(request.selector, "selector")

    def admit(self) -> bool:
        """Refuse without weights. Refuse a reset during requests or an update, and a probe or decode check while steps
        continue.
        """
        rank = self._rank
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be digested")
        if self._request.adapter:
            if self._action != CHECK_ACTION_CHECKSUM:
                raise Reason.UNSUPPORTED.error("of an adapter, only checksums are taken", field="action")
            if self._staging() is None:
                rank.adapters.find(self._request.adapter, "adapter")
        if self._action == CHECK_ACTION_RESET_TENSORS:
            rank.refuse_during_update()
            rank.refuse_active()
        if self._action == CHECK_ACTION_COMPARE and rank.snapshot is None and not self._request.expected_digest:
            raise Reason.FIELD_INVALID.error("a comparison needs a snapshot or expected_digest", field="action")
        if self._action == CHECK_ACTION_PROBE:
            refuse_prompts(rank, self._request.prompts)
        if self._action == CHECK_ACTION_DECODE and not rank.at_rest:
            raise Reason.ILLEGAL_STATE.error(
                "decode is compared with prefill while generation is paused", next_step="Pause first."
            )
        if self._action == CHECK_ACTION_READ:
            rows_of(self._request, self._shard().meta)
        if self._request.shadow:
            self._shadow()
        return True

    def run(self) -> CheckReport | Later:
        """Carry out the action. Raises DIGEST_MISMATCH if the model digest differs from the expected digest."""
        rank = self._rank
        if self._action == CHECK_ACTION_PROBE:
            return CheckReport(action=self._action, probed=probed(rank, self._request.prompts))
        if self._action == CHECK_ACTION_DECODE:
            return CheckReport(action=self._action, decode=check_decode(rank))
        if self._action == CHECK_ACTION_READ:
            return CheckReport(action=self._action, values=first_rows(self._request, self._shard()))
        if self._request.adapter:
            return self._digest_adapter()
        if self._action == CHECK_ACTION_RESET_TENSORS:
            rank.beside.stop(Reason.WEIGHTS_DIRTY.error("the weights were scrambled meanwhile"))
            scramble(rank, self._request.skip_tensors)
        elif self._request.shadow or not rank.at_rest:
            return self._beside()
        return _Digesting(rank, self._request, self._action, rank.ranks).run()

    def _beside(self) -> Later:
        rank = self._rank
        shadow = self._shadow().shards if self._request.shadow else None
        digesting = _Digesting(rank, self._request, self._action, rank.ranks.aside, shadow)
        timer = threading.Timer(
            max(0.0, self._deadline - time.monotonic()),
            digesting.stop.set,
            [Reason.DEADLINE_EXCEEDED.error("the time was up before the weights were digested")],
        )
        timer.daemon = True
        timer.start()

        def work() -> CheckReport:
            try:
                return digesting.run()
            finally:
                timer.cancel()

        # Only its own update changes a shadow copy, and the steps of an update run in sequence.
        return Later(work, digesting.stop if shadow is None else None)

    def _shard(self) -> Shard:
        """Return the rank's shard of the tensor to read. Raises FIELD_INVALID."""
        shard = self._rank.model.shards.shards.get(self._request.tensor)
        if shard is None:
            raise unknown(self._request.tensor)
        return shard

    def _shadow(self) -> Shadow:
        """Return the shadow copy of the command's update. Raises UPDATE_NOT_FOUND."""
        update = self._rank.update
        if update is None or update.shadow is None or update.update_id != self._update_id:
            raise Reason.UPDATE_NOT_FOUND.error(f"no staged update {self._update_id or '(none)'} is open at this rank")
        return update.shadow

    def _staging(self) -> OpenUpdate | None:
        """Return the open update if it is of the adapter. All ranks decide alike, also while they read the files."""
        update = self._rank.update
        adapter = None if update is None else update.stages_adapter
        return update if adapter is not None and adapter.name == self._request.adapter else None

    def _digest_adapter(self) -> CheckReport:
        """Digest the adapter of the open update, or a loaded one. Raises WEIGHTS_INCOMPLETE, ADAPTER_NOT_FOUND."""
        rank, update = self._rank, self._staging()
        if update is None:
            adapter = rank.adapters.find(self._request.adapter, "adapter")
        else:
            rank.ranks.agree(update.check_complete)
            assert update.adapter is not None
            adapter = update.adapter
        report = _Digesting(rank, self._request, self._action, rank.ranks, adapter.shards).run()
        report.adapter_scale = adapter.scale
        return report


class _Digesting:
    """Digests of the weights at the step of its creation. :attr:`stop` is set before the weights change.

    ``shadow``: the shard map of a shadow copy or an adapter, with a model digest only; None: the served weights.
    """

    def __init__(
        self,
        rank: Rank,
        request: CheckWeightsRequest,
        action: CheckAction.ValueType,
        council: Council,
        shadow: ShardMap | None = None,
    ) -> None:
        self.stop = Stop()
        self._rank = rank
        self._request = request
        self._action = action
        self._council = council
        self._shadow = shadow
        self._key = request.digest_key
        self._origin = rank.origin if rank.update is None else None

    def run(self) -> CheckReport:
        """Compute the digests. Raises the error with which :attr:`stop` was set."""
        started = time.perf_counter()
        request = self._request
        report = CheckReport(action=self._action)
        if self._shadow is not None or (self._key and self._action == CHECK_ACTION_CHECKSUM):
            report.tensor_count = self._digest_alone(report)
        else:
            self._digest_rank(report)
        report.elapsed.CopyFrom(duration(time.perf_counter() - started))
        if request.expected_digest and report.model_digest != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {report.model_digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": report.model_digest},
            )
        return report

    def _digest_alone(self, report: CheckReport) -> int:
        """Digest the model without this rank's own digests. Return the number of tensors."""
        shards = self._rank.model.shards if self._shadow is None else self._shadow
        digested = self._digest_model(report, shards, None).shards
        if self._shadow is None and self._origin is not None and len(digested) == len(shards.shards):
            self._origin.digest = report.model_digest
        return len(digested)

    def _digest_rank(self, report: CheckReport) -> None:
        rank, request = self._rank, self._request
        local: RankDigest | None = None
        with self.stop.on_error():
            local = rank_digest(rank.model.module, request.skip_tensors, self.stop)
        if not request.HasField("model_digest") or request.model_digest or self._compares:
            complete = len(self._digest_model(report, rank.model.shards, local).shards) == len(rank.model.shards.shards)
            if self._origin is not None and complete:
                self._origin.digest = report.model_digest
        self.stop.check()
        assert local is not None
        digests = {entry.meta.name: entry.sha256 for entry in local.tensors}
        report.tensor_count, report.rank_digest = len(digests), local.digest
        if request.per_tensor:
            report.tensors.extend(_entry(entry.meta, entry.sha256) for entry in local.tensors)
        if self._action == CHECK_ACTION_SNAPSHOT:
            rank.snapshot = digests
        elif self._action == CHECK_ACTION_COMPARE and rank.snapshot is not None:
            skip = request.skip_tensors
            snapshot = {name: sha for name, sha in rank.snapshot.items() if not any(part in name for part in skip)}
            _compare(report, digests, snapshot)

    @property
    def _compares(self) -> bool:
        return bool(self._request.expected_digest or self._request.fingerprints)

    def _digest_model(self, report: CheckReport, shards: ShardMap, local: RankDigest | None) -> ShardMap:
        """Digest the full tensors, all ranks together. Return the shard map without skipped tensors."""
        skip = self._request.skip_tensors
        selected = ShardMap(
            {name: shard for name, shard in shards.shards.items() if not any(part in name for part in skip)}
        )
        local_digests = {} if local is None else self._full_here(selected, local)
        with self._council.exchanging() as exchange:
            result = model_digest(selected, exchange, stop=self.stop, known_digests=local_digests, key=self._key)
            if self._request.fingerprints:
                with self.stop.on_error():
                    report.difference.CopyFrom(difference(selected, result, self._request.fingerprints, self._key))
                agree_to_go_on(exchange, self.stop)
        report.model_digest = result.digest
        report.inconsistent.extend(result.inconsistent)
        if self._request.per_tensor:
            report.model_tensors.extend(
                _entry(selected.shards[name].meta, digest) for name, digest in result.digests.items()
            )
        return selected

    def _full_here(self, shards: ShardMap, local: RankDigest) -> dict[str, str]:
        """Return the rank's digests that are also digests of a full tensor: same name, dtype, shape and memory."""
        parameters = self._rank.model.module.state_dict(keep_vars=True)
        return {
            entry.meta.name: entry.sha256
            for entry in local.tensors
            if (shard := shards.shards.get(entry.meta.name)) is not None
            and shard.meta == entry.meta
            and shard.local is parameters.get(entry.meta.name)
        }


def scramble(rank: Rank, skip: Sequence[str]) -> None:
    """Change every byte of every weight, except names that contain an entry of ``skip``.

    Each call changes the bytes differently, so that two calls do not undo each other. Replicas stay equal. Only a full
    update makes the weights whole again.
    """
    rank.scrambled += 1
    for name, tensor in rank.model.named.items():
        if any(part in name for part in skip):
            continue
        data = as_bytes(tensor)
        source = torch.Generator(data.device).manual_seed(rank.scrambled)
        noise = torch.randint(1, 256, data.shape, dtype=data.dtype, device=data.device, generator=source)
        torch.bitwise_xor(data, noise, out=data)
    rank.weights = Weights.MIXED


def _compare(report: CheckReport, digests: Mapping[str, str], snapshot: Mapping[str, str]) -> None:
    common = digests.keys() & snapshot.keys()
    report.matched = sum(digests[name] == snapshot[name] for name in common)
    report.changed.extend(sorted(name for name in common if digests[name] != snapshot[name]))
    report.missing.extend(sorted(snapshot.keys() - digests.keys()))
    report.unexpected.extend(sorted(digests.keys() - snapshot.keys()))


def _entry(meta: TensorMeta, digest: str) -> TensorDigest:
    return TensorDigest(name=meta.name, dtype=dtype_name(meta.dtype), shape=Shape(dims=meta.shape), sha256=digest)
