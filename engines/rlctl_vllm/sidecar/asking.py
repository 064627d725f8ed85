"""What of SGLang's /generate a vLLM can do.

vLLM ignores what it does not know, so whatever is not known here is refused, and so is what would be dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlctl.errors import Reason
from rlctl.sglang_api import asking
from rlctl.sglang_api.asking import Asked, Asking, Words

_STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}

WORDS = Words(
    "vLLM",
    fields=frozenset({"priority", "cache_salt"}),
    sampling=frozenset({*_STRUCTURED, "spaces_between_special_tokens", "logit_bias"}),
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
    """A parsed body, its ``sampling`` and ``fields`` vLLM's. Raises as :func:`rlctl.sglang_api.asking.read`."""
    given = asking.read(body, WORDS)
    return dataclasses.replace(given, prompts=[_in_its_words(asked) for asked in given.prompts])


def _in_its_words(asked: Asked) -> Asked:
    shapes = {ours: asked.sampling[name] for name, ours in _STRUCTURED.items() if name in asked.sampling}
    if len(shapes) > 1:
        raise Reason.FIELD_CONFLICT.error(f"{', '.join(shapes)} exclude each other", field="sampling_params")
    extra = {name: value for name, value in asked.sampling.items() if name not in _STRUCTURED}
    return dataclasses.replace(asked, sampling={**extra, "structured_outputs": shapes} if shapes else extra)
