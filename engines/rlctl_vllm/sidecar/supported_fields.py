"""What of SGLang's /generate a vLLM can do.

vLLM ignores what it does not know, so whatever is not known here is refused, and so is what would be dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlctl.sglang_api import request
from rlctl.sglang_api.request import Asking, Words
from rlctl_vllm.requests.bodies import GRAMMARS, structured

WORDS = Words(
    "vLLM",
    fields=frozenset({"priority", "cache_salt"}),
    sampling=frozenset({*GRAMMARS, "logit_bias"}),
    without={
        **dict.fromkeys(
            (
                *("input_embeds", "image_data", "video_data", "audio_data", "modalities", "lora_path"),
                *("token_ids_logprob", "session_id", "session_params", "routed_dp_rank", "custom_logit_processor"),
                *("routing_key", "extra_key", "bootstrap_host", "bootstrap_port", "bootstrap_room", "model"),
            ),
            (None,),
        ),
        **dict.fromkeys(
            (
                *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "return_entropy"),
                *("return_sampling_mask", "background", "return_bytes"),
            ),
            (None, False),
        ),
        **dict.fromkeys(("no_logs", "log_metrics"), (None, False, True)),
    },
    sampling_without=dict.fromkeys(("stop_regex", "custom_params", "stream_interval"), (None,)),
    strict=True,
)


def read(body: Any) -> Asking:
    """A parsed body, its ``sampling`` and ``fields`` vLLM's. Raises as :func:`rlctl.sglang_api.request.read`."""
    given = request.read(body, WORDS)
    prompts = [dataclasses.replace(asked, sampling=structured(asked.sampling)) for asked in given.prompts]
    return dataclasses.replace(given, prompts=prompts)
