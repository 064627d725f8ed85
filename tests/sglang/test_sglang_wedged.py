"""What a server of one rank cannot get out of by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_stage import Driver, Source, prompt

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(300)


def test_a_broadcast_that_never_comes_ends_with_its_update(one: Driver, tiny: tuple[Any, Path]) -> None:
    """The last that needs the server: one that is stuck inside a collective can only be ended, and is."""
    scratch = one.engine._server._process.scratch  # type: ignore[union-attr]
    left = scratch.segments()
    assert left, "SGLang has a load snapshot in shared memory"
    with Source(one, "silent") as source:
        one.prepare("stuck")
        plan = source.plan(tiny[0], bucket_bytes=100_000)
        receiving = one.submit(source.announce(plan), update_id="stuck")
        source.group.broadcast(next(source.packed(tiny[0], plan)))
        assert not receiving.done()  # it waits for the second bucket
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlctl_servers.engine.INTERRUPT_S", 1.0)
            one.admin.submit(one.engine.interrupt("stuck")).result(60)
        with pytest.raises(RlctlError) as broken:
            receiving.result(60)
        assert broken.value.outcome in (common.OUTCOME_UNKNOWN, common.OUTCOME_DIRTY)
    assert [failure.reason for failure in one.failures] == [Reason.ENGINE_WEDGED]
    one.engine._server._process._wait(10)  # type: ignore[union-attr]
    assert not any(segment.exists() for segment in left)
    assert not scratch.path.exists()
    assert one.engine.can_restart()
    for request in (v.GetLoadsRequest(), v.PauseGenerationRequest(), v.CheckWeightsRequest()):
        with pytest.raises(RlctlError) as refused:
            one.tell(request)
        assert refused.value.reason is Reason.ENGINE_WEDGED
        assert refused.value.outcome == common.OUTCOME_REJECTED
    with pytest.raises(RlctlError):
        one.generate(prompt(encode("1"), 2))
