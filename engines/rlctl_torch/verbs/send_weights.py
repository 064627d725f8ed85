"""SendWeights: this engine's weights, or an adapter's, to the ranks of a receiving stage, during generation.

All ranks gather full tensors, and rank 0 broadcasts these tensors. If the ranks of the receiving stage hold the same
parts, every rank sends its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import SendWeightsRequest, WeightsReport
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.group.sender import wire_device
from rlctl.weights.shards.gather import Gathering
from rlctl.weights.shards.rank_exchange import Exchange, agree_to_go_on
from rlctl.weights.tensor.buckets import from_proto
from rlctl.weights.tensor.work import Stop
from rlctl_torch.rank import Rank, Weights
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.ordered_commands import Action, with_outcome


class Send(Action):
    """Gather and broadcast the tensors of the buckets."""

    def __init__(self, rank: Rank, request: SendWeightsRequest) -> None:
        self._rank = rank
        self._shards = rank.model.shards
        self._group = request.group_name
        buckets = [from_proto(bucket, f"buckets[{i}]") for i, bucket in enumerate(request.buckets)]
        self._metas = [meta for bucket in buckets for meta in bucket.metas]
        self._adapter = request.adapter
        self._parts = any(bucket.parts for bucket in buckets)
        if self._parts and not all(bucket.parts for bucket in buckets):
            raise Reason.FIELD_CONFLICT.error(
                "buckets of full tensors and of parts exclude each other", field="buckets"
            )
        if self._parts and self._adapter:
            raise Reason.FIELD_CONFLICT.error("an adapter is sent in full tensors", field="buckets")

    def admit(self) -> bool:
        """Refuse while an update is open, or the weights are released or not one version."""
        rank = self._rank
        rank.refuse_during_update()
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be sent")
        if rank.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error(f"the weights are {rank.weights.value}")
        return True

    def run(self) -> WeightsReport | Later:
        """Check on all ranks, then gather and broadcast: in the background, unless steps are at rest."""
        rank = self._rank
        groups: list[WeightGroup] = []
        rank.ranks.agree(lambda: groups.extend(self._check()))
        group = groups[0] if groups else None
        if rank.at_rest:
            return self._send(group, rank.ranks.exchanging, Stop())
        stop = Stop()
        return Later(lambda: self._send(group, rank.ranks.aside.exchanging, stop), stop)

    def _send(
        self,
        group: WeightGroup | None,
        exchanging: Callable[[], AbstractContextManager[Exchange]],
        stop: Stop,
    ) -> WeightsReport:
        """Send the tensors. A rank that must stop does so together with the other ranks.

        At the end all sent tensors are of one version: no rank had to stop when the last rank had read its last tensor.
        """
        report = WeightsReport()
        with exchanging() as exchange:
            for tensor in self._own_parts(stop) if self._parts else self._full_tensors(exchange, stop):
                if group is None or stop.cause is not None:
                    continue
                with stop.on_error():
                    _broadcast(group, tensor)
                    report.tensors += 1
            agree_to_go_on(exchange, stop)
        return report

    def _own_parts(self, stop: Stop) -> Iterator[torch.Tensor]:
        """Yield this rank's parts. Other ranks go at their own pace."""
        for meta in self._metas:
            with stop.on_error():
                part = self._rank.model.shards.part_in_place(meta.name).to(meta.dtype).contiguous()
            if stop.cause is not None:
                return
            yield part

    def _full_tensors(self, exchange: Exchange, stop: Stop) -> Iterator[torch.Tensor]:
        """Yield all tensors at rank 0. Every rank gathers."""
        gathering = Gathering(self._shards.shards, exchange)
        for meta in self._metas:
            full = gathering.full(meta.name, stop)
            if full is not None:
                yield full

    def _check(self) -> list[WeightGroup]:
        if self._adapter:
            self._shards = self._rank.adapters.find(self._adapter, "adapter").shards
        reference = self._shards.reference
        for meta in self._metas:
            if reference.get(meta.name) != meta:
                owner = f"adapter {self._adapter!r}" if self._adapter else "this model"
                raise Reason.FIELD_INVALID.error(f"{meta} is not a tensor of {owner}", field="buckets")
        return [self._rank.groups.get(self._group)] if self._parts or self._rank.ranks.rank == 0 else []


def _broadcast(group: WeightGroup, tensor: torch.Tensor) -> None:
    """Broadcast a tensor. A failure leaves this engine's weights as they are."""
    try:
        group.broadcast(tensor.to(wire_device(group, tensor.device)))
    except RlctlError as error:
        raise with_outcome(error, OUTCOME_REJECTED) from error
