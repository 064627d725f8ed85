"""Steps with an in-process fleet: faults of stages and coordinator, adapters, groups of implicit updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from updating import (
    abort,
    begin,
    join,
    write,
)

from rlctl.contract.errors import Reason
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.results_pb2 import (
    Operation,
)

UNREACHABLE = common.STAGE_STATE_UNREACHABLE


def engines(fleet: InProcessFleet) -> list[FakeEngine]:
    stages = [stage._engine for _, stage in sorted(fleet.stages.items())]  # stages start at once, in any order
    return stages + [worker._follower._engine for _, worker in sorted(fleet.workers.items())]  # type: ignore[return-value]


def held(fleet: InProcessFleet) -> list[dict[str, tuple[str, str]]]:
    """Return every rank's adapters: version and contents by name."""
    return [
        {name: (adapter.version, engine.adapter_weights[name]) for name, adapter in engine.adapters.items()}
        for engine in engines(fleet)
    ]


async def load(fleet: InProcessFleet, path: str, version: str = "a-1", **fields: object) -> Operation:
    return await fleet.stub.LoadAdapter(v.LoadAdapterRequest(name="math", path=path, version=version, **fields))


async def dirty(fleet: InProcessFleet) -> None:
    """Make every stage DIRTY by an aborted update."""
    plan = await begin(fleet, "aborted")
    await join(fleet, plan)
    await write(fleet, plan, "half")
    await abort(fleet, plan)
    assert {fleet.stage(spec.slot).state for spec in fleet.specs} == {common.STAGE_STATE_DIRTY}


async def kill(fleet: InProcessFleet, slot: str) -> StageSpec:
    stage = fleet.stages.pop(slot)

    async def without_a_word() -> None:
        pass

    stage._deregister = without_a_word  # type: ignore[method-assign]
    await stage.stop()
    await fleet.until(lambda _: fleet.stage(slot).state == UNREACHABLE)
    return next(spec for spec in fleet.specs if spec.slot == slot)


async def cut_off(fleet: InProcessFleet, slot: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Break a stage's link, and prevent new links until the returned function is called."""
    dialer = fleet.server.coordinator._peers._dialer
    dial, address, away = dialer.dial, fleet.stage(slot).registration.address, [True]

    async def unless_away(to: str) -> Any:
        if away and to == address:
            raise Reason.UNREACHABLE.error("it is cut off")
        return await dial(to)

    monkeypatch.setattr(dialer, "dial", unless_away)
    await fleet.server.coordinator.roster.slots[slot].commander.close()
    await fleet.until(lambda _: fleet.stage(slot).state == UNREACHABLE)
    return away.clear


async def restart_coordinator(fleet: InProcessFleet) -> None:
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(fleet.server.address)


def on_record(fleet: InProcessFleet) -> list[str]:
    return [key for key, _ in fleet.server.coordinator._journal.read("pause")]


def header(slot: str = "", key: str = "") -> RequestHeader:
    return RequestHeader(for_slot=slot, request_id=key, unkeyed=not key)


async def group(fleet: InProcessFleet, slot: str, offset: int, world_size: int = 4, **changes: object) -> Operation:
    request = v.InitWeightsUpdateGroupRequest(
        header=changes.pop("header", header(slot)),
        **{
            "group_name": "slime-pp_0",
            "rank_offset": offset,
            "world_size": world_size,
            "master_address": "127.0.0.1",
            "master_port": 1,
            "backend": "gloo",
        }
        | changes,
    )
    return await fleet.stub.InitWeightsUpdateGroup(request)


async def end(fleet: InProcessFleet, slot: str = "", version: str = "", **fields: object) -> Operation:
    asked = header(slot)
    if not slot:
        asked.target.model = "actor"
    return await fleet.stub.CommitWeightUpdate(u.CommitWeightUpdateRequest(header=asked, version=version, **fields))
