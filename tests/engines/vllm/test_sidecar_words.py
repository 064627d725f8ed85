"""What is asked in SGLang's words, and what is told in them. No I/O."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rlctl_vllm.requests.bodies import Limits, bodies
from rlctl_vllm.sidecar.admin import Admin
from rlctl_vllm.sidecar.responses import Sample, completion, wire_version
from rlctl_vllm.sidecar.supported_fields import read

from rlctl.contract.errors import Reason, RlctlError

LIMITS = Limits(vocab_size=100, context_length=200, longest_prompt=199, any_logprobs=True)


def ended(body: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """The answer to a request that vLLM has answered with this choice."""
    asking = read({"input_ids": [5], **body})
    sample = Sample(asking.prompts[0], "r", [5], driven=True)
    sample.take({"choices": [{"index": 0, "text": "", "token_ids": [], **choice}], "usage": None})
    return sample.answer()


def test_a_batch_gives_each_prompt_its_own_fields() -> None:
    asking = read(
        {
            "text": ["a", "b"],
            "sampling_params": [{"max_new_tokens": 0}, {"temperature": 0}],
            "return_logprob": True,
            "top_logprobs_num": [0, 3],
            "rid": "r",
        }
    )
    first, second = asking.prompts
    assert asking.listed
    assert (first.rid, second.rid) == ("r_0", "r_1")
    assert first.request.sampling_params.HasField("max_new_tokens")
    assert not second.request.sampling_params.HasField("max_new_tokens")
    assert second.request.sampling_params.HasField("temperature")
    assert (first.request.top_logprobs_num, second.request.top_logprobs_num) == (0, 3)


@pytest.mark.parametrize(
    ("body", "reason", "field"),
    [
        ([], Reason.FIELD_INVALID, "body"),
        ({"text": "a", "input_ids": [1]}, Reason.FIELD_CONFLICT, "input_ids"),
        ({"text": []}, Reason.FIELD_REQUIRED, "text"),
        ({"text": ["a", 1]}, Reason.FIELD_INVALID, "text"),
        ({"input_ids": [-1]}, Reason.FIELD_INVALID, "input_ids"),
        ({"input_ids": [1.5]}, Reason.FIELD_INVALID, "input_ids"),
        ({"text": "a", "stream": 2}, Reason.FIELD_INVALID, "stream"),
        ({"text": ["a", "b"], "rid": ["x"]}, Reason.LENGTH_MISMATCH, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, Reason.FIELD_INVALID, "rid"),
        ({"text": "a", "sampling_params": {"n": 0}}, Reason.FIELD_INVALID, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"n": True}}, Reason.FIELD_INVALID, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"ignore_eos": 2}}, Reason.FIELD_INVALID, "sampling_params.ignore_eos"),
        ({"text": "a", "sampling_params": {"seed": 1}}, Reason.FIELD_INVALID, "sampling_params.seed"),
        ({"text": "a", "sampling_params": {"stop_regex": "b"}}, Reason.UNSUPPORTED, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, Reason.FIELD_CONFLICT, "sampling_params"),
        ({"text": "a", "return_hidden_states": True}, Reason.UNSUPPORTED, "return_hidden_states"),
    ],
)
def test_what_is_wrong_is_named(body: Any, reason: Reason, field: str) -> None:
    with pytest.raises(RlctlError) as refused:
        read(body)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    read({"text": "a", "lora_path": None, "return_hidden_states": False, "sampling_params": {"stop": None}})


def test_the_same_is_asked_over_completions() -> None:
    asked = read({"input_ids": [5, 6], "sampling_params": {"stop": "x", "sampling_seed": 3}}).prompts[0]
    (body,) = bodies(asked.request, [5, 6], ["id"], LIMITS)
    told = completion(body, "m")
    assert (told["model"], told["prompt"], told["request_id"], told["stream"]) == ("m", [5, 6], "id", True)
    assert (told["max_tokens"], told["stop"], told["seed"]) == (128, ["x"], 3)
    assert not told.keys() & {"sampling_params", "token_ids", "output_mode", "detokenize"}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ({"finish_reason": "stop", "token_ids": [7, 2]}, {"type": "stop", "matched": 2}),
        ({"finish_reason": "stop", "stop_reason": 7, "token_ids": [7]}, {"type": "stop", "matched": 7}),
        ({"finish_reason": "stop", "stop_reason": "==", "token_ids": [7]}, {"type": "stop", "matched": "=="}),
        ({"finish_reason": "length", "token_ids": [7, 8]}, {"type": "length", "length": 2}),
        ({"finish_reason": None, "token_ids": [7]}, None),
    ],
)
def test_ends_are_named(choice: dict[str, Any], finish: Any) -> None:
    assert ended({}, **choice)["meta_info"]["finish_reason"] == finish


def test_an_end_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(RlctlError) as failed:
        ended({}, finish_reason="error")
    assert failed.value.reason is Reason.ENGINE_FAILED


def test_both_routes_log_probabilities_become_the_same() -> None:
    body = {"return_logprob": True, "top_logprobs_num": 1}
    tops = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -0.25}]
    content = [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": tops}]
    flat = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -0.25}]}
    for logprobs in ({"content": content}, flat):
        meta = ended(body, token_ids=[7], logprobs=logprobs)["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, 7, None]]
        assert meta["output_top_logprobs"] == [[[-0.25, 9, None]]]


@pytest.mark.parametrize(
    ("label", "driven", "version"),
    [("7@3", True, 7), ("7@3", False, "7@3"), ("step-7@3", True, "step-7"), ("12", False, 12), ("a@b", True, "a@b")],
)
def test_versions_are_numbers_where_they_can_be(label: str, driven: bool, version: int | str) -> None:
    assert wire_version(label, driven=driven) == version


class Engine:
    """The plug-in, as far as it is told to do something."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        async def tell(request: Any, call: Any) -> None:
            self.told.append(verb)

        return tell


BUCKET = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("update_weights_from_distributed", {**BUCKET, "shapes": [[-1]]}, "shapes[0]"),
        ("update_weights_from_distributed", {**BUCKET, "shapes": [[1 << 64]]}, "shapes[0]"),
        ("init_weights_update_group", {**GROUP, "master_port": -1}, "master_port"),
        ("init_weights_update_group", {**GROUP, "world_size": 1 << 40}, "world_size"),
    ],
)
async def test_a_number_that_is_none_of_its_kind_is_refused_before_anything_is_paused(
    verb: str, body: dict[str, Any], field: str
) -> None:
    engine: Any = Engine()
    requests: Any = SimpleNamespace(active=0)
    with pytest.raises(RlctlError) as refused:
        await Admin(engine, requests).carry_out(verb, body)
    assert (refused.value.reason, refused.value.field, engine.told) == (Reason.FIELD_INVALID, field, [])
