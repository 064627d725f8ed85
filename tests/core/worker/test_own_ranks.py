"""A worker whose engine speaks for several ranks: one answer is filed for each of them, as the engine's."""

from __future__ import annotations

from typing import Any

from rlctl.contract import outcomes
from rlctl.contract.errors import Reason
from rlctl.engine import Call, brings_ranks
from rlctl.ports import SystemClock
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_SKIPPED,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.worker.worker import Worker

RANKS = [WorkerCoordinates(rank=rank) for rank in range(3)]


class OneAnswer:
    """An engine with a few verbs."""

    name = "one"

    async def get_loads(self, request: v.GetLoadsRequest, call: Call) -> v.Loads:
        return v.Loads(running=2)

    async def flush_cache(self, request: v.FlushCacheRequest, call: Call) -> None:
        raise Reason.ENGINE_FAILED.error("half of it", outcome=OUTCOME_DIRTY)

    async def check_weights(self, request: v.CheckWeightsRequest, call: Call) -> list[RankResult]:
        return [RankResult(coordinates=r, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK) for r in RANKS]


async def carry_out(request: Any, ranks: int) -> list[RankResult]:
    clock = SystemClock()
    worker = Worker(OneAnswer(), RANKS[0], clock, others=RANKS[1:ranks])  # type: ignore[arg-type]
    return await worker.carry_out(request, Call("c", clock.now() + 5))


async def test_one_answer_is_filed_for_every_rank_and_its_data_once() -> None:
    results = await carry_out(v.GetLoadsRequest(), 3)
    assert [result.coordinates.rank for result in results] == [0, 1, 2]
    assert {result.evidence for result in results} == {EVIDENCE_ENGINE}
    assert [result.HasField("loads") for result in results] == [True, False, False]
    assert outcomes.one_per_rank(RANKS, results) == results
    assert outcomes.evidence_of(results) == EVIDENCE_ENGINE


async def test_an_error_is_every_ranks() -> None:
    results = await carry_out(v.FlushCacheRequest(), 3)
    assert {result.outcome for result in results} == {OUTCOME_DIRTY}
    assert {result.error.reason for result in results} == {"ENGINE_FAILED"}
    skipped = await carry_out(v.PauseGenerationRequest(), 3)
    assert {result.outcome for result in skipped} == {OUTCOME_SKIPPED}


async def test_ranks_that_answer_for_themselves_are_believed() -> None:
    results = await carry_out(v.CheckWeightsRequest(), 3)
    assert {result.evidence for result in results} == {EVIDENCE_RANK}


async def test_an_engine_of_one_rank_answers_for_it() -> None:
    (result,) = await carry_out(v.GetLoadsRequest(), 1)
    assert result.evidence == EVIDENCE_RANK


def test_which_plugins_have_ranks_of_their_own() -> None:
    assert brings_ranks("sglang")
    assert not brings_ranks("torch")
