"""A real vLLM of two tensor-parallel ranks: each takes its part in, and answers for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver, Source, prompt, refusal

import rlctl
from rlctl.client.probe import Probe
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(vllm: str, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A server of two ranks."""
    driver = Driver(VLLMEngine, tiny[1], tp_size=2)
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


def test_every_rank_takes_its_part_and_says_what_came(pair: Driver, tiny: tuple[Any, Path]) -> None:
    info = pair.info
    assert [(worker.rank, worker.tp) for worker in info.layout.workers] == [(0, 0), (1, 1)]
    assert not info.capabilities.answers_for_ranks
    assert common.VERIFICATION_LEVEL_RECEIVED in info.capabilities.verification
    assert common.VERIFICATION_LEVEL_EXPECTED not in info.capabilities.verification, "cut tensors are not read back"
    assert refusal(pair, v.CheckWeightsRequest()).outcome == common.OUTCOME_SKIPPED
    model = changed(tiny[0], seed=9)
    with Source(pair, "both") as source:
        assert source.world_size == 3
        plan = source.plan(model)
        pair.prepare("u", digest_received=True)
        receiving = pair.submit(source.announce(plan), update_id="u")
        source.send(model, plan)
        results = receiving.result(60)
        assert [result.coordinates.rank for result in results] == [0, 1]
        version = common.WeightVersion(label="new", sequence=2)
        committed = pair.tell(v.CommitUpdateRequest(version=version), update_id="u")
    assert {result.weights.received_digest for result in committed} == {rlctl.model_digest(model)}
    assert {result.evidence for result in committed} == {common.EVIDENCE_RANK}
    pair.engine.set_version(version)
    wanted = Probe.of(model, [encode("1+2=3")])
    probed = pair.tell(v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE, prompts=wanted.to_proto().prompts)).probed
    assert [list(each.logprobs) for each in probed] == [pytest.approx(each, abs=1e-4) for each in wanted.logprobs]
    pair.tell(v.FlushCacheRequest())
    pair.tell(v.ContinueGenerationRequest())
    generating = pair.begin(prompt(encode("3+"), 12))
    last = generating.result()[-1].samples[0]
    assert generating.tokens == greedy(model, encode("3+"), 12)
    assert last.versions[0].version == version
