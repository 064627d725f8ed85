"""The stage server as the source of groups, without SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rlctl_sglang.readback.send_weights import Source
from rlctl_sglang.state import Membership

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v


class Group:
    """A group that the source is in."""

    stands, closed = True, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def source() -> Iterator[Source]:
    readback: Any = None  # nothing is read
    source = Source("127.0.0.1", readback, {})
    yield source
    source.close()


async def join(source: Source, port: int, *, probe: bool = False) -> v.GroupReport:
    request = v.InitWeightsUpdateGroupRequest(
        group_name="g", master_address="h", master_port=port, world_size=2, num_ranks=1, probe_only=probe
    )
    return await source.join(request, Call("c", 0.0))


async def test_a_group_is_confirmed_only_with_the_store_that_it_was_formed_at(source: Source) -> None:
    group: Any = Group()
    source._groups["g"] = Membership("h", 1, 0, 2, "gloo"), group
    assert (await join(source, 1)).world_size == 2
    with pytest.raises(RlctlError) as refused:
        await join(source, 2)
    assert (refused.value.reason, refused.value.field) == (Reason.GROUP_EXISTS, "group_name")
    assert source.is_in("g")
    assert not group.closed


async def test_a_group_that_has_ended_gives_way(source: Source) -> None:
    group: Any = Group()
    source._groups["g"] = Membership("h", 1, 0, 2, "gloo"), group
    group.stands = False
    await join(source, 2, probe=True)
    assert group.closed
    assert not source.is_in("g")
