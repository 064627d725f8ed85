"""Bodies that other projects' clients send to generate, field by field, from their sources.

Facts only: the fields and the kinds of their values. Each row says which file of which version sends it, and which
fields of the answer that client reads. Prompts are token ids of the tiny model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.demo.tiny import encode

SGLANG, VLLM, OMNI = ("sglang", "slime"), ("vllm",), ("omni",)
EVERY = (*SGLANG, *VLLM, *OMNI)

SLIME = "slime 624b824a"
MILES = "Miles 31f1ca96"
VERL = "verl 0.9.1"
SKYRL = "SkyRL a9564572"
TRL = "TRL 1.16.0"
OMNI_WHEEL = "sglang-omni 0.1.9"
OPENAI = "openai 3.57.0"

IDS = encode("1+2=")
"""A prompt."""
CHAT = [{"role": "user", "content": "1+2"}]


@dataclass(frozen=True)
class Sent:
    """One request of a client.

    Attributes:
        client: project and version.
        file: which of its files sends it.
        case: what it is for.
        dialects: those that claim this client.
        reads: fields of the answer that the client reads, dotted; a number is an index.
        refused: field that the torch engine's fleet refuses, with 400; "": it is answered.
    """

    client: str
    file: str
    case: str
    dialects: tuple[str, ...]
    path: str
    body: Mapping[str, Any]
    reads: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def name(self) -> str:
        """For a test's id."""
        return f"{self.client.partition(' ')[0]}-{self.case}"

    def body_for(self, checkpoint: Path) -> dict[str, Any]:
        """Return the body, with the path of the model's checkpoint in place of CHECKPOINT."""
        named = {"model": str(checkpoint)} if self.body.get("model") == "CHECKPOINT" else {}
        return {**self.body, **named}


_SLIME_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 4,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
_SLIME_READS = (
    "text",
    "meta_info.output_token_logprobs.0.0",
    "meta_info.output_token_logprobs.0.1",
    "meta_info.finish_reason.type",
    "meta_info.weight_version",
    "meta_info.prompt_tokens",
    "meta_info.completion_tokens",
    "meta_info.cached_tokens",
    "meta_info.e2e_latency",
)
_SCORING = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
_SCORE_READS = ("meta_info.input_token_logprobs.1.0", "meta_info.input_token_logprobs.1.1")
_ROUTED = {"X-SMG-Routing-Key": "sample-1"}

_ROLLOUT = "slime/rollout/sglang_rollout.py"
_MILES_ROLLOUT = "miles/rollout/sglang_rollout.py"
_MILES_PAYLOAD = "miles/rollout/generate_utils/generate_endpoint_utils.py"
_SKYRL_CLIENT = "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py"
_TRL_CLIENT = "trl/generation/vllm_client.py"
_VERL_ADAPTER = "verl/workers/rollout/sglang_rollout/http_server_engine.py"

_MILES_BODY = {
    "input_ids": IDS,
    "sampling_params": _SLIME_SAMPLING,
    "return_logprob": True,
    "return_routed_experts": False,
    "return_indexer_topk": False,
}
_TRL_SAMPLING = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 4,
    "logprobs": 0,
}
_TRL_CHAT = {
    **_TRL_SAMPLING,
    "model": "actor",
    "logprobs": True,
    "top_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "messages": CHAT,
}
_TRL_CHAT_READS = (
    "prompt_token_ids.0",
    "choices.1.token_ids.0",
    "choices.0.logprobs.content.0.top_logprobs",
    "choices.0.logprobs.content.0.token",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_SKYRL_SAMPLING = {
    "max_tokens": 4,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
}
_SKYRL_READS = ("choices.0.token_ids.0", "choices.0.finish_reason", "choices.0.logprobs.content.0.logprob")

SENT = (
    Sent(
        SLIME,
        _ROLLOUT,
        "rollout",
        SGLANG,
        "/generate",
        {"sampling_params": _SLIME_SAMPLING, "return_logprob": True, "input_ids": IDS},
        _SLIME_READS,
        _ROUTED,
    ),
    Sent(
        SLIME,
        _ROLLOUT,
        "deterministic",
        SGLANG,
        "/generate",
        {"sampling_params": {**_SLIME_SAMPLING, "sampling_seed": 43}, "return_logprob": True, "input_ids": IDS},
        _SLIME_READS,
    ),
    Sent(
        SLIME,
        _ROLLOUT,
        "top_p",
        SGLANG,
        "/generate",
        {
            "sampling_params": {
                **_SLIME_SAMPLING,
                "top_p": 0.9,
                "custom_params": {"return_top_p_token_ids": True},
            },
            "return_logprob": True,
            "input_ids": IDS,
        },
        refused="engine_fields",
    ),
    Sent(
        SLIME,
        _ROLLOUT,
        "routing_replay",
        SGLANG,
        "/generate",
        {
            "sampling_params": _SLIME_SAMPLING,
            "return_logprob": True,
            "return_routed_experts": True,
            "input_ids": IDS,
        },
        refused="return_routed_experts",
    ),
    Sent(
        SLIME,
        _ROLLOUT,
        "images",
        SGLANG,
        "/generate",
        {
            "sampling_params": _SLIME_SAMPLING,
            "return_logprob": True,
            "image_data": ["data:image/png;base64,"],
            "text": "1+2=",
        },
        refused="image_data",
    ),
    Sent(
        SLIME,
        "slime/agent/adapters/common.py",
        "agent",
        SGLANG,
        "/generate",
        {
            "rid": "0f7e1c9a5d3b4f5c8a7e6d5c4b3a2910",
            "input_ids": IDS,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "max_new_tokens": 4,
                "stop": ["</s>"],
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
            "return_logprob": True,
        },
        _SLIME_READS[1:],
        _ROUTED,
    ),
    Sent(
        SLIME,
        "slime/rollout/on_policy_distillation.py",
        "teacher",
        SGLANG,
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": {**_SCORING, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
        _SCORE_READS,
    ),
    Sent(MILES, _MILES_PAYLOAD, "rollout", SGLANG, "/generate", _MILES_BODY, _SLIME_READS, _ROUTED),
    Sent(
        MILES,
        _MILES_ROLLOUT,
        "distillation",
        SGLANG,
        "/generate",
        {
            "sampling_params": _SLIME_SAMPLING,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "input_ids": IDS,
        },
        (*_SLIME_READS, "meta_info.output_top_logprobs.0.1.1"),
    ),
    Sent(
        MILES,
        _MILES_PAYLOAD,
        "indexer_replay",
        SGLANG,
        "/generate",
        {**_MILES_BODY, "return_indexer_topk": True},
        refused="return_indexer_topk",
    ),
    Sent(
        MILES,
        "miles/rollout/generate_utils/prefill_logprobs.py",
        "rescoring",
        SGLANG,
        "/generate",
        {
            "input_ids": [IDS, IDS],
            "sampling_params": {**_SLIME_SAMPLING, **_SCORING},
            "return_logprob": True,
            "logprob_start_len": 2,
        },
        ("0.meta_info.input_token_logprobs.1.0", "1.meta_info.input_token_logprobs.1.1"),
    ),
    Sent(
        MILES,
        "miles/rollout/on_policy_distillation.py",
        "teacher",
        SGLANG,
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": _SCORING,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
        (*_SCORE_READS, "meta_info.input_top_logprobs.1.1.1"),
    ),
    Sent(
        MILES,
        "miles/ray/rollout/eval_fleet.py",
        "probe",
        SGLANG,
        "/generate",
        {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
        ("text",),
    ),
    Sent(
        MILES,
        "miles/rollout/session/core.py",
        "session",
        SGLANG,
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": CHAT,
            "input_ids": IDS,
            "max_tokens": 4,
            "logprobs": True,
            "return_meta_info": True,
            "no_stop_trim": False,
        },
        (
            "choices.0.message.content",
            "choices.0.meta_info.output_token_logprobs.0.0",
            "choices.0.meta_info.output_token_logprobs.0.1",
            "choices.0.meta_info.completion_tokens",
            "choices.0.meta_info.weight_version",
        ),
    ),
    Sent(
        MILES,
        "miles/rollout/session/core.py",
        "session_with_tools",
        SGLANG,
        "/v1/chat/completions",
        {"model": "default", "messages": CHAT, "input_ids": IDS, "logprobs": True, "tools": [_TOOL]},
        refused="tools",
    ),
    Sent(
        VERL,
        _VERL_ADAPTER,
        "adapter",
        SGLANG,
        "/generate",
        {
            "sampling_params": {
                "max_new_tokens": 4,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "repetition_penalty": 1.0,
            },
            "input_ids": IDS,
            "return_logprob": True,
        },
        ("text", "meta_info.output_token_logprobs.0.1", "meta_info.finish_reason.type"),
    ),
    Sent(
        VERL,
        "verl/trainer/main_generation_server.py",
        "chat",
        EVERY,
        "/v1/chat/completions",
        {
            "model": "CHECKPOINT",
            "messages": CHAT,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 4,
            "n": 1,
        },
        ("choices.0.message.content", "choices.0.finish_reason", "id", "created", "object"),
    ),
    Sent(
        SKYRL,
        _SKYRL_CLIENT,
        "generate",
        VLLM,
        "/inference/v1/generate",
        {"sampling_params": _SKYRL_SAMPLING, "model": "CHECKPOINT", "token_ids": IDS},
        _SKYRL_READS,
        {"X-Session-ID": "trajectory-1"},
    ),
    Sent(
        SKYRL,
        _SKYRL_CLIENT,
        "salted",
        VLLM,
        "/inference/v1/generate",
        {
            "sampling_params": _SKYRL_SAMPLING,
            "model": "default",
            "token_ids": IDS,
            "cache_salt": "skyrl-weight-version-3",
        },
        _SKYRL_READS,
    ),
    Sent(
        SKYRL,
        _SKYRL_CLIENT,
        "tinker",
        VLLM,
        "/inference/v1/generate",
        {
            "sampling_params": {
                "n": 2,
                "logprobs": 0,
                "output_kind": 2,
                "prompt_logprobs": 0,
                "temperature": 1.0,
                "max_tokens": 4,
                "seed": 3,
                "top_k": -1,
                "top_p": 1.0,
                "stop": ["7"],
                "stop_token_ids": [5],
            },
            "model": "actor",
            "token_ids": IDS,
        },
        ("choices.1.token_ids", "prompt_logprobs.1"),
    ),
    Sent(
        SKYRL,
        _SKYRL_CLIENT,
        "routed_experts",
        VLLM,
        "/skyrl/v1/generate",
        {"sampling_params": _SKYRL_SAMPLING, "model": "actor", "token_ids": IDS},
        refused="routed_experts",
    ),
    Sent(
        SKYRL,
        _SKYRL_CLIENT,
        "render",
        VLLM,
        "/v1/chat/completions/render",
        {"model": "actor", "messages": CHAT},
        ("token_ids.0", "sampling_params", "model"),
    ),
    Sent(SKYRL, _SKYRL_CLIENT, "tokenize", VLLM, "/tokenize",
         {"model": "default", "prompt": "1+2", "add_special_tokens": True}, ("tokens.0",)),
    Sent(SKYRL, _SKYRL_CLIENT, "detokenize", VLLM, "/detokenize",
         {"model": "default", "tokens": IDS}, ("prompt",)),
    Sent(
        TRL,
        _TRL_CLIENT,
        "completions",
        VLLM,
        "/v1/completions",
        {
            "model": "actor",
            "prompt": [IDS, IDS],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_TRL_SAMPLING,
        },
        ("choices.3.prompt_token_ids.0", "choices.3.token_ids.0", "choices.0.logprobs.top_logprobs.0"),
    ),
    Sent(
        TRL,
        _TRL_CLIENT,
        "structured",
        VLLM,
        "/v1/completions",
        {
            "model": "actor",
            "prompt": [IDS],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_TRL_SAMPLING,
            "structured_outputs": {"regex": "[0-9]+"},
        },
        refused="engine_fields",
    ),
    Sent(
        TRL,
        _TRL_CLIENT,
        "features",
        VLLM,
        "/inference/v1/generate",
        {
            "request_id": "trl-0f7e1c9a5d3b4f5c8a7e6d5c4b3a2910",
            "model": "actor",
            "token_ids": IDS,
            "features": None,
            "sampling_params": {**_TRL_SAMPLING, "output_kind": 2},
        },
        ("choices.1.token_ids.0", "choices.1.logprobs.content.0.logprob"),
    ),
    Sent(TRL, _TRL_CLIENT, "chat", VLLM, "/v1/chat/completions", _TRL_CHAT, _TRL_CHAT_READS),
    Sent(
        TRL,
        _TRL_CLIENT,
        "chat_without_logprobs",
        VLLM,
        "/v1/chat/completions",
        {**_TRL_CHAT, "logprobs": False, "top_logprobs": None, "chat_template_kwargs": {"enable_thinking": False}},
        ("prompt_token_ids.0", "choices.0.token_ids.0"),
    ),
    Sent(
        TRL,
        _TRL_CLIENT,
        "chat_with_tools",
        VLLM,
        "/v1/chat/completions",
        {**_TRL_CHAT, "tools": [_TOOL], "tool_choice": "none"},
        _TRL_CHAT_READS,
    ),
    Sent(
        TRL,
        _TRL_CLIENT,
        "chat_with_its_own_template",
        VLLM,
        "/v1/chat/completions",
        {**_TRL_CHAT, "chat_template": "{{ messages }}"},
        refused="chat_template",
    ),
    Sent(
        TRL,
        _TRL_CLIENT,
        "sequence_logprobs",
        VLLM,
        "/v1/completions",
        {"model": "actor", "prompt": [IDS, IDS], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2},
        ("choices.1.prompt_logprobs.1",),
    ),
    Sent(
        OMNI_WHEEL,
        "sglang_omni/serve/protocol.py",
        "ids",
        OMNI,
        "/generate",
        {
            "model": "default",
            "input_ids": IDS,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop": None,
                "stop_token_ids": None,
                "seed": 3,
                "max_new_tokens": 4,
                "max_tokens": None,
            },
            "stream": False,
            "output_modalities": ["text"],
            "metadata": {"group": 1},
            "return_omni_rollout": False,
            "return_routed_experts": False,
            "return_indexer_topk": False,
        },
        ("text", "meta_info.output_token_logprobs.0.1", "meta_info.request_metadata.group", *_SLIME_READS[3:7]),
    ),
    Sent(
        OMNI_WHEEL,
        "sglang_omni/serve/protocol.py",
        "prompt",
        OMNI,
        "/generate",
        {"prompt": "1+2=", "sampling_params": {"max_new_tokens": 4}},
        ("text", "meta_info.output_token_logprobs.0.1"),
    ),
    Sent(
        OMNI_WHEEL,
        "sglang_omni/serve/protocol.py",
        "messages",
        OMNI,
        "/generate",
        {"messages": CHAT, "sampling_params": {"max_tokens": 4}, "return_logprob": False},
        ("text", "meta_info.completion_tokens"),
    ),
    Sent(
        OMNI_WHEEL,
        "sglang_omni/serve/protocol.py",
        "audio",
        OMNI,
        "/generate",
        {"prompt": "1+2=", "output_modalities": ["text", "audio"]},
        refused="output_modalities",
    ),
    Sent(
        OPENAI,
        "openai/types/chat/completion_create_params.py",
        "chat",
        EVERY,
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": CHAT,
            "max_completion_tokens": 4,
            "n": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "seed": 3,
            "stop": ["7"],
            "user": "u",
            "store": False,
            "metadata": {"run": "1"},
            "stream": False,
        },
        (
            "choices.1.message.content",
            "choices.0.logprobs.content.0.top_logprobs.1.token",
            "usage.total_tokens",
            "metadata.weight_versions.0.version",
        ),
    ),
    Sent(
        OPENAI,
        "openai/types/completion_create_params.py",
        "completions",
        EVERY,
        "/v1/completions",
        {"model": "default", "prompt": "1+2=", "max_tokens": 4, "best_of": 1, "echo": False, "logprobs": 2, "n": 1},
        ("choices.0.text", "choices.0.logprobs.token_logprobs.0", "choices.0.logprobs.tokens.0"),
    ),
)  # fmt: skip


def streams() -> tuple[Sent, ...]:
    """Those of the clients that stream too."""
    return tuple(each for each in SENT if each.name in ("slime-rollout", "openai-chat", "openai-completions"))
