"""What a server that outlives its stage server is called while its weights are of no version, without a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rlctl_servers.server.http import Answer
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.version_labels import WRITING
from rlctl_sglang.server.facts import Facts
from rlctl_sglang.state import State
from rlctl_sglang.updates.updates import Updates

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, Outcome

CALL = Call("c", math.inf, update_id="u")


class Server:
    """SGLang as far as its label and its session go; ``receives``: broadcasts arrive; ``reached``: for so many more."""

    def __init__(self) -> None:
        self.label, self.session, self.receives = "at its start", False, True
        self.reached = 1 << 10
        self.told: list[str] = []

    async def tell(self, path: str, body: dict[str, Any], **_: Any) -> Answer:
        self.told.append(path)
        ok = True
        match path:
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/begin_weight_update":
                ok, self.session = not self.session, True
            case "/end_weight_update":
                ok, self.session = self.session, False
            case "/update_weights_from_distributed":
                if not self.reached:
                    raise Reason.UNREACHABLE.error("it takes no connection")
                self.reached -= 1
                ok = self.receives
        return Answer(200 if ok else 400, {"success": ok, "message": "" if ok else "Failed to receive weights: ..."})

    async def must(self, path: str, body: dict[str, Any], **how: Any) -> Answer:
        answer = await self.tell(path, body, **how)
        if not answer.ok:
            raise Reason.ENGINE_FAILED.error(answer.message)
        return answer


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def updates(server: Server, tiny: tuple[Any, Path]) -> Updates:
    control: Any = server
    checkpoints = Checkpoints("SGLang", str(tiny[1]), ())
    return Updates(control, State(), checkpoints, Facts({}, {}), lambda: "at its start")


async def write(updates: Updates, server: Server, *, receives: bool = True, buckets: int = 1) -> None:
    """One tensor over a group that stands, in each bucket."""
    server.receives = receives
    updates._state.groups["g"] = 2
    bucket = v.TensorBucket(names=["model.norm.weight"], dtypes=["torch.float32"], shapes=[v.Shape(dims=[128])])
    await updates.from_distributed(
        v.UpdateWeightsFromDistributedRequest(group_name="g", buckets=[bucket] * buckets), CALL
    )


async def fail_to_write(updates: Updates, server: Server) -> None:
    with pytest.raises(RlctlError) as failed:
        await write(updates, server, receives=False)
    assert failed.value.outcome == OUTCOME_REJECTED, "nothing was written"


@pytest.mark.parametrize(("reached", "outcome"), [(0, OUTCOME_REJECTED), (1, OUTCOME_DIRTY)])
async def test_a_server_that_cannot_be_reached_any_more_holds_what_it_was_sent(
    updates: Updates, server: Server, reached: int, outcome: Outcome.ValueType
) -> None:
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    server.reached = reached
    with pytest.raises(RlctlError) as failed:
        await write(updates, server, buckets=2)
    assert (failed.value.reason, failed.value.outcome) == (Reason.UNREACHABLE, outcome)


async def test_an_update_that_wrote_nothing_leaves_the_label_also_after_a_further_attempt(
    updates: Updates, server: Server
) -> None:
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    assert server.label == WRITING
    updates.prepare(v.PrepareUpdateRequest(), CALL)  # the next attempt, which does not come to write
    await updates.abort(CALL)
    assert server.label == "at its start"


async def test_half_written_weights_are_not_called_whole_by_an_update_that_wrote_nothing(
    updates: Updates, server: Server
) -> None:
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    await write(updates, server)
    await updates.abort(CALL)
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    await updates.abort(CALL)
    assert server.label == WRITING


async def test_scrambled_weights_are_not_called_whole_before_the_next_commit(updates: Updates, server: Server) -> None:
    await updates.marking.spoil(CALL)
    assert server.label == WRITING
    for _ in range(2):
        updates.prepare(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_PARTIAL), CALL)
        await fail_to_write(updates, server)
        await updates.abort(CALL)
        assert server.label == WRITING
    updates.prepare(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_PARTIAL), CALL)
    await write(updates, server)
    await updates.commit("new@2", CALL)
    assert server.label == "new@2"


async def test_what_a_stage_server_that_ended_left_open_is_closed_before_a_load_from_disk(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    """SGLang would pack weights for the second time when somebody closes it later."""
    server.session = True
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), CALL)
    assert not server.session
    assert server.told.index("/end_weight_update") < server.told.index("/update_weights_from_disk")


async def test_a_checkpoint_that_took_all_of_the_time_to_read_is_not_loaded(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    updates.prepare(v.PrepareUpdateRequest(), CALL)
    late = Call("c", 0.0, update_id="u")
    with pytest.raises(RlctlError) as failed:
        await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), late)
    assert (failed.value.reason, failed.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_REJECTED)
    assert server.told == []
