"""Groups of a server that takes weights in by vLLM's own engine, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from rlctl_vllm.updates.native_nccl import Native

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.vllm_groups import BACKEND
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v


async def test_a_group_is_confirmed_only_with_the_store_that_it_was_formed_at() -> None:
    control: Any = None  # nothing is asked of vLLM
    native = Native(control, {}, 1, "127.0.0.1", interrupted=False)
    native._group, native._store = "g", ("127.0.0.1", 1)

    async def join(port: int) -> v.GroupReport:
        request = v.InitWeightsUpdateGroupRequest(
            group_name="g", master_address="127.0.0.1", master_port=port, world_size=2, rank_offset=1, backend=BACKEND
        )
        [report] = await native.each("InitWeightsUpdateGroup", request, v.GroupReport, Call("c", 0.0))
        return report

    assert (await join(1)).group_rank == 1
    with pytest.raises(RlctlError) as refused:
        await join(2)
    assert (refused.value.reason, refused.value.field) == (Reason.GROUP_EXISTS, "group_name")
