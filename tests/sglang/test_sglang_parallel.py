"""A real SGLang of two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_stage import Driver, Source, changed, greedy, prompt

from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A server of two ranks."""
    driver = Driver(tiny[1], tp_size=2)
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


def test_one_answer_for_two_ranks_is_no_evidence_for_each(pair: Driver) -> None:
    assert [(worker.rank, worker.tp) for worker in pair.info.layout.workers] == [(0, 0), (1, 1)]
    assert not pair.info.model_digest, "cut tensors cannot be read back"
    assert not pair.info.capabilities.verification


def test_every_rank_takes_its_part_of_what_is_broadcast(pair: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=9)
    before = pair.tell(v.CheckWeightsRequest())
    assert [result.coordinates.rank for result in before] == [0, 1]
    assert {result.evidence for result in before} == {common.EVIDENCE_RANK}
    with Source(pair, "both") as source:
        assert source.world_size == 3
        plan = source.plan(model)
        pair.prepare("u")
        receiving = pair.submit(source.announce(plan), update_id="u")
        source.send(model, plan)
        receiving.result(60)
        version = pair.commit("u", "new", 2)
    after = pair.tell(v.CheckWeightsRequest())
    assert all(a.check.rank_digest != b.check.rank_digest for a, b in zip(before, after, strict=True))
    pair.tell(v.FlushCacheRequest())
    pair.tell(v.ContinueGenerationRequest())
    generating = pair.begin(prompt(encode("3+"), 12))
    last = generating.result()[-1].samples[0]
    assert generating.tokens == greedy(model, encode("3+"), 12)
    assert last.versions[0].version == version
