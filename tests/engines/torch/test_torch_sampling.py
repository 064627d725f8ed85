"""From logits to tokens: distributions, filters, penalties, and draws that depend on nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from rlctl_torch.generation.request_settings import Settings, check
from rlctl_torch.generation.sampling import sample, score, uniform
from torch_stage import generate_request

from rlctl.contract.errors import Reason, RlctlError


def settings(**fields: object) -> Settings:
    return check(generate_request([1], **fields), vocab_size=8, eos=frozenset({0}), tokenizer=True)


@dataclass
class Fake:
    settings: Settings
    seed: int = 1
    index: int = 0
    position: int = 0
    output: Counter[int] = field(default_factory=Counter)
    prompt: frozenset[int] = frozenset()

    def seen(self) -> tuple[Mapping[int, int], frozenset[int]]:
        return self.output, self.prompt


PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBABILITIES).log()


def frequencies(draws: int = 4000, **fields: object) -> list[float]:
    chosen = settings(**fields)
    found = Counter(c.token for c in sample(LOGITS.repeat(draws, 1), [Fake(chosen, position=i) for i in range(draws)]))
    return [found[token] / draws for token in range(len(PROBABILITIES))]


def test_draws_follow_the_distribution() -> None:
    assert frequencies() == pytest.approx(PROBABILITIES, abs=0.03)


def test_temperature_sharpens() -> None:
    expected = torch.softmax(LOGITS / 0.5, dim=-1).tolist()
    assert frequencies(temperature=0.5) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 1}, 1),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 0.3}, 3),
        ({"min_p": 1.0}, 1),
        # top_p counts within what top_k leaves: 0.4 / 0.7 is not yet 0.58.
        ({"top_k": 2, "top_p": 0.58}, 2),
        ({"top_k": 2, "top_p": 0.57}, 1),
    ],
)
def test_filters_keep_the_most_likely(fields: dict[str, float], kept: int) -> None:
    total = sum(PROBABILITIES[:kept])
    expected = [p / total for p in PROBABILITIES[:kept]] + [0.0] * (5 - kept)
    assert frequencies(**fields) == pytest.approx(expected, abs=0.03)


def test_greedy_takes_the_most_likely_and_reports_raw_logprobs() -> None:
    (choice,) = sample(LOGITS[None].clone(), [Fake(settings(temperature=0, return_logprob=True))])
    assert choice.token == 0
    assert choice.logprob == pytest.approx(math.log(0.4), abs=1e-6)


def test_logprobs_come_after_temperature_and_before_the_filters() -> None:
    (choice,) = sample(
        LOGITS[None].clone(), [Fake(settings(temperature=2.0, top_k=1, return_logprob=True, top_logprobs_num=2))]
    )
    expected = torch.log_softmax(LOGITS / 2, dim=-1)
    assert choice.logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert [token for token, _ in choice.top] == [0, 1]
    assert [value for _, value in choice.top] == pytest.approx(expected[:2].tolist(), abs=1e-6)


def test_rows_of_a_batch_keep_to_their_own_settings() -> None:
    kinds = [{"temperature": 0}, {"top_k": 1}, {"return_logprob": True, "temperature": 0}, {"top_logprobs_num": 3}]
    choices = sample(LOGITS.repeat(4, 1), [Fake(settings(**kind)) for kind in kinds])
    assert [c.token for c in choices[:3]] == [0, 0, 0]
    assert [c.logprob is not None for c in choices] == [False, False, True, True]
    assert [len(c.top) for c in choices] == [0, 0, 0, 3]


def test_a_draw_depends_on_seed_sample_and_position_only() -> None:
    alone = sample(LOGITS[None].clone(), [Fake(settings(), seed=7, index=2, position=5)])
    crowd = [Fake(settings(temperature=0.1 * n), seed=n) for n in range(1, 9)]
    among = sample(LOGITS.repeat(9, 1), [*crowd, Fake(settings(), seed=7, index=2, position=5)])
    assert among[-1].token == alone[0].token
    numbers = {uniform(seed, index, position) for seed in range(9) for index in range(9) for position in range(9)}
    assert len(numbers) == 9**3
    assert all(0 <= number < 1 for number in numbers)


def test_penalties_lower_what_was_seen() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, -1.0, 0.0]])
    fake = Fake(
        settings(
            temperature=0,
            return_logprob=True,
            top_logprobs_num=5,
            repetition_penalty=2.0,
            frequency_penalty=0.25,
            presence_penalty=0.5,
        ),
        output=Counter({0: 3, 3: 1}),
        prompt=frozenset({1}),
    )
    expected = torch.log_softmax(torch.tensor([1.0 - 0.75 - 0.5, 1.0, 2.0, -2.0 - 0.25 - 0.5, 0.0]), dim=-1)
    (choice,) = sample(logits, [fake])
    assert choice.token == 2
    assert dict(choice.top) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-6)


def test_prompts_are_scored_at_the_temperature() -> None:
    choices = score(LOGITS.repeat(2, 1), [3, 0], settings(temperature=0.5, top_k=1))
    expected = torch.log_softmax(LOGITS / 0.5, dim=-1)
    assert [c.logprob for c in choices] == pytest.approx([float(expected[3]), float(expected[0])], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"temperature": math.nan}, "sampling_params.temperature"),
        ({"temperature": math.inf}, "sampling_params.temperature"),
        ({"top_p": 0}, "sampling_params.top_p"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"top_p": math.nan}, "sampling_params.top_p"),
        ({"top_k": 0}, "sampling_params.top_k"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"min_p": 1.5}, "sampling_params.min_p"),
        ({"n": 100_000}, "sampling_params.n"),
        ({"stop": ["a", ""]}, "sampling_params.stop"),
        ({"stop_token_ids": [8]}, "sampling_params.stop_token_ids"),
        ({"frequency_penalty": 3}, "sampling_params.frequency_penalty"),
        ({"presence_penalty": -3}, "sampling_params.presence_penalty"),
        ({"repetition_penalty": 0}, "sampling_params.repetition_penalty"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "sampling_params.min_new_tokens"),
        ({"min_new_tokens": 129}, "sampling_params.min_new_tokens"),
        ({"top_logprobs_num": 9}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
    ],
)
def test_bad_settings_are_refused_by_field(fields: dict[str, object], path: str) -> None:
    with pytest.raises(RlctlError) as caught:
        settings(**fields)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, path)


def test_stop_tokens_include_the_models_unless_ignored() -> None:
    assert settings(stop_token_ids=[5]).stop_ids == {0, 5}
    assert settings(stop_token_ids=[5], ignore_eos=True).stop_ids == {5}
