"""``validate_only``: refused where the call itself would be, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from updating import refusal, version_of, weights

from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader

Checkpoint = Callable[[str], str]


@pytest.mark.parametrize("validate_only", [False, True])
async def test_what_is_read_from_disk(fleet: InProcessFleet, checkpoint: Checkpoint, validate_only: bool) -> None:
    header = RequestHeader(validate_only=validate_only)
    disk = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), header=header)
    disk.options.quorum = 9
    assert (await refusal(fleet.stub.UpdateWeightsFromDisk(disk))).field == "options.quorum"
    header.target.slots.append("a")
    adapter = v.LoadAdapterRequest(name="math", path=checkpoint("lora"), header=header)
    assert (await refusal(fleet.stub.LoadAdapter(adapter))).field == "header.target"
    # And what would be accepted is not done.
    if validate_only:
        disk.options.quorum = 0
        answer = await fleet.stub.UpdateWeightsFromDisk(disk)
        assert (answer.validate_only, list(answer.targets)) == (True, ["a", "b"])
        assert version_of(fleet) == ("initial", 1)
        assert set(weights(fleet)) == {"one"}
        assert not (await fleet.stub.ListOperations(rpc.ListOperationsRequest())).operations


async def test_an_update_that_its_clients_do_not_name(fleet: InProcessFleet) -> None:
    begin = u.BeginWeightUpdateRequest(implicit=True, header=RequestHeader(validate_only=True))
    plan = await fleet.stub.BeginWeightUpdate(begin)
    assert [target.slot for target in plan.targets] == ["a", "b"]
    assert plan.version.label
    assert not fleet.server.coordinator.updates.is_open(plan.update_id)
    begin.rollout.max_unavailable = 1
    refused = await refusal(fleet.stub.BeginWeightUpdate(begin))
    assert refused.field == "rollout.max_unavailable"
    begin.rollout.Clear()
    opened = await fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(implicit=True))
    assert (await fleet.stub.BeginWeightUpdate(begin)).update_id == opened.update_id, "the call would confirm it"
