"""This process as the source of groups: what the ranks of another stage are sent comes from here, not from SGLang.

SGLang's own ranks can only receive in a group of a weight update, or send what they hold to one other process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import GroupReport, InitWeightsUpdateGroupRequest, SendWeightsRequest, WeightsReport
from rlctl.weights.group.network_interfaces import address_of
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.tensor.buckets import from_proto
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_sglang.readback.readback import Readback
from rlctl_sglang.state import Membership


class Source:
    """Sends what a server holds."""

    def __init__(self, node: str, readback: Readback, reference: Mapping[str, TensorMeta]) -> None:
        """``node``: name or address under which others reach this host. Raises ENGINE_FAILED, GROUP_FAILED."""
        self._host = address_of(node)
        self._store = GroupStore(self._host)
        self._readback = readback
        self._reference = reference
        self._groups: dict[str, tuple[Membership, WeightGroup]] = {}

    @property
    def store(self) -> tuple[str, int]:
        """Where its groups meet."""
        return self._store.address(self._host)

    def is_in(self, group_name: str) -> bool:
        """Whether it is the source of a group of this name."""
        return group_name in self._groups

    async def join(self, request: InitWeightsUpdateGroupRequest, call: Call) -> GroupReport:
        """Become the source of a group. Raises FIELD_INVALID, GROUP_EXISTS, GROUP_FAILED."""
        if request.paired or request.num_ranks != 1 or request.backend not in ("", "gloo"):
            raise Reason.FIELD_INVALID.error(
                "SGLang's stage server sends full tensors, alone, over gloo", field="members"
            )
        report = GroupReport(group_name=request.group_name, world_size=request.world_size)
        membership = Membership(request.master_address, request.master_port, 0, request.world_size, "gloo")
        standing, group = self._groups.get(request.group_name, (None, None))
        if group is not None and not group.stands:
            self.leave(request.group_name)
            standing = None
        if standing is not None and standing != membership:
            raise Reason.GROUP_EXISTS.error(
                f"group {request.group_name!r} stands as {standing}, not {membership}", field="group_name"
            )
        if standing is not None or request.probe_only:
            return report
        remaining = max(call.deadline - asyncio.get_running_loop().time(), 0.01)
        limit = seconds(request.group_timeout) or remaining
        joined = await asyncio.to_thread(
            join,
            (request.master_address, request.master_port),
            name=request.group_name,
            rank=0,
            world_size=request.world_size,
            timeout_s=min(remaining, limit),
            broadcast_timeout_s=limit,
            interface_host=self._host,
        )
        self._groups[request.group_name] = membership, joined
        return report

    def leave(self, group_name: str) -> None:
        """Leave a group; what is being sent in it ends."""
        _, group = self._groups.pop(group_name)
        group.close()

    async def send(self, request: SendWeightsRequest, call: Call) -> WeightsReport:
        """Send what the buckets name, in their order. SGLang has handed everything over before the first tensor leaves:
        it waits for no receiver.

        Raises FIELD_INVALID, UNSUPPORTED, GROUP_NOT_FOUND, GROUP_FAILED.
        """
        buckets = [from_proto(bucket, f"buckets[{index}]") for index, bucket in enumerate(request.buckets)]
        if any(bucket.parts or bucket.flattened for bucket in buckets):
            raise Reason.UNSUPPORTED.error("full tensors are sent, one by one", field="buckets")
        metas = [meta for bucket in buckets for meta in bucket.metas]
        for meta in metas:
            if self._reference.get(meta.name) != meta:
                raise Reason.FIELD_INVALID.error(f"{meta} is not what this model has", field="buckets")
        if request.group_name not in self._groups:
            raise Reason.GROUP_NOT_FOUND.error(f"no group {request.group_name!r} stands", field="group_name")
        _, group = self._groups[request.group_name]
        held: dict[str, torch.Tensor] = {}
        inconsistent = await self._readback.read(lambda name, tensor, _: held.update({name: tensor}), call)
        if inconsistent:
            raise Reason.WEIGHTS_DIRTY.error(f"the ranks hold different bytes of {', '.join(inconsistent[:5])}")
        for meta in metas:
            await asyncio.to_thread(group.broadcast, held[meta.name])
        return WeightsReport(tensors=len(metas))

    def close(self) -> None:
        """Leave every group."""
        for _, group in self._groups.values():
            group.close()
        self._groups.clear()
        self._store.close()
