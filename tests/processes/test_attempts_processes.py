"""Engines that die while weights are on their way: what the others get, under which quorum, in how many attempts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds
from interrupted_weights import Interrupted
from models import greedy
from trainers import PP_TP, train
from up_helpers import restarted

from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import Publisher
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[LaunchedFleet]:
    """Every test leaves all of them routable."""
    engines = [EngineSpec("a", str(tiny[1]), tp_size=2), EngineSpec("b", str(tiny[1])), EngineSpec("c", str(tiny[1]))]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


def break_group(publisher: Publisher) -> None:
    (group,) = publisher.aio._part._groups.values()
    group.interrupt()


def held(fleet: Fleet, *slots: str) -> set[str]:
    operation = fleet.check_weights(slots=slots)
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def test_the_others_go_on_without_an_engine_that_dies(three: LaunchedFleet) -> None:
    with three.connect() as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        publisher.update(demo_tiny.make(seed=1), version="whole")
        before = [stage.incarnation for stage in fleet.status().stages]
        model = demo_tiny.make(seed=2)
        weights = Interrupted(model, three.process("c").kill)
        result = publisher.update(weights, version="without-c", quorum=2, retries=1, deadline_s=60)
        assert weights.passes == 2
        assert result.operation.state == OPERATION_STATE_PARTIAL
        outcomes = {stage.slot: stage.outcome for stage in result.operation.stage_results}
        assert (outcomes["a"], outcomes["b"]) == (common.OUTCOME_APPLIED, common.OUTCOME_APPLIED)
        assert outcomes["c"] in (common.OUTCOME_UNKNOWN, common.OUTCOME_NOT_SENT)
        stages = {stage.registration.slot: stage for stage in fleet.status().stages}
        assert {slot: stage.routable for slot, stage in stages.items()} == {"a": True, "b": True, "c": False}
        assert stages["c"].quarantine.reason
        assert [stage.incarnation for stage in stages.values()] == before, "nothing was restarted"
        assert holds(held(fleet, "a", "b"), model)
        for slot in ("a", "b"):
            (sample,) = fleet.generate([4, 5], slot=slot, max_new_tokens=8, temperature=0, ignore_eos=True).samples
            assert list(sample.output_ids) == greedy(model, [4, 5], 8)
            assert {span.version.label for span in sample.versions} == {"without-c"}
        assert fleet.status().models[0].latest.label == "without-c"
        # It is healed by a stage that has the version: no checkpoint has it, and the trainer is not asked. Engine b
        # holds the same parts as c, engine a does not.
        parts = [stage.registration.layout.shards_sha256 for stage in stages.values()]
        assert parts[1] == parts[2] != parts[0]
        restarted(three, fleet, "c")
        assert holds(held(fleet), model)
        assert fleet.status().stages[2].incarnation > before[2]
        assert fleet.status().models[0].latest.label == "without-c"
        assert all(stage.routable for stage in fleet.status().stages)
        publisher.update(demo_tiny.make(seed=4), version="three-again")
        # Its groups serve the next update.
        made = len(fleet.operations(verb="InitWeightsUpdateGroup", page_size=500))
        publisher.update(demo_tiny.make(seed=3), version="next")
        assert len(fleet.operations(verb="InitWeightsUpdateGroup", page_size=500)) == made
        assert holds(held(fleet), demo_tiny.make(seed=3))
        publisher.close()


def test_several_sources_start_over_without_an_engine_that_dies(three: LaunchedFleet, tmp_path: Path) -> None:
    with three.connect() as fleet:
        for path, seeds in (("ipc", [91, 92]), ("broadcast", [93, 94])):
            options = {"quorum": 2, "retries": 1}
            victim = three.process("c").pid
            store = tmp_path / path
            store.mkdir()
            said = train(fleet, store, seeds=seeds, path=path, kills=victim, options=options, **PP_TP)
            wanted = [update.get("digest", update) for update in said[0]]
            assert all(holds([digest], demo_tiny.make(seed=seed)) for digest, seed in zip(wanted, seeds, strict=True))
            assert [[update.get("digest", update) for update in rank] for rank in said] == [wanted] * 4
            assert held(fleet, "a", "b") == {wanted[-1]}
            stages = {stage.registration.slot: stage for stage in fleet.status().stages}
            assert {slot: stage.routable for slot, stage in stages.items()} == {"a": True, "b": True, "c": False}
            assert fleet.status().models[0].latest.label == f"seed-{seeds[-1]}"
            restarted(three, fleet, "c")
            assert held(fleet) == {wanted[-1]}


def test_without_a_quorum_nothing_is_served_and_the_rest_is_helped_by_the_next_update(three: LaunchedFleet) -> None:
    with three.connect() as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        before = fleet.status().models[0].latest
        weights = Interrupted(demo_tiny.make(seed=2), three.process("a.1").kill)
        with pytest.raises(RlctlError) as caught:
            publisher.update(weights, version="never", retries=1, deadline_s=60)
        assert caught.value.reason in (Reason.QUORUM_NOT_MET, Reason.RANK_LOST, Reason.GROUP_FAILED)
        assert fleet.status().models[0].latest == before
        states = {stage.registration.slot: stage.state for stage in fleet.status().stages}
        assert (states["b"], states["c"]) == (common.STAGE_STATE_DIRTY, common.STAGE_STATE_DIRTY)
        result = publisher.update(demo_tiny.make(seed=3), version="helped", quorum=2, retries=1, deadline_s=60)
        assert result.operation.state == OPERATION_STATE_PARTIAL
        assert holds(held(fleet, "b", "c"), demo_tiny.make(seed=3))
        # Two ranks are healed from one.
        restarted(three, fleet, "a")
        assert holds(held(fleet), demo_tiny.make(seed=3))
        publisher.close()


def test_a_group_that_breaks_with_every_engine_alive_costs_one_more_attempt(three: LaunchedFleet) -> None:
    with three.connect() as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        publisher.update(demo_tiny.make(seed=1), version="whole")
        model = demo_tiny.make(seed=2)
        weights = Interrupted(model, lambda: break_group(publisher))
        sent = copy.deepcopy(model)
        pending = publisher.update_async(weights, version="again", retries=1, deadline_s=60)
        pending.wait_sent()
        assert weights.passes == 2, "the tensors were needed once more"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        result = pending.wait()
        assert held(fleet) == {result.model_digest}
        assert holds([result.model_digest], sent)
        assert all(stage.routable for stage in fleet.status().stages)
        # Without retries the same failure ends the update.
        model = demo_tiny.make(seed=2)
        weights = Interrupted(model, lambda: break_group(publisher))
        with pytest.raises((OperationFailed, RlctlError)):
            publisher.update(weights, version="once", deadline_s=60)
        assert weights.passes == 1
        assert fleet.status().models[0].latest.label == "again"
        publisher.update(model, version="after")
        assert all(stage.routable for stage in fleet.status().stages)
        publisher.close()


def test_a_trainer_whose_update_is_ended_meanwhile_is_told_why(
    three: LaunchedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its own broadcast, or its next call, then breaks off with says nothing of that."""
    monkeypatch.setattr("rlctl.trainer.publisher.LEASE_TTL_S", 4.0)
    monkeypatch.setattr("rlctl.trainer.lead.Leading._renewing", lambda *_: nullcontext())
    with three.connect() as fleet:

        def interrupted(happens: Callable[[], object]) -> Interrupted:
            def meanwhile() -> None:
                happens()
                while fleet.status().models[0].update_owner == "first":
                    time.sleep(0.05)

            return Interrupted(demo_tiny.make(seed=9), meanwhile)

        def abort() -> None:
            fleet.abort_update(fleet.status().models[0].update_id, reason="the operator's")

        for incarnation, path in ((1, "broadcast"), (3, "ipc")):
            first = fleet.publisher("actor", path=path, trainer="first", incarnation=incarnation, bucket_bytes=16 << 10)
            second = fleet.publisher("actor", path=path, trainer="second", incarnation=incarnation + 1)
            other = demo_tiny.make(seed=incarnation)
            take_over = partial(second.update, other, version=f"taken-over-{path}", deadline_s=60)
            causes: list[tuple[Reason, str, Callable[[], object]]] = [
                (Reason.LEASE_EXPIRED, "first did not renew the lease for 4 s", lambda: None),
                (Reason.CANCELLED, "aborted: the operator's", abort),
                (Reason.TRAINER_FENCED, "second took over", take_over),
            ]
            for reason, message, happens in causes:
                with pytest.raises(OperationFailed) as caught:
                    first.update(interrupted(happens), version="never", deadline_s=60)
                assert (caught.value.reason, caught.value.message) == (reason, message)
            second.update(other, version=f"helped-{path}", deadline_s=60)
            assert holds(held(fleet), other)
            first.close()
            second.close()
