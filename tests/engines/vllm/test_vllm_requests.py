"""From requests to vLLM's bodies; without vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from rlctl_vllm.requests.bodies import Limits, bodies

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds

LIMITS = Limits(vocab_size=100, context_length=32, longest_prompt=31)


def body(limits: Limits = LIMITS, ids: tuple[int, ...] = (1, 2), **fields: Any) -> dict[str, Any]:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    request = GenerateRequest(input_ids=TokenIds(ids=ids), sampling_params=sampling, **fields)
    (made,) = bodies(request, ids, ["r"], limits)
    return made


def refused(**fields: Any) -> tuple[Reason, str]:
    with pytest.raises(RlctlError) as error:
        body(**fields)
    return error.value.reason, error.value.field


def test_defaults_are_rlctls_and_not_vllms() -> None:
    made = body()
    sampling = made["sampling_params"]
    assert sampling["max_tokens"] == 30, "128, cut at the context"
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, 0)
    assert made["stream"]
    assert made["stream_options"] == {"include_usage": True}
    assert "logprobs" not in sampling
    assert "seed" not in sampling


def test_every_sample_has_an_id_and_a_seed_of_its_own() -> None:
    request = GenerateRequest(input_ids=TokenIds(ids=[1]), sampling_params=SamplingParams(n=2, seed=7))
    made = bodies(request, [1], ["a", "b"], LIMITS)
    assert [(one["request_id"], one["sampling_params"]["seed"], one["sampling_params"]["n"]) for one in made] == [
        ("a", 7, 1),
        ("b", 8, 1),
    ]


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (1, 2), (19, 20)])
def test_one_more_likely_token_makes_room_for_the_drawn_one(asked: int, sent: int) -> None:
    assert body(return_logprob=True, top_logprobs_num=asked)["sampling_params"]["logprobs"] == sent


def test_a_prompts_logprobs_are_not_streamed() -> None:
    made = body(logprob_start_len=0)
    assert not made["stream"]
    assert made["sampling_params"]["prompt_logprobs"] == 0


def test_scoring_takes_a_token() -> None:
    assert body(sampling={"max_new_tokens": 0})["sampling_params"]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"ids": ()}, Reason.FIELD_REQUIRED, "input_ids.ids"),
        ({"ids": (100,)}, Reason.FIELD_INVALID, "input_ids.ids"),
        ({"ids": (1,) * 32}, Reason.PROMPT_TOO_LONG, ""),
        ({"ids": (100,) * 32}, Reason.PROMPT_TOO_LONG, ""),  # the ids of a long prompt are not looked at
        ({"top_logprobs_num": 20}, Reason.FIELD_INVALID, "top_logprobs_num"),
        ({"return_logprob": True, "sampling": {"min_p": 0.1}}, Reason.UNSUPPORTED, "sampling_params.min_p"),
        ({"return_logprob": True, "sampling": {"top_k": 3}}, Reason.UNSUPPORTED, "sampling_params.top_k"),
        ({"sampling": {"top_p": 2.0}}, Reason.FIELD_INVALID, "sampling_params.top_p"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], reason: Reason, field: str) -> None:
    assert refused(**fields) == (reason, field)


def test_logprobs_that_are_not_those_after_temperature_are_refused() -> None:
    raw = Limits(vocab_size=100, context_length=32, longest_prompt=31, logprobs_mode="raw_logprobs")
    assert refused(limits=raw, return_logprob=True, sampling={"temperature": 0.5})[1] == "return_logprob"
    assert refused(limits=raw, return_logprob=True, sampling={"presence_penalty": 0.5})[1] == "return_logprob"
    for temperature in (0.0, 1.0):
        assert body(limits=raw, return_logprob=True, sampling={"temperature": temperature})
    greedy = {"temperature": 0.0, "top_p": 0.5}
    assert body(return_logprob=True, sampling=greedy), "nothing is drawn, so nothing is cut off"


def test_log_probabilities_of_a_prompt_are_refused_where_they_end_the_server() -> None:
    ends = dataclasses.replace(LIMITS, no_prompt_logprobs="it ends")
    assert refused(limits=ends, logprob_start_len=0) == (Reason.UNSUPPORTED, "logprob_start_len")
    assert "prompt_logprobs" not in body(limits=ends, return_logprob=True)["sampling_params"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    blind = Limits(vocab_size=100, context_length=32, longest_prompt=31, tokenizer=False)
    made = body(limits=blind)
    assert (made["output_mode"], made["sampling_params"]["detokenize"]) == ("tokens", False)
    assert refused(limits=blind, sampling={"stop": ["a"]})[0] is Reason.UNSUPPORTED


def test_spaces_between_special_tokens_are_said_only_where_the_caller_does() -> None:
    assert "spaces_between_special_tokens" not in body()["sampling_params"]
    said = body(sampling={"spaces_between_special_tokens": False})["sampling_params"]
    assert said["spaces_between_special_tokens"] is False


def test_sglangs_grammars_become_structured_outputs() -> None:
    fields = Struct()
    fields.update({"sampling_params": {"regex": "[0-9]+", "logit_bias": {"5": 1}}})
    sampling = body(engine_fields=fields)["sampling_params"]
    assert (sampling["structured_outputs"], sampling["logit_bias"]) == ({"regex": "[0-9]+"}, {"5": 1})
    assert "regex" not in sampling
    fields.update({"sampling_params": {"regex": "[0-9]+", "ebnf": "x"}})
    assert refused(engine_fields=fields) == (Reason.FIELD_CONFLICT, "sampling_params")
