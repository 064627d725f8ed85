"""SendWeights: this engine's weights, as full tensors, to the ranks of another stage.

All ranks gather, rank 0 broadcasts. It happens in the engine thread, between two steps; no token comes meanwhile.
"""

from __future__ import annotations

from rlctl.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import SendWeightsRequest, WeightsReport
from rlctl.weights.buckets import from_proto
from rlctl.weights.gathering import Gathering
from rlctl.weights.groups import WeightGroup
from rlctl_torch.commands import with_outcome
from rlctl_torch.rank import Rank, Weights


class Send:
    """Gather and broadcast what the buckets name."""

    def __init__(self, rank: Rank, request: SendWeightsRequest) -> None:
        self._rank = rank
        self._group = request.group_name
        self._metas = [
            meta for i, bucket in enumerate(request.buckets) for meta in from_proto(bucket, f"buckets[{i}]").metas
        ]

    def admit(self) -> bool:
        """Refuse what would send something that is no version."""
        rank = self._rank
        rank.refuse_during_update()
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released; there is nothing to send")
        if rank.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error(f"the weights are {rank.weights.value}")
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def run(self) -> WeightsReport:
        """Every rank stays to the end, also when the other side is gone: the next gather is for all of them."""
        rank, report = self._rank, WeightsReport()
        found: list[WeightGroup] = []
        rank.ranks.agree(lambda: found.extend(self._check()))
        failure: RlctlError | None = None
        with rank.ranks.exchanging() as exchange:
            gathering = Gathering(rank.model.shards.shards, exchange)
            for meta in self._metas:
                full = gathering.full(meta.name)
                if full is None or failure is not None:
                    continue
                try:
                    found[0].broadcast(full.cpu() if found[0].backend == "gloo" else full)
                except RlctlError as error:
                    failure = error
                else:
                    report.tensors += 1

        def tell() -> None:
            if failure is not None:
                raise failure

        try:
            rank.ranks.agree(tell)
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_REJECTED) from error
        return report

    def _check(self) -> list[WeightGroup]:
        reference = self._rank.model.shards.reference
        for meta in self._metas:
            if reference.get(meta.name) != meta:
                raise Reason.FIELD_INVALID.error(f"{meta} is not what this model has", field="buckets")
        return [self._rank.groups.get(self._group)] if self._rank.ranks.rank == 0 else []
