"""Every field of SGLang's /generate is taken, refused by name, or known to change no answer."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.contract.errors import RlctlError
from rlctl.gateway.generation.sglang import WORDS
from rlctl.sglang_api.request import read

FIELDS = """
rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
use_audio_in_video video_config sampling_params watermark return_logprob logprob_start_len top_logprobs_num
token_ids_logprob return_sampling_mask sampling_logprobs_mode return_text_in_logprobs return_flat_raw_top_logprobs
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states
return_routed_experts routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc
background require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels return_bytes return_entropy
return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs
multi_item_delimiter_indices token_indices_to_pool cache_salt kv_hints
""".split()  # noqa: SIM905 it is a long list
"""Of SGLang 0.5.23's GenerateReqInput."""

SAMPLING = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params watermark
""".split()  # noqa: SIM905 it is a long list
"""Of SGLang 0.5.23's SamplingParams: what callers set."""

TEXTS = {"stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "watermark"}
FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")

OBSERVING = {"conversation_id", "custom_labels", "external_trace_header", "http_worker_ipc", "received_time"}
"""They change logs, metrics and traces, and no answer: ignored, and listed as unknown."""

TAKEN: dict[str, Any] = {
    "input_ids": [7],
    "sampling_params": {},
    "return_logprob": True,
    "stream": True,
    "return_prompt_token_ids": True,
    "log_metrics": False,
    "no_logs": True,
}
"""Values that do not fit a text."""
NUMBERS = {"logprob_start_len", "top_logprobs_num", "priority"}


def outcome(body: dict[str, Any]) -> str:
    try:
        asking = read(body, WORDS)
    except RlctlError as error:
        return f"{error.reason.name} {error.field}"
    return "unknown" if asking.unknown else "taken"


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_taken_or_refused_by_name(name: str) -> None:
    value = TAKEN.get(name, 1 if name in NUMBERS else "x")
    allowed = ("unknown",) if name in OBSERVING else ("taken", f"UNSUPPORTED {name}")
    prompt = {} if name in ("text", "input_ids") else {"input_ids": [7]}
    body = {**prompt, "return_logprob": True, name: value}
    assert outcome(body) in allowed
    assert outcome({"text": "x", "input_ids": None, name: None} if name != "text" else body) in (allowed[0], "taken")


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter_is_taken_or_refused_by_name(name: str) -> None:
    value: Any = {"stop_token_ids": [1], "beam_width": 4, **dict.fromkeys(FLAGS, False)}.get(name)
    if value is None:
        value = "x" if name in TEXTS else 1
    got = outcome({"text": "x", "sampling_params": {name: value}})
    assert got in ("taken", f"UNSUPPORTED sampling_params.{name}")
    assert outcome({"text": "x", "sampling_params": {name: None}}) == "taken"
