"""While a version is being published, stages that did not confirm it are told to serve nothing, and say so once."""

from __future__ import annotations

from updating import begin, join, write

from rlctl.testing.fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v


async def test_a_stage_that_has_confirmed_its_silence_is_not_asked_again(fleet: InProcessFleet) -> None:
    """Its reports while an update is open bring it grants; were each to be confirmed, there would be no end to it."""
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w")
    coordinator = fleet.server.coordinator
    model, peers = coordinator.roster.models["actor"], coordinator._peers
    await peers.silence(model, [])
    told = next(peers._grants)
    for _ in range(100):
        await fleet.stub.GetModelInfo(v.GetModelInfoRequest())
    assert next(peers._grants) - told < 20
    peers.speak(model)
