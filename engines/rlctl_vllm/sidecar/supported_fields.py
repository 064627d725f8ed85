"""Fields of SGLang's /generate that a vLLM supports.

vLLM ignores unknown fields. So fields that are unknown here are refused, and so are fields that vLLM would drop.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlctl.contract.errors import Reason
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


MOST_SAMPLES = 8192
"""Most samples of a call."""

MOST_BYTES = 256 << 20
"""Most bytes of a call's samples together, each with the prompt."""


def read(body: Any) -> Asking:
    """Read a parsed body, with ``sampling`` and ``fields`` in vLLM's form.

    Raises as :func:`rlctl.sglang_api.request.read`, FIELD_INVALID for too many samples, and MESSAGE_TOO_LARGE.
    """
    asking = request.read(body, WORDS, check_prompts=_check_samples, check_bytes=_check_bytes)
    _check_samples(sum(prompt.samples for prompt in asking.prompts), "sampling_params.n")
    prompts = [dataclasses.replace(prompt, sampling=structured(prompt.sampling)) for prompt in asking.prompts]
    return dataclasses.replace(asking, prompts=prompts)


def _check_samples(count: int, field: str) -> None:
    if count > MOST_SAMPLES:
        raise Reason.FIELD_INVALID.error(f"a call asks for {count} samples; it may ask for {MOST_SAMPLES}", field=field)


def _check_bytes(_size: int, together: int) -> None:
    if together > MOST_BYTES:
        raise Reason.MESSAGE_TOO_LARGE.error(
            f"the samples have {together} bytes or more together, each with its prompt; {MOST_BYTES} are taken",
            field="body",
            next_step="Ask for fewer at a time.",
        )
