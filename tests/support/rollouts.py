"""Rollouts of the SDK during updates, alike for every engine: cut samples go on, and every token has its version."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from answers import of_each
from models import changed, greedy

from rlctl.demo.tiny import encode
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk.blocking import Fleet
from rlctl.v1.verbs_pb2 import GetLoadsRequest

PROMPT = encode("7+")
LONG = 450
SAMPLES = 4
CHECKED = 20
PATIENCE_S = 60.0
TURNS = 4
"""Tries: under other load, samples may end before an update begins."""

Asked = dict[str, Any]
GREEDILY: Asked = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True, "timeout_s": 200.0}


def run_over_updates(fleet: Fleet, tiny: Any) -> None:
    """Check samples cut by an update: continued automatically, then returned to their trainer."""
    models = [changed(tiny, seed=seed) for seed in (60, 61, 62)]
    with contextlib.closing(fleet.publisher("actor", trainer="rollouts")) as publisher, ThreadPoolExecutor(1) as pool:
        for _ in range(TURNS):
            publisher.update(models[0], version="first")
            going_on = pool.submit(fleet.rollout("actor").generate, PROMPT, n=SAMPLES, **GREEDILY)
            _wait_for(fleet, going_on)
            publisher.update(models[1], version="second", pause="abort")
            if all(_labels(sample)[-1] == "second" for sample in going_on.result()):
                break
        for sample in going_on.result():
            _of_both(sample, models[0], models[1], ["first", "second"])
            assert sample.staleness == 1

        rollout = fleet.rollout("actor", resume="return")
        for _ in range(TURNS):
            returned = pool.submit(rollout.generate, PROMPT, n=SAMPLES, **GREEDILY)
            _wait_for(fleet, returned)
            publisher.update(models[2], version="third", pause="abort")
            cut = returned.result()
            if all(sample.finish == "abort" for sample in cut):
                break
            publisher.update(models[1], version="second")
        assert [sample.finish for sample in cut] == ["abort"] * SAMPLES
        assert all(0 < len(sample.output_ids) == len(sample.logprobs) < LONG for sample in cut)
        for sample in rollout.resume(cut, timeout_s=200.0):
            _of_both(sample, models[1], models[2], ["second", "third"])


def run_until(fleet: Fleet) -> None:
    """Check that the long tail is stopped, and continues later from its tokens."""
    rollout = fleet.rollout("actor")
    short = rollout.generate(PROMPT, **{**GREEDILY, "max_new_tokens": LONG // 10})[0]
    ended, rest = rollout.generate_until(1, [PROMPT] * 3, **GREEDILY)
    assert ended
    assert len(ended) + len(rest) == 3
    for sample in (*ended, *rollout.resume(rest, timeout_s=200.0)):
        assert sample.finish == "length"
        assert len(sample.output_ids) == len(sample.logprobs) == LONG
        assert sample.output_ids[: len(short.output_ids)] == short.output_ids
    assert sum(_running(fleet).values()) == 0


def _of_both(sample: RolloutSample, before: Any, after: Any, labels: list[str]) -> None:
    """Check that a sample's tokens match the weights of their versions."""
    assert sample.finish == "length"
    tokens, versions = sample.output_ids, _labels(sample)
    assert len(tokens) == len(versions) == len(sample.logprobs) == LONG
    kept = versions.count(labels[0])
    assert 0 < kept < LONG
    assert versions == labels[:1] * kept + labels[1:] * (LONG - kept)
    assert tokens[: min(kept, CHECKED)] == greedy(before, PROMPT, min(kept, CHECKED))
    new = tokens[kept : kept + CHECKED]
    assert new == greedy(after, PROMPT + tokens[:kept], len(new))


def _labels(sample: RolloutSample) -> list[str]:
    return [version.label for version in sample.versions if version is not None]


def _wait_for(fleet: Fleet, generating: Future[list[RolloutSample]]) -> None:
    """Wait until all samples run and have a token: engines serve requests in order of arrival."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(_running(fleet).values()) < SAMPLES:
        assert not generating.done(), generating.exception() or "they have ended already"
        assert time.monotonic() < deadline
    of_each(fleet, PROMPT, max_new_tokens=1, temperature=0.0)


def _running(fleet: Fleet) -> dict[str, int]:
    """Return running requests, by slot."""
    stages = fleet.call(GetLoadsRequest()).stage_results
    return {stage.slot: stage.rank_results[0].loads.running for stage in stages}
