"""The same requests at real vLLM and real SGLang: the same answers. Skipped where SGLang is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_stage import Driver, prompt

from rlctl.demo.tiny import encode
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # starts an SGLang server for a few tests


def whole(driver: Driver, request: rollout.GenerateRequest) -> tuple[rollout.GenerateResponse, rollout.Sample]:
    """The first message, and the sample put together."""
    parts = driver.generate(request)
    sample = rollout.Sample()
    for part in parts:
        sample.MergeFrom(part.samples[0])
    sample.text = "".join(part.samples[0].text for part in parts)
    return parts[0], sample


def same(one: Any, other: Any) -> None:
    """Log probabilities, most likely tokens included."""
    assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
    for left, right in zip(one, other, strict=True):
        assert left.HasField("logprob") == right.HasField("logprob")
        assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
        assert [top.token_id for top in left.top] == [top.token_id for top in right.top]
        assert [top.logprob for top in left.top] == pytest.approx([top.logprob for top in right.top], abs=1e-3)


def test_answers_are_those_of_sglang(driver: Driver, sglang: Driver, tiny: tuple[Any, Path]) -> None:
    driver.prepare("parity")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="parity")
    driver.commit("parity", "parity", 500)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    stop_id = rollout.SamplingParams(max_new_tokens=40, temperature=0.0, stop_token_ids=list(range(3, 16)))
    stop_text = rollout.SamplingParams(max_new_tokens=40, temperature=0.0, stop=["=="], ignore_eos=True)
    kept = rollout.SamplingParams(max_new_tokens=40, temperature=0.0, stop=["=="], no_stop_trim=True, ignore_eos=True)
    for request in (
        prompt(encode("1+2="), 16, return_logprob=True, top_logprobs_num=3),
        prompt(encode("12+34="), 4, return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
        rollout.GenerateRequest(
            text="7+8=", sampling_params=rollout.SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        ),
        prompt(encode("1+2="), 0, sampling_params=stop_id),
        prompt(encode("1+2="), 0, sampling_params=stop_text),
        prompt(encode("1+2="), 0, sampling_params=kept),
    ):
        (ours, mine), (theirs, other) = whole(driver, request), whole(sglang, request)
        assert list(mine.output_ids) == list(other.output_ids)
        assert mine.text == other.text
        assert mine.finish_reason == other.finish_reason
        assert ours.prompt_tokens == theirs.prompt_tokens
        assert list(ours.prompt_ids) == list(theirs.prompt_ids)
        same(mine.output_logprobs, other.output_logprobs)
        same(ours.input_logprobs, theirs.input_logprobs)
