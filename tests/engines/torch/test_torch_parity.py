"""The engine computes what plain transformers computes: tokens equal, log probabilities within 1e-4."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import rlctl_torch.generation.scheduler
from torch_models import FAMILIES, greedy, prompt_of, reference_logprobs
from torch_stage import Stage

from rlctl.v1.rollout_pb2 import FINISH_TYPE_LENGTH, TokenLogprob

TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 7, 12, 30, 5, 1)

UNSERVED = ("wide", "odd", "odd-moe")
"""Made for other tests."""

SERVED = [(family, size) for family in FAMILIES if family not in UNSERVED for size in (1, 2)]


@pytest.fixture(scope="module", params=SERVED, ids=lambda p: f"{p[0]}-tp{p[1]}")
def served(request: pytest.FixtureRequest, checkpoints) -> Iterator[Stage]:
    family, size = request.param
    stage = Stage(checkpoints(family), request.getfixturevalue("follower") if size == 2 else None)
    asyncio.run(stage.start())
    yield stage
    asyncio.run(stage.stop())


def close(found: list[TokenLogprob], expected: list[float]) -> None:
    assert len(found) == len(expected)
    worst = max((abs(f.logprob - e) for f, e in zip(found, expected, strict=True)), default=0.0)
    assert worst < TOLERANCE


async def test_greedy_tokens_alone(served: Stage) -> None:
    for length in (1, 9, 40):
        prompt = prompt_of(length)
        assert await served.tokens(prompt, 12) == greedy(served.config.model_path, prompt, 12)


async def test_greedy_tokens_and_logprobs_in_a_batch_of_mixed_lengths(served: Stage) -> None:
    path = served.config.model_path
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    counts = [4 + seed for seed in range(len(prompts))]
    responses = await asyncio.gather(
        *(
            served.generate(
                p, temperature=0, ignore_eos=True, max_new_tokens=c, return_logprob=True, logprob_start_len=0
            )
            for p, c in zip(prompts, counts, strict=True)
        )
    )
    for prompt, count, response in zip(prompts, counts, responses, strict=True):
        sample = response.samples[0]
        output = greedy(path, prompt, count)
        assert list(sample.output_ids) == output
        assert sample.finish_reason.type == FINISH_TYPE_LENGTH
        rows = reference_logprobs(path, prompt + output)
        assert [entry.token_id for entry in sample.output_logprobs] == output
        close(sample.output_logprobs, [float(rows[len(prompt) - 1 + i, t]) for i, t in enumerate(output)])
        first, *rest = response.input_logprobs
        assert (first.token_id, first.HasField("logprob")) == (prompt[0], False)
        assert [entry.token_id for entry in rest] == prompt[1:]
        close(rest, [float(rows[i, t]) for i, t in enumerate(prompt[1:])])


async def test_sampled_logprobs_are_taken_after_temperature(served: Stage) -> None:
    prompt = prompt_of(8)
    response = await served.generate(
        prompt, temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=10, ignore_eos=True, return_logprob=True, seed=3
    )
    output = list(response.samples[0].output_ids)
    rows = reference_logprobs(served.config.model_path, prompt + output, temperature=0.7)
    close(response.samples[0].output_logprobs, [float(rows[len(prompt) - 1 + i, t]) for i, t in enumerate(output)])


async def test_a_prompt_is_scored_without_output(served: Stage) -> None:
    prompt = prompt_of(20)
    response = await served.generate(prompt, max_new_tokens=0, temperature=0, logprob_start_len=5, top_logprobs_num=2)
    assert not response.samples[0].output_ids
    assert response.samples[0].finish_reason.type == FINISH_TYPE_LENGTH
    rows = reference_logprobs(served.config.model_path, prompt)
    assert [entry.token_id for entry in response.input_logprobs] == prompt[5:]
    close(response.input_logprobs, [float(rows[i - 1, prompt[i]]) for i in range(5, 20)])
    for i, entry in enumerate(response.input_logprobs, start=5):
        values, ids = rows[i - 1].topk(2)
        assert [top.token_id for top in entry.top] == ids.tolist()
        close(entry.top, values.tolist())


async def test_long_prompts_go_in_pieces(served: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlctl_torch.generation.scheduler, "PREFILL_TOKENS", 16)
    path = served.config.model_path
    prompts = [prompt_of(length) for length in (60, 35, 3)]
    responses = await asyncio.gather(
        *(served.generate(p, temperature=0, ignore_eos=True, max_new_tokens=6, logprob_start_len=1) for p in prompts)
    )
    for prompt, response in zip(prompts, responses, strict=True):
        assert list(response.samples[0].output_ids) == greedy(path, prompt, 6)
        rows = reference_logprobs(path, prompt)
        close(response.input_logprobs, [float(rows[i - 1, prompt[i]]) for i in range(1, len(prompt))])


async def test_what_others_left_in_the_cache_does_not_leak(served: Stage) -> None:
    """Not even as 0 times infinity: freed slots hold what they held."""
    cache = served.engine._rank.cache
    for tensor in [*cache.keys, *cache.values]:
        tensor[1:] = float("nan")
    path = served.config.model_path
    prompts = [prompt_of(length) for length in (1, 20, 3)]
    outputs = await asyncio.gather(*(served.tokens(prompt, 6) for prompt in prompts))
    assert outputs == [greedy(path, prompt, 6) for prompt in prompts]
