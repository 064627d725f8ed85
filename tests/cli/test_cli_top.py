"""``rlctl top``: queues now, rates between two samples of the same engine."""

from __future__ import annotations

import json

from cli_helpers import Cli, LiveFleet

from rlctl.cli.render.loads import Sample, summed, top_view
from rlctl.cli.render.tables import plain
from rlctl.v1.common_pb2 import STAGE_STATE_READY, STAGE_STATE_UNREACHABLE
from rlctl.v1.fleet_pb2 import Fleet, Stage, StageRegistration
from rlctl.v1.results_pb2 import Operation, RankResult, StageResult
from rlctl.v1.verbs_pb2 import Loads


def fleet(incarnation: int = 1) -> Fleet:
    stages = [
        Stage(
            registration=StageRegistration(slot=slot, model="actor"),
            state=state,
            routable=state == STAGE_STATE_READY,
            not_routable="" if state == STAGE_STATE_READY else "UNREACHABLE: the link is lost",
            enabled=True,
            incarnation=incarnation,
        )
        for slot, state in (("a", STAGE_STATE_READY), ("b", STAGE_STATE_UNREACHABLE))
    ]
    made = Fleet(stages=stages)
    made.header.observed_at.FromSeconds(2000)
    return made


def sample(at_s: float, tokens: int, step: int, incarnation: int = 1) -> Sample:
    loads = Loads(running=3, waiting=2, used_tokens=250, max_tokens=1000, step=step, generated_tokens=tokens)
    return Sample(at_s, fleet(incarnation), {"a": loads})


def test_rates_are_those_between_two_samples() -> None:
    a, b = top_view("fleet:1", sample(10.0, 1000, 50), sample(12.0, 4000, 90)).data["stages"]
    assert (a["running"], a["waiting"], a["tokens_per_s"], a["steps_per_s"]) == (3, 2, 1500.0, 20.0)
    assert (b["running"], b["tokens_per_s"], b["why_not"]) == (None, None, "the link is lost")


def test_an_engine_that_was_started_again_has_no_rate_at_first() -> None:
    for now in (sample(12.0, 10, 90), sample(12.0, 4000, 90, incarnation=2)):
        a = top_view("fleet:1", sample(10.0, 1000, 50), now).data["stages"][0]
        assert a["tokens_per_s"] is None
    assert top_view("fleet:1", None, sample(1.0, 1, 1)).data["stages"][0]["tokens_per_s"] is None


def test_ranks_of_a_stage_are_summed() -> None:
    ranks = [RankResult(loads=Loads(running=1, step=7)), RankResult(loads=Loads(running=2, step=8)), RankResult()]
    answered = Operation(stage_results=[StageResult(slot="a", rank_results=ranks), StageResult(slot="b")])
    assert summed(answered) == {"a": Loads(running=3, step=8)}


def test_the_table_shows_queues_the_cache_and_running_operations() -> None:
    now = sample(12.0, 4000, 90)
    running = Operation(operation_id="o", verb="WeightUpdate", model="actor", targets=["a", "b"])
    running.create_time.FromSeconds(1990)
    view = top_view("fleet:1", sample(10.0, 1000, 50), Sample(now.at_s, now.fleet, now.loads, [running]))
    summary, _, _, a, b, *_, update = plain(view.tables(False)).splitlines()
    assert summary == "Fleet at fleet:1: 1 of 2 stages routable, 3 running, 2 waiting, 1500 tokens/s"
    assert a.split()[:8] == ["a", "READY", "-", "3", "2", "25%", "1500", "20"]
    assert b.split()[:8] == ["b", "UNREACHABLE", "-", "-", "-", "-", "-", "-"]
    assert update.split() == ["o", "WeightUpdate", "actor", "2", "stages", "10.0s"]


def test_top_of_a_fleet_ends_after_its_samples(rlctl: LiveFleet) -> None:
    ran = rlctl("top", "-n", "2", "--interval", "100ms", "-o", "jsonl")
    assert ran.code == 0
    samples = [json.loads(line) for line in ran.out.splitlines()]
    assert len(samples) == 2
    assert [stage["slot"] for stage in samples[0]["stages"]] == ["a", "b"]
    assert all(stage["running"] == 0 and stage["steps_per_s"] is not None for stage in samples[1]["stages"])
    table = rlctl("top", "-n", "1", "--interval", "50ms").out
    assert "2 of 2 stages routable" in table
    assert "\x1b[" not in table
    assert rlctl("top", "--interval", "50ms", "--timeout", "1s").code == 0


def test_top_without_a_coordinator_fails(cli: Cli) -> None:
    assert cli("--endpoint", "127.0.0.1:1", "top").code == 5
