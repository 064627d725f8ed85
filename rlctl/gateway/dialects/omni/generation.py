"""SGLang-Omni's /generate: the prompt is token ids, a text or messages, and the reply is text.

Written from sglang-omni 0.1.9's ``RolloutGenerateRequest``. A body with SGLang's fields is accepted, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.gateway.generation import openai, sglang
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Reply

_PROMPTS = ("prompt", "messages")
_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "multimodal_train_inputs": (),
    "output_modalities": (["text"],),
    "return_indexer_topk": (False,),
    "return_omni_rollout": (False,),
    "return_routed_experts": (False,),
    "stage_params": ({},),
    "stage_sampling": ({},),
}
"""Unsupported fields, and their values without effect."""


async def generate(call: Call) -> Answer:
    """Generate text; fields of Omni or SGLang, and a reply that clients of both read."""
    fields = await call.fields()
    fields.refuse(_WITHOUT)
    body = dict(fields.values)
    metadata = fields.take("metadata", dict, None)
    prompt_fields = [name for name in ("input_ids", "text", *_PROMPTS) if body.get(name) is not None]
    if len(prompt_fields) > 1:
        raise Reason.FIELD_CONFLICT.error(f"{' and '.join(prompt_fields)} exclude each other", field=prompt_fields[1])
    model = await call.generation.model(fields.take("model", str, ""))
    if prompt_fields == ["messages"]:
        body["input_ids"] = await openai.render(call, fields, model)
    elif prompt_fields == ["prompt"]:
        body["text"] = fields.take("prompt", str)
    body["model"] = model
    body["sampling_params"] = _sampling(fields.take_fields("sampling_params", {}))
    body["return_logprob"] = fields.take("return_logprob", bool, True)
    for name in (*_PROMPTS, *_WITHOUT, "metadata", "tools", "tool_choice", "chat_template_kwargs"):
        body.pop(name, None)
    fields.accept(*fields.values)  # the rest is read below
    call.replace_json(body)
    answer = await sglang.generate(call)
    if metadata is not None and isinstance(answer, Reply) and isinstance(answer.body, dict):
        answer.body["meta_info"]["request_metadata"] = metadata
    return answer


def _sampling(params: Fields) -> dict[str, Any]:
    """Return the parameters under SGLang's names. The default length is SGLang's."""
    sampling = dict(params.values)
    most, seed = sampling.pop("max_tokens", None), sampling.pop("seed", None)
    if most is not None and sampling.get("max_new_tokens") not in (None, most):
        raise Reason.FIELD_CONFLICT.error("max_new_tokens is another number", field=params.path("max_tokens"))
    if most is not None:
        sampling["max_new_tokens"] = most
    if seed is not None:
        sampling["sampling_seed"] = seed
    return sampling
